"""Input columns that go into the results: which there are, of what type, and their values batch by batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.errors import ConfigError
from batchgen.io import openai, sources
from batchgen.io.files import InputFile
from batchgen.io.sinks import JSON_TEXT
from batchgen.spec import JobSpec
from batchgen.types import RowError
from batchgen.where import Filter

logger = logging.getLogger(__name__)

DECLARED_TYPES: dict[str, tuple[pa.DataType, tuple[type, ...]]] = {  # what a JSON value must be to have the type
    "string": (pa.string(), (str,)),
    "int64": (pa.int64(), (int,)),
    "float64": (pa.float64(), (int, float)),
    "bool": (pa.bool_(), (bool,)),
    "json": (pa.string(), ()),
    "text": (pa.string(), ()),
}


PLAIN_TYPES = {  # what results hold in place of types that writers and readers do without
    pa.null(): pa.string(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column on its way into the results.

    `form` says how values are written: "own" as the Arrow type they have, "text" as the text they are (or as JSON), as
    one of DECLARED_TYPES, or what an answer repeats of a request's body ("endpoint", "model"). `source` is the input
    column, where its name is another one.
    """

    field: pa.Field
    form: str
    is_id: bool = False
    source: str | None = None

    @property
    def name(self) -> str:
        """In the input."""
        return self.field.name if self.source is None else self.source


# Of OpenAI requests: what names them, and what answers in OpenAI's form repeat of them.
CUSTOM_ID = Column(pa.field(openai.ID, pa.string()), "custom_id", is_id=True)
REPEATED = (
    Column(pa.field("endpoint", pa.string()), "endpoint", source="body"),
    Column(pa.field("model", pa.string()), "model", source="body"),
)


@dataclass(frozen=True, slots=True)
class InputFields:
    """The id's field (None where the job names no id column) and the carried columns' fields, in result order."""

    columns: tuple[Column, ...]

    @property
    def id(self) -> pa.Field | None:
        return next((column.field for column in self.columns if column.is_id), None)

    @property
    def carried(self) -> tuple[pa.Field, ...]:
        return tuple(column.field for column in self.columns if not column.is_id)

    @property
    def names(self) -> tuple[str, ...]:
        """The input columns to read."""
        return tuple(dict.fromkeys(column.name for column in self.columns))


def input_fields(spec: JobSpec, files: Sequence[InputFile], formats: Sequence[str]) -> InputFields:
    """The columns that the job carries over, with one type for all input files.

    Where files have columns (all formats but JSON Lines) one keeps its own type, widened where files differ and as
    JSON text where they do not agree at all. From JSON Lines it is JSON text unless the job gives a type
    (which JSON Lines results hold as the value it stands for). Reads the files' schemas if need be.
    """
    if spec.input.where is not None:
        sources.check_where(Filter(spec.input.where), files, formats, spec.input.storage_options)
    requests = spec.input.format == "openai"
    if requests and spec.output.format == "openai":
        return InputFields((CUSTOM_ID, *REPEATED))
    names, id_name = spec.output.columns, spec.input.id_column
    if not names and id_name is None:
        return InputFields(())
    schemas = sources.schemas(files, formats, spec.input.storage_options)
    tables = [schema for schema in schemas if schema is not None]
    only_tables = bool(tables) and len(tables) == len(files)
    if names == "all":
        names = dict.fromkeys(_all_names(spec, files, formats, tables))
    elif names:
        _warn_of_unknown(names, spec, files, formats, tables)
    columns = []
    wanted = ([] if id_name is None else [(id_name, None, True)]) + [(*pair, False) for pair in names.items()]
    for name, declared, is_id in wanted:
        if only_tables and not any(name in schema.names for schema in tables):
            key, known = "input.id" if is_id else "output.columns", ", ".join(tables[0].names)
            raise ConfigError(f"{key}: no input file has a column {name!r}; {files[0].path} has {known}")
        common = _common_type(name, tables) if only_tables and declared is None else None
        if common is not None:
            columns.append(Column(pa.field(name, common), "own", is_id))
        else:
            if is_id and requests:
                columns.append(CUSTOM_ID)
                continue
            form = "text" if is_id else declared or "json"
            metadata = JSON_TEXT if form == "json" else None
            columns.append(Column(pa.field(name, DECLARED_TYPES[form][0], metadata=metadata), form, is_id))
    return InputFields(tuple(columns))


def _all_names(
    spec: JobSpec, files: Sequence[InputFile], formats: Sequence[str], tables: Sequence[pa.Schema]
) -> list[str]:
    """Every column but the id: by the files' schemas; JSON Lines have none, so its first rows count."""
    names = dict.fromkeys(name for schema in tables for name in schema.names)
    for values in _first_lines(spec, files, formats):
        names.update(dict.fromkeys(values))
    return [name for name in names if name != spec.input.id_column]


def _first_lines(spec: JobSpec, files: Sequence[InputFile], formats: Sequence[str]) -> list[Mapping[str, Any]]:
    """The first rows of the first file of JSON Lines."""
    first = next((file for file, kind in zip(files, formats, strict=True) if kind == "jsonl"), None)
    if first is None:
        return []
    options = spec.input.storage_options
    chunks = sources.read_shards(first, "jsonl", columns=None, shard_rows=None, done={}, storage_options=options)
    return [row.values for row in next(chunks).rows if row.values]


def _warn_of_unknown(
    names: Iterable[str], spec: JobSpec, files: Sequence[InputFile], formats: Sequence[str], tables: Sequence[pa.Schema]
) -> None:
    """JSON Lines may leave out what is null, so a column that no first row has is no error; but it may be misspelt."""
    rows = _first_lines(spec, files, formats)
    have = dict.fromkeys(name for values in rows for name in values)
    for name in names:
        if rows and name not in have and not any(name in schema.names for schema in tables):
            near = get_close_matches(name, have, 1)
            logger.warning(
                "output.columns: none of the first %d rows has a column %s, so it may be empty in all results; %s",
                len(rows),
                name,
                f"did you mean {near[0]}?" if near else f"they have {', '.join(sorted(have))}",
            )


def _common_type(name: str, tables: Sequence[pa.Schema]) -> pa.DataType | None:
    """The type that holds the column of every file; None where there is none."""
    found = {schema.field(name).type for schema in tables if schema.get_field_index(name) >= 0}
    found = {kind.value_type if pa.types.is_run_end_encoded(kind) else kind for kind in found}
    try:
        one_each = [pa.schema([pa.field(name, kind)]) for kind in found]
        common = pa.unify_schemas(one_each, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    if pa.types.is_floating(common) and any(pa.types.is_integer(kind) and kind.bit_width > 32 for kind in found):
        return None  # a long id would come out changed
    return PLAIN_TYPES.get(common, common)


def _readable(array: pa.Array, name: str, wrong: dict[int, RowError]) -> pa.Array:
    """The array; text in it that is no UTF-8 becomes null, and its row an error."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        values = []
        for place in range(len(array)):
            try:
                array.slice(place, 1).validate(full=True)
                values.append(array.slice(place, 1))
            except pa.ArrowInvalid:
                wrong[place] = RowError("invalid_unicode", f"column `{name}` is not valid UTF-8")
                values.append(pa.nulls(1, array.type))
        return pa.concat_arrays(values)
    return array


class Carrier:
    """Fills the columns of `InputFields` from chunks of rows."""

    def __init__(self, fields: InputFields) -> None:
        self._columns = fields.columns
        self.schema = pa.schema([column.field for column in fields.columns])

    def take(self, chunk: sources.Chunk) -> tuple[pa.RecordBatch, dict[int, RowError]]:
        """The chunk's carried columns (num_rows rows), and by place the rows without an id or with a wrong value."""
        if not chunk.rows:
            return pa.RecordBatch.from_pylist([], self.schema), {}
        wrong: dict[int, RowError] = {}
        arrays = [self._array(column, chunk, wrong) for column in self._columns]
        if not arrays:
            rows = pa.array([True] * len(chunk.rows))  # a batch without columns has no length of its own
            return pa.record_batch([rows], names=["row"]).select([]), wrong
        return pa.record_batch(arrays, schema=self.schema), wrong

    def _array(self, column: Column, chunk: sources.Chunk, wrong: dict[int, RowError]) -> pa.Array:
        name, kind = column.name, column.field.type
        if column.is_id and column.form != "custom_id":  # which is checked with the rest of its request
            for place, row in enumerate(chunk.rows):
                if row.values is not None and name not in row.values:
                    wrong[place] = RowError("missing_column", f"the row has no column `{name}`, which input.id names")
        if column.form == "own":
            assert chunk.batch is not None  # all input has columns
            index = chunk.batch.schema.get_field_index(name)
            if index < 0:
                return pa.nulls(len(chunk.rows), kind)
            array = chunk.batch.column(index)
            if pa.types.is_dictionary(array.type):  # a few rows do not take the whole file's dictionary along
                array = array.dictionary_decode()
            elif pa.types.is_run_end_encoded(array.type):  # which Parquet has not
                array = pc.run_end_decode(array)
            return _readable(array, name, wrong).cast(kind)
        convert = CONVERTERS.get(column.form) or _checked(column.form)
        values = []
        for place, row in enumerate(chunk.rows):
            value = None if row.values is None else row.values.get(name)
            try:
                values.append(None if value is None else convert(value))
            except ValueError as error:
                values.append(None)
                wrong.setdefault(place, RowError("invalid_row", f"column `{name}`: {error}"))
        return pa.array(values, kind)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json_text(value)


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "json": _json_text,
    "text": _text,
    "custom_id": _text,
    "endpoint": openai.endpoint_of,
    "model": openai.model_of,
}


def _checked(declared: str) -> Callable[[Any], Any]:
    """From a JSON value to one of the declared type; raises ValueError where it does not fit."""
    accepted = DECLARED_TYPES[declared][1]

    def convert(value: Any) -> Any:
        fits = isinstance(value, accepted) and (declared == "bool" or not isinstance(value, bool))
        if not fits or (declared == "int64" and not -(1 << 63) <= value < 1 << 63):
            raise ValueError(f"{_json_text(value)[:60]} is no {declared}, which output.columns asks for")
        return float(value) if declared == "float64" else value

    return convert
