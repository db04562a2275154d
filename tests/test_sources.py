"""Rows out of JSONL and Parquet: every kind of file and of bad row, shards, and what a resumed run skips."""

from __future__ import annotations

import datetime
import gzip
import io
import itertools
import json
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import chunks, put, put_table, ranges, rows, values, zstd

from batchgen.errors import ConfigError, DataError, StorageError
from batchgen.io import jsonline, lines, sources, storage
from batchgen.io import rows as row_limits
from batchgen.io.files import InputFile, expand, open_input
from batchgen.io.localdisk import LocalDisk
from batchgen.io.partitions import partitions
from batchgen.io.sources import Chunk, Row, content_proof, detect, read_shards, schema
from batchgen.io.stores import Store
from batchgen.types import ShardRange

GOOD = b'{"id":"a","prompt":"x"}\n'


def only(folder: Path, line: bytes | str) -> Row:
    """The row of a line that stands third, behind a blank one, with good neighbours."""
    data = line.encode() if isinstance(line, str) else line
    first, row, last = rows(put(folder, GOOD + b"\n" + data + b"\n" + GOOD), "jsonl")
    assert (first.error, last.error) == (None, None)
    assert (first.number, row.number, last.number) == (0, 1, 2)
    assert first.values == last.values == {"id": "a", "prompt": "x"}
    if row.error is not None:
        assert row.error.message.startswith("line 3: ")
        row.error.message.encode("utf-8")
    return row


# JSON Lines


def test_bom_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    """Cases A1, A4."""
    plain = b'{"id":1}\n{"id":2}\n{"id":3}\n'
    wanted = [{"id": 1}, {"id": 2}, {"id": 3}]
    for data in (
        plain,
        b"\xef\xbb\xbf" + plain,
        plain.replace(b"\n", b"\r\n"),
        plain[:-1],
        b"\n \t\r\n" + plain.replace(b"\n", b"\n\n\r\n") + b"  ",
        b"\xef\xbb\xbf\r\n" + plain,
    ):
        read = rows(put(tmp_path, data))
        assert [row.values for row in read] == wanted
        assert [row.number for row in read] == [0, 1, 2]
        assert all(row.error is None for row in read)


@pytest.mark.parametrize("size", [5 << 20, lines.BLOCK_BYTES - 13, lines.BLOCK_BYTES - 12])
def test_one_huge_line(tmp_path: Path, size: int) -> None:
    """Case A3."""
    long = "x" * size
    file = put(tmp_path, GOOD + json.dumps({"id": "b", "prompt": long}).encode() + b"\r\n" + GOOD)
    assert [row["prompt"] for row in values(file) if row] == ["x", long, "x"]


def test_lines_across_blocks_keep_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\xef\xbb\xbf" + b"".join(
        b'{"n":%d}%s' % (i, (b"\n", b"\r\n", b"\n\n", b"\n   \n")[i % 4]) for i in range(60)
    )
    wanted = [{"n": i} for i in range(60)]
    file = put(tmp_path, data)
    for size in (1, 2, 3, 7, 8, 9, 64):
        monkeypatch.setattr(lines, "BLOCK_BYTES", size)
        assert values(file) == wanted
        for place in ranges(file, shard_rows=7):
            piece = data[place.byte_start : place.byte_end].removeprefix(b"\xef\xbb\xbf")
            found = [json.loads(line)["n"] for line in piece.split(b"\n") if line.strip()]
            assert found == list(range(place.first_row, place.first_row + place.num_rows))


def test_an_overlong_line_is_passed_over_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "x.jsonl"
    with open(path, "wb") as out:
        out.write(GOOD + b'{"prompt":"')
        for _ in range(40):
            out.write(b"x" * (1 << 20))
        out.write(b'"}\n\n' + GOOD)
    file = expand([str(path)], {})[0]
    tracemalloc.start()
    read = rows(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert [row.values for row in read] == [{"id": "a", "prompt": "x"}, None, {"id": "a", "prompt": "x"}]
    assert read[1].error is not None and read[1].error.code == "invalid_row"
    assert read[1].error.message == "line 2: a line of more than 1 MiB"
    assert ranges(file) == [ShardRange(0, 0, 0, 3, 0, file.size)]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"id":"a","prompt":"some words to stand for a prompt"}\n' * 100_000)
    file = expand([str(path)], {})[0]
    tracemalloc.start()
    seen = 0
    for chunk in read_shards(file, "jsonl", columns=None, shard_rows=None, done={}, storage_options={}):
        seen += len(chunk.rows)
        if seen > 30_000:  # tracing is slow
            break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_strings_stay_strings_and_integers_whole(tmp_path: Path) -> None:
    """Case A8."""
    big = 2**64 + 1
    for value in ("72057594038135102", "007", "", " ", "NaN", "null"):
        assert only(tmp_path, json.dumps({"id": value})).values == {"id": value}
    for number in (7, -1, 2**53 + 1, 2**63, 2**64 - 1, big, -big, 10**300, 0.5, 1e30, -(2**63)):
        row = only(tmp_path, f'{{"id": {number}, "deep": [{{"n": {number}}}]}}')
        assert row.values == {"id": number, "deep": [{"n": number}]}
        assert row.values is not None and type(row.values["id"]) is type(number)


def test_surrogates(tmp_path: Path) -> None:
    """Case A6: a split pair is joined, an unpaired one is a row error that keeps what else can be read."""
    assert only(tmp_path, r'{"prompt":"ok \ud83d\ude00"}').values == {"prompt": "ok \U0001f600"}
    for lone in (r"\ud83d bad", r"\ude00\ud83d", r"\ud83d\ud83d\ude00"):
        row = only(tmp_path, f'{{"id":"a","prompt":"ok {lone}","m":[{{"c":"{lone}"}}]}}')
        assert row.error is not None and row.error.code == "invalid_unicode"
        assert "unpaired surrogate" in row.error.message and "'prompt'" in row.error.message
        assert row.values == {"id": "a", "prompt": None, "m": None}
    row = only(tmp_path, r'{"id":"a","\ud83d":1}')
    assert row.error is not None and row.error.code == "invalid_unicode"
    assert row.values == {"id": "a"}


def test_replacing_what_is_no_unicode_and_reading_nan_as_null() -> None:
    line = b'{"a":"x\\ud83d\xff","\\ude00":[{"b":"\\ud83d\\ude00"}],"n":[NaN,-Infinity],"s":"NaN"}'
    wanted = {"a": "x\ufffd\ufffd", "\ufffd": [{"b": "\U0001f600"}], "n": [None, None], "s": "NaN"}
    assert jsonline.parse(line, replace_unicode=True, nan_as_null=True) == (wanted, None)
    values, problem = jsonline.parse(line, replace_unicode=True)
    assert values == wanted and problem is not None and problem[0] == "invalid_json"
    values, problem = jsonline.parse(line, nan_as_null=True)
    assert problem is not None and problem[0] == "invalid_unicode" and values is not None and values["a"] is None
    assert jsonline.parse(b'{"n":1e999}', nan_as_null=True)[1] is not None


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("in/x.jsonl", {}),
        ("in/a=1/b=2/x=3.jsonl", {"a": "1", "b": "2"}),
        ("a=1/a=2/x", {"a": "2"}),
        ("in/a=/=b/c/x", {"a": ""}),
        ("in/a%20b=c%2Fd/x", {"a b": "c/d"}),
        ("in/a=__HIVE_DEFAULT_PARTITION__/x", {"a": None}),
        ("in/a=b=c/x", {"a": "b=c"}),
        ("s3://bucket/day=1/x.parquet", {"day": "1"}),
        ("zip://day=1/x.csv::s3://bucket/month=2/x.zip", {"day": "1"}),
        ("https://host/day=1/x.csv?q=a/b=c/d", {"day": "1"}),
    ],
)
def test_columns_that_folders_give(path: str, wanted: dict[str, str | None]) -> None:
    assert partitions(path) == wanted


def test_a_folders_column_gives_way_to_the_files_own(tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2], "own": ["x", None]})
    file = put_table(tmp_path, table, "own=f/day=1/x.parquet")
    assert values(file) == [{"n": 1, "own": "x", "day": "1"}, {"n": 2, "own": None, "day": "1"}]
    assert schema(file, "parquet", {}) == table.schema.append(pa.field("day", pa.string()))
    (chunk,) = chunks(file, columns=["day", "own"])
    assert chunk.batch is not None and chunk.batch.to_pylist() == [{"day": "1", "own": "x"}, {"day": "1", "own": None}]
    assert values(file, columns=["day"], where="day == '1' and own is None") == [{"day": "1"}]
    assert values(file, where="day == '2'") == []
    lines = put(tmp_path, b'{"n":1}\n{"day":2}\nbad\n', "day=1/x.jsonl")
    assert values(lines) == [{"n": 1, "day": "1"}, {"day": 2}, None]


@pytest.mark.parametrize("bad", [b"\xff", b"caf\xe9", b"\xed\xa0\xbd", b"\xc3", b"\xc0\xaf"])
def test_bytes_that_are_not_utf8(tmp_path: Path, bad: bytes) -> None:
    row = only(tmp_path, b'{"id":"a","prompt":"' + bad + b'"}')
    assert row.error is not None and row.error.code == "invalid_unicode"
    assert "not UTF-8" in row.error.message
    assert row.values == {"id": "a", "prompt": None}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id":1,"prompt":"x","score":NaN}', "NaN is not a JSON value"),
        ('{"id":1,"score":-Infinity}', "-Infinity is not a JSON value"),
        ('{"id":1,"score":1e999}', "1e999 is too large"),
        ("NaN", "NaN is not a JSON value"),
        ('{"id":1,"id":2}', "'id' occurs twice"),
        ('{"id":1, "id" : 2}', "'id' occurs twice"),
        ('{"id" : 1, "x": ":y", "id"\t:2}', "'id' occurs twice"),
        ('{"id":1, "x": "\\":", "id" :2}', "'id' occurs twice"),
        ('{"id":1, "x": "\\":", "id":2}', "'id' occurs twice"),
        ('{"a\\\\":1, "a\\\\":2}', "occurs twice"),
        ('{"id":1, "\\u0069d":2}', "'id' occurs twice"),
        ('{"x":[{"y":{"k":1,"k":1}}]}', "'k' occurs twice"),
        ('{"id":1,"score":NaN,"id":2}', "'id' occurs twice"),
        ('{"id":1', "not valid JSON"),
        ('{"id":1} {"id":2}', "Extra data at character 10"),
        ('{"id":1,}', "not valid JSON"),
        ("{'id':1}", "not valid JSON"),
        ('{"a":"\t"}', "Invalid control character"),
        ('{"id":01}', "not valid JSON"),
        ("x" * 1000, "not valid JSON"),
        ("\ufeff{}", "not valid JSON"),
        ('{"a":' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
        ('{"a":' + "9" * 5000 + "}", "thousands of digits"),
    ],
)
def test_invalid_json_names_the_line(tmp_path: Path, line: str, says: str) -> None:
    """Case A18."""
    row = only(tmp_path, line)
    assert row.error is not None and row.error.code == "invalid_json"
    assert says in row.error.message
    assert len(row.error.message) < 200


def test_what_nan_leaves(tmp_path: Path) -> None:
    assert only(tmp_path, '{"id":"a","score":NaN,"deep":{"x":1e999}}').values == {
        "id": "a",
        "score": None,
        "deep": {"x": None},
    }


@pytest.mark.parametrize(("line", "what"), [("[1,2]", "array"), ('"x"', "string"), ("1", "number"), ("null", "null")])
def test_a_row_must_be_an_object(tmp_path: Path, line: str, what: str) -> None:
    row = only(tmp_path, line)
    assert row.error is not None and row.error.code == "invalid_row"
    assert what in row.error.message
    assert row.values is None


keys = st.text('ab":\\ ', max_size=3)
members = st.recursive(
    st.text(':" \\x', max_size=4) | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(keys, inner), max_size=3).map(tuple),
    max_leaves=6,
)


def encode(value: Any, space: str) -> tuple[str, bool]:
    """JSON of a value whose objects are tuples of pairs, and whether an object has a key twice."""
    if isinstance(value, tuple):
        parts = [(json.dumps(key), *encode(item, space)) for key, item in value]
        twice = len({key for key, _ in value}) < len(value) or any(part[2] for part in parts)
        return "{" + ",".join(f"{key}{space}:{text}" for key, text, _ in parts) + "}", twice
    if isinstance(value, list):
        items = [encode(item, space) for item in value]
        return "[" + ",".join(text for text, _ in items) + "]", any(twice for _, twice in items)
    return json.dumps(value), False


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(keys, members), max_size=4).map(tuple), st.sampled_from(["", "", " ", "\t "]))
def test_duplicate_keys_are_found_exactly(row: tuple[tuple[str, Any], ...], space: str) -> None:
    text, twice = encode(row, space)
    fast = jsonline.parse_fast(text.encode())
    strict, problem = jsonline.parse_strict(text.encode())
    assert (problem is not None) == twice
    if twice:
        assert fast is None
    else:
        assert strict == json.loads(text)
        assert fast is None or fast == strict


def test_ordinary_rows_take_the_fast_way() -> None:
    for row in (
        {"id": "a", "prompt": "Note: see http://x/ at 10:30", "n": 1, "f": 0.5, "z": None},
        {"messages": [{"role": "user", "content": "a: b"}, {"role": "assistant", "content": "c", "x": {"y": [1]}}]},
        {"texte": "Oui : non", "token_ids": [1, 2, 3]},
        {"arguments": json.dumps({"city": "Paris", "at": "10:30"}), "code": 'print("x:", end=":")'},
    ):
        for line in (json.dumps(row), json.dumps(row, separators=(",", ":"))):
            assert jsonline.parse_fast(line.encode()) == row


# Compression


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_compressed_by_content_not_by_name(tmp_path: Path, pack: Any) -> None:
    """Case A14, also several members or frames in one file."""
    data = b"".join(b'{"id":%d}\n' % i for i in range(5))
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" if pack is zstd else b""
    for number, name in enumerate(("rows.jsonl.gz", "rows", "rows.jsonl", "rows.zst", "rows.bin")):
        split = len(data) * number // 5
        packed = skippable + pack(data[:split]) + pack(b"") + pack(data[split:])
        file = put(tmp_path, packed, name)
        assert detect(file, "auto", {}) == "jsonl"
        assert values(file) == [{"id": i} for i in range(5)]
        assert ranges(file) == [ShardRange(0, 0, 0, 5, 0, len(data))]
    assert [chunk.rows for chunk in chunks(put(tmp_path, pack(b"")))] == [[]]


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_a_cut_compressed_file_is_never_complete(tmp_path: Path, pack: Any) -> None:
    """Case A16."""
    data = b"".join(json.dumps({"id": i, "x": os.urandom(24).hex()}).encode() + b"\n" for i in range(6000))
    packed = pack(data)
    for cut in (12, len(packed) * 7 // 10, len(packed) - 9, len(packed) - 1):
        file = put(tmp_path, packed[:cut], "cut.jsonl.gz")
        seen: list[Chunk] = []
        with pytest.raises(DataError, match=r"cut\.jsonl\.gz.*cut short.*first \d+ rows") as caught:
            seen.extend(read_shards(file, "jsonl", columns=None, shard_rows=None, done={}, storage_options={}))
        assert caught.value.exit_code == 65
        assert not any(chunk.last or chunk.end for chunk in seen)
    assert cut > 100_000
    readable = int(str(caught.value).partition("its first ")[2].partition(" ")[0])
    assert 5000 < readable < 6000
    with pytest.raises(DataError, match="damaged"):
        rows(put(tmp_path, packed + b"garbage"), "jsonl")
    with pytest.raises(DataError, match="damaged"):
        detect(put(tmp_path, packed[:10] + b"\xff" * 100), "auto", {})


# What a file is


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\x00\x00", "xz"),
        (b"PK\x03\x04\x14", "zip"),
        (b"\x04\x22\x4d\x18d", "lz4"),
        (b"ORC\x00", "ORC is not supported yet"),
        (b"Obj\x01\x04", "Avro is not supported yet"),
        (b"\xff\xfe{\x00", "UTF-16"),
        (gzip.compress(b"BZh91AY&SY", mtime=0), "inside gzip: bzip2"),
        (gzip.compress(gzip.compress(GOOD, mtime=0), mtime=0), "compressed twice"),
        (gzip.compress(b"PAR1", mtime=0), "Parquet inside gzip"),
        (gzip.compress(b"[\n{}]", mtime=0), "JSON array"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, head: bytes, says: str) -> None:
    """Case A14: never 0 rows silently, whatever the suffix and the declared format."""
    for declared, name in (("auto", "x.jsonl"), ("jsonl", "x.dat"), ("auto", "x")):
        with pytest.raises(DataError, match=says) as caught:
            detect(put(tmp_path, head, name), declared, {})
        assert str(tmp_path / name) in str(caught.value)
        assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[\n  {\n    "id": 1\n  }\n]', 1),
        ('[{"id":1},{"id":2}]', 1),
        ('[ {"id":1},', 1),
        ("[]", 1),
        ("[\r\n{}]", 1),
        ("\ufeff[\n{}]", 1),
        ("\n\n [\n{}]", 3),
    ],
)
def test_a_json_array_is_not_json_lines(tmp_path: Path, text: str, line: int) -> None:
    """Case A4."""
    for declared, name in (("auto", "x.jsonl"), ("jsonl", "x.jsonl"), ("auto", "x.json")):
        with pytest.raises(DataError, match=rf"file is a JSON array, not JSON Lines: line {line} ") as caught:
            detect(put(tmp_path, text.encode(), name), declared, {})
        assert str(tmp_path / name) in str(caught.value)


def test_detect_by_bytes_then_suffix(tmp_path: Path) -> None:
    parquet = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), parquet)

    def found(data: bytes, name: str, declared: str = "auto") -> str:
        return detect(put(tmp_path, data, name), declared, {})

    assert found(parquet.getvalue(), "x.jsonl") == "parquet"
    assert found(parquet.getvalue(), "x", "parquet") == "parquet"
    for name in ("x.jsonl", "x", "x.txt", "x.csv", "x.json", "x.jsonl.gz"):
        assert found(GOOD, name) == "jsonl"
    for name in ("x.jsonl", "x", "x.json", "x.jsonl.gz"):
        assert found(b"", name) == "jsonl"
    assert found(b"not JSON\n" + GOOD, "x.jsonl") == "jsonl"
    assert found(b"not JSON\n" + GOOD, "x.dat", "jsonl") == "jsonl"
    assert found(GOOD, "x.parquet", "jsonl") == "jsonl"
    for data, name, declared, says in (
        (parquet.getvalue(), "x.parquet", "jsonl", "input.format is jsonl, but this is a Parquet file"),
        (GOOD, "x.parquet", "auto", "not a Parquet file"),
        (GOOD, "x.jsonl", "parquet", "not a Parquet file"),
        (b"", "x.parquet", "auto", "is empty"),
        (b"id,prompt\n1,x\n", "x.dat", "auto", "line 1 begins with 'id,prompt'"),
        (b"\x00\x01\x02", "x", "auto", "neither Parquet nor JSON Lines"),
        (b'{\n  "id": 1\n}\n', "x.jsonl", "auto", "laid out over several lines"),
    ):
        with pytest.raises(DataError, match=says):
            found(data, name, declared)


def test_many_files_are_looked_at_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(60):
        put(tmp_path, [b'{"a":1}\n', b"b,c\n1,2\n", b"text\n"][i % 3], f"{i:02}{('.jsonl', '.csv', '.txt')[i % 3]}")
    put_table(tmp_path, pa.table({"d": [1]}), "99.parquet")
    files = expand([str(tmp_path)], {})
    together, calls = threading.Barrier(sources.FILES_AT_ONCE), itertools.count()

    def patient(*arguments: Any) -> Any:
        if next(calls) < sources.FILES_AT_ONCE:
            together.wait(timeout=20)
        return open_input(*arguments)

    monkeypatch.setattr(sources, "open_input", patient)
    formats = sources.detect_all(files, "auto", {})
    assert formats == [*["jsonl", "csv", "text"] * 20, "parquet"]
    names = [found and found.names for found in sources.schemas(files, formats, {})]
    assert names == [*[None, ["b", "c"], ["text"]] * 20, ["d"]]
    assert sources.detect_all([], "auto", {}) == [] and sources.schemas([], [], {}) == []
    for name in ("20.csv", "07.csv", "31.csv"):
        (tmp_path / name).write_bytes(b"PK\x03\x04\0")
    with pytest.raises(DataError, match=r"07\.csv: a zip"):  # the first one, whichever was looked at first
        sources.detect_all(files, "auto", {})


def test_content_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def proof(data: bytes, name: str = "x.jsonl") -> str:
        return content_proof(put(tmp_path, data, name), {})

    data = bytearray(GOOD * 100)
    first = proof(data)
    assert first == proof(data, "moved.jsonl") and len(first) == 64
    data[1000] ^= 1
    assert proof(data) != first
    assert proof(b"") != proof(b"\n")

    monkeypatch.setattr(sources, "PROOF_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(sources, "PROOF_SAMPLE_BYTES", 1 << 10)
    large = bytearray(os.urandom(3 << 20))
    first = proof(large)
    assert first == proof(large)
    for position in (0, 1023, len(large) - 1, len(large) - 1024):
        large[position] ^= 1
        assert proof(large) != first
        large[position] ^= 1
    assert proof(large + b"x") != first

    table = pa.table({"a": list(range(1000))})
    file = put_table(tmp_path, table)
    first = content_proof(file, {})
    assert first == content_proof(put_table(tmp_path, table, "moved.parquet"), {})
    assert first != content_proof(put_table(tmp_path, pa.table({"a": list(range(1, 1001))})), {})


# Parquet


def test_column_types(tmp_path: Path) -> None:
    words = ["a", None, "\U0001f600", "a"]
    columns = {
        "string": pa.array(words),
        "large": pa.array(words, pa.large_string()),
        "dictionary": pa.array(words).dictionary_encode(),
        "view": pa.array(words, pa.string_view()),
        "binary": pa.array([None if word is None else word.encode() for word in words], pa.binary()),
    }
    for compression in ("snappy", "zstd"):
        file = put_table(tmp_path, pa.table(columns), compression=compression)
        assert values(file) == [dict.fromkeys(columns, word) for word in words]
    more = pa.table(
        {
            "int": pa.array([2**53 + 1, None]),
            "list": pa.array([[1, None], None], pa.list_(pa.int32())),
            "struct": pa.array([{"a": None, "b": 1}, None]),
            "null": pa.nulls(2),
            "time": pa.array([1_000_001, None], pa.timestamp("ns", "UTC")),
            "bool": pa.array([True, None]),
        }
    )
    file = put_table(tmp_path, more)
    assert values(file) == [
        {
            "int": 2**53 + 1,
            "list": [1, None],
            "struct": {"a": None, "b": 1},
            "null": None,
            "time": datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=datetime.timezone.utc),
            "bool": True,
        },
        dict.fromkeys(more.column_names),
    ]
    assert schema(file, "parquet", {}) == more.schema
    assert schema(put(tmp_path, GOOD), "jsonl", {}) is None
    carried = [chunk.batch for chunk in chunks(file)]
    assert pa.Table.from_batches([batch for batch in carried if batch is not None]).equals(more)


def test_messages_are_plain_lists_without_null_padding(tmp_path: Path) -> None:
    """Case A20: what JSONL gives for the same rows."""
    messages: list[list[dict[str, Any]] | None] = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}, {"id": "2"}]}],
        None,
        [],
    ]
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    call = pa.struct([("id", pa.string()), ("function", function)])
    fields = [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    kind = pa.list_(pa.struct(fields))
    read = values(put_table(tmp_path, pa.table({"messages": pa.array(messages, kind)})))
    twin = values(put(tmp_path, b"".join(json.dumps({"messages": m}).encode() + b"\n" for m in messages)))
    assert read == twin == [{"messages": m} for m in messages]
    assert type(read[0]["messages"]) is list and type(read[0]["messages"][0]) is dict  # type: ignore[index]


def test_columns_wanted_and_missing(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2], "b.c": ["x", "y"], "d": [{"e": 1}, {"e": 2}]})
    file = put_table(tmp_path, table)
    assert values(file, columns=["d", "missing", "a", "a"]) == [{"d": {"e": 1}, "a": 1}, {"d": {"e": 2}, "a": 2}]
    assert values(file, columns=["b.c"]) == [{"b.c": "x"}, {"b.c": "y"}]
    assert values(file, columns=["missing"]) == [{}, {}]
    assert [row.number for row in rows(file, columns=[])] == [0, 1]
    lines = put(tmp_path, b'{"a":1,"b":2}\n{"b":3}\n')
    assert values(lines, columns=["a", "c"]) == [{"a": 1}, {}]


def test_a_column_of_nulls_in_one_file_and_text_in_the_next(tmp_path: Path) -> None:
    """Case A9."""
    nulls = put_table(tmp_path, pa.table({"d": pa.nulls(2)}), "1.parquet")
    typed = put_table(tmp_path, pa.table({"d": pa.array([None, None], pa.string())}), "2.parquet")
    texts = put_table(tmp_path, pa.table({"d": ["x"]}), "3.parquet")
    assert [values(file) for file in (nulls, typed, texts)] == [[{"d": None}] * 2, [{"d": None}] * 2, [{"d": "x"}]]


def test_no_row_groups(tmp_path: Path) -> None:
    """Case A11."""
    kind = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "0.parquet", kind):
        pass
    file = expand([str(tmp_path / "0.parquet")], {})[0]
    assert pq.ParquetFile(file.path).num_row_groups == 0
    assert detect(file, "auto", {}) == "parquet"
    assert chunks(file) == [Chunk(0, [], None, True)]
    empty_groups = put_table(tmp_path, kind.empty_table(), "1.parquet")
    assert chunks(empty_groups) == [Chunk(0, [], None, True)]


def test_text_that_is_not_utf8_is_that_rows_error(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff\xfe", None, "é".encode()], pa.binary())
    table = pa.table({"id": [1, 2, 3, 4], "raw": texts, "text": texts.view(pa.string())})
    read = rows(put_table(tmp_path, table))
    assert [row.error and row.error.code for row in read] == [None, "invalid_unicode", None, None]
    assert read[1].error is not None and "'text'" in read[1].error.message
    assert [row.values for row in read] == [
        {"id": 1, "raw": "a", "text": "a"},
        {"id": 2, "raw": b"\xff\xfe", "text": None},
        {"id": 3, "raw": None, "text": None},
        {"id": 4, "raw": "é", "text": "é"},
    ]


def test_binary_that_is_no_text_is_carried_but_not_printed(tmp_path: Path) -> None:
    images = [{"bytes": b"\x89PNG\xff", "path": "a.png"}, {"bytes": b"plain", "path": None}]
    table = pa.table({"image": images, "raw": [b"\xff", b"text"]})
    file = put_table(tmp_path, table)
    read = rows(file)
    assert [row.error for row in read] == [None, None]
    assert read[0].values == {"image": images[0], "raw": b"\xff"}
    assert read[1].values == {"image": {"bytes": "plain", "path": None}, "raw": "text"}
    assert read[0].values is not None
    with pytest.raises(ValueError, match="not UTF-8 text"):
        f"{read[0].values['raw']}"
    with pytest.raises(ValueError, match="not UTF-8 text"):
        str(read[0].values["image"]["bytes"])
    batch = chunks(file)[0].batch
    assert batch is not None and pa.Table.from_batches([batch]).equals(table)


def test_damaged_parquet(tmp_path: Path) -> None:
    table = pa.table({"prompt": [os.urandom(20).hex() for _ in range(3000)]})
    good = put_table(tmp_path, table, row_group_size=1000)
    data = Path(good.path).read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for damaged in (data[:-1], data[: len(data) // 2], data[:6], data[:footer] + b"\xff" * 40 + data[footer + 40 :]):
        file = put(tmp_path, damaged, "bad.parquet")
        assert detect(file, "auto", {}) == "parquet"
        with pytest.raises(DataError, match=r"bad\.parquet"):
            chunks(file, "parquet")
        with pytest.raises(DataError, match=r"bad\.parquet"):
            schema(file, "parquet", {})
    start = pq.ParquetFile(good.path).metadata.row_group(1).column(0).dictionary_page_offset
    assert start is not None
    file = put(tmp_path, data[:start] + b"\xff" * 64 + data[start + 64 :], "bad.parquet")
    seen: list[Row] = []
    with pytest.raises(DataError, match=r"bad\.parquet.*first 1000 rows"):
        for chunk in read_shards(file, "parquet", columns=None, shard_rows=None, done={}, storage_options={}):
            seen.extend(chunk.rows)
    assert len(seen) == 1000


def test_a_column_twice(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    file = put_table(tmp_path, twice)
    with pytest.raises(DataError, match="column 'a' occurs twice"):
        chunks(file)
    assert values(file, columns=["b"]) == [{"b": 3}]


def test_a_large_row_group_is_read_page_by_page(tmp_path: Path) -> None:
    """Case A13, small: no column chunk is held whole, dictionary or not."""
    texts = [f"{i:08d}" * 250 for i in range(20_000)]  # 40 MB
    for name, column in (("plain", pa.array(texts)), ("large", pa.array(texts, pa.large_string()))):
        file = put_table(tmp_path, pa.table({"t": column}), f"{name}.parquet", compression="none", use_dictionary=False)
        assert pq.ParquetFile(file.path).num_row_groups == 1
        before = pa.total_allocated_bytes()
        peak = seen = 0
        for chunk in read_shards(file, "parquet", columns=None, shard_rows=None, done={}, storage_options={}):
            assert len(chunk.rows) <= 256 and sum(len(row.values["t"]) for row in chunk.rows if row.values) <= 1 << 20
            seen += len(chunk.rows)
            peak = max(peak, pa.total_allocated_bytes() - before)
        assert seen == 20_000
        assert peak < 12 << 20


# Shards


def test_chunk_and_shard_bounds(tmp_path: Path) -> None:
    short = put(tmp_path, b"".join(b'{"n":%d}\n' % i for i in range(20_000)))
    places = ranges(short)
    assert [(place.first_row, place.num_rows) for place in places] == [(0, 8192), (8192, 8192), (16384, 3616)]
    assert [place.shard for place in places] == [0, 1, 2]
    assert places[0].byte_start == 0 and places[-1].byte_end == short.size
    assert [a.byte_end for a in places[:-1]] == [b.byte_start for b in places[1:]]
    found = chunks(short)
    assert max(len(chunk.rows) for chunk in found) == 256
    assert [chunk.last for chunk in found] == [False] * (len(found) - 1) + [True]
    assert [place.num_rows for place in ranges(short, shard_rows=15_000)] == [15_000, 5_000]
    exact = put(tmp_path, b"{}\n" * 100 + b"\n\n")
    found = chunks(exact, shard_rows=50)
    assert [(chunk.shard, len(chunk.rows), chunk.last) for chunk in found] == [(0, 50, False), (1, 50, True)]
    assert found[1].end == ShardRange(0, 1, 50, 50, 150, 300)


def test_shards_end_by_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_limits, "SHARD_BYTES", 10_000)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 2_500)
    line = b'{"x":"' + b"y" * 991 + b'"}\n'
    assert len(line) == 1000
    file = put(tmp_path, line * 25)
    assert [place.num_rows for place in ranges(file)] == [10, 10, 5]
    assert [len(chunk.rows) for chunk in chunks(file)][:4] == [3, 3, 3, 1]
    assert [place.num_rows for place in ranges(file, shard_rows=20)] == [20, 5]
    packed = put(tmp_path, gzip.compress(line * 25), "x.gz")
    assert ranges(packed) == ranges(file)

    texts = pa.table({"a": [os.urandom(10).hex() for _ in range(3000)]})
    file = put_table(tmp_path, texts, row_group_size=1000, use_dictionary=False, compression="none")
    group = pq.ParquetFile(file.path).metadata.row_group(0)
    per_row = group.total_byte_size // group.num_rows
    assert ranges(file)[0].num_rows == -(-10_000 // per_row)
    assert sum(place.num_rows for place in ranges(file)) == 3000
    snappy = put_table(tmp_path, texts, "s.parquet", row_group_size=1000, use_dictionary=False)
    assert ranges(snappy) == ranges(file)  # a function of the rows' uncompressed size


@pytest.mark.parametrize("row_group_size", [1, 7, 50, 1000])
def test_parquet_shards_across_row_groups(tmp_path: Path, row_group_size: int) -> None:
    file = put_table(tmp_path, pa.table({"n": list(range(100))}), row_group_size=row_group_size)
    found = chunks(file, shard_rows=30)
    assert [row.number for chunk in found for row in chunk.rows] == list(range(100))
    assert [row.values for chunk in found for row in chunk.rows] == [{"n": i} for i in range(100)]
    assert [chunk.end for chunk in found if chunk.end] == [
        ShardRange(0, shard, shard * 30, min(30, 100 - shard * 30), 0, 0) for shard in range(4)
    ]
    assert [chunk.last for chunk in found] == [False] * (len(found) - 1) + [True]


def test_an_empty_file_gives_one_final_chunk(tmp_path: Path) -> None:
    for data in (b"", b"\n\n", b"\xef\xbb\xbf", b"  \r\n"):
        assert chunks(put(tmp_path, data)) == [Chunk(0, [], None, True)]


def numbered(kind: str, folder: Path, count: int, blanks: bool) -> InputFile:
    lines = b"".join(b'{"n":%d}\n%s' % (i, b"\n" if blanks and i % 3 == 1 else b"") for i in range(count))
    table = pa.table({"n": pa.array(range(count), pa.int64())})
    if kind == "parquet":
        return put_table(folder, table, row_group_size=4)
    if kind.startswith("arrow"):
        return put(folder, arrow(table, stream=kind == "arrow stream", batch_rows=4), "x.arrow")
    text = b"".join(b'"%d\n"%s' % (i, b"\r\n\n" if blanks and i % 3 == 1 else b"\n") for i in range(count))
    if kind.startswith("csv"):
        data = b"\xef\xbb\xbfn\n\n" + text
        return put(folder, gzip.compress(data) if kind == "csv gzip" else data, "x.csv")
    if kind == "text":
        return put(folder, b"".join(b"%d\n" % i if i % 4 else b"\n" for i in range(count)), "x.txt")
    return put(folder, {"plain": lines, "gzip": gzip.compress(lines), "zstd": zstd(lines)}[kind])


def arrow(table: pa.Table, stream: bool, batch_rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue().to_pybytes()


KINDS = ["plain", "gzip", "zstd", "parquet", "arrow file", "arrow stream", "csv", "csv gzip", "text"]


@settings(max_examples=250, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(0, 22),
    shard_rows=st.integers(1, 8),
    blanks=st.booleans(),
    data=st.data(),
)
def test_resuming_with_any_shards_done_gives_the_other_rows(
    tmp_path_factory: pytest.TempPathFactory, kind: str, count: int, shard_rows: int, blanks: bool, data: st.DataObject
) -> None:
    file = numbered(kind, tmp_path_factory.getbasetemp(), count, blanks)
    everything = chunks(file, shard_rows=shard_rows)
    assert [row.number for chunk in everything for row in chunk.rows] == list(range(count))
    places = {chunk.end.shard: chunk.end for chunk in everything if chunk.end is not None}
    done: dict[int, ShardRange | None] = {}
    for shard, place in places.items():
        state = data.draw(st.sampled_from(["open", "done", "done, place unknown"]))
        if state != "open":
            done[shard] = place if state == "done" else None
    resumed = chunks(file, shard_rows=shard_rows, done=done)
    wanted = [row for chunk in everything if chunk.shard not in done for row in chunk.rows]
    assert [row for chunk in resumed for row in chunk.rows] == wanted
    said = {chunk.end.shard: chunk.end for chunk in resumed if chunk.end is not None}
    assert said == {shard: place for shard, place in places.items() if done.get(shard) is None}
    assert [chunk.last for chunk in resumed] == [False] * (len(resumed) - 1) + [True]
    if done.get(len(places) - 1) is not None or not places:
        assert resumed[-1] == Chunk(len(places), [], None, True)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "text"]),
    count=st.integers(0, 22),
    shard_rows=st.integers(1, 8),
    low=st.integers(-1, 22),
    high=st.integers(0, 23),
)
def test_a_filter_leaves_shards_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, kind: str, count: int, shard_rows: int, low: int, high: int
) -> None:
    file = numbered(kind, tmp_path_factory.getbasetemp(), count, blanks=False)
    plain = chunks(file, shard_rows=shard_rows)
    found = chunks(file, shard_rows=shard_rows, where=f"int(n) >= {low} and int(n) < {high} and not int(n) == 5")
    assert [chunk.end for chunk in found if chunk.end] == [chunk.end for chunk in plain if chunk.end]
    wanted = [row for chunk in plain for row in chunk.rows if low <= row.number < high and row.number != 5]
    assert [row for chunk in found for row in chunk.rows] == wanted
    assert [chunk.last for chunk in found] == [False] * (len(found) - 1) + [True]
    batches = [(chunk.batch, chunk.rows) for chunk in found if chunk.batch is not None]
    assert all(batch.to_pylist() == [row.values for row in rows] for batch, rows in batches)


def hard_values(kind: str, folder: Path, data: list[tuple[bytes | None, ...]]) -> InputFile:
    """Columns a, b, c of text, some of which is not UTF-8."""
    folder = folder / "day=1"
    columns = [pa.array(column, pa.binary()).view(pa.string()) for column in zip(*data, strict=True)]
    table = pa.table(dict(zip("abc", columns, strict=True)))
    if kind == "parquet":
        return put_table(folder, table, row_group_size=3)
    if kind.startswith("arrow"):
        return put(folder, arrow(table, stream=kind == "arrow stream", batch_rows=4), "x.arrow")
    if kind == "csv":
        return put(folder, b"a,b,c\n" + b"".join(b",".join(one or b"" for one in row) + b"\n" for row in data), "x.csv")
    quoted = [[b"null" if one is None else b'"' + one + b'"' for one in row] for row in data]
    return put(folder, b"".join(b'{"a":%b,"b":%b,"c":%b}\n' % tuple(row) for row in quoted))


hard = st.sampled_from([None, b"0", b"1", b"2", b"x", b"\xff", b"1\xc3"])
TERMS = ["a == '1'", "a != '1'", "b > '0'", "int(b) > 0", "c is None", "c is not None", "day == '1'", "day != '1'"]


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(st.tuples(hard, hard, hard), min_size=1, max_size=12),
    terms=st.lists(st.sampled_from(TERMS), min_size=1, max_size=2),
    operator=st.sampled_from([" and ", " or "]),
    replace=st.booleans(),
)
def test_which_rows_pass_does_not_depend_on_what_is_read_of_them(
    tmp_path_factory: pytest.TempPathFactory,
    data: list[tuple[bytes | None, ...]],
    terms: list[str],
    operator: str,
    replace: bool,
) -> None:
    """A part's carried columns are read again without the others, and have to be those of the same rows."""
    passed = {}
    for kind in ("jsonl", "csv", "arrow file", "arrow stream", "parquet"):
        file = hard_values(kind, tmp_path_factory.getbasetemp(), data)
        found = []
        for columns in (None, [], ["a"], ["b", "c"], ["c", "day"], ["day", "gone"]):
            seen = rows(file, columns=columns, where=operator.join(terms), shard_rows=5, replace_unicode=replace)
            found.append([row.number for row in seen])
        assert found == [found[0]] * len(found), kind
        passed[kind] = found[0]
    assert passed["csv"] == passed["arrow file"] == passed["arrow stream"]


def test_done_shards_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 64)
    data = b"".join(b'{"n":%4d}\n' % i for i in range(100))
    places = ranges(put(tmp_path, data), shard_rows=10)
    spoilt = b"!" * places[8].byte_end + data[places[8].byte_end :]
    file = put(tmp_path, spoilt)
    done: dict[int, ShardRange | None] = {place.shard: place for place in places[:9]}
    assert values(file, "jsonl", shard_rows=10, done=done) == [{"n": i} for i in range(90, 100)]

    table = put_table(tmp_path, pa.table({"n": list(range(100))}), row_group_size=10, compression="none")
    raw = bytearray(Path(table.path).read_bytes())
    for group in range(9):
        column = pq.ParquetFile(table.path).metadata.row_group(group).column(0)
        start = column.dictionary_page_offset or column.data_page_offset
        raw[start : start + 20] = b"\xff" * 20
    file = put(tmp_path, bytes(raw), "spoilt.parquet")
    done = dict.fromkeys(range(9))
    assert values(file, shard_rows=10, done=done) == [{"n": i} for i in range(90, 100)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_line_numbers_stay_right_after_a_jump(tmp_path: Path, pack: Any) -> None:
    data = b"\n" + GOOD * 3 + b"\n\nbad 1\n" + GOOD * 3 + b"\n" + GOOD * 2 + b"bad 2\nbad 3"
    file = put(tmp_path, pack(data))
    every = [row for row in rows(file, shard_rows=2) if row.error]
    assert [row.error.message.partition(":")[0] for row in every if row.error] == ["line 7", "line 14", "line 15"]
    places = ranges(file, shard_rows=2)
    for chosen in itertools.product([False, True], repeat=len(places)):
        done: dict[int, ShardRange | None] = {
            place.shard: place for place, skip in zip(places, chosen, strict=True) if skip
        }
        left = [row for row in rows(file, shard_rows=2, done=done) if row.error]
        assert left == [row for row in every if row.number // 2 not in done]


def test_an_input_that_changed_under_the_run(tmp_path: Path) -> None:
    lines = put(tmp_path, b"{}\n" * 10)
    table = put_table(tmp_path, pa.table({"n": list(range(10))}))
    for file, format, wrong in (
        (lines, "jsonl", ShardRange(0, 1, 6, 5, 18, 33)),
        (lines, "jsonl", ShardRange(0, 1, 5, 5, 16, 30)),
        (table, "parquet", ShardRange(0, 1, 6, 5, 0, 0)),
    ):
        with pytest.raises(ConfigError, match="input has changed"):
            chunks(file, format, shard_rows=5, done={0: None, 1: wrong})


# Stores


def test_memory_urls(tmp_path: Path) -> None:
    store = Store("memory://sources/in")
    store.replace("a.jsonl", GOOD * 3)
    store.replace("b.zst", zstd(GOOD * 2))
    store.replace("c.parquet", Path(put_table(tmp_path, pa.table({"id": ["a"], "prompt": ["x"]})).path).read_bytes())
    files = expand(["memory://sources/in"], {})
    assert [detect(file, "auto", {}) for file in files] == ["jsonl", "jsonl", "parquet"]
    assert [values(file) for file in files] == [[{"id": "a", "prompt": "x"}] * count for count in (3, 2, 1)]
    assert [row.number for row in rows(files[0], shard_rows=2, done={0: ranges(files[0], shard_rows=2)[0]})] == [2]
    assert content_proof(files[0], {}) == content_proof(put(tmp_path, GOOD * 3), {})


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet"])
def test_a_failing_disk_is_not_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "x.parquet":
        file = put_table(tmp_path, pa.table({"n": [os.urandom(50).hex() for _ in range(9000)]}), row_group_size=1000)
    else:
        data = b"".join(b'{"n":"%s"}\n' % os.urandom(50).hex().encode() for _ in range(9000))
        file = put(tmp_path, gzip.compress(data) if name.endswith("gz") else data, name)

    class Failing(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 200_000 and self.tell() < file.size - 50_000:
                raise OSError(5, "Input/output error")
            return super().read(size)

    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(LocalDisk, "open", lambda self, path: storage.Opened(Failing(path), file.size, None))
    with pytest.raises(StorageError, match=r"x\..*Input/output error"):
        chunks(file)
