"""Arrow IPC, files and streams: record batch by record batch, which is what has to fit into memory.

Of a file the footer says where every batch lies, so that those of done shards are passed over; a stream is walked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from batchgen.errors import DataError
from batchgen.io.files import open_input
from batchgen.io.rows import CHUNK_BYTES, CHUNK_ROWS, Chunk, Request
from batchgen.io.streams import corrupt
from batchgen.io.tables import Rows
from batchgen.types import ShardRange

FILE_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"  # stands before every message
END_OF_STREAM = STREAM_MAGIC + b"\0\0\0\0"
# Places of the fields that are read by hand, in Arrow's File.fbs and Message.fbs
FOOTER_BATCHES, MESSAGE_HEADER, BATCH_LENGTH = 3, 2, 0
BLOCK = struct.Struct("<qi4xq")  # offset, length of the metadata, length of the body; of the footer's list


class _Batch(NamedTuple):
    """A batch that is read when it is asked for. `num_bytes` is its size in the file, all columns, as it is stored;
    `last` is the last one of the file that has rows."""

    num_rows: int
    num_bytes: int
    last: bool
    load: Callable[[], pa.RecordBatch]


def schema(path: str, storage_options: Mapping[str, Any]) -> pa.Schema:
    with open_input(path, storage_options) as raw, corrupt(path, lambda: 0):
        return _open(raw)[0].schema


def read(request: Request) -> Iterator[Chunk]:
    file, done = request.file, request.done
    max_rows, max_bytes = request.limits()
    row = shard = first = size = 0  # the open shard, its first row and its bytes so far
    finished = False
    with open_input(request.path, request.storage_options) as raw, corrupt(request.path, lambda: row):
        names = _open(raw)[0].schema.names
        rows_of = Rows(request, names)
        for found in _batches(raw, file.size, request.path, names, rows_of.columns):
            batch: pa.RecordBatch | None = None
            taken, row_bytes = 0, max(1, found.num_bytes // found.num_rows)
            while taken < found.num_rows:
                count = min(found.num_rows - taken, first + max_rows - row, -(-(max_bytes - size) // row_bytes))
                if shard not in done:
                    if batch is None:
                        batch = found.load()
                        step = max(1, min(CHUNK_ROWS, CHUNK_BYTES * batch.num_rows // max(batch.nbytes, 1)))
                    count = min(count, step)
                piece_at, number = taken, row
                taken, row, size = taken + count, row + count, size + count * row_bytes
                at_end = found.last and taken == found.num_rows
                closed = at_end or row == first + max_rows or size >= max_bytes
                end = ShardRange(file.number, shard, first, row - first, 0, 0) if closed else None
                share = min(raw.tell() / max(file.size, 1), 1.0)
                if batch is not None and shard not in done:
                    rows, piece = rows_of.take(batch.slice(piece_at, count), number)
                    if rows or end is not None:
                        finished = at_end
                        yield Chunk(shard, rows, end, finished, piece, share)
                elif end is not None:
                    known = done[shard]
                    if known is None:
                        finished = at_end
                        yield Chunk(shard, [], end, finished, share=share)
                    elif (known.first_row, known.num_rows) != (end.first_row, end.num_rows):
                        raise request.changed(shard, f"row {known.first_row}", f"row {end.first_row}")
                if closed:
                    shard, first, size = shard + 1, row, 0
    if not finished:
        yield Chunk(shard, [], None, True)


def _open(raw: BinaryIO, fields: Sequence[int] = ()) -> tuple[Any, bool]:
    """Arrow's reader (of these fields, or of all), and if it is one of a stream."""
    raw.seek(0)
    is_file = raw.read(len(FILE_MAGIC)) == FILE_MAGIC
    raw.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=list(fields), use_threads=False)
    opened = pa.ipc.open_file if is_file else pa.ipc.open_stream
    return opened(pa.PythonFile(raw, mode="r"), options=options), not is_file


def _batches(raw: BinaryIO, size: int, path: str, names: Sequence[str], columns: Sequence[str]) -> Iterator[_Batch]:
    # to read no column at all would mean all of them
    fields = sorted(names.index(name) for name in columns) or ([0] if names else [])
    reader, is_stream = _open(raw, fields)

    def shaped(batch: pa.RecordBatch) -> pa.RecordBatch:
        _check(batch)
        return batch.select(list(columns))

    if not is_stream:
        sizes = _batch_sizes(raw, size)
        last = max((number for number, (length, _) in enumerate(sizes) if length), default=-1)
        for number, (length, num_bytes) in enumerate(sizes):

            def load(number: int = number, length: int = length) -> pa.RecordBatch:
                batch = reader.get_batch(number)
                if batch.num_rows != length:
                    raise DataError(f"{path}: record batch {number} has {batch.num_rows} rows, its header {length}")
                return shaped(batch)

            if length:
                yield _Batch(length, num_bytes, number == last, load)
        return
    held: _Batch | None = None  # one is read ahead, so that the last one is known to be the last
    while True:
        begin = raw.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            break
        except (pa.ArrowException, OSError):
            if held is not None:
                yield held
            raise
        if batch.num_rows:
            if held is not None:
                yield held
            held = _Batch(batch.num_rows, raw.tell() - begin, False, lambda batch=batch: shaped(batch))  # type: ignore[misc]
    _check_end_of_stream(raw, size, path)
    if held is not None:
        yield held._replace(last=True)


def _check_end_of_stream(raw: BinaryIO, size: int, path: str) -> None:
    """Arrow takes the end of the bytes between two messages for the end of the stream, and reads nothing behind it."""
    end = raw.tell()
    raw.seek(max(0, end - len(END_OF_STREAM)))
    if raw.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise DataError(f"{path}: the Arrow stream has no end mark: it is cut short. Copy or write it again")
    if end < size:
        raise DataError(
            f"{path}: {size - end:,} bytes stand behind the end of the Arrow stream; several streams in one file are "
            "not read: write one, or one file each"
        )


def _check(batch: pa.RecordBatch) -> None:
    """Arrow believes what a file says of lengths and places; wrong ones would crash the process. Text that is not UTF-8
    is found row by row later."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for place in range(batch.num_rows):
            try:
                batch.slice(place, 1).validate(full=True)
            except pa.ArrowInvalid as error:
                if "UTF8" not in str(error):
                    raise


# The rows and bytes of each batch of a file, which pyarrow only tells after it has read the batch. These few numbers
# are taken from the flatbuffers by hand.


def _batch_sizes(raw: BinaryIO, size: int) -> list[tuple[int, int]]:
    try:
        raw.seek(size - 10)
        length = int.from_bytes(raw.read(4), "little")
        raw.seek(size - 10 - length)
        footer = raw.read(length)
        field = _field(footer, _root(footer), FOOTER_BATCHES)
        if field is None:
            return []
        vector = field + _u32(footer, field)
        blocks = [BLOCK.unpack_from(footer, vector + 4 + BLOCK.size * i) for i in range(_u32(footer, vector))]
        return [(_batch_length(raw, offset, meta), meta + body) for offset, meta, body in blocks]
    except (struct.error, ValueError) as error:
        raise pa.ArrowInvalid(f"its list of record batches cannot be read: {error}") from error


def _batch_length(raw: BinaryIO, offset: int, meta_length: int) -> int:
    raw.seek(offset)
    message = raw.read(meta_length)
    message = message[8 if message.startswith(STREAM_MAGIC) else 4 :]  # what stands before it is its length
    field = _field(message, _root(message), MESSAGE_HEADER)
    if field is None:
        raise ValueError("a message without content")
    length = _field(message, field + _u32(message, field), BATCH_LENGTH)
    return 0 if length is None else int(struct.unpack_from("<q", message, length)[0])


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _root(data: bytes) -> int:
    return _u32(data, 0)


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where the field of a table lies; None where it has its default."""
    directory = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, directory)[0]
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", data, directory + place)[0] if place < size else 0
    return table + offset if offset else None
