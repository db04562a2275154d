"""JSON Lines: every line that is not blank is a row."""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.io import jsonline, lines
from batchgen.io.lines import LineNumbers, overlong
from batchgen.io.rows import Chunk, Request, Row
from batchgen.io.streams import Stream
from batchgen.types import RowError


def read(request: Request) -> Iterator[Chunk]:
    numbers = LineNumbers(request.path, request.storage_options)
    unicode, nan = request.replace_unicode, request.nan_as_null

    def make(row: int, data: bytes | None, line: int) -> Row | None:
        if data is None:
            return Row(row, None, overlong(line, numbers))
        values, problem = jsonline.parse(data, replace_unicode=unicode, nan_as_null=nan)
        error = None if problem is None else RowError(problem[0], f"line {numbers.absolute(line)}: {problem[1]}")
        return request.completed(Row(row, values, error))

    with Stream(request.path, request.storage_options) as stream:
        yield from lines.read_records(request, stream, lambda start: lines.lines(stream, start), make, numbers)
