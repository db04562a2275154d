"""Pieces: a cache of work done on open shards, so that a restart goes on from the last checkpoint.

A piece is an immutable Arrow stream with its sha256 behind it. It holds finished samples, and for samples in flight
what they gained since the piece before: `start` is how many tokens were stored already, `check` their checksum. A
reader takes pieces in order and keeps `tokens[:start] + token_ids`; a delta that does not fit what it has (a piece
between was lost) is left out, so that a chain is cut short but never mixed up.

Chains stay inside one slot. What was taken over from a dead slot is written again, whole, by the slot that goes on
with it: the other one may come back and has its own plans for its pieces. Within a slot a later start knew all that
counts of an earlier one; what a superseded start still wrote after that is overruled.

A piece also carries what its writer wants to be remembered until it is written down elsewhere (`notes`: proofs of
JSON Lines parts), so that a checkpoint is one object.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import PermissionDenied, StorageError
from batchgen.io.storage import ObjectMissing
from batchgen.io.stores import Store
from batchgen.runfolder import piece_folder, piece_name, put_new
from batchgen.types import Completion, InFlight, RowError, RowKey, ShardRange, TokenIds

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 16 << 20
MANY_PIECES = 32  # kept at once, of which some are worth merging
_MERGED_AT_ONCE = 16
_SMALL_PIECE = 256  # rows
_MANY_NOTES = 16  # pieces that are kept for their notes
_ROW_BYTES = 64  # what a row takes beside its tokens and texts, roughly
_DIGEST_BYTES = 32
_SCHEMA = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("check", pa.uint32(), nullable=False),
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
_Rows = npt.NDArray[np.int64]  # row numbers, each once, in order


@dataclass(frozen=True, slots=True)
class _Entry:
    """One row of a piece: a finished sample, or what one in flight gained from token `start` on."""

    key: _Key
    start: int
    check: int  # of the tokens before `start`
    token_ids: TokenIds
    finished: Completion | None = None

    @property
    def size(self) -> int:
        return _ROW_BYTES + self.token_ids.nbytes + (_text_bytes(self.finished) if self.finished else 0)


class _Stored(NamedTuple):
    """How much of a sample in flight this slot's pieces hold."""

    length: int
    check: int  # crc32 of these tokens


@dataclass(slots=True)
class _Held:
    """What a piece holds of rows that are in no part yet."""

    size: int  # rows of the piece, the others too
    rows: dict[int, _Rows]  # by file
    finished: dict[int, _Rows]  # those with a finished sample among them

    def drop(self, shard: ShardRange) -> None:
        for table in (self.rows, self.finished):
            rows = table.get(shard.file)
            if rows is not None:
                table[shard.file] = rows[(rows < shard.first_row) | (rows >= shard.first_row + shard.num_rows)]
                if not len(table[shard.file]):
                    del table[shard.file]

    @property
    def is_worth_merging(self) -> bool:
        """Small, or most of it is of no use any more: deltas of samples that have ended, rows that are in parts."""
        return self.size < _SMALL_PIECE or 2 * sum(map(len, self.finished.values())) < self.size


def _held(files: npt.NDArray[np.int64], rows: _Rows, finished: npt.NDArray[np.bool_], size: int) -> _Held:
    def by_file(chosen: npt.NDArray[np.bool_]) -> dict[int, _Rows]:
        return {int(file): np.unique(rows[chosen & (files == file)]) for file in np.unique(files[chosen])}

    return _Held(size, by_file(np.ones(len(rows), np.bool_)), by_file(finished))


def _text_bytes(completion: Completion) -> int:
    return len(completion.error.message) if completion.error else 0


def _check(token_ids: TokenIds, before: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).tobytes(), before)


# -- one piece as bytes ------------------------------------------------------------------------------------------------


def encode(entries: list[_Entry], digest: str, notes: bytes = b"") -> bytes:
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
        "check": [entry.check for entry in entries],
        "token_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        "finish_reason": [c.finish_reason if c else None for c in done],
        "stop_string": [stop if isinstance(stop, str) else None for stop in stops],
        "stop_token": [None if stop is None or isinstance(stop, str) else int(stop) for stop in stops],
        "prompt_tokens": [c.prompt_tokens if c else None for c in done],
        "error_code": [error.code if error else None for error in errors],
        "error_message": [error.message.encode("utf-8", "backslashreplace") if error else None for error in errors],
    }
    schema = _SCHEMA.with_metadata({"batchgen.digest": digest, "batchgen.notes": notes})
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


def notes_of(batch: pa.RecordBatch) -> bytes:
    """What a piece's writer wants to be remembered."""
    return bytes((batch.schema.metadata or {}).get(b"batchgen.notes", b""))


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
        yield _Entry(key, row["start"], row["check"], ids, finished)


# -- what earlier starts left ------------------------------------------------------------------------------------------


class _History:
    """What the pieces of one slot say, read in order: samples that ended, and the tokens of those in flight."""

    def __init__(self) -> None:
        self.finished: dict[_Key, Completion] = {}
        self.chains: dict[_Key, TokenIds] = {}
        self._finished_in: dict[_Key, str] = {}  # epoch

    def add(self, name: str, batch: pa.RecordBatch) -> None:
        epoch = name.rpartition("/")[2].partition("-")[0]
        for entry in _entries(batch):
            key = entry.key
            if entry.finished is not None:
                self.finished[key], self._finished_in[key] = entry.finished, epoch
                continue
            have = self.chains.get(key, entry.token_ids[:0])
            if entry.start > len(have) or _check(have[: entry.start]) != entry.check:
                continue
            if key in self.finished and self._finished_in[key] < epoch:
                # the later start did not know it as finished: the earlier one was superseded when it wrote that
                del self.finished[key]
            self.chains[key] = np.concatenate([have[: entry.start], entry.token_ids])


class Pieces:
    """A slot's pieces: what they and those of dead slots hold, what is to be written, and when one can go.

    One thread uses it; only `read_back` may run beside it.
    """

    def __init__(self, store: Store, slot: int, epoch: int, attempt: str, digest: str) -> None:
        """`digest` names the run, `attempt` this start of it."""
        self._store, self._slot, self._digest = store, slot, digest
        self._epoch, self._attempt = epoch, attempt
        self._number = 0
        self.restored: dict[_Key, Completion | InFlight] = {}
        self._foreign: set[_Key] = set()  # restored from another slot, and in no piece of this one
        self._pending: dict[_Key, Completion] = {}
        self._stored: dict[_Key, _Stored] = {}
        self._saved: set[_Key] = set()  # finished, in pieces of this slot
        self._held: dict[str, _Held] = {}
        self._found: dict[str, pa.RecordBatch | None] = {}  # at the start; None: damaged. Batches until `load`
        self._noted: set[str] = set()  # pieces with notes that are nowhere else
        self._stuck: set[str] = set()  # worth merging, but something in them can only be had from there
        self._needed: dict[tuple[int, int], list[str]] = {}  # shard being read back: its pieces
        self.pending_bytes = 0

    # reading

    def read(self, dead_slots: Iterable[int] = ()) -> list[bytes]:
        """Read what earlier starts left, of other slots the dead ones' only. Returns the notes among it."""
        for slot in [self._slot, *dead_slots]:
            names = self._store.list(piece_folder(slot))
            with ThreadPoolExecutor(8) as pool:
                self._found |= zip(names, pool.map(self._read, names), strict=True)
        notes = {name: notes_of(batch) for name, batch in self._found.items() if batch is not None}
        self._noted = {name for name, note in notes.items() if note}
        return [note for note in notes.values() if note]

    def load(self, done: Mapping[int, Iterable[ShardRange]]) -> None:
        """Take up what was read, without the rows of parts."""
        bounds = {file: _bounds(shards) for file, shards in done.items()}
        histories: dict[str, _History] = {piece_folder(self._slot): _History()}
        for name, batch in self._found.items():
            if batch is not None:
                left = _open_rows(batch, bounds)
                self._held[name] = _held(*_columns(left), batch.num_rows)
                histories.setdefault(name.rpartition("/")[0] + "/", _History()).add(name, left)
        self._found = dict.fromkeys(self._found)
        for folder, history in histories.items():
            self._take_over(history, is_own=folder == piece_folder(self._slot))

    def _take_over(self, history: _History, *, is_own: bool) -> None:
        """Finished comes first, then the longest in flight; of equal ones this slot's own."""
        for key, token_ids in history.chains.items():
            if is_own:
                self._stored[key] = _Stored(len(token_ids), _check(token_ids))
            have = self.restored.get(key)
            if have is None or (isinstance(have, InFlight) and len(have.token_ids) < len(token_ids)):
                self.restored[key] = InFlight(RowKey(*key[:2]), key[2], token_ids)
        for key, completion in history.finished.items():
            if is_own:
                self._saved.add(key)
                self._stored.pop(key, None)
                self.restored[key] = completion
            elif not isinstance(self.restored.get(key), Completion):
                self._foreign.add(key)
                self.restored[key] = completion

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
        found = self.restored.pop((key.file, key.row, sample), None)
        if isinstance(found, Completion) and (key.file, key.row, sample) in self._foreign:
            self.record(found)
        return found

    def is_saved(self, key: RowKey, sample: int) -> bool:
        return (key.file, key.row, sample) in self._saved

    def pieces_of(self, shard: ShardRange) -> list[str]:
        """The pieces with finished samples of the shard, oldest first. They stay until its part is acknowledged."""
        names = [name for name, held in self._held.items() if self._is_own(name) and _within(held.finished, shard)]
        self._needed[shard.file, shard.shard] = names
        return sorted(names)

    def read_back(self, shard: ShardRange, names: Iterable[str]) -> dict[tuple[int, int], Completion]:
        """The finished samples of a shard, by row and sample, that `names` hold. Touches nothing but the store."""
        found: dict[tuple[int, int], Completion] = {}
        stop = shard.first_row + shard.num_rows
        for name in names:
            try:
                batch = decode(self._store.read(name), self._digest)
            except (ValueError, pa.ArrowException, OSError) as error:
                raise StorageError(
                    f"{self._store.path(name)}: this piece was whole when it was written and is not now: {error}. Run "
                    "again: what it held is computed anew"
                ) from error
            files, rows, finished = _columns(batch)
            own = finished & (files == shard.file) & (rows >= shard.first_row) & (rows < stop)
            for entry in _entries(batch.filter(pa.array(own))):
                if entry.finished is not None:
                    found[entry.key[1:]] = entry.finished
        return found

    # writing

    def record(self, completion: Completion) -> None:
        """Keep a finished sample for the next piece, unless its part is committed first."""
        key = (completion.key.file, completion.key.row, completion.sample)
        self._pending[key] = completion
        self.pending_bytes += _ROW_BYTES + completion.token_ids.nbytes

    def checkpoint(
        self, in_flight: Iterable[InFlight], notes: Callable[[bool], bytes] = lambda _: b"", *, last: bool = False
    ) -> bool:
        """Write what is new since the last checkpoint; False where nothing is. `last`: only what has to be saved.

        `notes(False)` are those since the last call, `notes(True)` all of them.
        """
        flying = {(one.key.file, one.key.row, one.sample): one for one in in_flight}
        entries = [_Entry(key, 0, 0, done.token_ids, done) for key, done in self._pending.items()]
        entries += [entry for one in flying.values() if (entry := self._delta(one)) is not None]
        merged: list[str] = []
        if entries and not last:  # what is merged rides in a piece that is written anyway
            merged, entries = self._merge(entries, flying)
        for group in _groups(entries):
            self._number += 1  # a name is used once: after a failure nobody knows whether it was written
            name = piece_name(self._slot, self._epoch, self._number, self._attempt)
            everything = len(self._noted) >= _MANY_NOTES
            note = notes(everything)
            if not put_new(self._store, name, encode(group, self._digest, note)):
                raise StorageError(f"{self._store.path(name)}: another writer made this piece; a slot has one writer")
            self._acknowledged(name, group)
            if note:
                self._noted = {name} if everything else {*self._noted, name}
        for name in merged:  # only now: dying before this leaves their rows twice, which is harmless
            self._held[name] = _Held(0, {}, {})
        if not last:
            self.sweep()
        return bool(entries)

    def _delta(self, one: InFlight) -> _Entry | None:
        key, token_ids = (one.key.file, one.key.row, one.sample), one.token_ids
        stored = self._stored.get(key, _Stored(0, 0))
        if key in self._pending or len(token_ids) <= stored.length:
            return None
        if _check(token_ids[: stored.length]) != stored.check:  # it was begun anew: what is stored is not its past
            stored = _Stored(0, 0)
        return _Entry(key, stored.length, stored.check, token_ids[stored.length :])

    def _merge(self, entries: list[_Entry], flying: Mapping[_Key, InFlight]) -> tuple[list[str], list[_Entry]]:
        """Where one slow row keeps many pieces alive: what counts in some of them moves into the piece being written.

        Returns the pieces that are not needed after it, and all of its entries.
        """
        needed = {name for names in self._needed.values() for name in names}
        worth = {
            name for name, held in self._held.items() if held.rows and held.is_worth_merging and self._is_own(name)
        }
        names = sorted(worth - self._stuck)
        if len(names) <= MANY_PIECES:
            return [], entries
        names = [name for name in names[:_MERGED_AT_ONCE] if name not in needed]
        moved: dict[_Key, _Entry] = {}
        merged = []
        with ThreadPoolExecutor(8) as pool:
            for name, batch in zip(names, pool.map(self._read, names), strict=True):
                kept = None if batch is None else self._kept(name, batch, flying)
                if kept is None:
                    self._stuck.add(name)
                else:
                    merged.append(name)
                    moved |= kept
        return merged, [entry for entry in entries if entry.key not in moved] + list(moved.values())

    def _kept(self, name: str, batch: pa.RecordBatch, flying: Mapping[_Key, InFlight]) -> dict[_Key, _Entry] | None:
        """The entries to write for what a piece holds; None where something of it can only be had from the piece."""
        kept: dict[_Key, _Entry] = {}
        files, rows, _ = _columns(batch)
        is_open = np.zeros(len(rows), np.bool_)
        for file, left in self._held[name].rows.items():
            is_open |= (files == file) & np.isin(rows, left)
        for entry in _entries(batch.filter(pa.array(is_open))):
            key = entry.key
            if key in self._pending or (key in self._saved) != (entry.finished is not None):
                continue  # is being written, has ended since, or was overruled by a later start
            if entry.finished is not None:
                kept[key] = entry
                continue
            one = flying.get(key) or self.restored.get(key)
            if not isinstance(one, InFlight) or len(one.token_ids) < self._stored.get(key, _Stored(0, 0)).length:
                return None
            kept[key] = _Entry(key, 0, 0, one.token_ids)
        return kept

    def _acknowledged(self, name: str, group: list[_Entry]) -> None:
        for entry in group:
            if entry.finished is None:
                total, check = entry.start + len(entry.token_ids), _check(entry.token_ids, entry.check)
                self._stored[entry.key] = _Stored(total, check)
            else:
                self._pending.pop(entry.key, None)
                self._stored.pop(entry.key, None)
                self._foreign.discard(entry.key)
                self._saved.add(entry.key)
        self._count_pending()
        keys = np.array([entry.key[:2] for entry in group], np.int64)  # (num_entries, 2)
        finished = np.array([entry.finished is not None for entry in group], np.bool_)
        self._held[name] = _held(keys[:, 0], keys[:, 1], finished, len(group))

    def committed(self, shard: ShardRange) -> None:
        """The rows of `shard` are in a part: forget them. Pieces that hold nothing else go with the next `sweep`."""
        stop = shard.first_row + shard.num_rows
        tables = (self._pending, self._stored, self.restored, self._saved, self._foreign)
        for table in tables:
            for key in [key for key in table if key[0] == shard.file and shard.first_row <= key[1] < stop]:
                table.pop(key) if isinstance(table, dict) else table.discard(key)
        self._count_pending()
        self._needed.pop((shard.file, shard.shard), None)
        for held in self._held.values():
            held.drop(shard)

    def _count_pending(self) -> None:
        self.pending_bytes = sum(_ROW_BYTES + one.token_ids.nbytes for one in self._pending.values())

    def sweep(self) -> None:
        """Delete pieces without open rows. One that cannot be deleted now is tried again later: it does no harm."""
        for name in [name for name, held in self._held.items() if not held.rows and name not in self._noted]:
            self._delete(name)

    def forget_notes(self) -> None:
        """They are written down elsewhere."""
        self._noted.clear()

    def clear(self) -> None:
        """Every row is in a part: delete this start's pieces and those it found, the damaged ones too, and no others:
        an extension of the run may be at work already."""
        for name in {*self._held, *self._found}:
            self._delete(name)

    def _delete(self, name: str) -> None:
        try:
            self._store.delete(name)
            self._held.pop(name, None)
        except (StorageError, PermissionDenied) as error:
            logger.warning("a piece stays behind: %s", error)

    def _is_own(self, name: str) -> bool:
        return name.startswith(piece_folder(self._slot))


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


def _columns(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """File, row, and whether it has ended, of every entry of a piece."""
    finished = batch.column("finish_reason").is_valid().to_numpy(zero_copy_only=False)
    return batch.column("file").to_numpy().astype(np.int64), batch.column("row").to_numpy(), finished


def _within(rows: Mapping[int, _Rows], shard: ShardRange) -> bool:
    own = rows.get(shard.file)
    return own is not None and bool(np.any((own >= shard.first_row) & (own < shard.first_row + shard.num_rows)))


def _open_rows(batch: pa.RecordBatch, bounds: Mapping[int, npt.NDArray[np.int64]]) -> pa.RecordBatch:
    """A piece reduced to the rows that are in no part yet."""
    files, rows, _ = _columns(batch)
    is_open = np.ones(len(rows), np.bool_)
    for file in np.unique(files).tolist():
        committed = bounds.get(file)
        if committed is not None and len(committed):
            own = files == file
            at = np.searchsorted(committed[:, 0], rows[own], side="right") - 1
            is_open[own] = (at < 0) | (rows[own] >= committed[at, 1])
    return batch if is_open.all() else batch.filter(pa.array(is_open))
