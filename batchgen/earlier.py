"""What earlier starts left in their pieces: which samples ended and where they are, and how far others had come.

Of samples that ended only their places are kept. They are read when their rows come by, some megabytes ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.piecefile import ROW_BYTES, Key, Listing, checksum, entries_of
from batchgen.types import Completion, ShardRange, TokenIds

MAX_AHEAD_BYTES = 32 << 20  # of samples that ended, read before their rows come by
_MOST_AHEAD = 1 << 15  # of them, since each takes half a kilobyte beside its tokens
_READERS = 4  # pieces in memory at once

Read = Callable[[str], "pa.RecordBatch | None"]  # None: the piece is gone or damaged
_Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Table:
    """Samples of one file that ended, by row and sample."""

    rows: _Rows
    samples: npt.NDArray[np.int32]
    pieces: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    left: npt.NDArray[np.bool_]  # nobody took it, and its row is in no part

    def __getitem__(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> _Table:
        return _Table(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def span(self, first: int, stop: int) -> slice:
        low, high = np.searchsorted(self.rows, (first, stop))
        return slice(int(low), int(high))


class Ended:
    """Samples that ended in earlier starts. Each is given once."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._names: list[str] = []
        self._tables: dict[int, _Table] = {}
        self._ahead: dict[Key, Completion] = {}
        self.lost: set[str] = set()  # pieces that could not be read again

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(table.left)) for table in self._tables.values())

    def learn(self, names: Sequence[str], tables: Mapping[int, _Table]) -> None:
        """`tables` by file, their pieces being those of `names`. What is known already stands."""
        first = len(self._names)
        self._names += names
        for file, table in tables.items():
            new = replace(table, pieces=table.pieces + np.int32(first))
            self._tables[file] = _joined(self._tables[file], new) if file in self._tables else new

    def _find(self, key: Key) -> int:
        table = self._tables.get(key[0])
        if table is None:
            return -1
        at = int(np.searchsorted(table.rows, key[1]))
        while at < len(table.rows) and table.rows[at] == key[1]:
            if table.samples[at] == key[2]:
                return at if table.left[at] else -1
            at += 1
        return -1

    def __contains__(self, key: Key) -> bool:
        return self._find(key) >= 0

    def take(self, key: Key) -> tuple[Completion, str] | None:
        """A sample and the piece that it was in."""
        at = self._find(key)
        if at < 0:
            return None
        if key not in self._ahead:
            self._read_on(key[0], at)
        table = self._tables[key[0]]
        table.left[at] = False
        found = self._ahead.pop(key, None)
        return None if found is None else (found, self._names[table.pieces[at]])

    def _read_on(self, file: int, at: int) -> None:
        """Have this sample and those after it in memory, and no others."""
        table = self._tables[file]
        chosen = at + np.flatnonzero(table.left[at : at + _MOST_AHEAD])
        size = np.cumsum(table.sizes[chosen].astype(np.int64) + ROW_BYTES)
        chosen = chosen[: max(1, int(np.searchsorted(size, MAX_AHEAD_BYTES, "right")))]
        pieces = np.unique(table.pieces[chosen]).tolist()
        places = [table.places[chosen[table.pieces[chosen] == piece]] for piece in pieces]
        self._ahead.clear()
        with ThreadPoolExecutor(_READERS) as pool:
            for piece, found in zip(pieces, pool.map(self._read_from, pieces, places), strict=True):
                if found is None:
                    self._lose(piece)
                else:
                    self._ahead |= found

    def _read_from(self, piece: int, places: npt.NDArray[np.int32]) -> dict[Key, Completion] | None:
        batch = self._read(self._names[piece])
        if batch is None:
            return None
        entries = entries_of(batch.take(pa.array(places)))
        # each by itself: one that is kept for long must not keep the others' tokens
        return {one.key: replace(one.finished, token_ids=one.token_ids.copy()) for one in entries if one.finished}

    def _lose(self, piece: int) -> None:
        self.lost.add(self._names[piece])
        for table in self._tables.values():
            table.left[table.pieces == piece] = False

    def move(self, key: Key, name: str, place: int) -> None:
        """The sample, if it is one of these, is in another piece now."""
        at = self._find(key)
        if at >= 0:
            if not self._names or self._names[-1] != name:
                self._names.append(name)
            table = self._tables[key[0]]
            table.pieces[at], table.places[at] = len(self._names) - 1, place

    def drop(self, shard: ShardRange) -> None:
        """The rows are in a part."""
        table = self._tables.get(shard.file)
        if table is not None:
            table.left[table.span(shard.first_row, shard.first_row + shard.num_rows)] = False


def _joined(first: _Table, second: _Table) -> _Table:
    both = _Table(*(np.concatenate([getattr(t, field.name) for t in (first, second)]) for field in fields(first)))
    order, starts = _grouped(both.rows, both.samples)
    return both[order[starts]]


def _grouped(rows: _Rows, samples: npt.NDArray[np.int32]) -> tuple[_Rows, _Rows]:
    """The order by row and sample, equal ones as they come; and where in it each of these groups begins."""
    keys = rows * (np.int64(samples.max(initial=0)) + 1) + samples
    order = np.argsort(keys, kind="stable")
    return order, np.flatnonzero(np.diff(keys[order], prepend=-1))


# -- the pieces of one slot --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class History:
    """What the pieces of one slot say, read in order: samples that ended, and the tokens of those in flight."""

    ended: dict[int, _Table]  # by file
    chains: dict[Key, TokenIds]
    overruled: set[Key]  # they ended, in a start that was superseded then: later ones went on with them


def history(listings: Mapping[str, Listing], read: Read) -> History:
    """`listings` of the pieces by name, in order; pieces of samples in flight are read again for their tokens."""
    names = list(listings)
    if not names:
        return History({}, {}, set())
    epochs = np.array([int(name.rpartition("/")[2].partition("-")[0]) for name in names], np.int32)
    pieces = np.repeat(np.arange(len(names), dtype=np.int32), [len(listing.rows) for listing in listings.values()])
    every = Listing.joined(list(listings.values()))
    ended: dict[int, _Table] = {}
    wanted: dict[int, list[npt.NDArray[np.int32]]] = {}  # piece: places of samples that may be in flight
    ended_in: dict[Key, tuple[int, int]] = {}  # of those, where they ended too: epoch, and index in the file's table
    for file in np.unique(every.files).tolist():
        own = np.flatnonzero(every.files == file)
        order, starts = _grouped(every.rows[own], every.samples[own])
        own = own[order]
        is_end, epoch = every.ended[own], epochs[pieces[own]]
        last_end = np.maximum.reduceat(np.where(is_end, epoch, 0), starts)
        last_flight = np.maximum.reduceat(np.where(is_end, 0, epoch), starts)
        last_place = np.maximum.reduceat(np.where(is_end, np.arange(len(own), dtype=np.int32), -1), starts)
        # a later start did not know it as ended: the earlier one was superseded when it wrote that
        in_flight = last_flight > last_end
        chosen = own[np.repeat(in_flight, np.diff(starts, append=len(own))) & ~is_end]
        for piece in np.unique(pieces[chosen]).tolist():
            wanted.setdefault(piece, []).append(every.places[chosen[pieces[chosen] == piece]])
        groups = np.flatnonzero(last_end)
        at = own[last_place[groups]]
        ended[file] = _Table(
            every.rows[at], every.samples[at], pieces[at], every.places[at], every.sizes[at], np.ones(len(at), np.bool_)
        )
        for index in np.flatnonzero(in_flight[groups]).tolist():
            key = file, int(ended[file].rows[index]), int(ended[file].samples[index])
            ended_in[key] = int(last_end[groups[index]]), index
    chains, reached = _chains({names[piece]: np.concatenate(wanted[piece]) for piece in sorted(wanted)}, read)
    overruled = {key for key, (epoch, _) in ended_in.items() if reached.get(key, 0) > epoch}
    for key in ended_in:
        if key in overruled:
            ended[key[0]].left[ended_in[key][1]] = False
        else:
            chains.pop(key, None)
    return History({file: table[table.left] for file, table in ended.items()}, chains, overruled)


def _chains(wanted: Mapping[str, npt.NDArray[np.int32]], read: Read) -> tuple[dict[Key, TokenIds], dict[Key, int]]:
    """The tokens of samples in flight, and the last epoch that added to each; `wanted` are their places by piece."""
    chains: dict[Key, TokenIds] = {}
    reached: dict[Key, int] = {}
    for name, batch in read_in_order(list(wanted), read):
        if batch is None:
            continue
        epoch = int(name.rpartition("/")[2].partition("-")[0])
        for entry in entries_of(batch.take(pa.array(np.sort(wanted[name])))):
            have = chains.get(entry.key, entry.token_ids[:0])
            if entry.start <= len(have) and checksum(have[: entry.start]) == entry.check:
                chains[entry.key] = np.concatenate([have[: entry.start], entry.token_ids])
                reached[entry.key] = epoch
    return chains, reached


def read_in_order(names: Sequence[str], read: Read) -> Iterator[tuple[str, pa.RecordBatch | None]]:
    """Several at a time, and no more than that in memory."""
    with ThreadPoolExecutor(_READERS) as pool:
        for first in range(0, len(names), _READERS):
            group = names[first : first + _READERS]
            yield from zip(group, pool.map(read, group), strict=True)
