"""Which sequences have the same keys and values because their block tables begin with the same blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MIN_SEQUENCES = 2  # that share a prefix

IntArray = npt.NDArray[np.int32]


def find_prefixes(
    block_table: IntArray,  # (num_slots, max_blocks)
    tiles: npt.NDArray[np.integer[Any]],  # (num_rows,) tiles of each row's keys that may be shared
    blocks_per_tile: int,
    *,
    slots: npt.NDArray[np.integer[Any]],  # (num_rows,) the rows' places in the block table
    min_saved: int,  # tiles of keys that a prefix must save
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows that may share a prefix, so ordered that those of a prefix are neighbours; for each of them (tiles that
    it shares, phase after that); and the prefixes: (num, 5) of (first, end) in that order, (begin, end) in tiles and
    phase.
    """
    nothing = np.empty(0, np.int64), np.empty((0, 2), np.int64), np.empty((0, 5), np.int64)
    rows = np.flatnonzero(tiles > 0)
    if len(rows) < MIN_SEQUENCES:
        return nothing
    # The usual case is found out quickly: the blocks at the end of the first tile are all different.
    blocks = block_table[slots[rows], blocks_per_tile - 1]
    ordered = np.sort(blocks)
    if not (ordered[1:] == ordered[:-1]).any():
        return nothing
    _, inverse, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    rows = rows[counts[inverse] > 1]
    width = int(tiles[rows].max()) * blocks_per_tile
    # What a row may not share becomes a number that no other row has.
    own = np.arange(width) >= tiles[rows, None] * blocks_per_tile
    keys = np.where(own, -1 - rows[:, None].astype(np.int32), block_table[slots[rows], :width])
    by_keys = np.argsort(np.ascontiguousarray(keys).view(f"V{4 * width}")[:, 0])  # as byte strings: neighbours is all
    rows, keys = rows[by_keys], keys[by_keys]
    same = keys[1:] == keys[:-1]
    common = np.where(same.all(axis=1), width, same.argmin(axis=1)) // blocks_per_tile  # of neighbours, in tiles

    # All longest runs of rows with a depth in common, by a stack of those that are still open.
    runs: list[tuple[int, int, int]] = []  # depth, first row, end
    opened = [(0, 0)]  # depth, first row
    changes = np.flatnonzero(np.diff(common, prepend=0, append=0))
    for row, depth in zip(changes.tolist(), np.append(common, 0)[changes].tolist(), strict=True):
        first = row
        while opened[-1][0] > depth:
            deeper, first = opened.pop()
            runs.append((deeper, first, row + 1))
        if opened[-1][0] < depth:
            opened.append((depth, first))
    done, phase = [0] * len(rows), [0] * len(rows)
    prefixes = []
    for depth, start, end in sorted(runs):  # the outer before the inner
        begin = done[start]
        if end - start >= MIN_SEQUENCES and (end - start - 1) * (depth - begin) >= min_saved:
            prefixes.append((start, end, begin, depth, phase[start]))
            done[start:end] = [depth] * (end - start)
            phase[start:end] = [phase[start] + 1] * (end - start)
    return (rows, np.array([done, phase]).T, np.array(prefixes)) if prefixes else nothing
