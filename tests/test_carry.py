"""Input columns on their way into the results: their types over all files, and their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import spec
from batchgen.carry import Carrier, InputFields, input_fields
from batchgen.errors import ConfigError
from batchgen.io import sources
from batchgen.io.files import InputFile, expand
from batchgen.types import RowError


def job(folder: Path, columns: Any = (), id: str | None = None) -> spec.JobSpec:
    return spec.parse(
        {
            "model": {"path": "m"},
            "input": {"path": str(folder), **({"id": id} if id else {})},
            "sampling": {"max_tokens": 1},
            "output": {"path": "o", "columns": columns},
        }
    )


def fields_of(folder: Path, columns: Any = (), id: str | None = None) -> tuple[InputFields, list[InputFile]]:
    files = expand((str(folder),), {}, allow_empty=False)
    formats = [sources.detect(file, "auto", {}) for file in files]
    return input_fields(job(folder, columns, id), files, formats), files


def carried(fields: InputFields, file: InputFile) -> tuple[pa.RecordBatch, dict[int, RowError]]:
    kind = sources.detect(file, "auto", {})
    names = None if kind == "jsonl" else list(fields.names)
    chunks = sources.read_shards(file, kind, columns=names, shard_rows=None, done={}, storage_options={})
    return Carrier(fields).take(next(iter(chunks)))


def write_jsonl(path: Path, *rows: str) -> None:
    path.write_text("".join(row + "\n" for row in rows))


def test_parquet_columns_keep_their_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "key": pa.array([1, 2], pa.int32()),
            "when": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "deep": pa.array([[{"x": 1, "y": None}], []], pa.list_(pa.struct([("x", pa.int8()), ("y", pa.string())]))),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    fields, files = fields_of(tmp_path, ["deep", "when", "kind"], id="key")
    batch, wrong = carried(fields, files[0])
    assert fields.id == pa.field("key", pa.int32()) and not wrong
    assert batch.schema.names == ["key", "deep", "when", "kind"]
    assert pa.table(batch).equals(table.select(batch.schema.names))


def test_types_over_all_parquet_files(tmp_path: Path) -> None:
    nulls = pa.table({"d": pa.nulls(1), "n": pa.array([1], pa.int32()), "mixed": [1], "long": [72057594038135102]})
    values = pa.table({"n": pa.array([1.5]), "d": ["x"], "mixed": ["y"], "long": [0.5], "late": [True]})
    pq.write_table(nulls, tmp_path / "1.parquet")
    pq.write_table(values, tmp_path / "2.parquet")
    fields, files = fields_of(tmp_path, "all")
    assert [(f.name, f.type) for f in fields.carried] == [
        ("d", pa.string()),
        ("n", pa.float64()),
        ("mixed", pa.string()),
        ("long", pa.string()),
        ("late", pa.bool_()),
    ]
    first, second = (carried(fields, file)[0].to_pylist() for file in files)
    assert first == [{"d": None, "n": 1.0, "mixed": "1", "long": "72057594038135102", "late": None}]
    # where the files do not agree, everything is JSON text
    assert second == [{"d": "x", "n": 1.5, "mixed": '"y"', "long": "0.5", "late": True}]


def test_json_columns_are_json_text(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        '{"id": "007", "s": "abc", "n": 72057594038135102, "o": {"k": ["ä", null]}}',
        '{"id": 12, "s": null, "b": false}',
        '{"id": 1.5}',
        "{",
        '{"s": "no id"}',
    )
    fields, files = fields_of(tmp_path, ["s", "n", "o", "b"], id="id")
    batch, wrong = carried(fields, files[0])
    assert all(field.type == pa.string() for field in batch.schema)
    assert batch.to_pydict() == {
        "id": ["007", "12", "1.5", None, None],
        "s": ['"abc"', None, None, None, '"no id"'],
        "n": ["72057594038135102", None, None, None, None],
        "o": ['{"k": ["ä", null]}', None, None, None, None],
        "b": [None, "false", None, None, None],
    }
    assert wrong == {4: RowError("missing_column", "the row has no column `id`, which input.id names")}


def test_declared_types(tmp_path: Path) -> None:
    rows = [
        {"s": "x", "i": 5, "f": 2, "b": True, "j": "text"},
        {"s": 5},
        {"i": "5"},
        {"i": True},
        {"i": 1 << 63},
        {"f": "nan"},
        {"b": 0},
        {"f": 2.5, "i": -(1 << 63)},
    ]
    write_jsonl(tmp_path / "a.jsonl", *map(json.dumps, rows))
    types = {"s": "string", "i": "int64", "f": "float64", "b": "bool", "j": "json"}
    fields, files = fields_of(tmp_path, types)
    assert [field.type for field in fields.carried] == [pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.string()]
    batch, wrong = carried(fields, files[0])
    assert batch.slice(0, 1).to_pylist() == [{"s": "x", "i": 5, "f": 2.0, "b": True, "j": '"text"'}]
    assert sorted(wrong) == [1, 2, 3, 4, 5, 6]
    assert wrong[2] == RowError("invalid_row", 'column `i`: "5" is no int64, which output.columns asks for')
    assert batch.slice(2, 1).to_pylist() == [dict.fromkeys(types)]
    assert batch.column("f")[7].as_py() == 2.5


def test_formats_may_mix(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "x": ["a"], "n": [5]}), tmp_path / "1.parquet")
    write_jsonl(tmp_path / "2.jsonl", '{"id": 2, "x": "b", "n": 6, "y": 0}')
    fields, files = fields_of(tmp_path, "all", id="id")
    assert [f.name for f in fields.carried] == ["x", "n", "y"]
    assert carried(fields, files[0])[0].to_pylist() == [{"id": "1", "x": '"a"', "n": "5", "y": None}]
    assert carried(fields, files[1])[0].to_pylist() == [{"id": "2", "x": '"b"', "n": "6", "y": "0"}]
    typed, _ = fields_of(tmp_path, {"n": "int64"})
    assert [carried(typed, file)[0].to_pylist() for file in files] == [[{"n": 5}], [{"n": 6}]]


def test_no_columns(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", "{}", "{}")
    fields, files = fields_of(tmp_path)
    assert fields == InputFields(()) and fields.id is None
    assert carried(fields, files[0])[0].num_rows == 2


def test_a_column_that_no_file_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "x": ["a"]}), tmp_path / "1.parquet")
    with pytest.raises(ConfigError, match=r"output\.columns: no input file has a column 'z'; .*1\.parquet has id, x"):
        fields_of(tmp_path, ["z"])
    with pytest.raises(ConfigError, match=r"input\.id: no input file has a column 'key'"):
        fields_of(tmp_path, id="key")


def test_the_id_may_be_carried_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "x": ["a"]}), tmp_path / "1.parquet")
    fields, files = fields_of(tmp_path, ["id", "x"], id="id")
    assert carried(fields, files[0])[0].column(0).to_pylist() == [1] and len(fields.carried) == 2


def test_text_formats_and_folders_have_columns_of_text(tmp_path: Path) -> None:
    folder = tmp_path / "day=1"
    folder.mkdir()
    (folder / "a.csv").write_text("key,text\n007,x\n,y\n")
    (folder / "b.txt").write_text("line\n")
    fields, files = fields_of(tmp_path, "all", id="key")
    assert [(f.name, f.type) for f in fields.carried] == [("text", pa.string()), ("day", pa.string())]
    batch, wrong = carried(fields, files[0])
    assert batch.to_pylist() == [{"key": "007", "text": "x", "day": "1"}, {"key": None, "text": "y", "day": "1"}]
    batch, wrong = carried(fields, files[1])
    assert batch.to_pylist() == [{"key": None, "text": "line", "day": "1"}]
    assert wrong[0].code == "missing_column"


def test_a_filter_needs_columns_that_exist(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    (files, formats) = expand((str(tmp_path),), {}, allow_empty=False), ["parquet"]
    wrong = job(tmp_path)
    wrong = wrong.model_copy(update={"input": wrong.input.model_copy(update={"where": "m > 1"})})
    with pytest.raises(ConfigError, match="no input file has a column 'm'"):
        input_fields(wrong, files, formats)


def test_a_few_rows_do_not_take_a_large_dictionary_along(tmp_path: Path) -> None:
    words = pa.array([f"word {i}" for i in range(50_000)])
    column = pa.DictionaryArray.from_arrays(pa.array(range(50_000), pa.int32()), words)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([50_000], pa.int32()), pa.array(["p"]))
    table = pa.table({"d": column, "runs": runs})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    fields, files = fields_of(tmp_path, ["d", "runs"])
    batch, wrong = carried(fields, files[0])
    assert batch["runs"].to_pylist() == ["p"] * 256 and batch["runs"].type == pa.string()
    assert batch.schema.field("d").type == column.type and batch["d"].to_pylist() == words[: batch.num_rows].to_pylist()
    assert len(batch["d"].dictionary) == batch.num_rows == 256 and not wrong


def test_a_misspelt_column_of_json_lines_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "day=1").mkdir()
    write_jsonl(tmp_path / "day=1/a.jsonl", '{"title": "x", "text": "y"}', '{"title": "z", "rare": 1}', "[")
    fields_of(tmp_path, ["title", "rare", "day"])
    assert not caplog.messages
    fields_of(tmp_path, ["titel", "text", "other"])
    one, other = caplog.messages
    assert "none of the first 2 rows has a column titel" in one and one.endswith("did you mean title?")
    assert "a column other" in other and other.endswith("they have day, rare, text, title")
