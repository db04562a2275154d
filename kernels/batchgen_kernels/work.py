"""How a step of ragged paged attention is cut into the items of attention.py: on the host, in numpy, once for all
layers of a kind.

An item is a tile of query rows over a range of keys. Short sequences take a small tile each, chunks of prompts large
ones. Where there are too few items for the device, ranges of keys are cut at multiples of one length, counted from the
first key, and the parts merged. Sequences whose block tables begin with the same blocks go over these together in
large tiles, so that they are read once, and that is a part as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels.prefixes import find_prefixes

ITEM_WORDS = 6  # row of the block table, first entry, entries, first key, end, number of the part
ENTRY_WORDS = 4  # token, keys that it sees, place of its first part, parts (0 where it has none)
ANCHOR = 128  # keys are cut at multiples of it; a whole number of tiles and of blocks
MIN_SPLIT = 256  # keys of a part, from which on reading them takes long beside what a part costs
MIN_TILES_SAVED = 8  # of ANCHOR keys, from which on sharing pays
COST_STEP = 16  # keys that make no difference to the order of items
LARGE_COST = 2  # of a key to a large tile, where it is 1 to a small one

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.integer[Any]]


class Room(NamedTuple):
    """Numbers of rows that a plan takes, or is padded to."""

    items: int
    entries: int
    merged: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A step's work on the host."""

    items: IntArray  # (num_items, ITEM_WORDS), the dearest first
    entries: IntArray  # (num_tokens, ENTRY_WORDS)
    merged: IntArray  # (num_merged,) the entries that have parts
    with_large: bool  # some item is more than a small tile

    @property
    def room(self) -> Room:
        return Room(len(self.items), len(self.entries), len(self.merged))


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A step's work on the device, for layers of one kind. Items of no entries are padding."""

    items: torch.Tensor  # (num_items, ITEM_WORDS) int32
    entries: torch.Tensor  # (num_tokens, ENTRY_WORDS) int32
    merged: torch.Tensor  # (1 + num_merged,) int32: how many of the others hold
    parts: torch.Tensor  # room for (max_parts, num_heads, value_dim) float32, flat
    part_lses: torch.Tensor  # room for (max_parts, num_heads) float32, flat
    with_large: bool
    merge_programs: int  # that merge parts; 0 where there are none


class _Tiles(NamedTuple):
    """Tiles of rows, each over a range of keys. All (num_tiles,)."""

    rows: Array  # of the block table
    firsts: Array  # entries
    counts: Array
    begins: Array  # keys
    ends: Array


def plan(
    query_starts: IntArray,  # (num_seqs + 1,)
    context_lens: IntArray,  # (num_seqs,)
    slots: IntArray,  # (num_seqs,) rows of the block table
    block_table: IntArray,  # (max_num_seqs, max_blocks)
    num_tokens: int,  # with padding
    *,
    group: int,  # query heads of a KV head
    window: int | None,
    small: int,  # rows of a tile
    large: int,
    block_size: int,
    target_items: int,  # enough to keep the device busy
    max_parts: int,
    max_items: int | None = None,
    split_tokens: int | None = None,  # cuts ranges of keys at its multiples, whatever else the step holds
    share: bool = True,
) -> Plan:
    per_small, per_large = small // group, large // group
    lengths = np.diff(query_starts).astype(np.int64)
    past = context_lens - lengths
    order = np.arange(len(lengths))
    begins = np.zeros(len(lengths), np.int64)
    prefixes = np.empty((0, 5), np.int64)
    # Not with a window: the keys that a row begins with there are its own. Nor for chunks that fill a tile themselves.
    if share and window is None and split_tokens is None and per_large > 1:
        short = np.flatnonzero((lengths > 0) & (lengths <= max(per_small, per_large // 2)) & (past >= ANCHOR))
        sharing, done, prefixes = find_prefixes(
            block_table, past[short] // ANCHOR, ANCHOR // block_size, slots=slots[short], min_saved=MIN_TILES_SAVED
        )
        if len(sharing):
            alone = np.ones(len(lengths), np.bool_)
            alone[short[sharing]] = False
            order = np.concatenate((short[sharing], np.flatnonzero(alone)))
            lengths, past = lengths[order], past[order]
            begins[: len(sharing)] = done[:, 0] * ANCHOR
    entries, places = _entries(query_starts, lengths, past, order, num_tokens)
    own = _own_tiles(entries, places, lengths, slots[order], begins, window, per_small, per_large)
    all_tiles, bounds = [own], np.zeros(1, np.int64)
    if len(prefixes):
        shared, bounds = _prefix_tiles(places, slots[order], prefixes, per_large)
        all_tiles.append(shared)
    if num_tokens > places[-1]:
        pads = np.arange(places[-1], num_tokens, per_small)
        none = np.zeros_like(pads)
        all_tiles.append(_Tiles(none, pads, np.minimum(num_tokens - pads, per_small), none, none))
    tiles = own if len(all_tiles) == 1 else _Tiles(*map(np.concatenate, zip(*all_tiles, strict=True)))

    size = split_tokens or _split_size(tiles, target_items)
    longest = int(tiles.ends.max(initial=0))
    num_own = len(own.rows)
    while True:
        split = tiles.begins // size
        parts = -(-tiles.ends // size) - split  # of each tile
        # A short range may lie across a cut, if only the step is asked.
        parts[tiles.ends - tiles.begins <= (0 if split_tokens else size)] = 1
        before = np.zeros(len(tiles.rows), np.int64)  # parts that a tile's rows have from others
        if len(prefixes):
            before = _parts_before(parts, prefixes, num_own + bounds)
        totals = parts[:num_own] + before[:num_own]
        num_parts = int((totals * own.counts)[totals > 1].sum())
        num_items = int(parts.sum())
        if num_parts <= max_parts and (max_items is None or num_items <= max_items):
            break
        if split_tokens is not None:
            raise ValueError(f"split_tokens {split_tokens}: the step has {num_parts} parts, of which {max_parts} fit")
        if size >= longest:  # many prefixes one in the other
            assert len(prefixes), "a step without parts always fits"
            return plan(
                query_starts, context_lens, slots, block_table, num_tokens, group=group, window=window, small=small,
                large=large, block_size=block_size, target_items=target_items, max_parts=max_parts,
                max_items=max_items, share=False,
            )  # fmt: skip
        size *= 2

    merged = np.empty(0, np.int32)
    if num_parts:
        by_entry = np.repeat(totals, own.counts)
        merged = np.flatnonzero(by_entry > 1).astype(np.int32)
        counts = by_entry[merged]
        entries[merged, 2] = np.cumsum(counts) - counts
        entries[merged, 3] = counts
    if num_items > len(tiles.rows):
        tile = np.repeat(np.arange(len(tiles.rows)), parts)
        number = np.arange(num_items) - np.repeat(np.cumsum(parts) - parts, parts)
        tiles = _Tiles(*(column[tile] for column in tiles))
        cut = (split[tile] + number) * size
        ends = np.where(parts[tile] == 1, tiles.ends, np.minimum(tiles.ends, cut + size))
        tiles = tiles._replace(begins=np.maximum(tiles.begins, cut), ends=ends)
        before = before[tile] + number
    is_large = tiles.counts > per_small
    with_large = bool(is_large.any())
    keys = tiles.ends - tiles.begins
    cost = (keys * np.where(is_large, LARGE_COST, 1) if with_large else keys) // COST_STEP
    # 16 bits are sorted several times as fast as 64
    by_cost = np.argsort(np.maximum(0xFFFF - cost, 0).astype(np.uint16), kind="stable")
    items = np.empty((len(keys), ITEM_WORDS), np.int32)
    for column, values in enumerate((*tiles, before)):
        items[:, column] = values[by_cost]
    return Plan(items, entries, merged, with_large)


def _entries(
    query_starts: IntArray, lengths: LongArray, past: LongArray, order: LongArray, num_tokens: int
) -> tuple[IntArray, LongArray]:
    """Entries of all tokens, the sequences in this order, and the place of each one's first token, and the end."""
    places = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths, out=places[1:])
    num_live = places[-1]
    within = np.arange(num_live)
    within -= np.repeat(places[:-1], lengths)
    entries = np.zeros((num_tokens, ENTRY_WORDS), np.int32)
    entries[:num_live, 0] = np.repeat(query_starts[order], lengths) + within
    entries[num_live:, 0] = np.arange(num_live, num_tokens)
    entries[:num_live, 1] = np.repeat(past + 1, lengths) + within
    return entries, places


def _own_tiles(
    entries: IntArray,
    places: LongArray,
    lengths: LongArray,
    slots: IntArray,
    begins: LongArray,  # where a sequence's keys begin that it does not share
    window: int | None,
    per_small: int,
    per_large: int,
) -> _Tiles:
    num_tiles = np.where(lengths <= per_small, lengths > 0, -(-lengths // per_large))
    sequence = np.repeat(np.arange(len(lengths)), num_tiles)
    offsets = (np.arange(len(sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * per_large
    firsts = places[sequence] + offsets
    counts = np.minimum(lengths[sequence] - offsets, max(per_small, per_large))
    tile_begins = begins[sequence]
    if window is not None:
        tile_begins = np.maximum(entries[firsts, 1] - np.int64(window), 0)
    return _Tiles(slots[sequence], firsts, counts, tile_begins, entries[firsts + counts - 1, 1].astype(np.int64))


def _prefix_tiles(places: LongArray, slots: IntArray, prefixes: LongArray, per_large: int) -> tuple[_Tiles, LongArray]:
    """And the first tile of each prefix, and the end."""
    left, right, begins, ends, _ = prefixes.T
    num_entries = places[right] - places[left]
    num_tiles = -(-num_entries // per_large)
    bounds = np.zeros(len(prefixes) + 1, np.int64)
    np.cumsum(num_tiles, out=bounds[1:])
    span = np.repeat(np.arange(len(prefixes)), num_tiles)
    offsets = (np.arange(len(span)) - bounds[span]) * per_large
    counts = np.minimum(num_entries[span] - offsets, per_large)
    tiles = _Tiles(slots[left[span]], places[left[span]] + offsets, counts, begins[span] * ANCHOR, ends[span] * ANCHOR)
    return tiles, bounds


def _parts_before(parts: LongArray, prefixes: LongArray, bounds: LongArray) -> LongArray:
    """For each tile, the parts that its rows have from prefixes around it. `bounds` are each prefix's first tile, and
    the end."""
    before = np.zeros(len(parts), np.int64)
    of_rows = np.zeros(int(prefixes[:, 1].max()), np.int64)  # those of sequences so far: an outer prefix comes first
    for (left, right), first, end in zip(prefixes[:, :2].tolist(), bounds[:-1], bounds[1:], strict=True):
        before[first:end] = of_rows[left]
        of_rows[left:right] += parts[first]
    before[: len(of_rows)] = of_rows  # sequences that share have one tile each, the first ones
    return before


def _split_size(tiles: _Tiles, target_items: int) -> int:
    total = int((tiles.ends - tiles.begins).sum())
    return max(MIN_SPLIT, -(-total // (target_items * ANCHOR)) * ANCHOR)


def room_of(capacity: int, target_items: int) -> Room:
    """What every step of at most so many decodes fits into."""
    return Room(capacity + capacity // 4 + target_items, capacity, capacity)


def pack(plans: Sequence[Plan], rooms: Sequence[Room]) -> IntArray:
    """All of it in one array, each plan in the room that it is given."""
    packed = np.zeros(sum(_words(room) for room in rooms), np.int32)
    first = 0
    for plan_, room in zip(plans, rooms, strict=True):
        assert len(plan_.entries) == room.entries
        items, entries, merged = _sections(first, room)
        packed[items : items + plan_.items.size] = plan_.items.reshape(-1)
        packed[entries : entries + plan_.entries.size] = plan_.entries.reshape(-1)
        packed[merged] = len(plan_.merged)
        packed[merged + 1 : merged + 1 + len(plan_.merged)] = plan_.merged
        first += _words(room)
    return packed


def unpack(packed: torch.Tensor, rooms: Sequence[Room]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Items, entries and merged of each plan in what `pack` made."""
    unpacked, first = [], 0
    for room in rooms:
        items, entries, merged = _sections(first, room)
        unpacked.append(
            (
                packed[items : items + room.items * ITEM_WORDS].view(-1, ITEM_WORDS),
                packed[entries : entries + room.entries * ENTRY_WORDS].view(-1, ENTRY_WORDS),
                packed[merged : merged + 1 + room.merged],
            )
        )
        first += _words(room)
    return unpacked


def _sections(first: int, room: Room) -> tuple[int, int, int]:
    entries = first + _aligned(room.items * ITEM_WORDS)
    return first, entries, entries + room.entries * ENTRY_WORDS


def _words(room: Room) -> int:
    return _aligned(room.items * ITEM_WORDS) + room.entries * ENTRY_WORDS + _aligned(1 + room.merged)


def _aligned(words: int) -> int:
    """Sections begin at multiples of 16 bytes, so that a kernel is compiled for one alignment."""
    return -(-words // 4) * 4
