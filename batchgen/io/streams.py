"""Bytes of input files: opened anywhere, decompressed by what they are, with failures told apart from bad content."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from batchgen.errors import BatchgenError, DataError
from batchgen.io.files import open_input

UNPACKED_BLOCK_BYTES = 16 << 10  # read at once where it is compressed: what a cut stream loses of its readable rows
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")
ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame without content, which some writers put first


def compression_of(head: bytes) -> str | None:
    if ZSTD_SKIPPABLE.match(head):
        return "zstd"
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), None)


def plain_name(path: str) -> str:
    """A file's name in lower case without what says that it is compressed, to look at its suffix."""
    name = path.partition("::")[0].partition("?")[0].lower() if "://" in path else path.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


class Stream:
    """A file's bytes from the beginning, decompressed where they are compressed."""

    def __init__(self, path: str, storage_options: Mapping[str, Any]) -> None:
        self._raw = open_input(path, storage_options)
        self.compression = compression_of(self._raw.read(8))
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

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()


@contextlib.contextmanager
def corrupt(path: str, rows_read: Callable[[], int]) -> Iterator[None]:
    """Arrow's errors about the content of `path` as ours."""
    try:
        yield
    except BatchgenError:
        raise
    except pa.ArrowNotImplementedError as error:
        what = " ".join(str(error).split())
        raise DataError(f"{path}: the file holds what cannot be read ({what}); write it in another way") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: the file is damaged or cut short ({' '.join(str(error).split())}); its first {rows_read()} rows "
            "could be read. Copy or write it again"
        ) from error
