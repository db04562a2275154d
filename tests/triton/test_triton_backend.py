"""The Triton attention backend, in the interpreter, against the plain-torch one, as models use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import batch

from batchgen.attention.base import AttentionBackend, AttentionMetadata
from batchgen.attention.reference import ReferenceBackend
from batchgen.attention.triton import TritonAttention
from batchgen.device import Cpu
from batchgen.errors import ModelError
from batchgen.models.config import KVSpec

LAYERS = (
    KVSpec(6, 2, 32, 0.2),
    KVSpec(6, 2, 32, 0.2, window=20, soft_cap=4.0),
    KVSpec(4, 4, 48, 0.1),
    KVSpec(2, 2, 32, 0.2, value_dim=16),
    KVSpec(4, 2, 24, 0.2, value_dim=40, window=9, soft_cap=3.0, sinks=True),
)
SINKS = torch.tensor([2.0, -1.0, 0.5, 4.0])  # of the last layer's heads


class Small(Cpu):
    """Where the tests' tensors are."""

    def __init__(self) -> None:
        self.torch_device = torch.empty(0).device


class Wide(Small):
    """A device for which steps are cut up as on a large GPU."""

    num_multiprocessors = 100


def chunks(
    backend: AttentionBackend, rows: list[tuple[int, int, int]], padding: int = 0, shared: int = 0
) -> AttentionMetadata:
    """Of (sequence, first, end) rows; sequence s owns the blocks 20 s + 19, 20 s + 18, ... behind `shared` of 0's."""
    size = backend.block_size
    tables = [[20 * s * (i >= shared) + 19 - i for i in range(20)] for s, _, _ in rows]
    slots = [t[p // size] * size + p % size for t, (_, a, b) in zip(tables, rows, strict=True) for p in range(a, b)]
    lengths, contexts = [b - a for _, a, b in rows], [b for _, _, b in rows]
    return batch(backend, lengths, contexts, tables, slots + [-1] * padding)


def run(
    backends: tuple[TritonAttention, ReferenceBackend],
    step: AttentionMetadata,
    dtype: torch.dtype,
    written: bool = True,
) -> None:
    """All layers of both write and attend alike."""
    tokens = len(step.slot_mapping)
    cos, sin = torch.rand(tokens, 12), torch.rand(tokens, 12)
    for layer, spec in enumerate(LAYERS):
        fused = torch.randn(tokens, spec.num_heads + spec.num_kv_heads, spec.head_dim).to(dtype)
        value = torch.randn(tokens, spec.num_kv_heads, spec.value_size).to(dtype)
        outs = []
        for backend in backends:
            query, key = fused.clone().split((spec.num_heads, spec.num_kv_heads), dim=1)
            if written:
                backend.rope_and_write(layer, query, key, value, cos, sin, layer == 2, step)
            outs.append(backend.attend(layer, query, step, SINKS if spec.sinks else None))
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(*outs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "block_size", "device"),
    [(torch.float32, 16, Small), (torch.float16, 128, Wide)],
)
def test_equals_the_reference_backend(dtype: torch.dtype, block_size: int, device: type[Small]) -> None:
    torch.manual_seed(0)
    made = device()
    backends = TritonAttention(made, block_size), ReferenceBackend(block_size, made.torch_device)
    fast = backends[0]
    for backend in backends:
        backend.allocate(LAYERS, 80, dtype)
    run(backends, chunks(fast, [(0, 0, 40), (2, 0, 3)]), dtype)
    run(backends, chunks(fast, [(2, 3, 4), (0, 40, 41), (1, 0, 25)], padding=5), dtype)
    step = chunks(fast, [(0, 41, 43), (3, 0, 1)])
    # What is sampled attends as single tokens, with metadata of its own in the same step.
    samples = chunks(fast, [(0, 42, 43), (3, 0, 1)])
    run(backends, step, dtype)
    run(backends, samples, dtype, written=False)
    run(backends, chunks(fast, [(1, 25, 26), (3, 1, 2), (0, 43, 44)]), dtype)


def test_what_was_prepared_for_a_capacity_serves_every_step_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph does: it was captured with one step's tensors and runs again after others were prepared."""
    monkeypatch.setattr("batchgen_kernels.work.MIN_TILES_SAVED", 1)
    torch.manual_seed(0)
    device = Wide()
    fast, plain = TritonAttention(device, 16), ReferenceBackend(16, device.torch_device)
    for backend in (fast, plain):
        backend.allocate(LAYERS, 120, torch.float32)
    prefill = chunks(plain, [(0, 0, 150)])
    for layer, pool in enumerate(fast._pools):
        spec = LAYERS[layer]
        key = torch.randn(150, spec.num_kv_heads, spec.head_dim)
        value = torch.randn(150, spec.num_kv_heads, spec.value_size)
        for backend in (fast, plain):
            rotation = torch.ones(150, 0), torch.zeros(150, 0)
            backend.rope_and_write(layer, key[:, :0], key, value, *rotation, False, prefill)
        assert pool.any()
    table = torch.zeros(6, 20, dtype=torch.int32)
    captured: AttentionMetadata | None = None
    for rows in ([(0, 150, 151)], [(0, 151, 152), (1, 144, 145), (2, 144, 146 - 1), (4, 129, 130)], [(4, 130, 131)]):
        step = chunks(plain, rows, padding=5 - len(rows), shared=9)
        table[: len(rows)] = step.block_table
        step = AttentionMetadata(
            step.query_starts, step.context_lens, step.slots, table, step.host_table, step.slot_mapping
        )
        fast.prepare(step, capacity=5)
        if captured is None:
            captured, kept = step, fast._steps[-1]
        fast._steps.append(kept)  # nothing but what lies on the device tells the step from the captured one
        for layer, spec in enumerate(LAYERS):
            query, key = torch.randn(2, 5, spec.num_heads, spec.head_dim)
            value = torch.randn(5, spec.num_kv_heads, spec.value_size)
            given = key[:, : spec.num_kv_heads], value, torch.ones(5, 0), torch.zeros(5, 0)
            sinks = SINKS if spec.sinks else None
            for backend in (fast, plain):
                backend.rope_and_write(layer, query, *given, False, step)
            out = fast.attend(layer, query, captured, sinks)
            torch.testing.assert_close(out, plain.attend(layer, query, step, sinks), atol=1e-5, rtol=1e-5)


def test_a_step_is_uploaded_in_one_copy() -> None:
    class Counting(Small):
        count = 0

        def upload(self, array: Any, into: torch.Tensor | None = None) -> torch.Tensor:
            self.count += 1
            return super().upload(array, into)

    device = Counting()
    backend = TritonAttention(device, 16)
    backend.allocate(LAYERS, 80, torch.float32)
    chunks(backend, [(0, 0, 60), (2, 0, 3)])
    assert device.count == 1


def test_copied_block_serves_like_its_source() -> None:
    backend = TritonAttention(Small(), 16)
    backend.allocate(LAYERS, 80, torch.float16)
    step = chunks(backend, [(0, 0, 16)])
    for layer, spec in enumerate(LAYERS):
        key = torch.randn(16, spec.num_kv_heads, spec.head_dim).half()
        value = torch.randn(16, spec.num_kv_heads, spec.value_size).half()
        cos, sin = torch.ones(16, 0), torch.zeros(16, 0)
        backend.rope_and_write(layer, key[:, :0], key, value, cos, sin, False, step)
    query = torch.randn(16, 6, 32).half()
    before = backend.attend(0, query, step)
    backend.copy_block(19, 45)
    step.block_table[0, 0] = 45
    assert torch.equal(before, backend.attend(0, query, step)) and before.any()


def test_bytes_of_a_block() -> None:
    backend = TritonAttention(Small(), 16)
    assert backend.bytes_per_block(LAYERS[:3], torch.float16) == 2 * 16 * 2 * (2 * 2 * 32 + 4 * 48)
    assert backend.bytes_per_block(LAYERS[3:], torch.float16) == 16 * 2 * (2 * (32 + 16) + 2 * (24 + 40))


def test_what_it_cannot_serve_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="key_dim 12: expected a multiple of 8"):
        TritonAttention(Small()).allocate((KVSpec(2, 2, 12, 1.0),), 2, torch.float32)
    with pytest.raises(ModelError, match="value_dim 12: expected a multiple of 8"):
        TritonAttention(Small()).allocate((KVSpec(2, 2, 16, 1.0, value_dim=12),), 2, torch.float32)
    with pytest.raises(ModelError, match="num_heads 3: expected a multiple of the 2 KV heads"):
        TritonAttention(Small()).bytes_per_block((KVSpec(3, 2, 32, 1.0),), torch.float32)
    with pytest.raises(ModelError, match="block_size 48"):
        TritonAttention(Small(), 48).bytes_per_block(LAYERS, torch.float32)
    with pytest.raises(ModelError, match=r"not in torch\.int8"):
        TritonAttention(Small()).allocate(LAYERS, 2, torch.int8)
    monkeypatch.setattr("batchgen.attention.triton.architecture", lambda: "sm_80")
    with pytest.raises(ModelError, match="sm_80"):
        TritonAttention(Small()).allocate(LAYERS, 2, torch.float8_e4m3fn)


def test_nothing_to_do() -> None:
    backend = TritonAttention(Small(), 16)
    backend.allocate(LAYERS, 80, torch.float32)
    empty, table = np.zeros(0, np.int32), np.zeros((1, 20), np.int32)
    slots = torch.full((3,), -1)
    step = AttentionMetadata(np.zeros(1, np.int32), empty, empty, torch.from_numpy(table), table, slots)
    backend.prepare(step)
    assert not backend.attend(0, torch.ones(3, 6, 32), step).any()
