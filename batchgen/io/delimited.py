"""CSV and TSV: a header line, then rows of text as it is written; quoted as RFC 4180 says, also over several lines.

An empty value is null, a quoted empty one is empty text. Own code, because rows must be cut at places where a restart
can go on, and because a bad row must not take its neighbours along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.errors import DataError
from batchgen.io import lines
from batchgen.io.lines import LineNumbers, not_utf8, overlong
from batchgen.io.rows import Chunk, Request, Row
from batchgen.io.streams import Stream, corrupt, plain_name
from batchgen.types import RowError

HEADER_BYTES = 1 << 20
DELIMITERS = (b",", b";", b"\t")
QUOTED = re.compile(rb'"[^"]*(?:""[^"]*)*"')

_Lines = Iterator[tuple[int, int, bytes | None]]


class Header(NamedTuple):
    """The columns, what separates values, and the offset of the first row."""

    names: list[str]
    delimiter: bytes
    end: int


def schema(path: str, storage_options: Mapping[str, Any]) -> pa.Schema:
    with Stream(path, storage_options) as stream, corrupt(path, lambda: 0):
        names = _header(path, lines.lines(stream, 0, whole=True)).names
    return pa.schema([pa.field(name, pa.string()) for name in names])


def read(request: Request) -> Iterator[Chunk]:
    path = request.path
    numbers = LineNumbers(path, request.storage_options)
    with Stream(path, request.storage_options) as stream:
        found = lines.lines(stream, 0, whole=True)
        with corrupt(path, lambda: 0):
            header = _header(path, found)

        def records(start: int) -> _Lines:
            here = found if start == header.end else lines.lines(stream, start, whole=True)
            return _records(path, here, header.delimiter, numbers)

        yield from lines.read_records(
            request,
            stream,
            records,
            _Rows(request, header, numbers).make,
            numbers,
            begin=header.end,
            as_batch=lines.text_batch(request.wanted(header.names)),
        )


def _header(path: str, found: _Lines) -> Header:
    """Its delimiter is the one of `DELIMITERS` that occurs most in it, the first one of equals; a tab in a .tsv."""
    pieces: list[bytes] = []
    size = quotes = end = 0
    for number, end, data in found:  # noqa: B007 - the end counts
        size += HEADER_BYTES if data is None else len(data) + 1
        if data is None or size > HEADER_BYTES:
            raise DataError(f"{path}: line {number}: the CSV header does not end within 1 MiB; is there a lone quote?")
        if data.rstrip(b"\r") or pieces:
            pieces.append(data)
            quotes += data.count(b'"')
            if quotes % 2 == 0:
                break
    text = b"\n".join(pieces).removesuffix(b"\r")
    if not text:
        return Header([], DELIMITERS[0], end)
    bare = QUOTED.sub(b"", text)
    if b"\r" in bare:
        raise DataError(f"{path}: lines end with a lone CR, as on old Macs; convert them to LF")
    most = max(DELIMITERS, key=bare.count)
    delimiter = b"\t" if plain_name(path).endswith(".tsv") else most
    values = _values(text, delimiter)
    if values is None or quotes % 2:
        raise DataError(f"{path}: line 1: quotes in the CSV header do not match")
    try:
        names = [(value or b"").decode("utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: line 1: the CSV header is not UTF-8 text: {error}; convert the file") from None
    for place, name in enumerate(names):
        if not name:
            raise DataError(
                f"{path}: line 1: column {place + 1} of the CSV header has no name; give it one (an index that pandas "
                "wrote is left out with index=False)"
            )
        if name in names[:place]:
            raise DataError(f"{path}: line 1: column {name!r} occurs twice in the CSV header; rename one of them")
    return Header(names, delimiter, end)


def _records(path: str, found: _Lines, delimiter: bytes, numbers: LineNumbers) -> _Lines:
    """Lines put together where a quoted value goes over several. Empty lines are no rows."""
    for number, first_end, data in found:
        end, text = first_end, data
        if text is not None and b'"' in text and _ends_inside(text, False, delimiter):
            pieces, size = [text], len(text)
            for _, end, more in found:  # noqa: B007 - the end counts
                size += lines.MAX_LINE_BYTES if more is None else len(more) + 1
                if more is None or size > lines.MAX_LINE_BYTES:
                    raise DataError(
                        f"{path}: line {numbers.absolute(number)}: a quote opens a value that is not closed within "
                        f"{lines.MAX_LINE_BYTES >> 20} MiB; it may be a lone quote, which must be doubled and quoted"
                    )
                pieces.append(more)
                if not _ends_inside(more, True, delimiter):
                    break
            else:
                raise DataError(
                    f"{path}: line {numbers.absolute(number)}: a quote opens a value that is not closed to the end of "
                    "the file. The file is cut short, or this is a lone quote, which must be doubled and quoted"
                )
            text = b"\n".join(pieces)
        if text is None or text.rstrip(b"\r"):
            yield number, end, text


def _ends_inside(line: bytes, inside: bool, delimiter: bytes) -> bool:
    """If a quoted value is still open behind a line, given whether one was open before it. A quote opens a value only
    as its first character."""
    opening = delimiter + b'"'
    at = 0
    if not inside:
        if line[:1] != b'"':
            at = line.find(opening) + 1
            if not at:
                return False
        at += 1
    while True:
        at = line.find(b'"', at) + 1
        if not at:
            return True
        if line[at : at + 1] == b'"':  # a doubled one is part of the value
            at += 1
            continue
        at = line.find(opening, at) + 2
        if at == 1:
            return False


def _values(record: bytes, delimiter: bytes) -> list[bytes | None] | None:
    """The values of a record; None where something stands behind a closing quote."""
    if b'"' not in record:
        return [value or None for value in record.split(delimiter)]
    values: list[bytes | None] = []
    at = 0
    while True:
        if record[at : at + 1] == b'"':
            quoted = QUOTED.match(record, at)
            if quoted is None:
                return None
            values.append(quoted.group()[1:-1].replace(b'""', b'"'))
            at = quoted.end()
            if record[at : at + 1] not in (b"", delimiter):
                return None
        else:
            end = record.find(delimiter, at)
            end = len(record) if end < 0 else end
            values.append(record[at:end] or None)
            at = end
        if at == len(record):
            return values
        at += 1


class _Rows:
    """Makes rows of records."""

    def __init__(self, request: Request, header: Header, numbers: LineNumbers) -> None:
        self._request, self._header, self._numbers = request, header, numbers
        self._errors = "replace" if request.replace_unicode else "strict"
        needed = [(header.names.index(name), name) for name in request.needed(header.names)]
        self._judged = [column for column in needed if column[1] in request.judged()]
        self._others = [column for column in needed if column[1] not in request.judged()]

    def make(self, number: int, record: bytes | None, line: int) -> Row | None:
        if record is None:
            return Row(number, None, overlong(line, self._numbers))
        values = _values(record.removesuffix(b"\r"), self._header.delimiter)
        if values is None or len(values) != len(self._header.names):
            return Row(number, None, self._misshapen(record, values, line))
        found: dict[str, Any] = {}
        row = Row(number, found)
        self._fill(row, found, self._judged, values, line)
        if not self._request.keeps(row):
            return None
        self._fill(row, found, self._others, values, line)
        return self._request.shaped(row)

    def _fill(
        self,
        row: Row,
        found: dict[str, Any],
        columns: Sequence[tuple[int, str]],
        values: Sequence[bytes | None],
        line: int,
    ) -> None:
        for place, name in columns:
            value = values[place]
            try:
                found[name] = None if value is None else value.decode("utf-8", self._errors)
            except UnicodeDecodeError as error:
                found[name] = None
                row.error = row.error or not_utf8(error, self._numbers.absolute(line), name)

    def _misshapen(self, record: bytes, values: list[bytes | None] | None, line: int) -> RowError:
        first = self._numbers.absolute(line)
        more = record.count(b"\n")
        where = f"lines {first} to {first + more}" if more else f"line {first}"
        if values is None:
            return RowError("invalid_row", f"{where}: text behind the closing quote of a value; is it a lone quote?")
        return RowError(
            "invalid_row", f"{where}: {len(values)} values, but the header has {len(self._header.names)} columns"
        )
