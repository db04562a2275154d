"""Mixture of experts: tokens sorted by expert on the device, and a matmul whose tiles take their expert's weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_kernels import tuning
from batchgen_kernels.reference import SortedTokens, num_tiles, tile_rows

__all__ = ["grouped_linear", "grouped_linear_pays", "sort_tokens", "tile_rows"]

MAX_CHUNKS = 64  # of assignments: every chunk reads the counts of all


def grouped_linear_pays() -> bool:
    return True


def sort_tokens(
    expert_ids: torch.Tensor,  # (num_tokens, top_k) int32 or int64; -1 is no assignment
    num_experts: int,
    tile: int,
) -> SortedTokens:
    """Assignments by expert, then those to none, in the order they came, each expert's padded to whole tiles."""
    num_tokens, top_k = expert_ids.shape
    num_assignments = num_tokens * top_k
    blocks, num_warps, num_stages = tuning.choose("sort_tokens")
    block = blocks["ASSIGNMENTS"]
    experts = max(triton.next_power_of_2(num_experts + 1), 16)
    num_chunks = min(triton.cdiv(num_assignments, block), MAX_CHUNKS) or 1
    steps = triton.cdiv(num_assignments, num_chunks * block)  # of a chunk
    most_tiles = num_tiles(num_assignments, num_experts, tile)
    flat = expert_ids.reshape(-1)
    counts = torch.empty(num_chunks, experts, dtype=torch.int32, device=flat.device)
    order = torch.empty(most_tiles * tile, dtype=torch.int32, device=flat.device)
    tile_experts = torch.empty(most_tiles, dtype=torch.int32, device=flat.device)
    sizes = {"BLOCK": block, "EXPERTS": experts, "num_warps": num_warps, "num_stages": num_stages}
    _count_assignments_kernel[(num_chunks,)](
        flat, counts, order, num_assignments, num_experts, len(order), steps, **sizes
    )
    _sort_tokens_kernel[(num_chunks,)](
        flat,
        counts,
        order,
        tile_experts,
        num_assignments,
        num_experts,
        most_tiles,
        steps,
        num_chunks,
        TILE=tile,
        **sizes,
    )
    return SortedTokens(order, tile_experts, num_tokens, top_k)


# Steps differ in these, and must not wait for a compiler
@triton.jit(do_not_specialize=["num_assignments", "num_slots", "steps"])
def _count_assignments_kernel(
    expert_ids,  # (num_assignments,)
    counts,  # (num_chunks, EXPERTS) int32
    order,  # (num_slots,) int32, filled with -1
    num_assignments,
    num_experts,
    num_slots,
    steps,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros((EXPERTS,), tl.int32)
    for step in range(steps):
        index = (chunk * steps + step) * BLOCK + lanes
        used = index < num_assignments
        expert = tl.load(expert_ids + index, used, 0).to(tl.int32)
        count += tl.histogram(tl.where(expert < 0, num_experts, expert), EXPERTS, mask=used)
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), count)
    for start in range(chunk * BLOCK, num_slots, tl.num_programs(0) * BLOCK):
        tl.store(order + start + lanes, -1, start + lanes < num_slots)


@triton.jit(do_not_specialize=["num_assignments", "most_tiles", "steps", "num_chunks"])
def _sort_tokens_kernel(
    expert_ids,  # (num_assignments,)
    counts,  # (num_chunks, EXPERTS) int32
    order,  # (num_slots,) int32
    tile_experts,  # (most_tiles,) int32
    num_assignments,
    num_experts,
    most_tiles,
    steps,
    num_chunks,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    columns = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)  # this chunk's
    for other in range(num_chunks):
        count = tl.load(counts + other * EXPERTS + columns)
        total += count
        before += tl.where(other < chunk, count, 0)
    tiles = (total + TILE - 1) // TILE
    last_tile = tl.cumsum(tiles, 0)  # + 1
    place = (last_tile - tiles) * TILE + before  # of an expert's next assignment
    for step in range(steps):
        index = (chunk * steps + step) * BLOCK + lanes
        used = index < num_assignments
        expert = tl.load(expert_ids + index, used, 0).to(tl.int32)
        expert = tl.where(expert < 0, num_experts, expert)
        equal = (expert[:, None] == expert[None, :]) & (lanes[None, :] < lanes[:, None])
        slot = tl.gather(place, expert, 0) + tl.sum(equal.to(tl.int32), 1)
        tl.store(order + slot, index, used)
        place += tl.histogram(expert, EXPERTS, mask=used)
    for start in range(chunk * 16, most_tiles, num_chunks * 16):
        tile = start + tl.arange(0, 16)
        expert = tl.sum((last_tile[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(tile_experts + tile, tl.where(expert < num_experts, expert, -1), tile < most_tiles)


def grouped_linear(
    x: torch.Tensor,  # (num_tokens, in_features), or (num_tokens * top_k, in_features): a row of each assignment
    weight: torch.Tensor,  # (num_experts, out_features, in_features)
    tokens: SortedTokens,
    bias: torch.Tensor | None = None,  # (num_experts, out_features)
    weights: torch.Tensor | None = None,  # (num_tokens, top_k): what the router gives an assignment
) -> torch.Tensor:
    """x W^T + b by each assignment's expert, zero where it has none -> (num_tokens * top_k, out_features).

    With `weights`, an assignment's result is multiplied by its weight, and a token's are added up, always in the same
    order -> (num_tokens, out_features).
    """
    _, out_features, in_features = weight.shape
    order, tile_experts, num_tokens, top_k = tokens
    num_assignments = num_tokens * top_k
    if x.shape not in {(num_tokens, in_features), (num_assignments, in_features)}:
        raise ValueError(f"x: expected {num_tokens} or {num_assignments} rows of {in_features}, got {tuple(x.shape)}")
    out = x.new_empty(num_assignments, out_features)
    tile = len(order) // len(tile_experts)
    kind = f"grouped_linear/{tile}" if x.dtype != torch.float32 else "grouped_linear/float32"
    blocks, num_warps, num_stages = tuning.choose(kind)
    columns, inner = blocks["COLUMNS"], blocks["INNER"]
    _grouped_linear_kernel[(len(tile_experts) * triton.cdiv(out_features, columns),)](
        x,
        weight,
        bias,
        weights,
        out,
        order,
        tile_experts,
        len(tile_experts),
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        SHARED=top_k if len(x) == num_tokens else 1,
        TILE=tile,
        COLUMNS=columns,
        INNER=inner,
        BAND=blocks["BAND"],
        WHOLE=in_features % inner == 0,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out if weights is None else out.view(num_tokens, top_k, out_features).sum(dim=1)


@triton.jit
def _grouped_linear_kernel(
    x,  # (num_rows, in_features)
    weight,  # (num_experts, out_features, in_features)
    bias,  # (num_experts, out_features) or None
    weights,  # (num_assignments,) or None
    out,  # (num_assignments, out_features)
    order,  # (num_tiles * TILE,) int32
    tile_experts,  # (num_tiles,) int32
    num_tiles,
    out_features,
    in_features,
    x_stride,
    expert_stride,
    weight_stride,
    SHARED: tl.constexpr,  # assignments that share a row of x
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    BAND: tl.constexpr,  # tiles that go through all columns together: their weights and inputs stay in the cache
    WHOLE: tl.constexpr,  # in_features is a multiple of INNER
):
    program = tl.program_id(0)
    column_blocks = tl.cdiv(out_features, COLUMNS)
    band = program // (BAND * column_blocks)
    band_tiles = tl.minimum(num_tiles - band * BAND, BAND)
    within = program % (BAND * column_blocks)
    tile = band * BAND + within % band_tiles
    column_block = within // band_tiles
    expert = tl.load(tile_experts + tile)
    assignment = tl.load(order + tile * TILE + tl.arange(0, TILE))
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    out_at = out + assignment.to(tl.int64)[:, None] * out_features + column[None, :]
    stored = (assignment >= 0)[:, None] & (column < out_features)[None, :]
    if expert < 0:
        tl.store(out_at, tl.zeros((TILE, COLUMNS), out.dtype.element_ty), stored)
        return
    row = (tl.maximum(assignment, 0) // SHARED).to(tl.int64)
    inner = tl.arange(0, INNER)
    x_at = x + row[:, None] * x_stride + inner[None, :]
    # Columns behind the last read it again, so that weights need no mask where in_features has none.
    weight_row = tl.minimum(column, out_features - 1).to(tl.int64) * weight_stride
    weight_at = weight + expert.to(tl.int64) * expert_stride + weight_row[None, :] + inner[:, None]
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    for start in range(0, in_features, INNER):
        if WHOLE:
            a = tl.load(x_at)
            b = tl.load(weight_at)
        else:
            left = in_features - start
            a = tl.load(x_at, inner[None, :] < left, 0.0)
            b = tl.load(weight_at, inner[:, None] < left, 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_at += INNER
        weight_at += INNER
    if bias is not None:
        total += tl.load(bias + expert * out_features + column, column < out_features, 0.0).to(tl.float32)[None, :]
    if weights is not None:
        total *= tl.load(weights + tl.maximum(assignment, 0)).to(tl.float32)[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), stored)
