"""Runs a decoder step by step over a scattered pool, to be compared with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from batches import batch
from batchgen_kernels import reference as ops
from transformers import PreTrainedModel

from batchgen.attention.base import AttentionMetadata
from batchgen.attention.reference import ReferenceBackend
from batchgen.models import registry
from batchgen.models.decoder import Decoder
from batchgen.weights import open_checkpoint

BLOCK_SIZE = 4


class Harness:
    """Runs a decoder over sequences whose blocks lie scattered in the pool, in whatever chunks the test asks for."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        quantization: str | None = None,
        max_model_len: int = 256,
        num_blocks: int = 128,
        readers: int = 1,
    ) -> None:
        backend = ReferenceBackend(BLOCK_SIZE)
        self.decoder: Decoder = registry.build(
            open_checkpoint(folder),
            dtype=dtype,
            quantization=quantization,
            backend=backend,
            max_model_len=max_model_len,
            ops=ops,
            readers=readers,
        )
        backend.allocate(self.decoder.config.layers, num_blocks, dtype)
        self.free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.blocks: dict[int, list[int]] = {}
        self.context: dict[int, int] = {}

    def metadata(self, rows: list[tuple[int, int]], padding: int = 0) -> AttentionMetadata:
        """Of sequences whose last `length` tokens are (sequence, length): their contexts end at self.context."""
        slots = []
        for sequence, length in rows:
            end = self.context[sequence]
            for position in range(end - length, end):
                slots.append(self.blocks[sequence][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        return batch(
            self.decoder.backend,
            [length for _, length in rows],
            [self.context[sequence] for sequence, _ in rows],
            [self.blocks[sequence] for sequence, _ in rows],
            slots + [-1] * padding,
        )

    def step(self, chunks: dict[int, list[int]], *, padding: int = 0, sample: bool = False) -> dict[int, torch.Tensor]:
        """Feed the next tokens of some sequences -> their logits: of every token, or of the last one only."""
        ids: list[int] = []
        positions: list[int] = []
        rows, lasts = [], []
        for sequence, tokens in chunks.items():
            start = self.context.get(sequence, 0)
            self.context[sequence] = start + len(tokens)
            owned = self.blocks.setdefault(sequence, [])
            while len(owned) * BLOCK_SIZE < self.context[sequence]:
                owned.append(self.free.pop())
            ids += tokens
            positions += range(start, start + len(tokens))
            rows.append((sequence, len(tokens)))
            lasts.append(len(ids) - 1)
        with torch.inference_mode():
            hidden = self.decoder.forward(
                torch.tensor(ids + [0] * padding),
                torch.tensor(positions + [0] * padding),
                self.metadata(rows, padding),
                torch.tensor(lasts) if sample else None,
                self.metadata([(sequence, 1) for sequence, _ in rows]) if sample else None,
            )
            logits = self.decoder.logits(hidden)
        counts = [1 if sample else length for _, length in rows]
        return dict(zip(chunks, logits[: sum(counts)].split(counts), strict=True))


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def sequences(vocab_size: int, *lengths: int) -> dict[int, list[int]]:
    chooser = random.Random(7)
    return {number: [chooser.randrange(vocab_size) for _ in range(length)] for number, length in enumerate(lengths)}
