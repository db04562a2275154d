"""CSV, TSV and plain text: values as they are written, bad rows alone, and nothing swallowed by a lone quote."""

from __future__ import annotations

import csv
import gzip
import io
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import chunks, put, ranges, rows, values, zstd

from batchgen.errors import DataError
from batchgen.io import lines
from batchgen.io.files import expand
from batchgen.io.sources import detect, read_shards, schema

TEXT = pa.string()


def test_values_are_text_as_it_is_written(tmp_path: Path) -> None:
    """A8: an id is not made a number; an empty value is null, a quoted one is not; a BOM is no part of a name."""
    data = b'id,text,n\n007,"a ""q"", b",\n"72057594038135102","",1e5\n NA ,null,"\xc3\xa9"\n,,x\n'
    wanted = [
        {"id": "007", "text": 'a "q", b', "n": None},
        {"id": "72057594038135102", "text": "", "n": "1e5"},
        {"id": " NA ", "text": "null", "n": "é"},
        {"id": None, "text": None, "n": "x"},
    ]
    for written in (data, b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n"), data[:-1], data + b"\n\r\n"):
        for name, packed in (("x.csv", written), ("x.csv.gz", gzip.compress(written)), ("x.csv.zst", zstd(written))):
            file = put(tmp_path, packed, name)
            assert detect(file, "auto", {}) == "csv"
            assert values(file) == wanted
            assert schema(file, "csv", {}) == pa.schema([("id", TEXT), ("text", TEXT), ("n", TEXT)])
    (chunk,) = chunks(file, columns=["n", "id", "gone"])
    assert chunk.batch is not None and chunk.batch.schema == pa.schema([("n", TEXT), ("id", TEXT)])
    assert chunk.batch.to_pylist() == [row.values for row in chunk.rows]


@pytest.mark.parametrize(
    ("data", "name", "wanted"),
    [
        (b"a;b\n1,5;2\n", "x.csv", {"a": "1,5", "b": "2"}),
        (b"a\tb\n1;5\t2\n", "x.csv", {"a": "1;5", "b": "2"}),
        (b"a\tb,c,d\n1\t2\n", "x.tsv", {"a": "1", "b,c,d": "2"}),
        (b"a\tb,c\n1\t2\n", "x.TSV.gz", {"a": "1", "b,c": "2"}),
        (b'"a;b;c;d",e,f\n1,2,3\n', "x.csv", {"a;b;c;d": "1", "e": "2", "f": "3"}),
        (b'"a\nb",c\n1,2\n', "x.csv", {"a\nb": "1", "c": "2"}),
        (b"a\n1\n", "x.csv", {"a": "1"}),
        (b"a,b;c\n1,2\n", "x.csv", {"a": "1", "b;c": "2"}),  # as many of both: the comma
    ],
)
def test_the_delimiter_is_told_by_the_header(tmp_path: Path, data: bytes, name: str, wanted: dict[str, str]) -> None:
    assert values(put(tmp_path, gzip.compress(data) if name.endswith("gz") else data, name)) == [wanted]


def test_a_bad_row_takes_no_other_along(tmp_path: Path) -> None:
    data = b'a,b\n1,x\n2\n3,y,z\n4,\xff\n\xe9,5\n"6"x,y\n"7\n"x,y\n8,"z\nz"\n9,5" disk\n'
    found = rows(put(tmp_path, data, "x.csv"))
    assert [row.number for row in found] == list(range(9))
    said = {row.number: (row.error.code, row.error.message) for row in found if row.error}
    assert said == {
        1: ("invalid_row", "line 3: 1 values, but the header has 2 columns"),
        2: ("invalid_row", "line 4: 3 values, but the header has 2 columns"),
        3: ("invalid_unicode", "line 5, column 'b': bytes that are not UTF-8 (0xff)"),
        4: ("invalid_unicode", "line 6, column 'a': bytes that are not UTF-8 (0xe9)"),
        5: ("invalid_row", "line 7: text behind the closing quote of a value; is it a lone quote?"),
        6: ("invalid_row", "lines 8 to 9: text behind the closing quote of a value; is it a lone quote?"),
    }
    assert [row.values for row in found] == [
        {"a": "1", "b": "x"},
        None,
        None,
        {"a": "4", "b": None},
        {"a": None, "b": "5"},
        None,
        None,
        {"a": "8", "b": "z\nz"},
        {"a": "9", "b": '5" disk'},
    ]
    replaced = rows(put(tmp_path, data, "x.csv"), replace_unicode=True)
    assert [replaced[3].values, replaced[4].values] == [{"a": "4", "b": "\ufffd"}, {"a": "\ufffd", "b": "5"}]
    assert rows(put(tmp_path, data, "x.csv"), columns=["b"])[4].error is None  # its bad column is not read


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a,b,a\n1,2,3\n", "line 1: column 'a' occurs twice"),
        (b",a\n1,2\n", "line 1: column 1 of the CSV header has no name"),
        (b"a,\n1,2\n", "column 2 of the CSV header has no name"),
        (b"a,\xff\n1,2\n", "not UTF-8"),
        (b'"a"x,b\n', "quotes in the CSV header do not match"),
        (b'a,"b\n1,2\n', "quotes in the CSV header do not match"),
        (b"a,b\r1,2\r", "lone CR"),
        (b'a,"' + b"x\n" * (1 << 20), "header does not end within 1 MiB"),
    ],
)
def test_a_header_that_cannot_be_used(tmp_path: Path, data: bytes, says: str) -> None:
    file = put(tmp_path, data, "x.csv")
    for use in (lambda: rows(file, "csv"), lambda: schema(file, "csv", {})):
        with pytest.raises(DataError, match=says) as caught:
            use()
        assert "x.csv" in str(caught.value)


def test_files_without_rows(tmp_path: Path) -> None:
    for data in (b"", b"\n\n", b"a,b", b"a,b\r\n", b"\xef\xbb\xbfa,b\n\n"):
        (chunk,) = chunks(put(tmp_path, data, "x.csv"))
        assert (chunk.rows, chunk.end, chunk.last) == ([], None, True)


def test_a_lone_quote_ends_the_job_before_it_swallows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lone = b'a,b\n1,x\n2,"y\n' + b"3,z\n" * 1000
    with pytest.raises(DataError, match=r"x\.csv: line 3: a quote opens a value that is not closed to the end"):
        rows(put(tmp_path, lone, "x.csv"))
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "long.csv"
    with open(path, "wb") as out:
        out.write(lone)
        for _ in range(20):
            out.write(b"3,some text to fill a line\n" * 40_000)
    file = expand([str(path)], {})[0]
    tracemalloc.start()
    with pytest.raises(DataError, match=r"line 3: a quote opens a value that is not closed within 1 MiB"):
        rows(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    overlong = put(tmp_path, b"a\n1\n" + b"x" * (2 << 20) + b"\n2\n", "x.csv")
    assert [row.error and row.error.message for row in rows(overlong)] == [
        None,
        "line 3: a line of more than 1 MiB",
        None,
    ]


cells = st.text('a,;\t"\n\r é', max_size=5) | st.none()


@settings(max_examples=200, deadline=None)
@given(
    table=st.lists(st.lists(cells, min_size=3, max_size=3), max_size=8),
    delimiter=st.sampled_from(",;\t"),
    block=st.integers(1, 9),
)
def test_what_is_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str | None]], delimiter: str, block: int
) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["x", "y", "z"])
    for row in table:
        writer.writerow([cell or "" for cell in row])
    written = out.getvalue()
    file = put(tmp_path_factory.getbasetemp(), written.encode(), "written.csv")
    wanted = [dict(zip("xyz", [cell or "" for cell in row], strict=True)) for row in table]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", block)
        assert values(file) == wanted
        for place in ranges(file, shard_rows=2):
            piece = written.encode()[place.byte_start : place.byte_end].decode()
            parsed = list(csv.reader(io.StringIO(piece, newline=""), delimiter=delimiter))
            assert parsed == [list(row.values()) for row in wanted[place.first_row : place.first_row + place.num_rows]]


def test_line_numbers_stay_right_after_a_jump(tmp_path: Path) -> None:
    file = put(tmp_path, b'a,b\n1,"x\n\nx"\n2,y\n3,z\n4,z\nbad\n', "x.csv")
    first = ranges(file, shard_rows=2)[0]
    (row,) = [row for row in rows(file, shard_rows=2, done={0: first}) if row.error]
    assert row.number == 4 and row.error is not None and row.error.message.startswith("line 8: ")


def test_csv_beginning_like_something_else(tmp_path: Path) -> None:
    """Letters that are some format's magic begin a text as well."""
    for head in (b"ORCID", b"PARENT", b"PAR1", b"ARROW1", b"BZhat"):
        assert values(put(tmp_path, head + b",b\n1,2\n", "x.csv")) == [{head.decode(): "1", "b": "2"}]
        assert values(put(tmp_path, head + b"\n", "x.txt")) == [{"text": head.decode()}]
    with pytest.raises(DataError, match="ORC is not supported"):
        detect(put(tmp_path, b"ORC\x00\x01", "x.csv"), "auto", {})
    assert detect(put(tmp_path, b"a,b\n", "x.dat"), "csv", {}) == "csv"


# Plain text


def test_every_line_is_a_row(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf first \r\n\n\xff\n{"a":1}\nlast'
    for name, packed in (("x.txt", data), ("x.txt.gz", gzip.compress(data)), ("x", data)):
        file = put(tmp_path, packed, name)
        found = rows(file, detect(file, "auto" if name != "x" else "text", {}))
        assert [row.values for row in found] == [
            {"text": " first "}, {"text": ""}, {"text": None}, {"text": '{"a":1}'}, {"text": "last"}
        ]  # fmt: skip
        assert [row.error and row.error.message for row in found if row.error] == [
            "line 3: bytes that are not UTF-8 (0xff)"
        ]
        assert rows(file, "text", replace_unicode=True)[2].values == {"text": "\ufffd"}
        assert schema(file, "text", {}) == pa.schema([("text", TEXT)])
    assert values(put(tmp_path, b"a\n\n\n", "x.txt")) == [{"text": "a"}, {"text": ""}, {"text": ""}]
    for empty in (b"", b"\xef\xbb\xbf"):
        assert values(put(tmp_path, empty, "x.txt")) == []


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    for name, line in (("x.csv", b'some,"words to",stand\n'), ("x.txt", b"some words to stand for a prompt\n")):
        (tmp_path / name).write_bytes(line * 100_000)
        file = expand([str(tmp_path / name)], {})[0]
        tracemalloc.start()
        options: dict[str, Any] = {"columns": None, "shard_rows": None, "done": {}, "storage_options": {}}
        seen = 0
        for chunk in read_shards(file, name[-3:].replace("txt", "text"), **options):
            seen += len(chunk.rows)
            if seen > 20_000:  # tracing is slow
                break
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
