"""The plain-torch attention backend: the simplest right code, which the fast backends are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchgen.attention.base import AttentionMetadata
from batchgen.models.config import KVSpec


class ReferenceBackend:
    name = "reference"

    def __init__(self, block_size: int = 16, device: torch.device | None = None) -> None:
        self.block_size = block_size
        self._device = device
        self._layers: tuple[KVSpec, ...] = ()
        self._keys: list[torch.Tensor] = []  # one a layer: (num_blocks, block_size, num_kv_heads, head_dim)
        self._values: list[torch.Tensor] = []  # (num_blocks, block_size, num_kv_heads, value_size)

    def bytes_per_block(self, layers: Sequence[KVSpec], dtype: torch.dtype) -> int:
        numbers = sum(spec.num_kv_heads * (spec.head_dim + spec.value_size) for spec in layers)
        return self.block_size * numbers * dtype.itemsize

    def allocate(self, layers: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype) -> None:
        self._layers = tuple(layers)
        self._keys = [self._pool(num_blocks, spec, spec.head_dim, dtype) for spec in layers]
        self._values = [self._pool(num_blocks, spec, spec.value_size, dtype) for spec in layers]

    def _pool(self, num_blocks: int, spec: KVSpec, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_blocks, self.block_size, spec.num_kv_heads, size, dtype=dtype, device=self._device)

    def prepare(self, metadata: AttentionMetadata, *, capacity: int | None = None) -> None:
        assert capacity is None, "this backend waits for the device and fits into no graph"

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
        for heads in (query, key):
            heads.copy_(_rotate(heads, cos, sin, interleaved))
        live = metadata.slot_mapping >= 0
        slots = metadata.slot_mapping[live]
        for pool, new in ((self._keys[layer], key), (self._values[layer], value)):
            pool.flatten(0, 1)[slots] = new[live].to(pool.dtype)

    def attend(
        self, layer: int, query: torch.Tensor, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec = self._layers[layer]
        out = query.new_zeros(*query.shape[:2], spec.value_size)
        starts, contexts = metadata.query_starts.tolist(), metadata.context_lens.tolist()
        for sequence, context_len in enumerate(contexts):
            start, end = starts[sequence], starts[sequence + 1]
            slot = int(metadata.slots[sequence])
            blocks = metadata.block_table[slot, : -(-context_len // self.block_size)].long()
            key = self._keys[layer][blocks].flatten(0, 1)[:context_len]  # (context_len, num_kv_heads, head_dim)
            value = self._values[layer][blocks].flatten(0, 1)[:context_len]  # (context_len, num_kv_heads, value_size)
            out[start:end] = _attend_one(query[start:end], key, value, spec, sinks).to(out.dtype)
        return out

    def copy_block(self, source: int, target: int) -> None:
        for pool in (*self._keys, *self._values):
            pool[target] = pool[source]


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first 2 * cos.shape[-1] dimensions of (num_tokens, heads, head_dim), in float32."""
    half = cos.shape[-1]
    turned, rest = heads[..., : 2 * half].float(), heads[..., 2 * half :].float()
    cos, sin = cos[:, None, :], sin[:, None, :]  # the same for every head
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turned[..., :half], turned[..., half:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: KVSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The last query_len positions of one sequence attend to its whole context.

    (query_len, num_heads, head_dim) -> (query_len, num_heads, value_size)
    """
    group = spec.num_heads // spec.num_kv_heads
    keys = key.float().repeat_interleave(group, dim=1)  # (context_len, num_heads, head_dim)
    values = value.float().repeat_interleave(group, dim=1)  # (context_len, num_heads, value_size)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    query_positions = torch.arange(len(key) - len(query), len(key), device=key.device)[:, None]
    key_positions = torch.arange(len(key), device=key.device)[None, :]
    hidden = key_positions > query_positions
    if spec.window is not None:
        hidden |= key_positions <= query_positions - spec.window
    scores = scores.masked_fill(hidden, -torch.inf)  # (num_heads, query_len, context_len)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, values)
