"""Rows out of input files: streamed in order, cut into shards, with a code for every row that cannot be read.

Shard boundaries depend on the file and on `shard_rows` alone, so that a resumed run cuts the same shards and may skip
those that are done. Memory is bounded by one record of a text format, by one page per column of Parquet, and by one
record batch of Arrow.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa

from batchgen.errors import ConfigError, DataError
from batchgen.io import arrow, delimited, jsonl, jsonline, parquet, text
from batchgen.io.files import InputFile, open_input
from batchgen.io.lines import SPACE, UTF8_BOM
from batchgen.io.partitions import partitions
from batchgen.io.rows import Chunk, NotText, Request, Row
from batchgen.io.streams import Stream, compression_of, corrupt, plain_name
from batchgen.io.tables import with_folders
from batchgen.types import ShardRange
from batchgen.where import Filter

__all__ = [
    "Chunk",
    "NotText",
    "Row",
    "check_where",
    "content_proof",
    "detect",
    "detect_all",
    "read_shards",
    "schema",
    "schemas",
]

PROOF_WHOLE_BYTES = 16 << 20  # up to this size a content proof reads everything
PROOF_SAMPLES = 32
PROOF_SAMPLE_BYTES = 64 << 10
PROOF_BLOCK_BYTES = 1 << 20
SNIFF_BYTES = 64 << 10
FILES_AT_ONCE = 16

_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True)
class Format:
    """One input format. `magic` are the bytes that a file of it begins with; without any the name's suffix tells it.
    `schema` is None where every row has columns of its own."""

    title: str
    suffixes: tuple[str, ...]
    read: Callable[[Request], Iterator[Chunk]]
    schema: Callable[[str, Mapping[str, Any]], pa.Schema] | None = None
    magic: tuple[bytes, ...] = ()


FORMATS: Mapping[str, Format] = {
    "parquet": Format("Parquet", (".parquet", ".pq"), parquet.read, parquet.schema, (parquet.MAGIC,)),
    "arrow": Format(
        "Arrow",
        (".arrow", ".arrows", ".feather", ".ipc"),
        arrow.read,
        arrow.schema,
        (arrow.FILE_MAGIC, arrow.STREAM_MAGIC),
    ),
    "csv": Format("CSV", (".csv", ".tsv"), delimited.read, delimited.schema),
    "text": Format("plain text", (".txt",), text.read, text.schema),
    "jsonl": Format("JSON Lines", (".jsonl", ".ndjson", ".json", ".jsonlines"), jsonl.read),
}
REFUSED_MAGIC = {
    b"BZh": "bzip2 compression is not supported; use gzip or zstd",
    b"\xfd7zXZ\x00": "xz compression is not supported; use gzip or zstd",
    b"PK\x03\x04": "a zip archive is not supported; unpack it, or use gzip or zstd",
    b"\x04\x22\x4d\x18": "lz4 compression is not supported; use gzip or zstd",
    b"\xff\x06\x00\x00sNaPpY": "snappy framing is not supported; use gzip or zstd",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive is not supported; unpack it, or use gzip or zstd",
    b"PARE": "Parquet with an encrypted footer is not supported",
    b"FEA1": "Feather version 1 is not supported; write it as version 2",
    b"ORC": "ORC is not supported yet; convert it to Parquet",
    b"Obj\x01": "Avro is not supported yet; convert it to Parquet",
    b"\xff\xfe": "UTF-16 text is not supported; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text is not supported; convert it to UTF-8",
}


def read_shards(
    file: InputFile,
    format: str,
    *,
    columns: Sequence[str] | None,
    shard_rows: int | None,
    done: Mapping[int, ShardRange | None],
    storage_options: Mapping[str, Any],
    where: Filter | None = None,
    replace_unicode: bool = False,
    nan_as_null: bool = False,
) -> Iterator[Chunk]:
    """The rows of all shards that are not in `done`, in order. Columns that a row lacks are missing in its values.

    A shard that is done with a known range is passed over without parsing it (and without reading it, in Parquet, in
    Arrow files and in text that is not compressed); one that is done with an unknown range is walked, and yields a
    chunk without rows that says its range. Rows that `where` drops are left out; a shard's range holds them all the
    same. `replace_unicode` puts U+FFFD where text is not Unicode, `nan_as_null` reads JSON's NaN and Infinity as null.
    """
    request = Request(file, columns, shard_rows, done, storage_options, where, replace_unicode, nan_as_null)
    return FORMATS[format].read(request)


def _of_each(call: Callable[..., _Out], files: Sequence[InputFile], *more: Sequence[Any]) -> list[_Out]:
    """`call` of each file (and of what `more` has for it), several at a time: a store answers in its own time, and ten
    thousand answers one after the other would take minutes. The first file's error comes first."""
    if len(files) < 2:
        return [call(*each) for each in zip(files, *more, strict=True)]
    with ThreadPoolExecutor(min(FILES_AT_ONCE, len(files)), thread_name_prefix="input-files") as pool:
        return list(pool.map(call, files, *more))


def schema(file: InputFile, format: str, storage_options: Mapping[str, Any]) -> pa.Schema | None:
    """The columns and types of a file, those of its folders included; None for JSONL, which has none."""
    find = FORMATS[format].schema
    return None if find is None else with_folders(find(file.path, storage_options), partitions(file.path))


def schemas(
    files: Sequence[InputFile], formats: Sequence[str], storage_options: Mapping[str, Any]
) -> list[pa.Schema | None]:
    """`schema` of each file."""
    return _of_each(lambda file, kind: schema(file, kind, storage_options), files, formats)


def check_where(
    where: Filter, files: Sequence[InputFile], formats: Sequence[str], storage_options: Mapping[str, Any]
) -> None:
    """ConfigError where a column of the filter is in no file, as far as the files' schemas tell: a typing error would
    drop every row. Most often the first file's is enough."""
    if not all(FORMATS[kind].schema for kind in formats):
        return
    missing = set(where.columns)
    have: list[str] = []
    for part in (slice(0, 1), slice(1, None)):
        for found in schemas(files[part], formats[part], storage_options):
            assert found is not None
            missing.difference_update(found.names)
            have = have or found.names
        if not missing:
            return
    if have:
        raise ConfigError(
            f"input.where: no input file has a column {sorted(missing)[0]!r}; {files[0].path} has {', '.join(have)}"
        )


def detect(file: InputFile, declared: str, storage_options: Mapping[str, Any]) -> str:
    """The file's format, a key of FORMATS: by its first bytes, then by its suffix. A `declared` format (other than
    "auto") counts more than the suffix, but must agree with the bytes. OpenAI requests are JSON Lines."""
    with open_input(file.path, storage_options) as raw:
        head = raw.read(SNIFF_BYTES)
    compression = compression_of(head)
    if compression:
        with Stream(file.path, storage_options) as stream, corrupt(file.path, lambda: 0):
            head = stream.read(SNIFF_BYTES)
    name = plain_name(file.path)
    by_name = next((kind for kind, format in FORMATS.items() if name.endswith(format.suffixes)), "auto")
    wanted = {"auto": by_name, "openai": "jsonl"}.get(declared, declared)
    inside = f" inside {compression}" if compression else ""
    if compression and compression_of(head):
        raise DataError(f"{file.path}: compressed twice; unpack it once")

    def begins(magic: bytes) -> bool:
        """Text may begin with the letters of a magic, but holds no NUL."""
        may_be_text = wanted in ("csv", "text") and magic.isalnum()
        return head.startswith(magic) and not (may_be_text and b"\0" not in head)

    for magic, reason in REFUSED_MAGIC.items():
        if begins(magic):
            raise DataError(f"{file.path}{inside}: {reason}")
    found = next((kind for kind, format in FORMATS.items() if any(map(begins, format.magic))), None)
    if found is not None:
        title = FORMATS[found].title
        if compression:
            raise DataError(f"{file.path}: {title}{inside}; unpack it ({title} compresses by itself)")
        if declared not in ("auto", found):
            raise DataError(
                f"{file.path}: input.format is {declared}, but this is {_a(title)} file; set input.format: auto"
            )
        return found
    if wanted != "auto" and FORMATS[wanted].magic:
        title, begin = FORMATS[wanted].title, " or ".join(map(_shown, FORMATS[wanted].magic))
        what = "is empty" if not head else f"does not begin with the bytes {begin}"
        raise DataError(f"{file.path}: not {_a(title)} file: it {what}. Was it written to its end?")
    if wanted in ("csv", "text") and (declared != "auto" or not _is_json_object(head)):
        return wanted
    _check_json(file.path, head, known="jsonl" in (wanted, by_name))
    return "jsonl"


def detect_all(files: Sequence[InputFile], declared: str, storage_options: Mapping[str, Any]) -> list[str]:
    """`detect` of each file."""
    return _of_each(lambda file: detect(file, declared, storage_options), files)


def _a(title: str) -> str:
    return f"{'an' if title.startswith('A') else 'a'} {title}"


def _shown(magic: bytes) -> str:
    return magic.decode() if magic.isalnum() else magic.hex(" ")


def _is_json_object(head: bytes) -> bool:
    """If the first line is one, as far as it is known: then a file called .txt or .csv is JSON Lines all the same."""
    line, feed, _ = head.removeprefix(UTF8_BOM).lstrip(SPACE).partition(b"\n")
    if not feed and len(head) >= SNIFF_BYTES:
        return line.startswith(b'{"')
    return jsonline.parse_fast(line) is not None


def _check_json(path: str, head: bytes, known: bool) -> None:
    """DataError where a file does not look like JSON Lines; one that is not `known` to be them has to begin so."""
    content = head.removeprefix(UTF8_BOM)
    start = content.lstrip(SPACE)
    line = content[: len(content) - len(start)].count(b"\n") + 1
    first = start.partition(b"\n")[0].rstrip()
    if re.match(rb"\[[ \t]*(\{|\]|\r|\n|$)", start):
        raise DataError(
            f"{path}: file is a JSON array, not JSON Lines: line {line} begins with '['. "
            "Write one object a line, without brackets and commas around them (jq -c '.[]' does it)"
        )
    if first == b"{":
        raise DataError(
            f"{path}: file is a JSON document laid out over several lines, not JSON Lines: line {line} is only "
            "'{'. Write one object a line (jq -c . does it)"
        )
    if start and not known and not start.startswith(b"{"):
        raise DataError(
            f"{path}: neither Parquet nor JSON Lines: line {line} begins with {ascii(first[:20])[1:]}, and the "
            f"name does not tell what it is. Set input.format to one of {', '.join(FORMATS)}"
        )


# What a file holds, in short


def content_proof(file: InputFile, storage_options: Mapping[str, Any]) -> str:
    """A hash that a changed file does not keep: of Parquet its footer, of others all bytes of a small file, the head,
    the tail and samples between of a large one. Always its size too."""
    digest = hashlib.sha256(str(file.size).encode())
    with open_input(file.path, storage_options) as raw:
        for start, end in _proof_ranges(raw, file.size):
            raw.seek(start)
            for block_start in range(start, end, PROOF_BLOCK_BYTES):
                digest.update(raw.read(min(end - block_start, PROOF_BLOCK_BYTES)))
    return digest.hexdigest()


def _proof_ranges(raw: BinaryIO, size: int) -> list[tuple[int, int]]:
    footer = parquet.footer_range(raw, size)
    if footer is not None:
        return [footer]
    if size <= PROOF_WHOLE_BYTES:
        return [(0, size)]
    step = (size - PROOF_SAMPLE_BYTES) / (PROOF_SAMPLES - 1)
    return [(int(i * step), int(i * step) + PROOF_SAMPLE_BYTES) for i in range(PROOF_SAMPLES)]
