"""Triton: what changes logits in place before tokens are drawn, penalties and bias. What each computes is said at
`draws`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_kernels import tuning
from batchgen_kernels.draws import Bias, Penalties

PROMPT = tl.constexpr(1 << 30)  # of a count: the token is in the prompt


def penalise(logits: torch.Tensor, penalties: Penalties, vocab: int) -> None:
    """In place. Tokens are counted first, and whichever program comes to one of them first takes all of its count."""
    num_rows, max_len = len(logits), penalties.history.shape[1]
    config = tuning.choose("sample/penalise")
    counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=logits.device)
    grid = num_rows, triton.cdiv(max_len, config.blocks["BLOCK"])
    seen = penalties.history, penalties.history.stride(0), penalties.slots, penalties.num_prompt, penalties.num_tokens
    costs = penalties.repetition, penalties.frequency, penalties.presence
    _count_kernel[grid](*seen, counts, vocab, **config.blocks, num_warps=config.num_warps)
    _penalise_kernel[grid](
        logits, logits.stride(0), *costs, *seen, counts, vocab, **config.blocks, num_warps=config.num_warps
    )


@triton.jit
def _count_kernel(
    history,  # (num_slots, max_len) int32
    history_stride,
    slots,  # (num_rows,) int32
    num_prompt,  # (num_rows,) int32
    num_tokens,  # (num_rows,) int32
    counts,  # (num_rows, vocab) int32, of output tokens, with PROMPT added for those of the prompt
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    place, prompt = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.load(num_prompt + row)
    token = tl.load(
        history + tl.load(slots + row).to(tl.int64) * history_stride + place,
        mask=place < tl.load(num_tokens + row),
        other=vocab,
    )
    count = counts + row.to(tl.int64) * vocab + token
    tl.atomic_add(count, 1, mask=(token < vocab) & (place >= prompt), sem="relaxed")
    tl.atomic_or(count, PROMPT, mask=(token < vocab) & (place < prompt), sem="relaxed")


@triton.jit
def _penalise_kernel(
    logits,  # (num_rows, at least vocab) float32
    stride,
    repetition,  # (num_rows,) float32
    frequency,  # (num_rows,) float32
    presence,  # (num_rows,) float32
    history,  # (num_slots, max_len) int32
    history_stride,
    slots,  # (num_rows,) int32
    num_prompt,  # (num_rows,) int32
    num_tokens,  # (num_rows,) int32
    counts,  # (num_rows, vocab) int32
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(
        history + tl.load(slots + row).to(tl.int64) * history_stride + place,
        mask=place < tl.load(num_tokens + row),
        other=vocab,
    )
    # An exchange with 0: Triton's own does not compile for AMD.
    count = tl.atomic_and(counts + row.to(tl.int64) * vocab + token, 0, mask=token < vocab, sem="relaxed")
    first = (token < vocab) & (count != 0)
    of_output = (count & (PROMPT - 1)).to(tl.float32)
    factor = tl.load(repetition + row)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=first, other=0.0)
    x = tl.where(x > 0.0, x / factor, x * factor)
    x = x - tl.load(frequency + row) * of_output - tl.where(of_output > 0.0, tl.load(presence + row), 0.0)
    tl.store(logits + row.to(tl.int64) * stride + token, x, mask=first)


def add_bias(logits: torch.Tensor, bias: Bias) -> None:
    """In place."""
    max_ids = bias.ids.shape[1]
    config = tuning.choose("sample/bias")
    if max_ids:
        _add_bias_kernel[(len(logits), triton.cdiv(max_ids, config.blocks["BLOCK"]))](
            *(logits, logits.stride(0), bias.ids, bias.ids.stride(0), bias.values, bias.values.stride(0), max_ids),
            **config.blocks,
            num_warps=config.num_warps,
        )


@triton.jit
def _add_bias_kernel(
    logits,  # (num_rows, at least vocab) float32
    stride,
    ids,  # (num_rows, max_ids) int32
    ids_stride,
    biases,  # (num_rows, max_ids) float32
    biases_stride,
    max_ids,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row * ids_stride + place, mask=place < max_ids, other=-1)
    at = logits + row.to(tl.int64) * stride + token
    changed = tl.load(at, mask=token >= 0) + tl.load(biases + row * biases_stride + place, mask=place < max_ids)
    tl.store(at, changed, mask=token >= 0)
