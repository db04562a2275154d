"""Rotary embedding fused with the KV write, in the interpreter, against its plain-torch twin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from batchgen_kernels import attention, cache, reference


@dataclass
class Case:
    num_heads: int = 6
    num_kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    rotary_dim: int = 32
    interleaved: bool = False
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32


CASES = [
    Case(),
    Case(9, 3, 64, 64, 64, dtype=torch.float16, kv_dtype=torch.float16),
    Case(7, 1, 80, 80, 32, block_size=64),
    Case(3, 3, 48, 16, 24, interleaved=True, block_size=128),
    Case(4, 2, 192, 128, 64, interleaved=True, block_size=32, dtype=torch.float16, kv_dtype=torch.float32),
    Case(18, 17, 16, 24, 0),
    Case(dtype=torch.float32, kv_dtype=torch.float16),
    Case(4, 2, 64, 32, 48, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn),
    Case(kv_dtype=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_equals_twin(case: Case, num_tokens: int) -> None:
    torch.manual_seed(0)
    queries, keys = case.num_heads * case.key_dim, case.num_kv_heads * case.key_dim
    fused = torch.randn(num_tokens, queries + keys + case.num_kv_heads * case.value_dim + 3).to(case.dtype)
    angles = 6 * torch.rand(num_tokens, case.rotary_dim // 2)
    cos, sin, scales = angles.cos(), angles.sin(), (1.0, 1.0)
    if case.kv_dtype == torch.float8_e4m3fn:
        # The interpreter rounds up to a power of two wrongly: numbers and turns by which nothing is rounded.
        fused = fused.to(torch.float8_e4m3fn).to(case.dtype)
        cos, sin, scales = (angles < 3).float(), (angles >= 3).float(), (0.5, 0.25)
    slots = torch.randperm(4 * case.block_size)[:num_tokens]
    slots[num_tokens // 2] = -1
    shape = attention.pool_shape(4, case.num_kv_heads, case.key_dim, case.value_dim, case.block_size)
    results = []
    for ops in (cache, reference):
        states, pool = fused.clone(), torch.zeros(shape).to(case.kv_dtype)
        query, key, value, _ = states.split((queries, keys, case.num_kv_heads * case.value_dim, 3), dim=1)
        ops.rope_and_write(
            query.unflatten(1, (case.num_heads, case.key_dim)),
            key.unflatten(1, (case.num_kv_heads, case.key_dim)),
            value.unflatten(1, (case.num_kv_heads, case.value_dim)),
            cos,
            sin,
            slots,
            pool,
            block_size=case.block_size,
            interleaved=case.interleaved,
            key_scale=scales[0],
            value_scale=scales[1],
        )
        results.append((states, pool.float()))
    (states, pool), (wanted_states, wanted_pool) = results
    assert wanted_pool.any() or num_tokens == 1
    torch.testing.assert_close(states, wanted_states, atol=1e-3 if case.dtype == torch.float16 else 1e-6, rtol=1e-3)
    torch.testing.assert_close(pool, wanted_pool, atol=1e-3, rtol=2e-3)


def test_8_bits_hold_no_more_than_their_largest_number() -> None:
    for ops in (cache, reference):
        pool = torch.zeros(attention.pool_shape(1, 1, 16, 16, 16)).to(torch.float8_e4m3fn)
        states = torch.full((1, 1, 16), 1e6)
        states[..., 1::2] = -3e4
        cos, sin = torch.ones(1, 0), torch.zeros(1, 0)
        ops.rope_and_write(states, states, states, cos, sin, torch.zeros(1).long(), pool, block_size=16)
        assert pool.float()[0, 0, :2].tolist() == [448, -448]
        assert pool.float()[0, 0, 256:258].tolist() == [448, -448]


def test_copied_block_is_its_source_in_all_layers() -> None:
    pools = [torch.randn(attention.pool_shape(5, 2, dim, 16, 16)).half() for dim in (16, 32)]
    before = [pool.clone() for pool in pools]
    cache.copy_block(pools, 3, 1)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[1], old[3])
        assert torch.equal(pool[[0, 2, 3, 4]], old[[0, 2, 3, 4]])
