"""Rows out of Arrow batches: what the formats with columns of their own (Parquet, Arrow) share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchgen.errors import DataError
from batchgen.io.rows import NotText, Request, Row
from batchgen.types import RowError
from batchgen.where import Filter, Mismatch


class Rows:
    """Makes rows of a file's batches: filters them, and gives them the columns of the file's folders."""

    def __init__(self, request: Request, names: Sequence[str]) -> None:
        self._request = request
        self.columns = request.needed(names)  # to read
        if twice := [name for name in self.columns if list(names).count(name) > 1]:
            raise DataError(f"{request.path}: column {twice[0]!r} occurs twice; rename one of them")
        self._wanted = request.wanted(names)
        self._folders = {name: value for name, value in request.partitions.items() if name not in names}
        self.plain = self._wanted == self.columns and request.where is None and not request.replace_unicode
        if request.where is not None:
            request.where.saw([*names, *self._folders])

    def take(self, batch: pa.RecordBatch, first_row: int) -> tuple[list[Row], pa.RecordBatch]:
        """The rows of a batch whose first one has this number, and the same rows as Arrow."""
        if self.plain:
            return batch_rows(batch, range(first_row, first_row + batch.num_rows)), batch
        if self._request.replace_unicode:
            batch = _replaced(batch)
        numbers = list(range(first_row, first_row + batch.num_rows))
        errors: dict[int, RowError] = {}
        if self._request.where is not None:
            kept = self._kept(batch, self._request.where, errors)
            if len(kept) < batch.num_rows:
                batch = _taken(batch, kept)
                numbers = [numbers[place] for place in kept]
                errors = {new: errors[old] for new, old in enumerate(kept) if old in errors}
        batch = self._shaped(batch)
        rows = batch_rows(batch, numbers)
        for place, error in errors.items():
            rows[place].error = error
        return rows, batch

    def _kept(self, batch: pa.RecordBatch, where: Filter, errors: dict[int, RowError]) -> list[int]:
        """The places of rows that pass, and of those that cannot be read or judged, with the reason."""
        names = [name for name in where.columns if name in batch.schema.names]
        kept = []
        for place, row in enumerate(batch_rows(_select(batch, names), range(batch.num_rows))):
            assert row.values is not None
            row.values.update(self._folders)
            try:
                if row.error is None and not where.keeps(row.values):
                    continue
            except Mismatch as error:
                row.error = RowError("invalid_row", f"input.where: {error}")
            kept.append(place)
            if row.error is not None:
                errors[place] = row.error
        return kept

    def _shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """With the wanted columns only, those of folders included."""
        if batch.schema.names == self._wanted:
            return batch
        for name in self._wanted:
            if name in self._folders:
                values = pa.repeat(pa.scalar(self._folders[name], pa.string()), batch.num_rows)
                batch = batch.append_column(name, values)
        return _select(batch, self._wanted)


def _taken(batch: pa.RecordBatch, places: list[int]) -> pa.RecordBatch:
    try:
        return batch.take(pa.array(places, pa.int64()))
    except pa.ArrowNotImplementedError:  # of some types, string views say
        if not places:
            return batch.slice(0, 0)
        columns = [pa.concat_arrays([column.slice(place, 1) for place in places]) for column in batch.columns]
        return pa.record_batch(columns, schema=batch.schema)


def _select(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    if not names:  # a batch without columns has no length of its own
        batch = batch.append_column("", pa.nulls(batch.num_rows))
    return batch.select(names)


def with_folders(schema: pa.Schema, folders: dict[str, str | None]) -> pa.Schema:
    """A file's columns and those of its folders, which are text."""
    for name in folders:
        if name not in schema.names:
            schema = schema.append(pa.field(name, pa.string()))
    return schema


def batch_rows(batch: pa.RecordBatch, numbers: Sequence[int]) -> list[Row]:
    if not batch.num_columns:
        return [Row(number, {}) for number in numbers]
    errors: dict[int, RowError] = {}
    names = batch.schema.names
    columns = [_column_values(column, name, errors) for name, column in zip(names, batch.columns, strict=True)]
    rows = [
        Row(number, dict(zip(names, values, strict=True)))
        for number, values in zip(numbers, zip(*columns, strict=True), strict=True)
    ]
    for place, error in errors.items():
        rows[place].error = error
    return rows


def _column_values(column: pa.Array, name: str, errors: dict[int, RowError]) -> list[Any]:
    """A column as plain Python. Values that cannot be (text that is not UTF-8) become None and their row's error."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":  # Python's own times end at microseconds
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    # Only these can hold bytes or structs.
    convert = any(part in str(kind) for part in ("binary", "struct"))
    try:
        values = column.to_pylist()
        return [_plain(value) for value in values] if convert else values
    except (ValueError, OverflowError):  # somewhere in the column: find the row
        pass
    values = []
    for i, scalar in enumerate(column):
        try:
            values.append(_plain(scalar.as_py()))
        except (ValueError, OverflowError) as error:
            values.append(None)
            code = "invalid_unicode" if isinstance(error, UnicodeDecodeError) else "invalid_row"
            errors.setdefault(i, RowError(code, f"column {name!r}: {error}"))
    return values


def _plain(value: Any, in_list: bool = False) -> Any:
    """Bytes as text. Inside lists, structs lose their null fields: all structs of a list have the fields of any."""
    if isinstance(value, dict):
        return {key: _plain(item, in_list) for key, item in value.items() if item is not None or not in_list}
    if isinstance(value, list):
        return [_plain(item, True) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return NotText(value)
    return value


# Text that is not UTF-8, as U+FFFD


def _replaced(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch whose text is UTF-8 throughout."""
    if not batch.num_columns:  # a new one would have no rows
        return batch
    columns = []
    for column in batch.columns:
        try:
            column.validate(full=True)
            columns.append(column)
        except pa.ArrowInvalid:
            columns.append(_repaired(column))
    return pa.record_batch(columns, schema=batch.schema)


def _repaired(column: pa.Array) -> pa.Array:
    kind = column.type
    plain = column.dictionary_decode() if pa.types.is_dictionary(kind) else column
    raw = plain.cast(_as_binary(plain.type)).to_pylist()
    repaired = pa.array([_decoded(value, plain.type) for value in raw], plain.type)
    return repaired.cast(kind) if pa.types.is_dictionary(kind) else repaired


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _as_binary(kind: pa.DataType) -> pa.DataType:
    """A type with bytes in place of text."""
    if _is_text(kind):
        return pa.large_binary()
    if pa.types.is_large_list(kind):
        return pa.large_list(_as_binary(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_as_binary(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_binary(field.type)) for field in kind])
    return kind


def _decoded(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if _is_text(kind):
        return value.decode("utf-8", "replace")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_decoded(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    return value
