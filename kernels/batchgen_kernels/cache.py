"""What writes the KV pool of attention.py: rotary embedding fused with the write of keys and values, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_kernels.tuning import choose


def rope_and_write(
    query: torch.Tensor,  # (num_tokens, num_heads, key_dim), rotated in place, may be a strided view
    key: torch.Tensor,  # (num_tokens, num_kv_heads, key_dim), rotated in place, may be a strided view
    value: torch.Tensor,  # (num_tokens, num_kv_heads, value_dim), may be a strided view
    cos: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
    sin: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
    slot_mapping: torch.Tensor,  # (num_tokens,) int64; -1 writes nothing
    pool: torch.Tensor,  # of attention.pool_shape
    *,
    block_size: int,
    interleaved: bool = False,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Rotate query and key in place, in float32, and write key and value to their slots, in the pool's dtype.

    A pool of 8 bits holds them divided by their scales.
    """
    num_tokens, num_heads, key_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    half = cos.shape[1]
    half_columns = triton.next_power_of_2(max(1, half))
    assert pool.is_contiguous() and pool.shape[1:] == (num_kv_heads, block_size * (key_dim + value_dim))
    assert cos.is_contiguous() and sin.is_contiguous()
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    config = choose("rope_and_write")
    heads = min(config.blocks["heads"], triton.next_power_of_2(max(num_heads, num_kv_heads)))
    tokens = config.blocks["tokens"]
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    if not num_tokens:
        return
    _rope_and_write_kernel[grid](
        query,
        key,
        value,
        cos,
        sin,
        slot_mapping,
        pool,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        1.0 / key_scale,
        1.0 / value_scale,
        num_tokens,
        num_heads,
        num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        HALF=half,
        HALF_COLUMNS=half_columns,
        REST_COLUMNS=triton.next_power_of_2(max(1, key_dim - 2 * half)),
        VALUE_COLUMNS=triton.next_power_of_2(value_dim),
        BLOCK_SIZE=block_size,
        INTERLEAVED=interleaved,
        TOKENS=tokens,
        HEADS=heads,
        # Not more threads than numbers: of two that have the same one, the first could write before the other reads.
        num_warps=min(config.num_warps, max(1, tokens * heads * half_columns // 32)),
    )


@triton.jit(do_not_specialize=["num_tokens"])  # steps differ in it, and must not wait for a compiler
def _rope_and_write_kernel(
    query,
    key,
    value,
    cos,
    sin,
    slot_mapping,
    pool,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_by,
    value_by,
    num_tokens,
    num_heads,
    num_kv_heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    REST_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A program takes HEADS heads of TOKENS tokens: of the query, or after these of key and value."""
    rows = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + rows // HEADS
    query_programs = tl.cdiv(num_heads, HEADS)
    if tl.program_id(1) < query_programs:
        head = tl.program_id(1) * HEADS + rows % HEADS
        live = (token < num_tokens) & (head < num_heads)
        states = query + token * query_token_stride + head * query_head_stride
        _rotate(states, live, cos, sin, token, HALF, HALF_COLUMNS, INTERLEAVED)
    else:
        head = (tl.program_id(1) - query_programs) * HEADS + rows % HEADS
        live = (token < num_tokens) & (head < num_kv_heads)
        states = key + token * key_token_stride + head * key_head_stride
        first, second = _rotate(states, live, cos, sin, token, HALF, HALF_COLUMNS, INTERLEAVED)
        slot = tl.load(slot_mapping + token, mask=live, other=-1)
        live = slot >= 0
        pages = pool + (slot // BLOCK_SIZE * num_kv_heads + head) * (BLOCK_SIZE * (KEY_DIM + VALUE_DIM))
        targets = pages + slot % BLOCK_SIZE * KEY_DIM
        half = tl.arange(0, HALF_COLUMNS)
        turned = live[:, None] & (half < HALF)[None, :]
        if INTERLEAVED:
            tl.store(targets[:, None] + 2 * half[None, :], _stored(first, key_by, pool), mask=turned)
            tl.store(targets[:, None] + 2 * half[None, :] + 1, _stored(second, key_by, pool), mask=turned)
        else:
            tl.store(targets[:, None] + half[None, :], _stored(first, key_by, pool), mask=turned)
            tl.store(targets[:, None] + (HALF + half)[None, :], _stored(second, key_by, pool), mask=turned)
        if 2 * HALF < KEY_DIM:
            rest = 2 * HALF + tl.arange(0, REST_COLUMNS)
            there = live[:, None] & (rest < KEY_DIM)[None, :]
            kept = tl.load(states[:, None] + rest[None, :], mask=there)
            tl.store(targets[:, None] + rest[None, :], _stored(kept, key_by, pool), mask=there)
        columns = tl.arange(0, VALUE_COLUMNS)
        there = live[:, None] & (columns < VALUE_DIM)[None, :]
        states = value + token * value_token_stride + head * value_head_stride
        values = tl.load(states[:, None] + columns[None, :], mask=there)
        targets = pages + BLOCK_SIZE * KEY_DIM + slot % BLOCK_SIZE * VALUE_DIM
        tl.store(targets[:, None] + columns[None, :], _stored(values, value_by, pool), mask=there)


@triton.jit
def _rotate(
    states,  # (ROWS,) pointers
    live,
    cos,
    sin,
    token,  # (ROWS,)
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """In place -> both halves (ROWS, HALF_COLUMNS) as they were written."""
    half = tl.arange(0, HALF_COLUMNS)
    there = live[:, None] & (half < HALF)[None, :]
    if INTERLEAVED:
        firsts = states[:, None] + 2 * half[None, :]
        seconds = firsts + 1
    else:
        firsts = states[:, None] + half[None, :]
        seconds = firsts + HALF
    x = tl.load(firsts, mask=there, other=0.0).to(tl.float32)
    y = tl.load(seconds, mask=there, other=0.0).to(tl.float32)
    angles = token[:, None] * HALF + half[None, :]
    c = tl.load(cos + angles, mask=there, other=0.0)
    s = tl.load(sin + angles, mask=there, other=0.0)
    first = (x * c - y * s).to(states.dtype.element_ty)
    second = (y * c + x * s).to(states.dtype.element_ty)
    tl.store(firsts, first, mask=there)
    tl.store(seconds, second, mask=there)
    return first, second


@triton.jit
def _stored(states, by, pool):
    """States in the pool's dtype; what 8 bits cannot hold becomes the largest that they can."""
    if pool.dtype.element_ty.is_fp8():
        states = tl.clamp(states.to(tl.float32) * by, -448.0, 448.0)
    return states.to(pool.dtype.element_ty)


def copy_block(
    pools: list[torch.Tensor],  # (num_blocks, num_kv_heads, block_size * (key_dim + value_dim)) each
    source: int,
    target: int,
) -> None:
    """Copy one block in all layers, in as few launches as torch makes of it."""
    torch._foreach_copy_([pool[target] for pool in pools], [pool[source] for pool in pools])
