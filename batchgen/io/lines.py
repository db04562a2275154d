"""Formats made of text records: cut into lines with bounded memory, and records into chunks and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from batchgen.io.files import open_input
from batchgen.io.rows import CHUNK_BYTES, CHUNK_ROWS, Chunk, Request, Row
from batchgen.io.streams import Stream, corrupt
from batchgen.types import RowError, ShardRange

BLOCK_BYTES = 256 << 10  # read at once from a file that is not compressed
MAX_LINE_BYTES = 256 << 20  # a longer line is no row; it is passed over without being held
UTF8_BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"


def lines(stream: Stream, offset: int, whole: bool = False) -> Iterator[tuple[int, int, bytes | None]]:
    """(its number from here on, offset behind it, content) of each line that is not blank, without white space around
    it; with `whole` of every line, as it is but for its line feed. The stream stands at `offset`, at the begin of a
    line. The content is None for a line of more than MAX_LINE_BYTES."""
    number = 0
    rest: list[bytes] = []  # pieces of the line that is not complete
    rest_bytes = 0
    at_end = False
    while not at_end:
        block = stream.read(BLOCK_BYTES)
        at_end = not block
        if at_end and not rest_bytes:
            return
        pieces = block.split(b"\n")
        rest.append(pieces[0])
        rest_bytes += len(pieces[0])
        if rest_bytes > MAX_LINE_BYTES:
            rest.clear()
        if len(pieces) == 1 and not at_end:
            continue
        data = b"".join(rest)
        if offset == 0:
            data = data.removeprefix(UTF8_BOM)
            if at_end and not data and rest_bytes <= MAX_LINE_BYTES:
                return
        number += 1
        offset += rest_bytes + (not at_end)
        if not whole:
            data = data.strip(SPACE)
        if rest_bytes > MAX_LINE_BYTES:
            yield number, offset, None
        elif data or whole:
            yield number, offset, data
        for i in range(1, len(pieces) - 1):
            data = pieces[i]
            number += 1
            offset += len(data) + 1
            if not whole:
                data = data.strip(SPACE)
            if data or whole:
                yield number, offset, data
        rest, rest_bytes = [pieces[-1]], len(pieces[-1])


class LineNumbers:
    """Line numbers for messages. Lines that were jumped over are counted when a message asks, and only then."""

    def __init__(self, path: str, storage_options: Mapping[str, Any]) -> None:
        self._path, self._storage_options = path, storage_options
        self._start = 0  # where numbering began anew
        self._counted_to = 0
        self._lines = 0  # before `_counted_to`

    def jumped_to(self, offset: int) -> None:
        self._start = offset

    def absolute(self, number: int) -> int:
        """`number` counts from the last jump, the result from the begin of the file, both from 1."""
        if self._counted_to < self._start:
            with open_input(self._path, self._storage_options) as raw:
                raw.seek(self._counted_to)
                while self._counted_to < self._start:
                    block = raw.read(min(BLOCK_BYTES, self._start - self._counted_to))
                    if not block:
                        break
                    self._lines += block.count(b"\n")
                    self._counted_to += len(block)
        return self._lines + number


def read_records(
    request: Request,
    stream: Stream,
    records: Callable[[int], Iterator[tuple[int, int, Any]]],
    make: Callable[[int, Any, int], Row | None],
    numbers: LineNumbers,
    *,
    begin: int = 0,
    as_batch: Callable[[list[Row]], pa.RecordBatch] | None = None,
) -> Iterator[Chunk]:
    """The chunks of a file made of records, the first of which begins at offset `begin`.

    `records(offset)` gives (line number from there on, offset behind it, content) of each record from `offset` on, and
    `make(row number, content, line number)` its row, None where the filter drops it.
    """
    file, done = request.file, request.done
    max_rows, max_bytes = request.limits()
    shard = row = 0
    start = begin
    finished = False
    with corrupt(file.path, lambda: row):
        following = records(begin)
        ahead = next(following, None)  # one record read ahead, so that the last chunk is known to be the last
        while ahead is not None:
            known = done.get(shard)
            if known is not None:
                while known is not None:  # one jump over all that is done: in a store each is a request
                    request.check_begin(shard, known, row, start)
                    shard, row, start = shard + 1, row + known.num_rows, known.byte_end
                    known = done.get(shard)
                if stream.compression is None:
                    stream.seek(start)
                    numbers.jumped_to(start)
                    following = records(start)
                    ahead = next(following, None)
                else:
                    while ahead is not None and ahead[1] <= start:
                        ahead = next(following, None)
                continue
            wanted = shard not in done
            first_row, chunk_bytes, closed = row, 0, False
            rows: list[Row] = []
            end = start
            while ahead is not None and not closed:
                before = end
                number, end, content = ahead
                if wanted:
                    made = make(row, content, number)
                    if made is not None:
                        rows.append(made)
                        chunk_bytes += end - before
                row += 1
                ahead = next(following, None)
                closed = ahead is None or row - first_row == max_rows or end - start >= max_bytes
                if closed or len(rows) == CHUNK_ROWS or chunk_bytes >= CHUNK_BYTES:
                    place = ShardRange(file.number, shard, first_row, row - first_row, start, end) if closed else None
                    finished = ahead is None
                    batch = as_batch(rows) if as_batch is not None else None
                    yield Chunk(shard, rows, place, finished, batch, stream.share(end, file.size))
                    rows, chunk_bytes = [], 0
            shard, start = shard + 1, end
    if not finished:
        yield Chunk(shard, [], None, True)


def text_batch(names: list[str]) -> Callable[[list[Row]], pa.RecordBatch]:
    """Rows whose values are text, as Arrow columns."""
    schema = pa.schema([pa.field(name, pa.string()) for name in names])

    def as_batch(rows: list[Row]) -> pa.RecordBatch:
        values = [row.values or {} for row in rows]
        if not names:  # a batch without columns has no length of its own
            return pa.record_batch([pa.nulls(len(rows))], names=["row"]).select([])
        return pa.record_batch([pa.array([one.get(name) for one in values], pa.string()) for name in names], schema)

    return as_batch


def overlong(line: int, numbers: LineNumbers) -> RowError:
    limit = MAX_LINE_BYTES >> 20
    return RowError("invalid_row", f"line {numbers.absolute(line)}: a line of more than {limit} MiB")


def not_utf8(error: UnicodeDecodeError, line: int, column: str = "") -> RowError:
    where = f"line {line}" + (f", column {column!r}" if column else "")
    return RowError("invalid_unicode", f"{where}: bytes that are not UTF-8 (0x{error.object[error.start]:02x})")
