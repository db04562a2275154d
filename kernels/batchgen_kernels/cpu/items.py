"""How attention over a step is cut into the work items of attention.h, and which prefixes it reads once for several
sequences.

Sequences whose block tables begin with the same blocks have the same keys and values there, whatever these are. Their
query rows go over such a prefix together, tile of keys by tile, so that it is read once for all of them, and leave
their softmax unfinished; then each sequence goes on where its rows stand. That is the same arithmetic in the same
order as one item that goes over all keys of a row, so sharing changes no bit. Prefixes may lie one in the other (the
answers to a question behind the same system prompt): items come in phases, each of which starts from what those
before it left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen_kernels.prefixes import find_prefixes

# As the kernels have them, which is checked when these are loaded
KEY_TILE = 128
QUERY_ROWS = 48  # of one item at most
REGISTER_ROWS = 6
ITEM_WORDS = 6

MIN_TILES_SAVED = 2  # tiles of keys that sharing a prefix saves for each KV head, from which on it pays

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """A step's work, for all layers of the same shape.

    Row r of a KV head is query head r % group of its group at tokens[r / group]. `rows` are (sequence, KV head, first
    row, rows, first key, end): an item with a first key goes on from the state in which an earlier phase left its
    rows; one with an end stops there and leaves its rows' state, one without (0) goes to each row's own key.
    """

    tokens: IntArray  # (num_tokens, 2): place in the batch, number of keys seen, its own included
    rows: IntArray  # (num_items, ITEM_WORDS), the dearest of a phase first
    phases: IntArray  # (num_phases + 1,): the items of phase p are [phases[p], phases[p + 1])
    num_shared: int  # tokens with a state, the first of `tokens`


def attention_items(
    query_starts: IntArray,  # (num_seqs + 1,)
    context_lens: IntArray,  # (num_seqs,)
    block_table: IntArray | None,  # (num_seqs, max_blocks); without it nothing is shared
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    block_size: int,
    threads: int,
) -> Items:
    group = num_heads // num_kv_heads
    lengths = np.diff(query_starts)
    past = context_lens - lengths
    order, prefixes = np.arange(len(lengths)), np.empty((0, 5), np.int64)
    begins, phases = np.zeros((2, len(lengths)), np.int64)  # of a sequence's own item: first key, phase
    num_sharing = 0
    # Not with a window: the keys that a row begins with there are its own. Nor for chunks that fill an item by
    # themselves: for them reading is not what takes the time.
    if block_table is not None and window is None:
        short = np.flatnonzero((lengths > 0) & (lengths * group < QUERY_ROWS) & (past >= KEY_TILE))
        sharing, done, prefixes = find_prefixes(
            block_table, past[short] // KEY_TILE, KEY_TILE // block_size, slots=short, min_saved=MIN_TILES_SAVED
        )
        num_sharing = len(sharing)
        alone = np.ones(len(lengths), np.bool_)
        alone[short[sharing]] = False
        order = np.concatenate((short[sharing], np.flatnonzero(alone)))
        begins[:num_sharing], phases[:num_sharing] = done[:, 0] * KEY_TILE, done[:, 1]

    lengths, past = lengths[order], past[order]
    places = np.zeros(len(order) + 1, np.int64)  # of a sequence's first token in `tokens`
    np.cumsum(lengths, out=places[1:])
    tokens = np.empty((places[-1], 2), np.int32)
    within = np.arange(places[-1]) - np.repeat(places[:-1], lengths)
    tokens[:, 0] = np.repeat(query_starts[order], lengths) + within
    tokens[:, 1] = np.repeat(past, lengths) + within + 1

    # Spans of rows that go over the same keys: sequences, then prefixes.
    left, right, prefix_begins, prefix_ends, prefix_phases = prefixes.T
    sequence = np.concatenate((order, order[left]))
    first = np.concatenate((places[:-1], places[left])) * group
    rows = np.concatenate((lengths, places[right] - places[left])) * group
    begin = np.concatenate((begins, prefix_begins * KEY_TILE))
    end = np.concatenate((np.zeros(len(order), np.int64), prefix_ends * KEY_TILE))
    phase = np.concatenate((phases, prefix_phases))

    # Even tiles of whole register tiles, rather than full ones and a small rest; few prefixes in small tiles, so that
    # there is one for each thread.
    tiles = -(-rows // QUERY_ROWS)
    least = -(-2 * threads // (num_kv_heads * max(1, len(prefixes))))
    tiles[len(order) :] = np.maximum(tiles[len(order) :], np.minimum(least, -(-rows[len(order) :] // REGISTER_ROWS)))
    height = -(-rows // (np.maximum(tiles, 1) * REGISTER_ROWS)) * REGISTER_ROWS
    span = np.repeat(np.arange(len(rows)), tiles)
    offset = (np.arange(len(span)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * height[span]
    count = np.minimum(height[span], rows[span] - offset)
    span, offset, count = (a[count > 0] for a in (span, offset, count))
    first = first[span] + offset
    keys = np.where(end[span] > 0, end[span], tokens[(first + count - 1) // group, 1]) - begin[span]
    if window is not None:
        keys = np.minimum(keys, count // group + window + KEY_TILE)
    # Reading a key costs about what 4 rows of it cost.
    by_cost = np.lexsort((-keys * (count + 4), phase[span]))
    span, first, count = span[by_cost], first[by_cost], count[by_cost]
    items = np.empty((len(span), num_kv_heads, ITEM_WORDS), dtype=np.int32)
    for column, values in enumerate((sequence[span], None, first, count, begin[span], end[span])):
        items[:, :, column] = np.arange(num_kv_heads) if values is None else values[:, None]
    bounds = np.searchsorted(phase[span], np.arange(phase.max(initial=0) + 2)) * num_kv_heads
    return Items(tokens, items.reshape(-1, ITEM_WORDS), bounds.astype(np.int32), int(places[num_sharing]))
