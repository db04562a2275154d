"""Triton: RMS norm with the residual, and gated activations. What each computes is said at its twin in `reference`.

All arithmetic is in float32; values are rounded to the tensors' dtype where the twin rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_kernels import tuning
from batchgen_kernels.reference import SWIGLU_ALPHA, SWIGLU_LIMIT

NORM_SIZES = (256, 1024, 4096, 16384)  # rows up to a size share an entry of the table; longer ones take the last


def rms_norm(
    x: torch.Tensor,  # (num_tokens, dim) or (num_tokens, num_heads, dim), the last dimension contiguous
    weight: torch.Tensor,  # (dim,) float32
    eps: float,
    residual: torch.Tensor | None = None,  # (num_tokens, dim), the last dimension contiguous
) -> torch.Tensor:
    dim, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    if x.stride(-1) != 1 or (residual is not None and (residual.stride(-1) != 1 or residual.shape != x.shape)):
        raise ValueError("x, residual: expected one shape and a contiguous last dimension")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.shape[0] * heads
    if not num_rows:
        return out
    size = next((size for size in NORM_SIZES if dim <= size), NORM_SIZES[-1])
    config = tuning.choose(f"rms_norm/{size}")
    _rms_norm_kernel[(triton.cdiv(num_rows, config.blocks["ROWS"]),)](
        x,
        weight,
        residual,
        out,
        num_rows,
        heads,
        dim,
        x.stride(0),
        x.stride(1),
        0 if residual is None else residual.stride(0),
        eps,
        DIM=triton.next_power_of_2(dim),
        **config.blocks,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])  # steps differ in it, and must not wait for a compiler
def _rms_norm_kernel(
    x_ptr,  # (num_rows, heads, dim)
    weight_ptr,  # (dim,) float32
    residual_ptr,  # (num_rows, dim) or None
    out_ptr,  # (num_rows * heads, dim), contiguous
    num_rows,
    heads,
    dim,
    x_token_stride,
    x_head_stride,
    residual_stride,
    eps,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    inside = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    tokens, head = (rows // heads).to(tl.int64), rows % heads
    dtype = out_ptr.dtype.element_ty

    x_rows = tokens * x_token_stride + head * x_head_stride
    x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)  # (ROWS, DIM)
    if residual_ptr is not None:
        kept = residual_ptr + (tokens * residual_stride)[:, None] + columns[None, :]
        total = (tl.load(kept, mask=inside, other=0.0).to(tl.float32) + x).to(dtype)
        tl.store(kept, total, mask=inside)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / dim + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < dim, other=0.0)
    normalised = (x * scale[:, None]).to(dtype).to(tl.float32)
    written = out_ptr + rows.to(tl.int64)[:, None] * dim + columns[None, :]
    tl.store(written, (weight[None, :] * normalised).to(dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
    return _gate(gate_up, "silu")


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
    return _gate(gate_up, "gelu_tanh")


def clamped_swiglu_mul(gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
    return _gate(gate_up, "clamped_swiglu")


def _gate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    num_tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1 or gate_up.shape[1] % 2:
        raise ValueError("gate_up: expected an even, contiguous last dimension")
    out = torch.empty(num_tokens, dim, dtype=gate_up.dtype, device=gate_up.device)
    if not num_tokens:
        return out
    config = tuning.choose("gate")
    _gate_kernel[(num_tokens, triton.cdiv(dim, config.blocks["COLUMNS"]))](
        gate_up,
        out,
        dim,
        gate_up.stride(0),
        KIND=kind,
        ALPHA=SWIGLU_ALPHA,
        LIMIT=SWIGLU_LIMIT,
        **config.blocks,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@triton.jit
def _gate_kernel(
    gate_up_ptr,  # (num_tokens, 2 * dim)
    out_ptr,  # (num_tokens, dim)
    dim,
    stride,
    KIND: tl.constexpr,  # silu | gelu_tanh | clamped_swiglu
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < dim
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + dim + columns, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), so that both are gate / (1 + exp(-z))
    if KIND == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT, tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, tl.PropagateNan.ALL) + 1.0
        activated = gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if KIND == "gelu_tanh" else gate
        activated = (gate / (1.0 + tl.exp(-z))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * dim + columns, (activated * up).to(dtype), mask=inside)
