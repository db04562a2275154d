"""Sorting tokens by expert and the grouped matmul against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels import moe, reference

SIZES = [  # (num_tokens, top_k, num_experts, tile)
    (1, 2, 8, 16),  # more experts than assignments
    (1, 1, 1, 16),
    (9, 3, 5, 16),
    (50, 8, 60, 16),
    (67, 4, 3, 64),
    (0, 2, 4, 16),
]


def _expert_ids(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Different ones for each token, as far as there are any; expert 1 stays without a token."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if num_experts > top_k:
        scores[:, 1] = -1.0
    return scores.argsort(dim=1, descending=True)[:, torch.arange(top_k) % num_experts]


def _equal(got: reference.SortedTokens, expected: reference.SortedTokens) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_are_sorted_by_expert(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    *shape, tile = sizes
    expert_ids = _expert_ids(*shape).to(dtype)
    _equal(moe.sort_tokens(expert_ids, sizes[2], tile), reference.sort_tokens(expert_ids, sizes[2], tile))


def test_several_chunks_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "MAX_CHUNKS", 3)  # of several steps each
    expert_ids = _expert_ids(331, 2, 7)
    expert_ids[5:9] = -1  # rows that pad a step
    _equal(moe.sort_tokens(expert_ids, 7, 16), reference.sort_tokens(expert_ids, 7, 16))


def test_all_tokens_may_want_one_expert() -> None:
    expert_ids = torch.full((40, 1), 4)
    got = moe.sort_tokens(expert_ids, 9, 16)
    _equal(got, reference.sort_tokens(expert_ids, 9, 16))
    assert got.tile_experts.tolist() == [4, 4, 4] + [-1] * (len(got.tile_experts) - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_both_matmuls_of_experts(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_tokens, top_k, num_experts, tile = sizes
    hidden, inner = 72, 40  # neither a multiple of a block
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    x, first, bias = some(num_tokens, hidden), some(num_experts, 2 * inner, hidden), some(num_experts, 2 * inner)
    second, weights = some(num_experts, hidden, inner), some(num_tokens, top_k).float()
    tokens = reference.sort_tokens(_expert_ids(num_tokens, top_k, num_experts), num_experts, tile)
    gate_up = moe.grouped_linear(x, first, tokens, bias)
    expected = reference.grouped_linear(x, first, tokens, bias)
    close = {"rtol": 1e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(gate_up, expected, **close)
    acted = reference.silu_mul(expected)
    torch.testing.assert_close(
        moe.grouped_linear(acted, second, tokens, weights=weights),
        reference.grouped_linear(acted, second, tokens, weights=weights),
        **close,
    )


def test_rows_without_an_expert_are_zero() -> None:
    expert_ids = torch.tensor([[0, 2], [-1, -1], [2, 1]])
    x, weight = torch.randn(3, 16), torch.randn(3, 16, 16)
    tokens = moe.sort_tokens(expert_ids, 3, 16)
    weights = torch.tensor([[0.25, 0.75], [1.0, 1.0], [0.5, 0.5]])
    out = moe.grouped_linear(x, weight, tokens, weights=weights)
    expected = torch.stack([
        0.25 * (weight[0] @ x[0]) + 0.75 * (weight[2] @ x[0]),
        torch.zeros(16),
        0.5 * (weight[2] @ x[2]) + 0.5 * (weight[1] @ x[2]),
    ])  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not moe.grouped_linear(x, weight, tokens)[2:4].any()


def test_strided_rows_are_taken() -> None:
    wide = torch.randn(5, 48)
    tokens = reference.sort_tokens(_expert_ids(5, 2, 4), 4, 16)
    weight = torch.randn(4, 24, 32)
    got = moe.grouped_linear(wide[:, :32], weight, tokens)
    torch.testing.assert_close(got, reference.grouped_linear(wide[:, :32], weight, tokens), rtol=1e-5, atol=1e-5)


def test_the_tile_follows_the_load() -> None:
    assert [moe.tile_rows(n, 8) for n in (0, 1, 128, 129, 512, 513, 4096)] == [16, 16, 16, 64, 64, 128, 128]


def test_rows_must_fit() -> None:
    tokens = reference.sort_tokens(_expert_ids(5, 2, 4), 4, 16)
    with pytest.raises(ValueError, match="expected 5 or 10 rows of 32"):
        moe.grouped_linear(torch.randn(4, 32), torch.randn(4, 24, 32), tokens)
