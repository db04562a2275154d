"""Attention metadata of hand-made batches."""

from __future__ import annotations

import numpy as np
import torch

from batchgen.attention.base import AttentionBackend, AttentionMetadata


def batch(
    backend: AttentionBackend,
    query_lens: list[int],
    context_lens: list[int],
    block_table: list[list[int]],
    slot_mapping: list[int],
) -> AttentionMetadata:
    """Prepared for the backend. Rows of the block table may differ in length."""
    table = np.zeros((len(block_table), max(map(len, block_table))), np.int32)
    for row, blocks in zip(table, block_table, strict=True):
        row[: len(blocks)] = blocks
    metadata = AttentionMetadata(
        np.cumsum([0, *query_lens], dtype=np.int32),
        np.array(context_lens, np.int32),
        np.arange(len(query_lens), dtype=np.int32),
        torch.from_numpy(table),
        table,
        torch.tensor(slot_mapping),
    )
    backend.prepare(metadata)
    return metadata
