"""The native CPU attention backend: its KV pool, and each step's work cut into items once for all layers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from batchgen_kernels import pages
from batchgen_kernels.cpu import Ops
from batchgen_kernels.cpu.items import Items

from batchgen.attention.base import AttentionMetadata
from batchgen.errors import ConfigError, ModelError
from batchgen.models.config import KVSpec


class _Step(NamedTuple):
    metadata: AttentionMetadata
    block_table: torch.Tensor  # (num_seqs, max_blocks) int32, as far as it is read
    items: dict[tuple[int, int, int | None], Items]  # of each kind of layer


class CpuAttention:
    """Layers of equal shape share a step's work items. `block_size` is one of batchgen_kernels.cpu.BLOCK_SIZES."""

    name = "cpu"

    def __init__(self, ops: Ops, block_size: int = 32) -> None:
        self.block_size = block_size
        self._ops = ops
        self._layers: tuple[KVSpec, ...] = ()
        self._pools: list[torch.Tensor] = []  # one a layer, in the layout of batchgen_kernels
        self._filling = pages.Filling([])
        self._steps: deque[_Step] = deque(maxlen=2)  # a step has two: for all its tokens, and for those that sample

    def bytes_per_block(self, layers: Sequence[KVSpec], dtype: torch.dtype) -> int:
        return sum(math.prod(self._pool_shape(1, spec)) for spec in layers) * dtype.itemsize

    def allocate(self, layers: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"the native CPU attention keeps keys and values in float32 or bfloat16, not in {dtype}")
        self._layers = tuple(layers)
        shapes = [self._pool_shape(num_blocks, spec) for spec in layers]
        with _no_memory():
            self._pools = [pages.zeros(shape, dtype) for shape in shapes]
            self._filling = pages.Filling(self._pools)

    def _pool_shape(self, num_blocks: int, spec: KVSpec) -> tuple[int, int, int]:
        try:
            if spec.num_heads % spec.num_kv_heads:
                raise ValueError(f"num_heads {spec.num_heads}: expected a multiple of the {spec.num_kv_heads} KV heads")
            return self._ops.pool_shape(num_blocks, spec.num_kv_heads, spec.head_dim, self.block_size, spec.value_size)
        except ValueError as error:
            raise ModelError(f"the native CPU attention cannot serve this model: {error}") from None

    def prepare(self, metadata: AttentionMetadata, *, capacity: int | None = None) -> None:
        assert capacity is None, "a CPU has no graphs"
        with _no_memory():
            self._filling.check()
        columns = -(-int(metadata.context_lens.max(initial=0)) // self.block_size)
        table = torch.from_numpy(metadata.host_table[:, :columns][metadata.slots])
        self._steps.append(_Step(metadata, table, {}))

    def rope_and_write(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        metadata: AttentionMetadata,
    ) -> None:
        slots, pool, size = metadata.slot_mapping, self._pools[layer], self.block_size
        self._ops.rope_and_write(query, key, value, cos, sin, slots, pool, block_size=size, interleaved=interleaved)

    def attend(
        self, layer: int, query: torch.Tensor, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec = self._layers[layer]
        step = next(step for step in self._steps if step.metadata is metadata)
        return self._ops.paged_attention(
            query,
            self._pools[layer],
            step.block_table,
            self._items_of(spec, step),
            block_size=self.block_size,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            value_dim=spec.value_size,
            sinks=sinks,
        )

    def _items_of(self, spec: KVSpec, step: _Step) -> Items:
        kind = (spec.num_heads, spec.num_kv_heads, spec.window)
        if kind not in step.items:
            step.items[kind] = self._ops.attention_items(
                torch.from_numpy(step.metadata.query_starts),
                torch.from_numpy(step.metadata.context_lens),
                step.block_table,
                spec.num_heads,
                spec.num_kv_heads,
                block_size=self.block_size,
                window=spec.window,
            )
        return step.items[kind]

    def copy_block(self, source: int, target: int) -> None:
        for pool in self._pools:
            pool[target] = pool[source]


@contextmanager
def _no_memory() -> Iterator[None]:
    """The system does not give what seemed to be free."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"engine.kv_memory: the system has no memory left for the KV pool ({error}); lower it, or free memory"
        ) from None
