"""Arrow files and streams: types, dictionaries that change, what is skipped, and what is cut short or damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from inputs import chunks, put, ranges, rows, values

from batchgen.errors import ConfigError, DataError
from batchgen.io import rows as row_limits
from batchgen.io.files import InputFile
from batchgen.io.sources import detect, schema
from batchgen.types import ShardRange

KINDS = pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])


def put_arrow(
    folder: Path, batches: list[pa.RecordBatch], stream: bool, name: str = "x.arrow", **options: Any
) -> InputFile:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return put(folder, sink.getvalue().to_pybytes(), name)


def numbered(*lengths: int) -> list[pa.RecordBatch]:
    table = pa.table({"n": list(range(sum(lengths))), "t": [f"t{i}" for i in range(sum(lengths))]})
    found, at = [], 0
    for length in lengths:
        found.append(pa.record_batch(table.slice(at, length).to_pydict(), schema=table.schema))
        at += length
    return found


@KINDS
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_types_and_values(tmp_path: Path, stream: bool, compression: str | None) -> None:
    words = ["a", None, "\U0001f600", "a"]
    table = pa.table(
        {
            "string": words,
            "large": pa.array(words, pa.large_string()),
            "dictionary": pa.array(words).dictionary_encode(),
            "view": pa.array(words, pa.string_view()),
            "int": pa.array([2**53 + 1, None, 7, 8]),
            "list": pa.array([[{"role": "user", "x": None}], None, [], [{"role": "a", "x": 1}]]),
            "time": pa.array([1, None, 3, 4], pa.timestamp("us", "UTC")),
        }
    )
    file = put_arrow(tmp_path, table.to_batches(max_chunksize=3), stream, compression=compression)
    assert detect(file, "auto", {}) == detect(file, "arrow", {}) == "arrow"
    assert schema(file, "arrow", {}) == table.schema
    found = values(file)
    assert [row and row["dictionary"] for row in found] == words == [row and row["view"] for row in found]
    assert [row and row["list"] for row in found] == [[{"role": "user"}], None, [], [{"role": "a", "x": 1}]]
    batches = [chunk.batch for chunk in chunks(file) if chunk.batch is not None]
    assert pa.Table.from_batches(batches).cast(table.schema).equals(table)
    assert values(file, columns=["int", "gone"]) == [{"int": value} for value in table["int"].to_pylist()]
    assert [row.number for row in rows(file, columns=[])] == [0, 1, 2, 3]


@KINDS
def test_dictionaries_that_grow_or_are_replaced(tmp_path: Path, stream: bool) -> None:
    def batch(codes: list[int | None], words: list[str]) -> pa.RecordBatch:
        column = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array(words))
        return pa.record_batch([column, pa.array(range(len(codes)))], names=["d", "n"])

    batches = [batch([0, 1], ["a", "b"]), batch([2, 0, None], ["a", "b", "c"])]
    if stream:  # a file may only add
        batches.append(batch([1, 0], ["x", "y"]))
    file = put_arrow(tmp_path, batches, stream, emit_dictionary_deltas=True)
    wanted = ["a", "b", "c", "a", None] + (["y", "x"] if stream else [])
    assert [row and row["d"] for row in values(file)] == wanted
    assert [row and row["d"] for row in values(file, columns=["d"], shard_rows=2)] == wanted
    first = ranges(file, shard_rows=2)[0]
    assert [row and row["d"] for row in values(file, columns=["d"], shard_rows=2, done={0: first})] == wanted[2:]


@KINDS
def test_shards_across_batches(tmp_path: Path, stream: bool) -> None:
    file = put_arrow(tmp_path, numbered(7, 0, 1, 22, 0), stream)
    found = chunks(file, shard_rows=10)
    assert [chunk.end for chunk in found if chunk.end] == [ShardRange(0, i, i * 10, 10, 0, 0) for i in range(3)]
    assert [row.values and row.values["n"] for chunk in found for row in chunk.rows] == list(range(30))
    assert [chunk.last for chunk in found] == [False] * (len(found) - 1) + [True]
    with pytest.raises(ConfigError, match="input has changed"):
        rows(file, shard_rows=10, done={0: ShardRange(0, 0, 0, 9, 0, 0)})
    for empty in (numbered(0), numbered(0, 0)):
        (chunk,) = chunks(put_arrow(tmp_path, empty, stream))
        assert (chunk.rows, chunk.end, chunk.last) == ([], None, True)


@KINDS
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_shards_end_by_bytes_whatever_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, compression: str | None
) -> None:
    """Long rows make short shards, the same ones with any columns, any filter and any shards done."""
    monkeypatch.setattr(row_limits, "SHARD_BYTES", 10_000)
    lengths = (3, 0, 40, 1, 30)
    texts = [os.urandom(500 if i < 43 else 5_000 if i == 43 else 40).hex() for i in range(sum(lengths))]
    table = pa.table({"n": range(len(texts)), "text": texts, "kind": pa.array(texts).dictionary_encode()})
    (whole,) = table.to_batches()
    batches = [whole.slice(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    for names in (["n", "text"], ["n", "text", "kind"]):
        file = put_arrow(tmp_path, [one.select(names) for one in batches], stream, compression=compression)
        places = ranges(file)
        assert sum(place.num_rows for place in places) == len(texts) and len(places) >= 3
        if "kind" not in names and compression is None:
            held = [sum(map(len, texts[p.first_row : p.first_row + p.num_rows])) for p in places]
            assert all(9_000 < size < 21_000 for size in held[:-1]), held
        assert ranges(file, columns=["n"]) == ranges(file, columns=[]) == ranges(file, where="n < 9") == places
        assert [place.num_rows for place in ranges(file, shard_rows=50)] == [50, 24]
        for shard in range(len(places)):
            done: dict[int, ShardRange | None] = {place.shard: place for place in places if place.shard != shard}
            assert ranges(file, columns=["n"], done=done) == [places[shard]]
            assert ranges(file, columns=["n"], done={**done, shard: None}) == [places[shard]]


def test_done_shards_of_a_file_are_not_read(tmp_path: Path) -> None:
    batches = numbered(*[10] * 10)
    file = put_arrow(tmp_path, batches, stream=False)
    data = bytearray(Path(file.path).read_bytes())
    for i in range(90):  # the texts of all batches but the last
        data[data.index(b"t%d" % i, 500) : data.index(b"t%d" % i, 500) + 2] = b"\xff\xff"
    spoilt = put(tmp_path, bytes(data), "spoilt.arrow")
    places = {place.shard: place for place in ranges(file, shard_rows=10)}
    done: dict[int, ShardRange | None] = {shard: place for shard, place in places.items() if shard < 9}
    found = rows(spoilt, shard_rows=10, done=done)
    assert [row.values for row in found] == [{"n": i, "t": f"t{i}"} for i in range(90, 100)]
    whole = rows(spoilt, shard_rows=10)
    assert [row.error and row.error.code for row in whole] == ["invalid_unicode"] * 90 + [None] * 10


def test_a_cut_stream_is_never_complete(tmp_path: Path) -> None:
    file = put_arrow(tmp_path, numbered(100, 100, 100), stream=True)
    data = Path(file.path).read_bytes()
    counted = []
    for size in range(len(data) - 1, 300, -97):
        cut = put(tmp_path, data[:size], "cut.arrow")
        seen = []
        with pytest.raises(DataError, match=r"cut\.arrow.*cut short") as caught:
            for chunk in iterated(cut):
                seen.append(chunk)
        assert caught.value.exit_code == 65 and not any(chunk.last or chunk.end for chunk in seen)
        counted.append(sum(len(chunk.rows) for chunk in seen))
        if "first" in str(caught.value):
            assert f"first {counted[-1]} rows could be read" in str(caught.value)
    assert sorted(set(counted)) == [0, 100, 200, 300]  # the last one without its end mark
    with pytest.raises(DataError, match="bytes stand behind the end"):
        rows(put(tmp_path, data + data, "two.arrow"))


def iterated(file: InputFile) -> Any:
    from batchgen.io.sources import read_shards

    return read_shards(file, "arrow", columns=None, shard_rows=None, done={}, storage_options={})


def test_a_damaged_file(tmp_path: Path) -> None:
    file = put_arrow(tmp_path, numbered(100, 100), stream=False)
    data = Path(file.path).read_bytes()
    footer = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    spoilt = bytearray(data)
    place = spoilt.index(b"t0t1t2") - 500
    spoilt[place : place + 300] = b"\xff" * 300  # offsets of the texts
    for damaged in (data[:-1], data[: len(data) // 2], data[:footer] + b"\xff" * 40 + data[footer + 40 :], spoilt):
        with pytest.raises(DataError, match=r"bad\.arrow"):
            rows(put(tmp_path, bytes(damaged), "bad.arrow"))


@KINDS
def test_text_that_is_not_utf8_is_that_rows_error(tmp_path: Path, stream: bool) -> None:
    raw = pa.array([b"a", b"\xff\xfe", None, "é".encode()], pa.binary())
    deep = pa.StructArray.from_arrays([raw.view(pa.string())], ["x"])
    batch = pa.record_batch([pa.array([1, 2, 3, 4]), raw.view(pa.string()), deep], names=["id", "text", "deep"])
    file = put_arrow(tmp_path, [batch], stream)
    assert [row.error and row.error.code for row in rows(file)] == [None, "invalid_unicode", None, None]
    assert values(file)[1] == {"id": 2, "text": None, "deep": None}
    found = chunks(file, replace_unicode=True)[0]
    assert [row.error for row in found.rows] == [None] * 4
    assert found.rows[1].values == {"id": 2, "text": "\ufffd\ufffd", "deep": {"x": "\ufffd\ufffd"}}
    assert found.batch is not None
    found.batch.validate(full=True)


def test_twice_one_name_and_names_that_lie(tmp_path: Path) -> None:
    batch = pa.record_batch([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match="column 'a' occurs twice"):
        rows(put_arrow(tmp_path, [batch], stream=False))
    file = put_arrow(tmp_path, numbered(3), stream=True, name="x.parquet")
    assert detect(file, "auto", {}) == "arrow"
    with pytest.raises(DataError, match=r"input\.format is parquet, but this is an Arrow file"):
        detect(file, "parquet", {})
    with pytest.raises(DataError, match="not an Arrow file: it does not begin with the bytes ARROW1 or ff ff ff ff"):
        detect(put(tmp_path, b"{}\n", "x.feather"), "auto", {})
