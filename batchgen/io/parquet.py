"""Parquet: row group by row group, page by page, and only the columns that are needed."""

from __future__ import annotations

import datetime
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import DataError
from batchgen.io.files import open_input
from batchgen.io.rows import CHUNK_BYTES, CHUNK_ROWS, Chunk, Request
from batchgen.io.streams import corrupt
from batchgen.io.tables import Rows
from batchgen.types import ShardRange
from batchgen.where import Bounds

MAGIC = b"PAR1"
PAGE_BUFFER_BYTES = 1 << 20  # with a buffer a column chunk is read page by page, not whole


def schema(path: str, storage_options: Mapping[str, Any]) -> pa.Schema:
    with open_input(path, storage_options) as raw, corrupt(path, lambda: 0):
        return _open(raw).schema_arrow


def footer_range(raw: BinaryIO, size: int) -> tuple[int, int] | None:
    """Where the footer of a file lies, if it has one."""
    if size < 12 or raw.read(4) != MAGIC:
        return None
    raw.seek(size - 8)
    tail = raw.read(8)
    length = int.from_bytes(tail[:4], "little")
    return (size - 8 - length, size) if tail[4:] == MAGIC and length <= size - 12 else None


def read(request: Request) -> Iterator[Chunk]:
    done = request.done
    row = 0
    finished = False
    with open_input(request.path, request.storage_options) as raw, corrupt(request.path, lambda: row):
        parquet = _open(raw)
        metadata = parquet.metadata
        rows_of = Rows(request, parquet.schema_arrow.names)
        shards = _shards(request, metadata)
        first_rows = [place.first_row for place in shards]
        for place in shards:
            known = done.get(place.shard)
            if known is not None and (known.first_row, known.num_rows) != (place.first_row, place.num_rows):
                raise request.changed(place.shard, f"row {known.first_row}", f"row {place.first_row}")
            if place.shard in done and known is None:
                yield Chunk(place.shard, [], place, False, share=0.0)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            group_end = row + group.num_rows
            current = bisect_right(first_rows, row) - 1
            theirs = shards[current : bisect_left(first_rows, group_end)]
            if all(place.shard in done for place in theirs):
                row = group_end
                continue
            if request.where is not None and not request.where.may_keep(_bounds(request, group, parquet.schema_arrow)):
                row = group_end
                for place in theirs:
                    if place.first_row + place.num_rows <= row and place.shard not in done:
                        finished = row == metadata.num_rows and place is shards[-1]
                        yield Chunk(place.shard, [], place, finished, share=row / metadata.num_rows)
                continue
            batches = parquet.iter_batches(
                batch_size=max(1, min(CHUNK_ROWS, CHUNK_BYTES // _row_bytes(group))),
                row_groups=[number],
                columns=rows_of.columns,
                use_threads=False,
            )
            for batch in batches:
                taken = 0
                while taken < batch.num_rows:
                    place = shards[current]
                    place_end = place.first_row + place.num_rows
                    count = min(batch.num_rows - taken, place_end - row)
                    piece, first_row = batch.slice(taken, count), row
                    taken, row = taken + count, row + count
                    current += row == place_end
                    if place.shard not in done:
                        finished = row == metadata.num_rows
                        end = place if row == place_end else None
                        rows, piece = rows_of.take(piece, first_row)
                        if rows or end is not None:
                            yield Chunk(place.shard, rows, end, finished, piece, row / metadata.num_rows)
            if row != group_end:
                raise DataError(f"{request.path}: row group {number} holds {row - group_end:+} rows against its footer")
    if not finished:
        yield Chunk(len(shards), [], None, True)


def _open(raw: BinaryIO) -> pq.ParquetFile:
    return pq.ParquetFile(pa.PythonFile(raw, mode="r"), pre_buffer=False, buffer_size=PAGE_BUFFER_BYTES)


def _row_bytes(group: pq.RowGroupMetaData) -> int:
    return max(1, group.total_byte_size // max(1, group.num_rows))


def _shards(request: Request, metadata: pq.FileMetaData) -> list[ShardRange]:
    file = request.file.number
    max_rows, max_bytes = request.limits()
    shards: list[ShardRange] = []
    first_row = row = size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        left, row_bytes = group.num_rows, _row_bytes(group)
        while left:
            count = min(left, max_rows - (row - first_row), -(-(max_bytes - size) // row_bytes))
            row, left, size = row + count, left - count, size + count * row_bytes
            if row - first_row == max_rows or size >= max_bytes:
                shards.append(ShardRange(file, len(shards), first_row, row - first_row, 0, 0))
                first_row, size = row, 0
    if row > first_row:
        shards.append(ShardRange(file, len(shards), first_row, row - first_row, 0, 0))
    return shards


def _bounds(request: Request, group: pq.RowGroupMetaData, schema: pa.Schema) -> Callable[[str], Bounds | None]:
    """What the footer says of a column's values in a row group; of a folder's column, which has one value, all."""
    places: dict[str, int] = {}
    for place in range(group.num_columns):
        path = group.column(place).path_in_schema
        places[path] = -1 if path in places else place  # a column `a.b` and the field b of a column `a`

    def bounds(name: str) -> Bounds | None:
        if name not in schema.names:
            value = request.partitions.get(name)
            return Bounds(value, value, value is None) if name in request.partitions else None
        python = _in_statistics(schema.field(name).type)
        if places.get(name, -1) < 0 or python is None or (python is str and request.replace_unicode):
            return None  # U+FFFD may stand beyond the bytes that it replaces
        statistics = group.column(places[name]).statistics
        if statistics is None or not statistics.has_null_count:
            return None
        if statistics.null_count == group.num_rows:
            return Bounds(None, None, True)
        try:
            least, greatest = (statistics.min, statistics.max) if statistics.has_min_max else (None, None)
        except (ValueError, OverflowError, pa.ArrowException):  # text that is not UTF-8, a time beyond Python's
            return None
        if type(least) is not python or type(greatest) is not python:
            return None
        return Bounds(least, greatest, statistics.null_count > 0)

    return bounds


def _in_statistics(kind: pa.DataType) -> type | None:
    """The Python type that values of a column have both as rows and in statistics; None where the two differ (durations
    and truth values of one byte are numbers in the footer), or their order does."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return str
    if pa.types.is_integer(kind):
        return int
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return float
    if pa.types.is_date(kind):
        return datetime.date
    return datetime.datetime if pa.types.is_timestamp(kind) else None
