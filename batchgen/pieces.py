"""Pieces: a cache of work done on open shards, so that a restart goes on from the last checkpoint.

A piece is an immutable Arrow stream with its sha256 behind it. It holds finished samples, and for samples in flight
what they gained since the piece before: `start` is how many tokens were stored already. A reader takes pieces in
order and keeps `tokens[:start] + token_ids`; a delta that starts behind what it has (a piece between was lost) is
left out, so that a chain is cut short but never mixed up.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import StorageError
from batchgen.io.storage import ObjectMissing
from batchgen.io.stores import Store
from batchgen.runfolder import piece_folder, piece_name, put_new
from batchgen.types import Completion, InFlight, RowError, RowKey, ShardRange, TokenIds

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 16 << 20
_ROW_BYTES = 64  # what a row takes beside its tokens and texts, roughly
_DIGEST_BYTES = 32
_SCHEMA = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string()),  # null: in flight, and so is everything below
        pa.field("stop_string", pa.string()),
        pa.field("stop_token", pa.int64()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)

_Key = tuple[int, int, int]  # file, row, sample


@dataclass(frozen=True, slots=True)
class _Entry:
    """One row of a piece: a finished sample, or what one in flight gained from token `start` on."""

    key: _Key
    start: int
    token_ids: TokenIds
    finished: Completion | None
    total: int = 0  # tokens stored once this piece is written, and their checksum
    check: int = 0

    @property
    def size(self) -> int:
        return _ROW_BYTES + self.token_ids.nbytes + (_text_bytes(self.finished) if self.finished else 0)


class _Stored(NamedTuple):
    """How much of a sample in flight this slot's pieces hold."""

    length: int
    check: int  # crc32 of these tokens


def _text_bytes(completion: Completion) -> int:
    return len(completion.error.message) if completion.error else 0


def _check(token_ids: TokenIds) -> int:
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).tobytes())


# -- one piece as bytes ------------------------------------------------------------------------------------------------


def encode(entries: list[_Entry], digest: str) -> bytes:
    """A piece; `digest` names the run it belongs to."""
    done = [entry.finished for entry in entries]
    stops = [c.stop_reason if c else None for c in done]
    errors = [c.error if c else None for c in done]
    offsets = np.zeros(len(entries) + 1, np.int32)
    np.cumsum([len(entry.token_ids) for entry in entries], out=offsets[1:])
    tokens = np.concatenate([entry.token_ids for entry in entries]).astype(np.int32, copy=False)
    columns: dict[str, Any] = {
        "file": [entry.key[0] for entry in entries],
        "row": [entry.key[1] for entry in entries],
        "sample": [entry.key[2] for entry in entries],
        "start": [entry.start for entry in entries],
        "token_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        "finish_reason": [c.finish_reason if c else None for c in done],
        "stop_string": [stop if isinstance(stop, str) else None for stop in stops],
        "stop_token": [None if stop is None or isinstance(stop, str) else int(stop) for stop in stops],
        "prompt_tokens": [c.prompt_tokens if c else None for c in done],
        "error_code": [error.code if error else None for error in errors],
        "error_message": [error.message.encode("utf-8", "backslashreplace") if error else None for error in errors],
    }
    schema = _SCHEMA.with_metadata({"batchgen.digest": digest})
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    data = sink.getvalue().to_pybytes()
    return data + hashlib.sha256(data).digest()


def decode(data: bytes, digest: str) -> pa.RecordBatch:
    """A piece's rows. ValueError where it is torn, damaged or another run's."""
    stream = memoryview(data)[:-_DIGEST_BYTES]
    if len(data) < _DIGEST_BYTES or hashlib.sha256(stream).digest() != data[-_DIGEST_BYTES:]:
        raise ValueError("its checksum does not fit")
    with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
        own = (reader.schema.metadata or {}).get(b"batchgen.digest")
        if not reader.schema.equals(_SCHEMA) or own != digest.encode():
            raise ValueError("it belongs to another run or release")
        return reader.read_next_batch()


def _entries(batch: pa.RecordBatch) -> Iterator[_Entry]:
    offsets = batch.column("token_ids").offsets.to_numpy()
    tokens = batch.column("token_ids").values.to_numpy()
    names = [field.name for field in batch.schema if field.name != "token_ids"]
    columns = [batch.column(name).to_pylist() for name in names]
    for i, values in enumerate(zip(*columns, strict=True)):
        row = dict(zip(names, values, strict=True))
        key, ids = (row["file"], row["row"], row["sample"]), tokens[offsets[i] : offsets[i + 1]]
        finished = None
        if row["finish_reason"] is not None:
            finished = Completion(
                RowKey(*key[:2]),
                key[2],
                ids,
                row["finish_reason"],
                row["stop_string"] if row["stop_token"] is None else row["stop_token"],
                row["prompt_tokens"],
                None if row["error_code"] is None else RowError(row["error_code"], row["error_message"]),
            )
        yield _Entry(key, row["start"], ids, finished)


# -- all pieces of a slot ----------------------------------------------------------------------------------------------


class Pieces:
    """A slot's pieces: what they hold of earlier starts, what is to be written, and when one can go."""

    def __init__(self, store: Store, slot: int, epoch: int, digest: str) -> None:
        self._store, self._slot, self._epoch, self._digest = store, slot, epoch, digest
        self._number = 0
        self.restored: dict[_Key, Completion | InFlight] = {}
        self._pending: dict[_Key, Completion] = {}
        self._stored: dict[_Key, _Stored] = {}
        self._rows: dict[str, dict[int, npt.NDArray[np.int64]]] = {}  # piece: file: rows not in a part yet
        self.pending_bytes = 0

    # reading

    def load(self, done: Mapping[int, Iterable[ShardRange]]) -> None:
        """Read what earlier starts left, without rows of parts; pieces that hold nothing else are deleted."""
        names = self._store.list(piece_folder(self._slot))
        bounds = {file: _bounds(shards) for file, shards in done.items()}
        finished: dict[_Key, Completion] = {}
        chains: dict[_Key, TokenIds] = {}
        with ThreadPoolExecutor(8) as pool:
            for name, batch in zip(names, pool.map(self._read, names), strict=True):
                if batch is None:
                    continue
                self._rows[name], left = _open_rows(batch, bounds)
                for entry in _entries(left):
                    if entry.finished is not None:
                        finished[entry.key] = entry.finished
                        continue
                    have = chains.get(entry.key, entry.token_ids[:0])
                    if entry.start <= len(have):
                        chains[entry.key] = np.concatenate([have[: entry.start], entry.token_ids])
        for key, token_ids in chains.items():
            if key not in finished:
                self.restored[key] = InFlight(RowKey(*key[:2]), key[2], token_ids)
                self._stored[key] = _Stored(len(token_ids), _check(token_ids))
        self.restored |= finished
        self._sweep()

    def _read(self, name: str) -> pa.RecordBatch | None:
        try:
            return decode(self._store.read(name), self._digest)
        except ObjectMissing:  # deleted since it was listed
            return None
        except (ValueError, pa.ArrowException, OSError) as error:
            logger.warning("%s is left out: %s. What it held is computed again", self._store.path(name), error)
            return None

    def take(self, key: RowKey, sample: int) -> Completion | InFlight | None:
        """What earlier starts left of this sample, once: finished, begun, or nothing."""
        return self.restored.pop((key.file, key.row, sample), None)

    def names_of(self, shard: ShardRange) -> list[str]:
        """The pieces that hold rows of an open shard, oldest first."""
        stop = shard.first_row + shard.num_rows
        return sorted(
            name
            for name, files in self._rows.items()
            if (rows := files.get(shard.file)) is not None and ((rows >= shard.first_row) & (rows < stop)).any()
        )

    def read_back(self, shard: ShardRange, names: Iterable[str]) -> dict[tuple[int, int], Completion]:
        """The finished samples of a shard in these pieces, by row and sample. Safe to call from another thread."""
        place = {shard.file: _bounds([shard])}
        found: dict[tuple[int, int], Completion] = {}
        for name in names:
            batch = self._read(name)
            if batch is not None:
                entries = _entries(batch.filter(pa.array(_within(batch, place))))
                found |= {entry.key[1:]: entry.finished for entry in entries if entry.finished is not None}
        return found

    # writing

    def record(self, completion: Completion) -> None:
        """Keep a finished sample for the next piece, unless its part is committed first."""
        key = (completion.key.file, completion.key.row, completion.sample)
        self._pending[key] = completion
        self.pending_bytes += _ROW_BYTES + completion.token_ids.nbytes

    def checkpoint(self, in_flight: Iterable[InFlight]) -> bool:
        """Write what is new since the last checkpoint; False where nothing is."""
        entries = [_Entry(key, 0, done.token_ids, done) for key, done in self._pending.items()]
        entries += [entry for one in in_flight if (entry := self._delta(one)) is not None]
        for group in _groups(entries):
            self._number += 1  # a name is used once: after a failure nobody knows whether it was written
            name = piece_name(self._slot, self._epoch, self._number)
            if not put_new(self._store, name, encode(group, self._digest)):
                raise StorageError(f"{self._store.path(name)}: another writer made this piece; a slot has one writer")
            self._acknowledged(name, group)
        return bool(entries)

    def _delta(self, one: InFlight) -> _Entry | None:
        key, token_ids = (one.key.file, one.key.row, one.sample), one.token_ids
        stored = self._stored.get(key, _Stored(0, 0))
        if key in self._pending or len(token_ids) <= stored.length:
            return None
        start = stored.length
        if _check(token_ids[:start]) != stored.check:  # the sample was begun anew: what is stored is not its past
            start = 0
        return _Entry(key, start, token_ids[start:], None, len(token_ids), _check(token_ids))

    def _acknowledged(self, name: str, group: list[_Entry]) -> None:
        for entry in group:
            if entry.finished is None:
                self._stored[entry.key] = _Stored(entry.total, entry.check)
            else:
                del self._pending[entry.key]
                self._stored.pop(entry.key, None)
        self._count_pending()
        keys = np.array([entry.key[:2] for entry in group], np.int64)  # (num_entries, 2)
        self._rows[name] = {int(file): np.unique(keys[keys[:, 0] == file, 1]) for file in np.unique(keys[:, 0])}

    def committed(self, shard: ShardRange) -> None:
        """The rows of `shard` are in a part: forget them, and delete the pieces that hold nothing else."""
        stop = shard.first_row + shard.num_rows
        for table in (self._pending, self._stored, self.restored):
            for key in [key for key in table if key[0] == shard.file and shard.first_row <= key[1] < stop]:
                del table[key]
        self._count_pending()
        for files in self._rows.values():
            rows = files.get(shard.file)
            if rows is not None:
                files[shard.file] = rows[(rows < shard.first_row) | (rows >= stop)]
                if not len(files[shard.file]):
                    del files[shard.file]
        self._sweep()

    def _count_pending(self) -> None:
        self.pending_bytes = sum(_ROW_BYTES + one.token_ids.nbytes for one in self._pending.values())

    def _sweep(self) -> None:
        """Delete pieces without open rows. One that cannot be deleted now is tried again later: it does no harm."""
        for name in [name for name, files in self._rows.items() if not files]:
            self._delete(name)

    def clear(self) -> None:
        """Every row is in a part: delete all pieces of the slot, the damaged ones too."""
        try:
            for name in self._store.list(piece_folder(self._slot)):
                self._delete(name)
        except StorageError as error:
            logger.warning("pieces stay behind: %s", error)

    def _delete(self, name: str) -> None:
        try:
            self._store.delete(name)
            self._rows.pop(name, None)
        except StorageError as error:
            logger.warning("a piece stays behind: %s", error)


def _groups(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """The entries in order, in groups of at most 16 MiB."""
    group: list[_Entry] = []
    size = 0
    for entry in entries:
        if group and size + entry.size > MAX_PIECE_BYTES:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.size
    if group:
        yield group


def _bounds(shards: Iterable[ShardRange]) -> npt.NDArray[np.int64]:
    """First and end row of each shard, in order."""  # (num_shards, 2)
    return np.array(sorted((s.first_row, s.first_row + s.num_rows) for s in shards), np.int64).reshape(-1, 2)


def _within(batch: pa.RecordBatch, bounds: Mapping[int, npt.NDArray[np.int64]]) -> npt.NDArray[np.bool_]:
    """Which rows of a piece lie within the shards of these bounds."""
    files, rows = batch.column("file").to_numpy(), batch.column("row").to_numpy()
    is_within = np.zeros(len(rows), np.bool_)
    for file in np.unique(files).tolist():
        shards = bounds.get(file)
        if shards is not None and len(shards):
            own = files == file
            at = np.searchsorted(shards[:, 0], rows[own], side="right") - 1
            is_within[own] = (at >= 0) & (rows[own] < shards[at, 1])
    return is_within


def _open_rows(
    batch: pa.RecordBatch, bounds: Mapping[int, npt.NDArray[np.int64]]
) -> tuple[dict[int, npt.NDArray[np.int64]], pa.RecordBatch]:
    """The rows of a piece that are in no part yet: their numbers by file, and the piece reduced to them."""
    is_open = ~_within(batch, bounds)
    left = batch if is_open.all() else batch.filter(pa.array(is_open))
    files, rows = left.column("file").to_numpy(), left.column("row").to_numpy()
    return {file: np.unique(rows[files == file]) for file in np.unique(files).tolist()}, left
