"""The attention backend's protocol: who owns the KV pool, and what a step tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen.models.config import KVSpec


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One flat ragged batch of `num_seqs` sequences. Token t of sequence s has position
    context_lens[s] - query_len(s) + t; `slot_mapping` is block * block_size + offset, or -1 for padding rows
    (which write nothing and attend to nothing: their output is zero; a step of a fixed number of rows needs them).

    All tensors live on the backend's device. `num_tokens` counts padding rows, query_starts[-1] does not.
    """

    query_starts: torch.Tensor  # (num_seqs + 1,) int32, cumulative
    context_lens: torch.Tensor  # (num_seqs,) int32, this step's tokens included
    block_table: torch.Tensor  # (num_seqs, max_blocks) int32
    slot_mapping: torch.Tensor  # (num_tokens,) int64
    max_query_len: int
    max_context_len: int


class AttentionBackend(Protocol):
    """Owns an opaque paged KV pool, one per layer over one block numbering.

    Layout inside the pool is the backend's own; backends are compared through write + attend only.
    """

    name: str
    block_size: int  # tokens in one block

    def bytes_per_block(self, layers: Sequence[KVSpec], dtype: torch.dtype) -> int:
        """Bytes one block takes over all layers, keys and values."""
        ...

    def allocate(self, layers: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype) -> None:
        """Make the pool; called once, before the first step. Raises ModelError for a KVSpec it cannot serve."""
        ...

    def rope_and_write(
        self,
        layer: int,
        query: torch.Tensor,  # (num_tokens, num_heads, head_dim), may be a strided view
        key: torch.Tensor,  # (num_tokens, num_kv_heads, head_dim), may be a strided view
        value: torch.Tensor,  # (num_tokens, num_kv_heads, head_dim), may be a strided view
        cos: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
        sin: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
        interleaved: bool,
        metadata: AttentionMetadata,
    ) -> None:
        """Rotate query and key in place and write key and value to the pool."""
        ...

    def attend(self, layer: int, query: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Causal attention of rotated queries (num_tokens, num_heads, head_dim) over the pool -> the same shape."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        ...
