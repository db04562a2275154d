"""Result rows: their schema, and whole parts (Parquet or JSONL) built from one shard's results."""

from __future__ import annotations

import base64
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import BatchgenError, ConfigError, StorageError
from batchgen.io import answers
from batchgen.io.jsonline import utf8
from batchgen.runfolder import Counters, PartProof, proof_from_metadata
from batchgen.types import Completion, ShardRange

ERROR_TYPE = pa.struct([pa.field("code", pa.string()), pa.field("message", pa.string())])
RESULT_FIELDS = (
    pa.field("sample", pa.int32(), nullable=False),
    pa.field("text", pa.string()),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("stop_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32(), nullable=False),
    pa.field("output_tokens", pa.int32(), nullable=False),
    pa.field("truncated", pa.bool_(), nullable=False),
    pa.field("error", ERROR_TYPE),
)
TOKEN_IDS_FIELD = pa.field("token_ids", pa.list_(pa.int32()))

JSON_TEXT = {b"batchgen.holds": b"json"}  # marks a text column whose values are JSON

_PREFIX = "batchgen."
_BLOCK_BYTES = 64 << 20  # Arrow data built at a time; also a Parquet row group's
_TAIL_BYTES = 32 << 10  # a part's footer is a few kilobytes
_NO_CHECKSUM, _NO_FOOTER = "?" * 64, "!" * 64


def result_schema(*, id_field: pa.Field | None, carried: Sequence[pa.Field], token_ids: bool) -> pa.Schema:
    """The columns of a result row: id, the carried input columns, then what the model made of the row.

    A carried column whose name a result column has becomes `input_<name>`.
    """
    own = [*RESULT_FIELDS, TOKEN_IDS_FIELD] if token_ids else [*RESULT_FIELDS]
    taken = {"id"} | {field.name for field in own}
    names: dict[str, str] = {}  # the name in the result: the name in the input
    for field in carried:
        if not field.name:
            raise ConfigError(
                "output.columns: a column without a name cannot be carried over; name the columns you want"
            )
        name = f"input_{field.name}" if field.name in taken else field.name
        if name in names:
            other = names[name]
            raise ConfigError(
                f"output.columns: '{field.name}' is listed twice"
                if other == field.name
                else f"output.columns: '{other}' and '{field.name}' would both become the result column '{name}'; "
                "leave one of them out or rename it in the input"
            )
        names[name] = field.name
    first = pa.field("id", pa.string() if id_field is None else id_field.type)
    return pa.schema([first, *(field.with_name(name) for name, field in zip(names, carried, strict=True)), *own])


@dataclass(slots=True)
class ShardResults:
    """All results of one shard, in input order.

    `rows` are the rows' numbers in the file (those of the shard that are missing were filtered out), `samples` says how
    many result rows each has. `inputs` are their id (where the job names an id column) and carried columns, batch by
    batch; nothing, or batches without columns, where there are none. `completions` and `texts` are in the order of
    rows and samples. The text of a failed one is not kept.
    """

    shard: ShardRange
    rows: npt.NDArray[np.int64]  # (num_rows,)
    samples: npt.NDArray[np.int64]  # (num_rows,)
    inputs: Sequence[pa.RecordBatch]
    completions: Sequence[Completion]
    texts: Sequence[str]
    truncated: npt.NDArray[np.bool_]  # (num_rows,)

    def places(self, rows: range) -> slice:
        """Where the results of these rows (counted in the shard's kept ones) stand."""
        return slice(int(self.samples[: rows.start].sum()), int(self.samples[: rows.stop].sum()))

    def counters(self) -> Counters:
        errors = [completion.error for completion in self.completions]
        return Counters(
            rows=len(self.rows),
            rows_failed=len({c.key.row for c in self.completions if c.error is not None}),
            results=len(self.completions),
            truncated=int(np.count_nonzero(self.truncated)),
            prompt_tokens=sum(c.prompt_tokens for c in self.completions if c.sample == 0),
            output_tokens=sum(len(c.token_ids) for c in self.completions),
            failed=Counter(error.code for error in errors if error is not None),
            finish_reasons=Counter(c.finish_reason for c in self.completions),
        )


def build_part(part_format: str, schema: pa.Schema, results: ShardResults, metadata: Mapping[str, str]) -> bytes:
    """One part, whole. A Parquet part carries `metadata` in its footer; one of lines has no place for it."""
    _check_order(results)
    if part_format == "parquet":
        return write_parquet(schema, (_table(schema, results, rows) for rows in _blocks(results)), metadata)
    if part_format == "openai":
        return answers.build(schema, results, metadata["fingerprint"])
    assert part_format == "jsonl", part_format
    return _build_jsonl(schema, results)


def _check_order(results: ShardResults) -> None:
    """Rows in the wrong place would be wrong answers that nobody notices."""
    shard, rows = results.shard, results.rows.tolist()
    keys = [(c.key.file, c.key.row, c.sample) for c in results.completions]
    expected = [
        (shard.file, row, sample)
        for row, samples in zip(rows, results.samples.tolist(), strict=True)
        for sample in range(samples)
    ]
    whole = (
        keys == expected
        and all(a < b for a, b in pairwise([shard.first_row - 1, *rows, shard.first_row + shard.num_rows]))
        and len(results.texts) == len(keys)
        and len(results.truncated) == len(rows)
        and (not _has_inputs(results) or sum(batch.num_rows for batch in results.inputs) == len(rows))
    )
    if not whole:
        raise BatchgenError(
            f"the results of {shard} are not whole or out of order; nothing was written, please report it"
        )


def _has_inputs(results: ShardResults) -> bool:
    """Whether anything of the input is carried over: a batch without columns need not know its number of rows."""
    return any(batch.num_columns for batch in results.inputs)


# -- columns -----------------------------------------------------------------------------------------------------------


def _blocks(results: ShardResults) -> list[range]:
    """Row ranges whose Arrow data stays small: with many samples of long rows a shard can pass Arrow's 2 GiB."""
    num_rows, num_results = len(results.rows), len(results.completions)
    carried = sum(batch.nbytes for batch in results.inputs) * num_results // max(num_rows, 1)
    made = sum(map(len, results.texts)) * 4 + sum(len(c.token_ids) for c in results.completions) * 4
    step = max(1, num_rows * _BLOCK_BYTES // max(carried + made, 1))
    return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _input_columns(schema: pa.Schema, results: ShardResults, rows: range) -> list[pa.ChunkedArray | pa.Array]:
    """The id and the carried columns of these rows, each row repeated for its samples."""
    count = len(schema) - len(RESULT_FIELDS) - (TOKEN_IDS_FIELD.name in schema.names)
    columns: list[pa.ChunkedArray | pa.Array] = []
    samples = results.samples[rows.start : rows.stop]
    once = bool((samples == 1).all())
    if _has_inputs(results):
        table = pa.Table.from_batches(results.inputs).slice(rows.start, len(rows))
        repeat = None if once else pa.array(np.repeat(np.arange(len(rows)), samples))
        columns = [column if repeat is None else column.take(repeat) for column in table.columns]
    if len(columns) < count:  # no id column: a row is named by where it stands
        numbers = np.repeat(results.rows[rows.start : rows.stop], samples).tolist()
        columns.insert(0, pa.array([f"{results.shard.file}:{number}" for number in numbers], pa.string()))
    assert len(columns) == count, (len(columns), schema.names)
    return columns


def _table(schema: pa.Schema, results: ShardResults, rows: range) -> pa.Table:
    """The result rows of these input rows."""
    part = results.places(rows)
    completions = results.completions[part]
    texts = [
        text if completion.error is None else None
        for text, completion in zip(results.texts[part], completions, strict=True)
    ]
    errors = [c.error and {"code": c.error.code, "message": utf8(c.error.message)} for c in completions]
    made: dict[str, Any] = {
        "sample": [c.sample for c in completions],
        "text": texts,
        "finish_reason": [c.finish_reason for c in completions],
        "stop_reason": [None if c.stop_reason is None else str(c.stop_reason) for c in completions],
        "prompt_tokens": [c.prompt_tokens for c in completions],
        "output_tokens": [len(c.token_ids) for c in completions],
        "truncated": np.repeat(results.truncated[rows.start : rows.stop], results.samples[rows.start : rows.stop]),
        "error": errors,
    }
    arrays = [pa.array(made[field.name], field.type) for field in RESULT_FIELDS]
    if TOKEN_IDS_FIELD.name in schema.names:
        arrays.append(token_lists([c.token_ids for c in completions]))
    return pa.Table.from_arrays([*_input_columns(schema, results, rows), *arrays], schema=schema)


def token_lists(ids: Sequence[npt.NDArray[np.int32]]) -> pa.ListArray:
    """Token ids as one list<int32> column, without a Python object for each token."""
    offsets = np.zeros(len(ids) + 1, np.int32)
    np.cumsum([len(one) for one in ids], out=offsets[1:])
    values = np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


# -- Parquet -----------------------------------------------------------------------------------------------------------


def write_parquet(schema: pa.Schema, tables: Iterable[pa.Table], metadata: Mapping[str, str]) -> bytes:
    """A Parquet part: a row group for each table; `metadata`, and checksums of data and footer, in its footer."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, len(table)))
        # The checksums' places are filled in when the data is complete: what a writer holds back differs by release.
        footer = {**metadata, "checksum": _NO_CHECKSUM, "footer": _NO_FOOTER}
        writer.add_key_value_metadata({f"{_PREFIX}{key}": value for key, value in footer.items()})
    part = sink.getbuffer()
    start = len(part) - 8 - _footer_bytes(part)
    for unknown, covered in ((_NO_CHECKSUM, slice(start)), (_NO_FOOTER, slice(start, None))):
        checksum = hashlib.sha256(part[covered]).hexdigest()
        place = bytes(part[start:]).rindex(unknown.encode()) + start
        part[place : place + len(unknown)] = checksum.encode()
    return bytes(part)


def _check_footer(footer: bytes, checksum: str) -> None:
    """ValueError where a footer (up to the file's end) is not the one that was written."""
    at = footer.rfind(checksum.encode())
    blank = footer[:at] + _NO_FOOTER.encode() + footer[at + len(_NO_FOOTER) :]
    if len(checksum) != len(_NO_FOOTER) or hashlib.sha256(blank).hexdigest() != checksum:
        raise ValueError("it does not fit its checksum")


def _footer_bytes(tail: bytes | memoryview) -> int:
    return int.from_bytes(tail[-8:-4], "little")


def read_proof(file: BinaryIO, name: str) -> PartProof:
    """The proof in a Parquet part's footer; reads the end of the file only. StorageError where it is none."""
    size = file.seek(0, io.SEEK_END)
    tail = _tail(file, size, _TAIL_BYTES)
    if len(tail) < 12 or tail[-4:] != b"PAR1":
        raise corrupt(name, "it does not end as a Parquet file does")
    if _footer_bytes(tail) + 8 > len(tail):
        tail = _tail(file, size, _footer_bytes(tail) + 8)
    try:
        footer = pq.read_metadata(pa.BufferReader(tail))
        pairs = {key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}
        own = {key.removeprefix(_PREFIX): value for key, value in pairs.items() if key.startswith(_PREFIX)}
        _check_footer(tail[-8 - _footer_bytes(tail) :], own.pop("footer"))
        proof = proof_from_metadata(own, size)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise corrupt(name, f"its footer is damaged or not of this program ({first_line(error)})") from error
    if footer.num_rows != proof.counters.results:
        raise corrupt(name, f"it has {footer.num_rows} rows and says it has {proof.counters.results}")
    return proof


def _tail(file: BinaryIO, size: int, count: int) -> bytes:
    file.seek(max(0, size - count))
    return file.read()


def verify_parquet(data: bytes, name: str) -> PartProof:
    """The proof of a whole Parquet part, its checksum compared with its data."""
    proof = read_proof(io.BytesIO(data), name)
    if hashlib.sha256(memoryview(data)[: len(data) - 8 - _footer_bytes(data)]).hexdigest() != proof.checksum:
        raise corrupt(name, "its data does not fit its checksum")
    return proof


def corrupt(name: str, what: str) -> StorageError:
    """The error of a part that is not what was written."""
    return StorageError(
        f"{name}: this part is corrupt: {what}. Nothing is written over it: put a good copy in its place, or let "
        "`batchgen verify JOB --repair` compute its rows anew"
    )


def first_line(error: Exception) -> str:
    """What a library says, short."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


# -- JSONL -------------------------------------------------------------------------------------------------------------


def _build_jsonl(schema: pa.Schema, results: ShardResults) -> bytes:
    lines, options = io.BytesIO(), orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    for rows in _blocks(results):
        table = _table(schema, results, rows)
        columns = []
        for field, column in zip(schema, table.columns, strict=True):
            plain = _plain_type(column.type)
            values = (column if plain == column.type else column.cast(plain)).to_pylist()
            if field.metadata == JSON_TEXT:
                values = [None if value is None else orjson.Fragment(value) for value in values]
            columns.append(values)
        for values in zip(*columns, strict=True):
            row = dict(zip(schema.names, values, strict=True))
            lines.write(orjson.dumps(row, default=_json_value, option=options))
    return lines.getvalue()


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type a column is written to JSON as: what JSON has no form for becomes text, at any depth."""
    types = pa.types
    if (types.is_temporal(kind) and not types.is_interval(kind)) or types.is_decimal(kind):
        return pa.string()
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    nested: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], pa.DataType]], ...] = (
        (types.is_large_list, pa.large_list),
        (types.is_list, pa.list_),
    )
    for test, make in nested:
        if test(kind):
            return make(_plain_type(kind.value_type))
    return kind


def _json_value(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def count_jsonl(
    data: bytes, name: str, shard: ShardRange, *, part_format: str = "jsonl", filtered: bool = False
) -> Counters:
    """What a part of lines holds, counted from them: for a part whose proof was never written.

    Where the job filters rows, it may hold fewer than the shard has.
    """
    counters, failed_rows, number = Counters(), set(), 0
    try:
        for line in data.splitlines():
            number += 1
            result = orjson.loads(line)
            if part_format == "openai":
                answers.tally(result, counters)
                continue
            counters.rows += result["sample"] == 0
            counters.results += 1
            counters.finish_reasons[result["finish_reason"]] += 1
            counters.output_tokens += result["output_tokens"]
            if result["sample"] == 0:
                counters.prompt_tokens += result["prompt_tokens"]
                counters.truncated += result["truncated"]
            if result["error"] is not None:
                counters.failed[result["error"]["code"]] += 1
                failed_rows.add(counters.rows)
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise corrupt(name, f"line {number} is not a result ({first_line(error)})") from error
    rows = counters.rows
    wrong = rows > shard.num_rows if filtered else rows != shard.num_rows
    if wrong or (data and not data.endswith(b"\n")):
        raise corrupt(name, f"it holds {rows} rows where the input has {shard.num_rows}")
    counters.rows_failed += len(failed_rows)
    return counters
