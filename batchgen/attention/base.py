"""The attention backend's protocol: who owns the KV pool, and what a step tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from batchgen.models.config import KVSpec

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One flat ragged batch of `num_seqs` sequences. Token t of sequence s has position
    context_lens[s] - query_len(s) + t; `slot_mapping` is block * block_size + offset, or -1 for padding rows
    (which write nothing and attend to nothing: their output is zero; a step of a fixed number of rows needs them).

    Arrays are on the host, where a step's work is planned, tensors on the device. `num_tokens` counts padding rows,
    query_starts[-1] does not.
    """

    query_starts: IntArray  # (num_seqs + 1,) cumulative
    context_lens: IntArray  # (num_seqs,) this step's tokens included
    slots: IntArray  # (num_seqs,) each sequence's row of the block table
    block_table: torch.Tensor  # (max_num_seqs, max_blocks) int32, changed in place between steps
    host_table: IntArray  # the same on the host
    slot_mapping: torch.Tensor  # (num_tokens,) int64


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

    def prepare(self, metadata: AttentionMetadata, *, capacity: int | None = None) -> None:
        """Plan a step's work on the host, before the layers' calls with this metadata; does not wait for the device.

        `capacity`: every sequence has one query, and what the device needs goes into buffers for that many sequences,
        so that a CUDA graph which was captured with this capacity serves every step that is prepared with it. Backends
        of devices without graphs are never given one.
        """
        ...

    def rope_and_write(
        self,
        layer: int,
        query: torch.Tensor,  # (num_tokens, num_heads, head_dim), may be a strided view
        key: torch.Tensor,  # (num_tokens, num_kv_heads, head_dim), may be a strided view
        value: torch.Tensor,  # (num_tokens, num_kv_heads, value_size), may be a strided view
        cos: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
        sin: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
        interleaved: bool,
        metadata: AttentionMetadata,
    ) -> None:
        """Rotate query and key in place and write key and value to the pool."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention of rotated queries (num_tokens, num_heads, head_dim) over the pool ->
        (num_tokens, num_heads, value_size). `sinks` (num_heads,) float32 are given where the layer has them."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        ...
