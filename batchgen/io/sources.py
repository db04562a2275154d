"""Rows out of input files: streamed in order, cut into shards, with a code for every row that cannot be read.

Shard boundaries depend on the file and on `shard_rows` alone, so that a resumed run cuts the same shards and may skip
those that are done. Memory is bounded by one line of JSONL, or by one page per column of Parquet.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import BatchgenError, ConfigError, DataError
from batchgen.io import jsonline
from batchgen.io.files import InputFile, open_input
from batchgen.io.storage import naming
from batchgen.types import RowError, ShardRange

SHARD_ROWS = 8192
SHARD_BYTES = 64 << 20
CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10  # read at once from a JSONL file
UNPACKED_BLOCK_BYTES = 16 << 10  # the same where it is compressed: what a cut stream loses of its readable rows
MAX_LINE_BYTES = 256 << 20  # a longer line is no row; it is passed over without being held
PAGE_BUFFER_BYTES = 1 << 20  # with a buffer a Parquet column chunk is read page by page, not whole
PROOF_WHOLE_BYTES = 16 << 20  # up to this size a content proof reads everything
PROOF_SAMPLES = 32
PROOF_SAMPLE_BYTES = 64 << 10
PROOF_BLOCK_BYTES = 1 << 20
SNIFF_BYTES = 64 << 10

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame without content, which some writers put first
PARQUET_MAGIC = b"PAR1"
REFUSED_MAGIC = {
    b"BZh": "bzip2 compression is not supported; use gzip or zstd",
    b"\xfd7zXZ\x00": "xz compression is not supported; use gzip or zstd",
    b"PK\x03\x04": "a zip archive is not supported; unpack it, or use gzip or zstd",
    b"\x04\x22\x4d\x18": "lz4 compression is not supported; use gzip or zstd",
    b"\xff\x06\x00\x00sNaPpY": "snappy framing is not supported; use gzip or zstd",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive is not supported; unpack it, or use gzip or zstd",
    b"PARE": "Parquet with an encrypted footer is not supported",
    b"ORC": "ORC is not supported yet; convert it to Parquet",
    b"Obj\x01": "Avro is not supported yet; convert it to Parquet",
    b"ARROW1": "Arrow IPC is not supported yet; convert it to Parquet",
    b"\xff\xff\xff\xff": "an Arrow stream is not supported yet; convert it to Parquet",
    b"\xff\xfe": "UTF-16 text is not supported; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text is not supported; convert it to UTF-8",
}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonlines")
PARQUET_SUFFIXES = (".parquet", ".pq")
COMPRESSED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")
UTF8_BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"


class NotText(bytes):
    """A binary value that is not UTF-8 text, an image say. It may be carried along; to print it is an error."""

    def __str__(self) -> str:
        raise ValueError("a binary value that is not UTF-8 text cannot be printed")


@dataclass(slots=True)
class Row:
    """One input row. Where `error` is set the row failed, and `values` holds what could be read of it all the same
    (its id, say; what could not is None), or is None when nothing could."""

    number: int
    values: dict[str, Any] | None
    error: RowError | None = None


@dataclass(slots=True)
class Chunk:
    """Consecutive rows of one shard.

    `end` is set on the last chunk of a shard. `last` says that the file is read to its end; the chunk that says it has
    no rows where the file is empty or its last shard was skipped. `batch` is the same rows as Arrow, where the format
    has columns: carried columns are taken from it unchanged. `share` is how much of the file is read, from 0 to 1.
    """

    shard: int
    rows: list[Row]
    end: ShardRange | None
    last: bool
    batch: pa.RecordBatch | None = None
    share: float = 1.0


def read_shards(
    file: InputFile,
    format: str,
    *,
    columns: Sequence[str] | None,
    shard_rows: int | None,
    done: Mapping[int, ShardRange | None],
    storage_options: Mapping[str, Any],
) -> Iterator[Chunk]:
    """The rows of all shards that are not in `done`, in order. Columns that a row lacks are missing in its values.

    A shard that is done with a known range is passed over without parsing it (and without reading it, in Parquet and
    in JSONL that is not compressed); one that is done with an unknown range is walked, and yields a chunk without rows
    that says its range.
    """
    read = {"jsonl": _read_jsonl, "parquet": _read_parquet}[format]
    return read(file, columns, shard_rows, done, storage_options)


# What a file is


def detect(file: InputFile, declared: str, storage_options: Mapping[str, Any]) -> str:
    """The file's format, "parquet" or "jsonl": by its first bytes, then by its suffix. A `declared` format (other
    than "auto") counts more than the suffix, but must agree with the bytes. OpenAI requests are JSON Lines."""
    with _Raw(file.path, storage_options) as raw:
        head = raw.read(SNIFF_BYTES)
    compression = _compression(head)
    if compression:
        with _Stream(file.path, storage_options) as stream, _corrupt(file.path, lambda: 0):
            head = stream.read(SNIFF_BYTES)
    inside = f" inside {compression}" if compression else ""
    for magic, reason in REFUSED_MAGIC.items():
        if head.startswith(magic):
            raise DataError(f"{file.path}{inside}: {reason}")
    if _compression(head):
        raise DataError(f"{file.path}: compressed twice; unpack it once")

    name = file.path.partition("::")[0].partition("?")[0].lower() if "://" in file.path else file.path.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    wanted = declared
    if declared == "auto" and name.endswith(PARQUET_SUFFIXES):
        wanted = "parquet"
    if head.startswith(PARQUET_MAGIC):
        if compression:
            raise DataError(f"{file.path}: Parquet inside {compression}; unpack it (Parquet compresses by itself)")
        if wanted in ("jsonl", "openai"):
            raise DataError(
                f"{file.path}: input.format is {wanted}, but this is a Parquet file; set input.format: auto"
            )
        return "parquet"
    if wanted == "parquet":
        what = "is empty" if not head else "does not begin with the bytes PAR1"
        raise DataError(f"{file.path}: not a Parquet file: it {what}. Was it written to its end?")

    text = head.removeprefix(UTF8_BOM)
    start = text.lstrip(SPACE)
    line = text[: len(text) - len(start)].count(b"\n") + 1
    first = start.partition(b"\n")[0].rstrip()
    if re.match(rb"\[[ \t]*(\{|\]|\r|\n|$)", start):
        raise DataError(
            f"{file.path}: file is a JSON array, not JSON Lines: line {line} begins with '['. "
            "Write one object a line, without brackets and commas around them (jq -c '.[]' does it)"
        )
    if first == b"{":
        raise DataError(
            f"{file.path}: file is a JSON document laid out over several lines, not JSON Lines: line {line} is only "
            "'{'. Write one object a line (jq -c . does it)"
        )
    if start and wanted == "auto" and not start.startswith(b"{") and not name.endswith(JSON_SUFFIXES):
        raise DataError(
            f"{file.path}: neither Parquet nor JSON Lines: line {line} begins with {ascii(first[:20])[1:]}. Other "
            "formats are not supported yet; if it is JSON Lines all the same, set input.format: jsonl"
        )
    return "jsonl"


def schema(file: InputFile, format: str, storage_options: Mapping[str, Any]) -> pa.Schema | None:
    """The columns and types of a Parquet file; None for JSONL, which has none."""
    if format != "parquet":
        return None
    with _Raw(file.path, storage_options) as raw, _corrupt(file.path, lambda: 0):
        return _parquet_file(raw).schema_arrow


def content_proof(file: InputFile, storage_options: Mapping[str, Any]) -> str:
    """A hash that a changed file does not keep: of Parquet its footer, of others all bytes of a small file, the head,
    the tail and samples between of a large one. Always its size too."""
    digest = hashlib.sha256(str(file.size).encode())
    with _Raw(file.path, storage_options) as raw:
        for start, end in _proof_ranges(raw, file.size):
            raw.seek(start)
            for block_start in range(start, end, PROOF_BLOCK_BYTES):
                digest.update(raw.read(min(end - block_start, PROOF_BLOCK_BYTES)))
    return digest.hexdigest()


def _proof_ranges(raw: _Raw, size: int) -> list[tuple[int, int]]:
    if size >= 12 and raw.read(4) == PARQUET_MAGIC:
        raw.seek(size - 8)
        tail = raw.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] == PARQUET_MAGIC and length <= size - 12:
            return [(size - 8 - length, size)]
    if size <= PROOF_WHOLE_BYTES:
        return [(0, size)]
    step = (size - PROOF_SAMPLE_BYTES) / (PROOF_SAMPLES - 1)
    return [(int(i * step), int(i * step) + PROOF_SAMPLE_BYTES) for i in range(PROOF_SAMPLES)]


# Bytes


class _Raw(io.RawIOBase):
    """An opened input file whose failures are ours and name it, so that Arrow's own errors mean bad content."""

    def __init__(self, path: str, storage_options: Mapping[str, Any]) -> None:
        self._path = path
        self._file: BinaryIO = open_input(path, storage_options)

    def read(self, size: int = -1) -> bytes:
        with naming(self._path):
            return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with naming(self._path):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _compression(head: bytes) -> str | None:
    if ZSTD_SKIPPABLE.match(head):
        return "zstd"
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), None)


class _Stream:
    """A file's bytes from the beginning, decompressed where they are compressed."""

    def __init__(self, path: str, storage_options: Mapping[str, Any]) -> None:
        self._raw = _Raw(path, storage_options)
        self.compression = _compression(self._raw.read(8))
        self._raw.seek(0)
        self._source: Any = self._raw
        if self.compression:
            self._source = pa.CompressedInputStream(pa.PythonFile(self._raw, mode="r"), self.compression)

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end. Raises OSError where a compressed stream is cut or damaged."""
        data: bytes = self._source.read(min(size, UNPACKED_BLOCK_BYTES) if self.compression else size)
        return data

    def share(self, offset: int, size: int) -> float:
        """How much of a file of `size` bytes is read when the text is read up to `offset`: an estimate where it is
        compressed, because blocks are read ahead."""
        return min((self._raw.tell() if self.compression else offset) / max(size, 1), 1.0)

    def seek(self, offset: int) -> None:
        assert not self.compression
        self._raw.seek(offset)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()


@contextlib.contextmanager
def _corrupt(path: str, rows_read: Callable[[], int]) -> Iterator[None]:
    """Arrow's errors about the content of `path` as ours."""
    try:
        yield
    except BatchgenError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: the file is damaged or cut short ({' '.join(str(error).split())}); its first {rows_read()} rows "
            "could be read. Copy or write it again"
        ) from error


# JSON Lines


def _read_jsonl(
    file: InputFile,
    columns: Sequence[str] | None,
    shard_rows: int | None,
    done: Mapping[int, ShardRange | None],
    storage_options: Mapping[str, Any],
) -> Iterator[Chunk]:
    max_rows, max_bytes = _limits(shard_rows)
    numbers = _LineNumbers(file.path, storage_options)
    shard = row = start = 0
    finished = False
    with _Stream(file.path, storage_options) as stream, _corrupt(file.path, lambda: row):
        lines = _lines(stream, 0)
        ahead = next(lines, None)  # one line read ahead, so that the last chunk is known to be the last
        while ahead is not None:
            known = done.get(shard)
            if known is not None:
                if (known.first_row, known.byte_start) != (row, start):
                    raise _changed(file, shard, f"byte {known.byte_start}", f"byte {start}")
                shard, row, start = shard + 1, row + known.num_rows, known.byte_end
                if stream.compression is None:
                    stream.seek(start)
                    numbers.jumped_to(start)
                    lines = _lines(stream, start)
                    ahead = next(lines, None)
                else:
                    while ahead is not None and ahead[1] <= start:
                        ahead = next(lines, None)
                continue
            wanted = shard not in done
            first_row, chunk_start, closed = row, start, False
            rows: list[Row] = []
            while ahead is not None and not closed:
                number, end, data = ahead
                if wanted:
                    rows.append(_json_row(row, data, number, numbers, columns))
                row += 1
                ahead = next(lines, None)
                closed = ahead is None or row - first_row == max_rows or end - start >= max_bytes
                full = len(rows) == CHUNK_ROWS or end - chunk_start >= CHUNK_BYTES
                if closed or (wanted and full):
                    place = ShardRange(file.number, shard, first_row, row - first_row, start, end) if closed else None
                    finished = ahead is None
                    yield Chunk(shard, rows, place, finished, share=stream.share(end, file.size))
                    rows, chunk_start = [], end
            shard, start = shard + 1, end
    if not finished:
        yield Chunk(shard, [], None, True)


def _lines(stream: _Stream, offset: int) -> Iterator[tuple[int, int, bytes | None]]:
    """(its number from here on, offset behind it, content) of each line that is not blank. The stream stands at
    `offset`, at the begin of a line. The content is None for a line of more than MAX_LINE_BYTES."""
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
        number += 1
        offset += rest_bytes + (not at_end)
        data = data.strip(SPACE)
        if rest_bytes > MAX_LINE_BYTES:
            yield number, offset, None
        elif data:
            yield number, offset, data
        for i in range(1, len(pieces) - 1):
            data = pieces[i]
            number += 1
            offset += len(data) + 1
            data = data.strip(SPACE)
            if data:
                yield number, offset, data
        rest, rest_bytes = [pieces[-1]], len(pieces[-1])


class _LineNumbers:
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
            with _Raw(self._path, self._storage_options) as raw:
                raw.seek(self._counted_to)
                while self._counted_to < self._start:
                    block = raw.read(min(BLOCK_BYTES, self._start - self._counted_to))
                    if not block:
                        break
                    self._lines += block.count(b"\n")
                    self._counted_to += len(block)
        return self._lines + number


def _json_row(row: int, data: bytes | None, number: int, numbers: _LineNumbers, columns: Sequence[str] | None) -> Row:
    if data is None:
        message = f"line {numbers.absolute(number)}: a line of more than {MAX_LINE_BYTES >> 20} MiB"
        return Row(row, None, RowError("invalid_row", message))
    values, problem = jsonline.parse(data)
    error = None
    if problem is not None:
        error = RowError(problem[0], f"line {numbers.absolute(number)}: {problem[1]}")
    if values is not None and columns is not None:
        values = {name: values[name] for name in columns if name in values}
    return Row(row, values, error)


# Parquet


def _parquet_file(raw: _Raw) -> pq.ParquetFile:
    return pq.ParquetFile(pa.PythonFile(raw, mode="r"), pre_buffer=False, buffer_size=PAGE_BUFFER_BYTES)


def _read_parquet(
    file: InputFile,
    columns: Sequence[str] | None,
    shard_rows: int | None,
    done: Mapping[int, ShardRange | None],
    storage_options: Mapping[str, Any],
) -> Iterator[Chunk]:
    row = 0
    finished = False
    with _Raw(file.path, storage_options) as raw, _corrupt(file.path, lambda: row):
        parquet = _parquet_file(raw)
        metadata, names = parquet.metadata, parquet.schema_arrow.names
        wanted = names if columns is None else [name for name in dict.fromkeys(columns) if name in names]
        if twice := [name for name in wanted if names.count(name) > 1]:
            raise DataError(f"{file.path}: column {twice[0]!r} occurs twice; rename one of them")
        shards = _parquet_shards(file.number, metadata, shard_rows)
        first_rows = [place.first_row for place in shards]
        for place in shards:
            known = done.get(place.shard)
            if known is not None and (known.first_row, known.num_rows) != (place.first_row, place.num_rows):
                raise _changed(file, place.shard, f"row {known.first_row}", f"row {place.first_row}")
            if place.shard in done and known is None:
                yield Chunk(place.shard, [], place, False, share=0.0)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            group_end = row + group.num_rows
            current = bisect_right(first_rows, row) - 1
            if all(place.shard in done for place in shards[current : bisect_left(first_rows, group_end)]):
                row = group_end
                continue
            batches = parquet.iter_batches(
                batch_size=max(1, min(CHUNK_ROWS, CHUNK_BYTES // _row_bytes(group))),
                row_groups=[number],
                columns=wanted,
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
                        rows = _batch_rows(piece, first_row)
                        yield Chunk(place.shard, rows, end, finished, piece, row / metadata.num_rows)
            if row != group_end:
                raise DataError(f"{file.path}: row group {number} holds {row - group_end:+} rows against its footer")
    if not finished:
        yield Chunk(len(shards), [], None, True)


def _row_bytes(group: pq.RowGroupMetaData) -> int:
    return max(1, group.total_byte_size // max(1, group.num_rows))


def _parquet_shards(file: int, metadata: pq.FileMetaData, shard_rows: int | None) -> list[ShardRange]:
    max_rows, max_bytes = _limits(shard_rows)
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


def _batch_rows(batch: pa.RecordBatch, first_row: int) -> list[Row]:
    if not batch.num_columns:
        return [Row(first_row + i, {}) for i in range(batch.num_rows)]
    errors: dict[int, RowError] = {}
    names = batch.schema.names
    columns = [_column_values(column, name, errors) for name, column in zip(names, batch.columns, strict=True)]
    return [
        Row(first_row + i, dict(zip(names, values, strict=True)), errors.get(i))
        for i, values in enumerate(zip(*columns, strict=True))
    ]


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


# Both


def _limits(shard_rows: int | None) -> tuple[int, int]:
    """A shard ends with the row that reaches one of these: rows, bytes of input."""
    return (shard_rows, sys.maxsize) if shard_rows else (SHARD_ROWS, SHARD_BYTES)


def _changed(file: InputFile, shard: int, then: str, now: str) -> ConfigError:
    return ConfigError(
        f"{file.path}: shard {shard} began at {then} when the run was started and begins at {now} now: the input has "
        "changed. Restore it, or start a new run in another folder"
    )
