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

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.earlier import Ended, History, history, read_in_order
from batchgen.errors import PermissionDenied, StorageError
from batchgen.io.storage import ObjectMissing
from batchgen.io.stores import Store
from batchgen.piecefile import ROW_BYTES, Entry, Key, Listing, checksum, decode, encode, entries_of, notes_of
from batchgen.runfolder import piece_folder, piece_name, put_new
from batchgen.types import Completion, InFlight, RowKey, ShardRange

logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 16 << 20
MANY_PIECES = 32  # kept at once, of which some are worth merging
_MERGED_AT_ONCE = 16
_SMALL_PIECE = 256  # rows
_MANY_NOTES = 16  # pieces that are kept for their notes
_Rows = npt.NDArray[np.int64]  # row numbers, each once, in order


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
            if rows is not None and (own := _span(rows, shard)).start < own.stop:
                table[shard.file] = np.delete(rows, own)
                if not len(table[shard.file]):
                    del table[shard.file]

    @property
    def is_worth_merging(self) -> bool:
        """Small, or most of it is of no use any more: deltas of samples that have ended, rows that are in parts."""
        return self.size < _SMALL_PIECE or 2 * sum(map(len, self.finished.values())) < self.size


def _held(listing: Listing) -> _Held:
    def by_file(chosen: npt.NDArray[np.bool_]) -> dict[int, _Rows]:
        files = listing.files
        return {int(file): np.unique(listing.rows[chosen & (files == file)]) for file in np.unique(files[chosen])}

    return _Held(listing.length, by_file(np.ones(len(listing.rows), np.bool_)), by_file(listing.ended))


def _span(rows: _Rows, shard: ShardRange) -> slice:
    """Where a shard's rows are among `rows`, which are in order."""
    low, high = np.searchsorted(rows, (shard.first_row, shard.first_row + shard.num_rows))
    return slice(int(low), int(high))


_T = TypeVar("_T")


class _BySample(Generic[_T]):
    """A value for each of some samples. Dropping a shard takes as long as the shard has rows, however many others
    there are."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], dict[int, _T]] = {}  # file, row

    def __setitem__(self, key: Key, value: _T) -> None:
        self._rows.setdefault(key[:2], {})[key[2]] = value

    def __contains__(self, key: Key) -> bool:
        return key[2] in self._rows.get(key[:2], ())

    def __bool__(self) -> bool:
        return bool(self._rows)

    def get(self, key: Key) -> _T | None:
        samples = self._rows.get(key[:2])
        return None if samples is None else samples.get(key[2])

    def pop(self, key: Key) -> _T | None:
        samples = self._rows.get(key[:2])
        if samples is None:
            return None
        value = samples.pop(key[2], None)
        if not samples:
            del self._rows[key[:2]]
        return value

    def items(self) -> Iterator[tuple[Key, _T]]:
        for row, samples in self._rows.items():
            for sample, value in samples.items():
                yield (*row, sample), value

    def drop(self, shard: ShardRange) -> list[_T]:
        """Forget the shard's samples; returns what they had."""
        dropped: list[_T] = []
        for row in range(shard.first_row, shard.first_row + shard.num_rows) if self._rows else ():
            dropped += self._rows.pop((shard.file, row), {}).values()
        return dropped


class Pieces:
    """A slot's pieces: what they and those of dead slots hold, what is to be written, and when one can go.

    One thread uses it; only `read_back` may run beside it.
    """

    def __init__(self, store: Store, slot: int, epoch: int, attempt: str, digest: str) -> None:
        """`digest` names the run, `attempt` this start of it."""
        self._store, self._slot, self._digest = store, slot, digest
        self._epoch, self._attempt = epoch, attempt
        self._number = 0
        self._ended = Ended(self._read)
        self._begun: _BySample[InFlight] = _BySample()  # in flight in earlier starts
        self._overruled: set[Key] = set()  # ends of samples in this slot's found pieces that count for nothing
        self._pending: _BySample[Completion] = _BySample()
        self._stored: _BySample[_Stored] = _BySample()
        self._held: dict[str, _Held] = {}
        self._found: dict[str, Listing | None] = {}  # at the start; None: damaged, and all after `load`
        self._noted: set[str] = set()  # pieces with notes that are nowhere else
        self._stuck: set[str] = set()  # worth merging, but something in them can only be had from there
        self._needed: dict[tuple[int, int], list[str]] = {}  # shard being read back: its pieces
        self.pending_bytes = 0

    # reading

    def read(self, dead_slots: Iterable[int] = ()) -> list[bytes]:
        """Read what earlier starts left, of other slots the dead ones' only. Returns the notes among it."""
        notes = []
        for slot in [self._slot, *dead_slots]:
            for name, batch in read_in_order(self._store.list(piece_folder(slot)), self._read):
                self._found[name] = None if batch is None else Listing.of(batch)
                if batch is not None and (note := notes_of(batch)):
                    self._noted.add(name)
                    notes.append(note)
        return notes

    def load(self, done: Mapping[int, Iterable[ShardRange]]) -> None:
        """Take up what was read, without the rows of parts."""
        bounds = {file: _bounds(shards) for file, shards in done.items()}
        own = piece_folder(self._slot)
        slots: dict[str, dict[str, Listing]] = {own: {}}
        for name, listing in self._found.items():
            if listing is not None:
                left = _open_rows(listing, bounds)
                self._held[name] = _held(left)
                slots.setdefault(name.rpartition("/")[0] + "/", {})[name] = left
        self._found = dict.fromkeys(self._found)
        for folder, listings in slots.items():
            self._take_over(list(listings), history(listings, self._read), is_own=folder == own)
        for key in [key for key, _ in self._begun.items() if key in self._ended]:
            self._begun.pop(key)

    def _take_over(self, names: list[str], found: History, *, is_own: bool) -> None:
        """Finished comes first, then the longest in flight; of equal ones this slot's own."""
        self._ended.learn(names, found.ended)
        for key, token_ids in found.chains.items():
            if is_own:
                self._stored[key] = _Stored(len(token_ids), checksum(token_ids))
            have = self._begun.get(key)
            if have is None or len(have.token_ids) < len(token_ids):
                self._begun[key] = InFlight(RowKey(*key[:2]), key[2], token_ids)
        if is_own:
            self._overruled = found.overruled

    @property
    def left(self) -> int:
        """Samples that earlier starts left, finished or begun, and that nobody took yet."""
        return len(self._ended) + sum(1 for _ in self._begun.items())

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
        place = key.file, key.row, sample
        begun = self._begun.pop(place)
        found = self._ended.take(place)
        for name in self._ended.lost:
            self._held.pop(name, None)
        if found is None:
            return begun
        completion, name = found
        if not self._is_own(name):
            self.record(completion)
        return completion

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
            all_ = Listing.of(batch)
            own = all_.ended & (all_.files == shard.file) & (all_.rows >= shard.first_row) & (all_.rows < stop)
            for entry in entries_of(batch.filter(pa.array(own))):
                if entry.finished is not None:
                    found[entry.key[1:]] = entry.finished
        return found

    # writing

    def record(self, completion: Completion) -> None:
        """Keep a finished sample for the next piece, unless its part is committed first."""
        key = (completion.key.file, completion.key.row, completion.sample)
        self._discard(self._pending.pop(key))
        self._pending[key] = completion
        self.pending_bytes += _pending_size(completion)

    def checkpoint(
        self, in_flight: Iterable[InFlight], notes: Callable[[bool], bytes] = lambda _: b"", *, last: bool = False
    ) -> bool:
        """Write what is new since the last checkpoint; False where nothing is. `last`: only what has to be saved.

        `notes(False)` are those since the last call, `notes(True)` all of them.
        """
        flying = {(one.key.file, one.key.row, one.sample): one for one in in_flight}
        entries = [Entry(key, 0, 0, done.token_ids, done) for key, done in self._pending.items()]
        entries += [entry for one in flying.values() if (entry := self._delta(one)) is not None]
        merged: list[str] = []
        # What is merged rides in a piece that is written anyway. Samples in flight that are not said have to stay.
        if entries and not last and (flying or not self._stored):
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

    def _delta(self, one: InFlight) -> Entry | None:
        key, token_ids = (one.key.file, one.key.row, one.sample), one.token_ids
        stored = self._stored.get(key) or _Stored(0, 0)
        if key in self._pending or len(token_ids) <= stored.length:
            return None
        if checksum(token_ids[: stored.length]) != stored.check:  # it was begun anew: what is stored is not its past
            stored = _Stored(0, 0)
        return Entry(key, stored.length, stored.check, token_ids[stored.length :])

    def _merge(self, entries: list[Entry], flying: Mapping[Key, InFlight]) -> tuple[list[str], list[Entry]]:
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
        moved: dict[Key, Entry] = {}
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

    def _kept(self, name: str, batch: pa.RecordBatch, flying: Mapping[Key, InFlight]) -> dict[Key, Entry] | None:
        """The entries to write for what a piece holds; None where something of it can only be had from the piece."""
        kept: dict[Key, Entry] = {}
        all_ = Listing.of(batch)
        is_open = np.zeros(batch.num_rows, np.bool_)
        for file, left in self._held[name].rows.items():
            is_open |= (all_.files == file) & np.isin(all_.rows, left)
        for entry in entries_of(batch.filter(pa.array(is_open))):
            key = entry.key
            if key in self._pending:  # is being written
                continue
            if entry.finished is not None:
                if key not in self._overruled or name not in self._found:
                    kept[key] = entry
                continue
            stored = self._stored.get(key)
            if stored is None:  # has ended since
                continue
            one = flying.get(key) or self._begun.get(key)
            if one is None or len(one.token_ids) < stored.length:
                return None
            kept[key] = Entry(key, 0, 0, one.token_ids)
        return kept

    def _acknowledged(self, name: str, group: list[Entry]) -> None:
        for place, entry in enumerate(group):
            if entry.finished is None:
                total, check = entry.start + len(entry.token_ids), checksum(entry.token_ids, entry.check)
                self._stored[entry.key] = _Stored(total, check)
            else:
                self._discard(self._pending.pop(entry.key))
                self._stored.pop(entry.key)
                self._ended.move(entry.key, name, place)
        self._held[name] = _held(Listing.of_entries(group))

    def committed(self, shard: ShardRange) -> None:
        """The rows of `shard` are in a part: forget them. Pieces that hold nothing else go with the next `sweep`."""
        for completion in self._pending.drop(shard):
            self._discard(completion)
        self._stored.drop(shard)
        self._begun.drop(shard)
        self._ended.drop(shard)
        self._needed.pop((shard.file, shard.shard), None)
        for held in self._held.values():
            held.drop(shard)

    def _discard(self, completion: Completion | None) -> None:
        """It is not pending any more."""
        if completion is not None:
            self.pending_bytes -= _pending_size(completion)

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


def _pending_size(completion: Completion) -> int:
    return ROW_BYTES + completion.token_ids.nbytes


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    """The entries in order, in groups of at most 16 MiB."""
    group: list[Entry] = []
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


def _within(rows: Mapping[int, _Rows], shard: ShardRange) -> bool:
    own = rows.get(shard.file)
    return own is not None and (span := _span(own, shard)).start < span.stop


def _open_rows(listing: Listing, bounds: Mapping[int, npt.NDArray[np.int64]]) -> Listing:
    """A piece reduced to the rows that are in no part yet."""
    files, rows = listing.files, listing.rows
    is_open = np.ones(len(rows), np.bool_)
    for file in np.unique(files).tolist():
        committed = bounds.get(file)
        if committed is not None and len(committed):
            own = files == file
            at = np.searchsorted(committed[:, 0], rows[own], side="right") - 1
            is_open[own] = (at < 0) | (rows[own] >= committed[at, 1])
    return listing.only(is_open)
