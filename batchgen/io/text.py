"""Plain text: every line is a row with the one column `text`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from batchgen.io import lines
from batchgen.io.lines import LineNumbers, not_utf8, overlong
from batchgen.io.rows import Chunk, Request, Row
from batchgen.io.streams import Stream

COLUMN = "text"


def schema(path: str, storage_options: object) -> pa.Schema:
    return pa.schema([pa.field(COLUMN, pa.string())])


def read(request: Request) -> Iterator[Chunk]:
    numbers = LineNumbers(request.path, request.storage_options)
    errors = "replace" if request.replace_unicode else "strict"

    def make(row: int, data: bytes | None, line: int) -> Row | None:
        if data is None:
            return Row(row, None, overlong(line, numbers))
        try:
            made = Row(row, {COLUMN: data.removesuffix(b"\r").decode("utf-8", errors)})
        except UnicodeDecodeError as error:
            made = Row(row, {COLUMN: None}, not_utf8(error, numbers.absolute(line)))
        return request.completed(made)

    with Stream(request.path, request.storage_options) as stream:
        yield from lines.read_records(
            request,
            stream,
            lambda start: lines.lines(stream, start, whole=True),
            make,
            numbers,
            as_batch=lines.text_batch(request.wanted([COLUMN])),
        )
