"""Result rows: schema, order, types, both formats, and what a part proves of itself."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import BatchgenError, ConfigError, StorageError
from batchgen.io import sinks
from batchgen.io.sinks import ShardResults, build_part, count_jsonl, read_proof, result_schema, verify_parquet
from batchgen.runfolder import Counters, metadata_of
from batchgen.types import Completion, RowError, RowKey, ShardRange

SHARD = ShardRange(file=2, shard=3, first_row=10, num_rows=4, byte_start=100, byte_end=220)


def make_results(samples=1, inputs=(), shard=SHARD, failed=(11,), text="answer {row}.{sample}"):
    completions, texts = [], []
    for row in range(shard.first_row, shard.first_row + shard.num_rows):
        for sample in range(samples):
            error = RowError("empty_prompt", "no tokens") if row in failed else None
            ids = np.arange(0 if error else row % 5 + 1, dtype=np.int32)
            reason = "error" if error else "stop" if row % 2 else "length"
            stop = {0: None, 1: "END", 2: 7}[row % 3] if reason == "stop" else None
            completions.append(Completion(RowKey(shard.file, row), sample, ids, reason, stop, 20 + row, error))
            texts.append(text.format(row=row, sample=sample))
    truncated = np.arange(shard.num_rows) == 3
    rows = np.arange(shard.first_row, shard.first_row + shard.num_rows)
    return ShardResults(shard, rows, np.full(len(rows), samples), inputs, completions, texts, truncated)


def build(part_format, schema, results):
    return build_part(part_format, schema, results, metadata_of("f" * 64, 5, results.shard, results.counters()))


def test_schema_is_the_documented_one():
    schema = result_schema(id_field=None, carried=[], token_ids=False)
    assert schema.names == [
        *("id", "sample", "text", "finish_reason", "stop_reason", "prompt_tokens", "output_tokens", "truncated"),
        "error",
    ]
    assert schema.field("id").type == pa.string()
    carried = [pa.field("text", pa.large_string()), pa.field("day", pa.date32()), pa.field("token_ids", pa.int8())]
    schema = result_schema(id_field=pa.field("key", pa.int64()), carried=carried, token_ids=True)
    assert schema.names[:4] == ["id", "input_text", "day", "input_token_ids"]
    assert schema.field("id").type == pa.int64() and schema.field("input_text").type == pa.large_string()
    assert schema.field("token_ids").type == pa.list_(pa.int32())
    assert result_schema(id_field=None, carried=carried, token_ids=False).names[3] == "token_ids"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a"], "'a' is listed twice"),
        (["text", "input_text"], "'text' and 'input_text' would both become the result column 'input_text'"),
        ([""], "without a name"),
    ],
)
def test_impossible_column_names_are_refused(names, said):
    with pytest.raises(ConfigError, match="output") as caught:
        result_schema(id_field=None, carried=[pa.field(name, pa.string()) for name in names], token_ids=False)
    assert said in str(caught.value)


def test_parquet_part_rows_in_order_with_samples():
    carried = [pa.field("when", pa.timestamp("ns")), pa.field("tag", pa.dictionary(pa.int8(), pa.string()))]
    fields = [pa.field("id", pa.int64()), *carried]
    when = pa.array([1, None, 3, 4], pa.timestamp("ns"))
    tags = pa.array(["x", "y", None, "x"]).dictionary_encode().cast(carried[1].type)
    batch = pa.record_batch([pa.array([7, 8, 7, 9]), when, tags], schema=pa.schema(fields))
    results = make_results(samples=2, inputs=[batch.slice(0, 1), batch.slice(1)])
    schema = result_schema(id_field=fields[0], carried=carried, token_ids=True)
    table = pq.read_table(io.BytesIO(build("parquet", schema, results)))
    assert table.schema.equals(schema)
    rows = table.drop_columns(["when"]).to_pylist()  # nanoseconds have no Python type
    assert [(row["id"], row["sample"]) for row in rows] == [(i, s) for i in (7, 8, 7, 9) for s in (0, 1)]
    assert [row["tag"] for row in rows[::2]] == ["x", "y", None, "x"]
    assert table.column("when").combine_chunks().take([0, 2, 4]).cast(pa.int64()).to_pylist() == [1, None, 3]
    ok, bad = rows[0], rows[2]
    assert ok["text"] == "answer 10.0" and ok["error"] is None and ok["token_ids"] == [0]
    assert bad["text"] is None and bad["finish_reason"] == "error"
    assert bad["error"] == {"code": "empty_prompt", "message": "no tokens"}
    assert [row["truncated"] for row in rows] == [False] * 6 + [True] * 2
    assert [row["stop_reason"] for row in rows[6:]] == ["END", "END"]


def test_rows_are_named_by_place_without_an_id_column():
    for part_format in ("parquet", "jsonl"):
        data = build(part_format, result_schema(id_field=None, carried=[], token_ids=False), make_results(samples=2))
        if part_format == "parquet":
            ids = pq.read_table(io.BytesIO(data)).column("id").to_pylist()
        else:
            ids = [json.loads(line)["id"] for line in data.splitlines()]
        assert ids == ["2:10", "2:10", "2:11", "2:11", "2:12", "2:12", "2:13", "2:13"]


def test_large_shards_are_built_in_blocks(monkeypatch):
    monkeypatch.setattr(sinks, "_BLOCK_BYTES", 100)
    batch = pa.record_batch([pa.array(["a" * 50, "b" * 50, "c" * 50, "d" * 50])], names=["note"])
    schema = result_schema(id_field=None, carried=[pa.field("note", pa.string())], token_ids=False)
    results = make_results(samples=3, inputs=[batch])
    data = build("parquet", schema, results)
    assert pq.read_metadata(io.BytesIO(data)).num_row_groups == 4
    assert [row["note"][0] for row in pq.read_table(io.BytesIO(data)).to_pylist()] == [c for c in "abcd" for _ in "123"]
    assert verify_parquet(data, "part").counters.results == 12
    assert len(build("jsonl", schema, results).splitlines()) == 12


def test_counters():
    counters = make_results(samples=2).counters()
    assert counters == Counters(
        rows=4,
        rows_failed=1,
        results=8,
        truncated=1,
        prompt_tokens=30 + 31 + 32 + 33,
        output_tokens=2 * (1 + 0 + 3 + 4),
        failed={"empty_prompt": 2},
        finish_reasons={"length": 4, "error": 2, "stop": 2},
    )
    assert Counters.from_json(json.loads(json.dumps(counters.to_json()))) == counters


def test_a_parquet_part_proves_itself():
    results = make_results(samples=2)
    schema = result_schema(id_field=None, carried=[], token_ids=True)
    data = build("parquet", schema, results)
    proof = verify_parquet(data, "part")
    assert (proof.fingerprint, proof.epoch, proof.shard, proof.size) == ("f" * 64, 5, SHARD, len(data))
    assert proof.counters == results.counters()
    footer = pq.read_metadata(io.BytesIO(data)).metadata
    assert footer[b"batchgen.first_row"] == b"10" and footer[b"batchgen.fingerprint"] == b"f" * 64
    assert b"?" * 64 not in data


def test_only_the_end_of_a_part_is_read_for_its_proof(monkeypatch):
    class Watched(io.BytesIO):
        read_bytes = 0

        def read(self, *args):
            data = super().read(*args)
            self.read_bytes += len(data)
            return data

    shard = ShardRange(0, 0, 0, 20_000, 0, 0)
    results = make_results(shard=shard, failed=())
    results.texts = [f"{np.random.default_rng(i).bytes(40).hex()}" for i in range(20_000)]
    data = build("parquet", result_schema(id_field=None, carried=[], token_ids=False), results)
    file = Watched(data)
    assert read_proof(file, "part").shard == shard
    assert file.read_bytes < 40_000 < len(data)
    monkeypatch.setattr(sinks, "_TAIL_BYTES", 20)  # a footer longer than the first read
    assert read_proof(io.BytesIO(data), "part").shard == shard


@pytest.mark.parametrize("damage", ["empty", "short", "no magic", "footer", "length", "foreign", "rows"])
def test_a_corrupt_part_is_named(damage):
    schema = result_schema(id_field=None, carried=[], token_ids=False)
    data = bytearray(build("parquet", schema, make_results()))
    if damage == "foreign":
        sink = io.BytesIO()
        pq.write_table(pa.table({"a": [1]}), sink)
        data = bytearray(sink.getvalue())
    elif damage == "rows":
        place = data.index(b'"results":4') + len(b'"results":')
        data[place : place + 1] = b"5"
    elif damage == "footer":
        data[-60:-8] = b"\xff" * 52
    elif damage == "length":
        data[-8:-4] = (2**31).to_bytes(4, "little")
    else:
        data = {"empty": bytearray(), "short": data[: len(data) // 2], "no magic": data[:-4] + b"JUNK"}[damage]
    with pytest.raises(StorageError, match=r"out/part-7\.parquet: this part is corrupt"):
        read_proof(io.BytesIO(bytes(data)), "out/part-7.parquet")


def test_every_changed_byte_of_the_data_breaks_the_checksum():
    data = build("parquet", result_schema(id_field=None, carried=[], token_ids=False), make_results())
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for place in range(0, end, 7):
        broken = bytearray(data)
        broken[place] ^= 1
        with pytest.raises(StorageError, match="does not fit its checksum"):
            verify_parquet(bytes(broken), "part")


def test_jsonl_is_strict_json_of_the_same_columns():
    deep = pa.list_(pa.struct([("t", "timestamp[ns]")]))
    kinds = {
        "score": pa.array([float("nan"), float("inf"), 1.5, None]),
        "when": pa.array([1, 2, 3, None], pa.timestamp("ns")),
        "price": pa.array([decimal.Decimal("1.10"), None, None, None], pa.decimal128(10, 2)),
        "raw": pa.array([b"\x00\xff", b"", None, b"a"]),
        "tag": pa.array(["x", "y", None, "x"]).dictionary_encode(),
        "deep": pa.array([[{"t": dt.datetime(2024, 1, 2)}], [], None, [None]], deep),
        "pairs": pa.array([[("k", dt.date(2024, 1, 2))], [], None, []], pa.map_(pa.string(), pa.date32())),
        "big": pa.array([2**64 - 1, 0, 1, None], pa.uint64()),
        "half": pa.array(np.array([1.5, 2, 3, 4], np.float16)),
        "flags": pa.array([[True], [False], None, []], pa.large_list(pa.bool_())),
    }
    batch = pa.record_batch(list(kinds.values()), names=list(kinds))
    schema = result_schema(id_field=None, carried=list(batch.schema), token_ids=True)
    data = build("jsonl", schema, make_results(inputs=[batch]))

    def no_constant(name):
        raise AssertionError(name)

    assert data.endswith(b"\n")
    rows = [json.loads(line, parse_constant=no_constant) for line in data.decode("utf-8").splitlines()]
    assert [list(row) for row in rows] == [schema.names] * 4
    first = rows[0]
    assert [row["score"] for row in rows] == [None, None, 1.5, None]
    assert first["when"] == "1970-01-01 00:00:00.000000001" and first["price"] == "1.10" and first["raw"] == "AP8="
    assert first["tag"] == "x" and first["deep"][0]["t"].startswith("2024-01-02") and first["big"] == 2**64 - 1
    assert first["pairs"] == [["k", "2024-01-02"]] and first["half"] == 1.5 and first["flags"] == [True]
    assert first["error"] is None and rows[1]["error"] == {"code": "empty_prompt", "message": "no tokens"}
    assert rows[1]["text"] is None and first["token_ids"] == [0]


def test_text_of_any_kind_survives():
    hard = 'quote " back\\ newline \n\r\u2028 nul \x00 emoji \U0001f600 é'
    results = make_results()
    results.texts = [hard] * 4
    error = RowError("invalid_unicode", "half a pair: \ud83d")
    results.completions[1] = Completion(RowKey(2, 11), 0, np.empty(0, np.int32), "error", None, 0, error)
    schema = result_schema(id_field=None, carried=[], token_ids=False)
    table = pq.read_table(io.BytesIO(build("parquet", schema, results))).to_pylist()
    lines = [json.loads(line) for line in build("jsonl", schema, results).decode().split("\n")[:-1]]
    for rows in (table, lines):
        assert rows[0]["text"] == hard and rows[1]["error"]["message"] == "half a pair: \\ud83d"


def test_jsonl_counted_from_its_lines_gives_the_same_counters():
    results = make_results(samples=3)
    data = build("jsonl", result_schema(id_field=None, carried=[], token_ids=False), results)
    assert count_jsonl(data, "part", SHARD) == results.counters()
    for broken in (
        data[:-1],
        data[: len(data) // 2],
        data + b"garbage\n",
        b"",
        b"[1]\n",
        data.replace(b'"sample":0', b'"s":0'),
    ):
        with pytest.raises(StorageError, match="part: this part is corrupt"):
            count_jsonl(broken, "part", SHARD)


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
def test_a_shard_without_rows_is_a_part_without_rows(part_format):
    shard = ShardRange(0, 0, 0, 0, 0, 0)
    batch = pa.record_batch([pa.array([], pa.string())], names=["note"])
    schema = result_schema(id_field=None, carried=list(batch.schema), token_ids=True)
    data = build(part_format, schema, make_results(shard=shard, inputs=[batch]))
    if part_format == "parquet":
        assert verify_parquet(data, "part").shard == shard
        assert pq.read_table(io.BytesIO(data)).schema.equals(schema)
    else:
        assert data == b"" and count_jsonl(data, "part", shard) == Counters()


def test_rows_out_of_order_are_never_written():
    results = make_results()
    results.completions = [results.completions[1], results.completions[0], *results.completions[2:]]
    with pytest.raises(BatchgenError, match="out of order"):
        build("parquet", result_schema(id_field=None, carried=[], token_ids=False), results)
