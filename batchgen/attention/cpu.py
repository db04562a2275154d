"""The native CPU attention backend: its KV pool, and each step's work cut into items once for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from batchgen_kernels.cpu import Ops

from batchgen.attention.base import AttentionMetadata
from batchgen.errors import ModelError
from batchgen.models.config import KVSpec


class CpuAttention:
    """Layers of equal shape share their work items. `block_size` is a multiple of 16."""

    name = "cpu"

    def __init__(self, ops: Ops, block_size: int = 32) -> None:
        self.block_size = block_size
        self._ops = ops
        self._layers: tuple[KVSpec, ...] = ()
        self._pools: list[torch.Tensor] = []  # one a layer, in the layout of batchgen_kernels
        self._step: AttentionMetadata | None = None  # what `_items` belong to
        self._items: dict[tuple[int, int, int | None], torch.Tensor] = {}

    def bytes_per_block(self, layers: Sequence[KVSpec], dtype: torch.dtype) -> int:
        return sum(2 * self.block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in layers)

    def allocate(self, layers: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype) -> None:
        try:
            shapes = [
                self._ops.pool_shape(num_blocks, spec.num_kv_heads, spec.head_dim, self.block_size) for spec in layers
            ]
        except ValueError as error:
            raise ModelError(f"the native CPU attention cannot serve this model: {error}") from None
        self._layers = tuple(layers)
        self._pools = [torch.empty(shape, dtype=dtype).zero_() for shape in shapes]  # touched: no surprise later

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

    def attend(self, layer: int, query: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        spec = self._layers[layer]
        return self._ops.paged_attention(
            query,
            self._pools[layer],
            metadata.block_table,
            metadata.query_starts,
            metadata.context_lens,
            self._items_of(spec, metadata),
            block_size=self.block_size,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
        )

    def _items_of(self, spec: KVSpec, metadata: AttentionMetadata) -> torch.Tensor:
        if self._step is not metadata:
            self._step, self._items = metadata, {}
        kind = (spec.num_heads, spec.num_kv_heads, spec.window)
        if kind not in self._items:
            self._items[kind] = self._ops.attention_items(metadata.query_starts, metadata.context_lens, *kind)
        return self._items[kind]

    def copy_block(self, source: int, target: int) -> None:
        for pool in self._pools:
            pool[target] = pool[source]
