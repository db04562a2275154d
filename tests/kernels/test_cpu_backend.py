"""The native CPU attention backend against the plain-torch one, through write and attend, as a model runs them."""

from __future__ import annotations

import pytest
import torch
from batches import batch
from batchgen_kernels import cpu

from batchgen.attention.base import AttentionBackend, AttentionMetadata
from batchgen.attention.cpu import CpuAttention
from batchgen.attention.reference import ReferenceBackend
from batchgen.errors import ModelError
from batchgen.models.config import KVSpec

OPS = cpu.load()
pytestmark = pytest.mark.skipif(OPS is None, reason="the native ops were not built")
LAYERS = (
    KVSpec(6, 2, 32, 0.2),
    KVSpec(6, 2, 32, 0.2, window=20, soft_cap=4.0),
    KVSpec(4, 4, 48, 0.1),
    KVSpec(3, 3, 192, 0.1, value_dim=128),
    KVSpec(4, 2, 36, 0.2, value_dim=20, window=9, soft_cap=3.0, sinks=True),
    KVSpec(6, 2, 32, 0.2, window=20, sinks=True),
)


def native(block_size: int = 16) -> CpuAttention:
    assert OPS is not None
    return CpuAttention(OPS, block_size)


def chunks(backend: AttentionBackend, rows: list[tuple[int, int, int]], padding: int = 0) -> AttentionMetadata:
    """Of (sequence, first, end) rows; sequence s owns the blocks 10 s + 9, 10 s + 8, ..."""
    slots = [(10 * s + 9 - p // 16) * 16 + p % 16 for s, a, b in rows for p in range(a, b)]
    return batch(
        backend,
        [b - a for _, a, b in rows],
        [b for _, _, b in rows],
        [[10 * s + 9 - i for i in range(10)] for s, _, _ in rows],
        slots + [-1] * padding,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference_backend(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fast, plain = native(), ReferenceBackend(16)
    for backend in (fast, plain):
        backend.allocate(LAYERS, 40, dtype)
    steps = [
        ([(0, 0, 100), (2, 0, 3)], 0),
        ([(2, 3, 4), (0, 100, 101), (1, 0, 35)], 5),
        ([(0, 101, 102), (3, 0, 1)], 0),
    ]
    for rows, padding in steps:
        step = chunks(fast, rows, padding)
        tokens = len(step.slot_mapping)
        cos, sin = torch.rand(tokens, 16), torch.rand(tokens, 16)
        for layer, spec in enumerate(LAYERS):
            fused = torch.randn(tokens, spec.num_heads + spec.num_kv_heads, spec.head_dim).to(dtype)
            value = torch.randn(tokens, spec.num_kv_heads, spec.value_size).to(dtype)
            sinks = torch.randn(spec.num_heads) * 2 if spec.sinks else None
            outs = []
            for backend in (fast, plain):
                query, key = fused.clone().split((spec.num_heads, spec.num_kv_heads), dim=1)
                backend.rope_and_write(layer, query, key, value, cos, sin, layer == 2, step)
                outs.append(backend.attend(layer, query, step, sinks))
            assert outs[0].shape == (tokens, spec.num_heads, spec.value_size)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(*outs, atol=tolerance, rtol=tolerance)
    # What was sampled attends as single tokens, with other metadata in the same step.
    samples = chunks(fast, [(0, 101, 102), (1, 34, 35)])
    query = torch.randn(2, 6, 32).to(dtype)
    torch.testing.assert_close(fast.attend(0, query, samples), plain.attend(0, query, samples), atol=2e-2, rtol=2e-2)


def test_copied_block_serves_like_its_source() -> None:
    backend = native()
    backend.allocate(LAYERS, 40, torch.bfloat16)
    step = chunks(backend, [(0, 0, 16)])
    for layer, spec in enumerate(LAYERS):
        key = torch.randn(16, spec.num_kv_heads, spec.head_dim).bfloat16()
        value = torch.randn(16, spec.num_kv_heads, spec.value_size).bfloat16()
        cos, sin = torch.ones(16, 0), torch.zeros(16, 0)
        backend.rope_and_write(layer, key[:, :0].expand(16, 0, spec.head_dim), key, value, cos, sin, False, step)
    query, latent = torch.randn(16, 6, 32).bfloat16(), torch.randn(16, 3, 192).bfloat16()
    before = backend.attend(0, query, step), backend.attend(3, latent, step)
    backend.copy_block(9, 25)
    step.host_table[0, 0] = 25
    backend.prepare(step)
    assert torch.equal(before[0], backend.attend(0, query, step)) and before[0].any()
    assert torch.equal(before[1], backend.attend(3, latent, step)) and before[1].any()


def test_bytes_per_block_is_what_the_pool_takes() -> None:
    backend = native(32)
    # 48 dimensions are a multiple of 16; 40 are stored as 48 in the values.
    assert backend.bytes_per_block([KVSpec(4, 2, 48, 1.0)], torch.bfloat16) == 32 * 2 * (48 + 48) * 2
    assert backend.bytes_per_block([KVSpec(4, 2, 40, 1.0)] * 2, torch.float32) == 2 * 32 * 2 * (40 + 48) * 4
    assert backend.bytes_per_block([KVSpec(4, 2, 192, 1.0, value_dim=120)], torch.bfloat16) == 32 * 2 * (192 + 128) * 2


def test_a_large_pool_is_zero() -> None:
    backend = native(32)
    backend.allocate([KVSpec(4, 4, 64, 1.0)], 200, torch.float32)
    (pool,) = backend._pools
    assert pool.nbytes == 200 * backend.bytes_per_block([KVSpec(4, 4, 64, 1.0)], torch.float32) > 2 << 20
    assert not pool.any()


@pytest.mark.parametrize(
    ("spec", "dtype", "message"),
    [
        (KVSpec(4, 4, 33, 1.0), torch.float32, "head_dim 33"),
        (KVSpec(4, 4, 512, 1.0), torch.float32, "head_dim 512"),
        (KVSpec(4, 3, 32, 1.0), torch.float32, "num_heads 4"),
        (KVSpec(4, 4, 32, 1.0, value_dim=300), torch.float32, "value_dim 300"),
        (KVSpec(4, 4, 32, 1.0), torch.float16, "float16"),
    ],
)
def test_a_model_it_cannot_serve_is_refused(spec: KVSpec, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        native().allocate([spec], 4, dtype)
