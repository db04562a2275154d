"""Ragged paged attention in Triton: prefill chunks and decodes in one launch, and the merge of what was cut apart.

The work is planned on the host (work.py). Each program takes one item: the query heads of one KV head at some tokens,
over a range of keys. What is the only item of its tokens writes their output; otherwise it leaves a part, normalised
and with its log-sum-exp, and a second kernel weighs the parts of a token.

A layer's KV pool holds for each block and KV head keys (block_size, key_dim), then values (block_size, value_dim).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_kernels.tuning import Config, choose
from batchgen_kernels.work import ENTRY_WORDS, ITEM_WORDS, Work

BLOCK_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 256
LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_ITEM_WORDS, _ENTRY_WORDS = tl.constexpr(ITEM_WORDS), tl.constexpr(ENTRY_WORDS)


def pool_shape(
    num_blocks: int, num_kv_heads: int, key_dim: int, value_dim: int, block_size: int
) -> tuple[int, int, int]:
    """The shape of a layer's KV pool."""
    for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
        if dim % 8 or not 16 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{name} {dim}: expected a multiple of 8 from 16 to {MAX_HEAD_DIM}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size {block_size}: expected one of {', '.join(map(str, BLOCK_SIZES))}")
    return num_blocks, num_kv_heads, block_size * (key_dim + value_dim)


def launch_config(
    num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, *, decode: bool
) -> Config:
    """How the kernel is launched for steps of decodes only or for others, with KV of this dtype: `small` and `large`
    are the rows of its two tiles, `keys` is how many keys a tile of them has."""
    size = "float32" if dtype == torch.float32 else max(64, triton.next_power_of_2(max(key_dim, value_dim)))
    config = choose(f"paged_{'decode' if decode else 'attention'}/{size}")
    small = max(config.blocks["small"], triton.next_power_of_2(num_heads // num_kv_heads))
    blocks = {"small": small, "large": max(config.blocks["large"], small), "keys": config.blocks["keys"]}
    return config._replace(blocks=blocks)


def paged_attention(
    query: torch.Tensor,  # (num_tokens, num_heads, key_dim), may be a strided view
    pool: torch.Tensor,
    block_table: torch.Tensor,  # (max_num_seqs, max_blocks) int32
    work: Work,
    *,
    config: Config,
    block_size: int,
    value_dim: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # (num_heads,) float32
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention over the pool, softmax in float32 -> (num_tokens, num_heads, value_dim).

    `work` and `config` belong together. Each logit of `sinks` takes its share of a head's softmax and gives nothing.
    """
    num_tokens, num_heads, key_dim = query.shape
    num_blocks, num_kv_heads, _ = pool.shape
    assert pool.is_contiguous() and pool.shape == pool_shape(num_blocks, num_kv_heads, key_dim, value_dim, block_size)
    assert query.stride(2) == block_table.stride(1) == 1
    out = query.new_empty(num_tokens, num_heads, value_dim)
    with_large = work.with_large and config.blocks["large"] > config.blocks["small"]
    _paged_attention_kernel[(len(work.items), num_kv_heads)](
        query,
        pool,
        out,
        block_table,
        work.items,
        work.entries,
        sinks,
        work.parts,
        work.part_lses,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        scale * key_scale * (1.0 if soft_cap else LOG2_E),
        soft_cap or 0.0,
        value_scale,
        WITH_CAP=soft_cap is not None,
        WINDOW=window or 0,
        GROUP=num_heads // num_kv_heads,
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        SMALL=config.blocks["small"],
        LARGE=config.blocks["large"] if with_large else 0,
        KEYS=config.blocks["keys"],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if work.merge_programs:
        merge_parts(out, work, sinks)
    return out


@triton.jit
def _paged_attention_kernel(
    query,
    pool,
    out,
    table,
    items,
    entries,
    sinks,
    parts,
    part_lses,
    query_token_stride,
    query_head_stride,
    table_stride,
    scale,
    soft_cap,
    value_scale,
    WITH_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    KEYS: tl.constexpr,
):
    item = items + tl.program_id(0) * _ITEM_WORDS
    count = tl.load(item + 2)  # none where the grid is of a capacity
    if (count > 0) & (count <= SMALL // GROUP):
        _attend(
            query, pool, out, table, item, entries, sinks, parts, part_lses,
            query_token_stride, query_head_stride, table_stride, scale, soft_cap, value_scale,
            WITH_CAP, WINDOW, GROUP, NUM_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE, SMALL, KEYS, False,
        )  # fmt: skip
    # The first is known when it is compiled, the second when it runs.
    if LARGE > 0:  # noqa: SIM102
        if count > SMALL // GROUP:
            _attend(
                query, pool, out, table, item, entries, sinks, parts, part_lses,
                query_token_stride, query_head_stride, table_stride, scale, soft_cap, value_scale,
                WITH_CAP, WINDOW, GROUP, NUM_HEADS, KEY_DIM, VALUE_DIM, BLOCK_SIZE, LARGE, KEYS, True,
            )  # fmt: skip


@triton.jit
def _attend(
    query,
    pool,
    out,
    table,
    item,
    entries,
    sinks,
    parts,
    part_lses,
    query_token_stride,
    query_head_stride,
    table_stride,
    scale,
    soft_cap,
    value_scale,
    WITH_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNMASKED: tl.constexpr,
):
    """One item in a tile of ROWS rows: row r is query head r % GROUP of the KV head's at entry r // GROUP.

    With UNMASKED, the keys that all rows see go through a loop of their own that hides none.
    """
    KEY_COLUMNS: tl.constexpr = triton.next_power_of_2(KEY_DIM)
    VALUE_COLUMNS: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
    kv_head = tl.program_id(1)
    table += tl.load(item).to(tl.int64) * table_stride
    entries += tl.load(item + 1) * _ENTRY_WORDS
    count = tl.load(item + 2)
    begin = tl.load(item + 3) // KEYS * KEYS
    end = tl.load(item + 4)
    part = tl.load(item + 5)
    rows = tl.arange(0, ROWS)
    place = rows // GROUP
    live = place < count
    head = kv_head * GROUP + rows % GROUP
    token = tl.load(entries + place * _ENTRY_WORDS, mask=live, other=0).to(tl.int64)
    seen = tl.load(entries + place * _ENTRY_WORDS + 1, mask=live, other=0)
    columns = tl.arange(0, KEY_COLUMNS)
    queries = tl.load(
        query + (token * query_token_stride + head * query_head_stride)[:, None] + columns[None, :],
        mask=live[:, None] & (columns < KEY_DIM)[None, :],
        other=0.0,
    )  # (ROWS, KEY_COLUMNS)
    if not pool.dtype.element_ty.is_fp8():
        queries = queries.to(pool.dtype.element_ty)
    pool += kv_head.to(tl.int64) * (BLOCK_SIZE * (KEY_DIM + VALUE_DIM))
    pool_stride: tl.constexpr = (NUM_HEADS // GROUP) * BLOCK_SIZE * (KEY_DIM + VALUE_DIM)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    if UNMASKED:
        # From `whole` to `masked`, every row sees every key.
        masked = tl.minimum(tl.min(tl.where(live, seen, end), axis=0), end) // KEYS * KEYS
        whole = begin
        if WINDOW > 0:
            behind = tl.max(tl.where(live, seen, 0), axis=0) - WINDOW
            whole = tl.maximum(begin, tl.minimum((behind + KEYS - 1) // KEYS * KEYS, masked))
            top, total, acc = _tiles(
                queries, pool, table, seen, scale, soft_cap, begin, whole, end, top, total, acc,
                pool_stride, True, WITH_CAP, WINDOW, KEY_DIM, VALUE_DIM, BLOCK_SIZE, KEYS,
            )  # fmt: skip
        top, total, acc = _tiles(
            queries, pool, table, seen, scale, soft_cap, whole, masked, end, top, total, acc,
            pool_stride, False, WITH_CAP, WINDOW, KEY_DIM, VALUE_DIM, BLOCK_SIZE, KEYS,
        )  # fmt: skip
        begin = tl.maximum(whole, masked)
    top, total, acc = _tiles(
        queries, pool, table, seen, scale, soft_cap, begin, end, end, top, total, acc,
        pool_stride, True, WITH_CAP, WINDOW, KEY_DIM, VALUE_DIM, BLOCK_SIZE, KEYS,
    )  # fmt: skip

    heads = token * NUM_HEADS + head
    columns = tl.arange(0, VALUE_COLUMNS)
    stored = live[:, None] & (columns < VALUE_DIM)[None, :]
    if tl.load(entries + 3) == 0:  # all entries of an item have other parts, or none has
        if sinks is not None:
            sink = tl.load(sinks + head, mask=live, other=0.0) * _LOG2_E
            higher = tl.maximum(top, sink)
            kept = tl.exp2(top - higher)
            acc = acc * kept[:, None]
            total = total * kept + tl.exp2(sink - higher)
        acc = acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(out + heads[:, None] * VALUE_DIM + columns[None, :], acc.to(out.dtype.element_ty), mask=stored)
    else:
        base = tl.load(entries + place * _ENTRY_WORDS + 2, mask=live, other=0)
        slots = (base + part).to(tl.int64) * NUM_HEADS + head
        acc = acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(parts + slots[:, None] * VALUE_DIM + columns[None, :], acc, mask=stored)
        tl.store(part_lses + slots, top + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=live)


@triton.jit
def _tiles(
    queries,  # (ROWS, KEY_COLUMNS)
    pool,  # at the KV head in block 0
    table,
    seen,  # (ROWS,)
    scale,
    soft_cap,
    first,
    last,
    end,
    top,  # (ROWS,) of the scores, in powers of two
    total,  # (ROWS,)
    acc,  # (ROWS, VALUE_COLUMNS)
    POOL_STRIDE: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The softmax's state after the keys of [first, last), tile by tile."""
    key_columns = tl.arange(0, queries.shape[1])
    value_columns = tl.arange(0, acc.shape[1])
    for start in tl.range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        there = keys < end
        if KEYS <= BLOCK_SIZE:
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            pages = pool + block * POOL_STRIDE
            within = start % BLOCK_SIZE + tl.arange(0, KEYS)
            key_rows = pages + within * KEY_DIM
            value_rows = pages + within * VALUE_DIM + BLOCK_SIZE * KEY_DIM
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            pages = pool + blocks * POOL_STRIDE
            within = tl.arange(0, KEYS) % BLOCK_SIZE
            key_rows = pages + within * KEY_DIM
            value_rows = pages + within * VALUE_DIM + BLOCK_SIZE * KEY_DIM
        key_pointers = key_rows[:, None] + key_columns[None, :]
        value_pointers = value_rows[:, None] + value_columns[None, :]
        # What lies behind the last key may be anything, NaN as well.
        if MASKED:
            key = tl.load(key_pointers, mask=there[:, None] & (key_columns < KEY_DIM)[None, :], other=0.0)
            value = tl.load(value_pointers, mask=there[:, None] & (value_columns < VALUE_DIM)[None, :], other=0.0)
        else:
            key = tl.load(key_pointers, mask=(key_columns < KEY_DIM)[None, :], other=0.0)
            value = tl.load(value_pointers, mask=(value_columns < VALUE_DIM)[None, :], other=0.0)
        key = key.to(queries.dtype)
        value = value.to(queries.dtype)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale  # (ROWS, KEYS)
        if WITH_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), right for infinite e^2x as well
            raised = tl.exp2(scores * (2 * _LOG2_E / soft_cap))
            scores = (soft_cap * _LOG2_E) * (1 - 2 / (raised + 1))
        if MASKED:
            visible = (keys[None, :] < seen[:, None]) & there[None, :]
            if WINDOW > 0:
                visible &= keys[None, :] >= seen[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        if MASKED:
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
        else:
            safe = higher
        weights = tl.exp2(scores - safe[:, None])
        kept = tl.exp2(top - safe)
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
        top = higher
    return top, total, acc


def merge_parts(
    out: torch.Tensor,  # (num_tokens, num_heads, value_dim), written where there are parts
    work: Work,
    sinks: torch.Tensor | None,  # (num_heads,) float32
) -> None:
    """The weighted sum of a token's parts, by their log-sum-exps (to base 2)."""
    num_heads, value_dim = out.shape[1:]
    _merge_parts_kernel[(work.merge_programs,)](
        out,
        work.parts,
        work.part_lses,
        work.entries,
        work.merged,
        sinks,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        PARTS=4,
        num_warps=4,
    )


@triton.jit
def _merge_parts_kernel(
    out,
    parts,
    part_lses,
    entries,
    merged,
    sinks,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    columns = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    # A program takes what it comes to: how many there are is known on the device only.
    for place in range(tl.program_id(0), tl.load(merged) * NUM_HEADS, tl.num_programs(0)):
        entry = entries + tl.load(merged + 1 + place // NUM_HEADS) * _ENTRY_WORDS
        head = place % NUM_HEADS
        token = tl.load(entry).to(tl.int64)
        base = tl.load(entry + 2).to(tl.int64)
        num_parts = tl.load(entry + 3)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        if sinks is not None:
            top = tl.load(sinks + head) * _LOG2_E
            total += 1.0
        acc = tl.zeros((columns.shape[0],), tl.float32)
        for first in range(0, num_parts, PARTS):
            part = first + tl.arange(0, PARTS)
            slots = (base + part) * NUM_HEADS + head
            lses = tl.load(part_lses + slots, mask=part < num_parts, other=float("-inf"))
            values = tl.load(
                parts + slots[:, None] * VALUE_DIM + columns[None, :],
                mask=(part < num_parts)[:, None] & (columns < VALUE_DIM)[None, :],
                other=0.0,
            )
            higher = tl.maximum(top, tl.max(lses, axis=0))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(lses - safe)
            kept = tl.exp2(top - safe)
            total = total * kept + tl.sum(weights, axis=0)
            acc = acc * kept + tl.sum(weights[:, None] * values, axis=0)
            top = higher
        acc /= tl.where(total == 0.0, 1.0, total)
        target = out + (token * NUM_HEADS + head) * VALUE_DIM + columns
        tl.store(target, acc.to(out.dtype.element_ty), mask=columns < VALUE_DIM)
