"""What every input format gives and is asked for: rows, chunks of them, and how a file is cut into shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyarrow import RecordBatch

from batchgen.errors import ConfigError
from batchgen.io.files import InputFile
from batchgen.io.partitions import partitions
from batchgen.types import RowError, ShardRange
from batchgen.where import Filter, Mismatch

SHARD_ROWS = 8192
SHARD_BYTES = 64 << 20
CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20


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
    """Consecutive rows of one shard, without those that a filter drops.

    `end` is set on the last chunk of a shard, and covers all its rows, dropped ones too. `last` says that the file is
    read to its end; the chunk that says it has no rows where the file is empty or its last shard was skipped. `batch`
    is the same rows as Arrow, where the format has columns: carried columns are taken from it unchanged. `share` is how
    much of the file is read, from 0 to 1.
    """

    shard: int
    rows: list[Row]
    end: ShardRange | None
    last: bool
    batch: RecordBatch | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of one file. `columns` None are all. Shards in `done` are passed over (see `read_shards`)."""

    file: InputFile
    columns: Sequence[str] | None
    shard_rows: int | None
    done: Mapping[int, ShardRange | None]
    storage_options: Mapping[str, Any]
    where: Filter | None = None
    replace_unicode: bool = False  # text that is not UTF-8 gets U+FFFD instead of failing its row
    nan_as_null: bool = False
    partitions: dict[str, str | None] = field(init=False)
    _plain: bool = field(init=False)  # rows stay as they are

    def __post_init__(self) -> None:
        object.__setattr__(self, "partitions", partitions(self.file.path))
        object.__setattr__(self, "_plain", self.where is None and self.columns is None and not self.partitions)

    @property
    def path(self) -> str:
        return self.file.path

    def limits(self) -> tuple[int, int]:
        """A shard ends with the row that reaches one of these: rows, bytes of input."""
        return (self.shard_rows, sys.maxsize) if self.shard_rows else (SHARD_ROWS, SHARD_BYTES)

    def wanted(self, names: Iterable[str]) -> list[str]:
        """The wanted ones of a file's columns, those of its folders included."""
        known = dict.fromkeys([*names, *self.partitions])
        return [name for name in dict.fromkeys(known if self.columns is None else self.columns) if name in known]

    def needed(self, names: Iterable[str]) -> list[str]:
        """Those of a file's own columns that have to be read: the wanted ones, and what the filter looks at."""
        names = list(names)
        return [name for name in dict.fromkeys([*self.wanted(names), *self.judged()]) if name in names]

    def judged(self) -> tuple[str, ...]:
        """The columns that the filter looks at."""
        return () if self.where is None else self.where.columns

    def keeps(self, row: Row) -> bool:
        """If the row passes the filter, by its own columns and those of its folders, which it is given. A row that
        cannot be read or judged is kept: it is an error, not gone.

        Which other columns are read must make no difference, so they, and what is wrong with them, come later."""
        if row.values is None:
            return True
        for name, value in self.partitions.items():
            row.values.setdefault(name, value)
        if self.where is None or row.error is not None:
            return True
        self.where.saw(row.values)
        try:
            return self.where.keeps(row.values)
        except Mismatch as error:
            row.error = RowError("invalid_row", f"input.where: {error}")
            return True

    def shaped(self, row: Row) -> Row:
        """With no other columns than the wanted ones."""
        values = row.values
        if self.columns is not None and values is not None:
            row.values = {name: values[name] for name in self.columns if name in values}
        return row

    def completed(self, row: Row) -> Row | None:
        """The row as it is wanted; None where the filter drops it."""
        return row if self._plain else self.shaped(row) if self.keeps(row) else None

    def check_begin(self, shard: int, known: ShardRange, first_row: int, byte_start: int) -> None:
        """A done shard begins where it did."""
        if (known.first_row, known.byte_start) != (first_row, byte_start):
            by_bytes = known.byte_start != byte_start
            then = f"byte {known.byte_start}" if by_bytes else f"row {known.first_row}"
            now = f"byte {byte_start}" if by_bytes else f"row {first_row}"
            raise self.changed(shard, then, now)

    def changed(self, shard: int, then: str, now: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: shard {shard} began at {then} when the run was started and begins at {now} now: the input "
            "has changed. Restore it, or start a new run in another folder"
        )
