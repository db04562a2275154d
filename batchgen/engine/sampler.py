"""How each slot's tokens are drawn: kept on the host, packed for the rows of a step."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from batchgen_kernels.draws import Drawn, SamplingRows, pack

from batchgen.engine.step import IntArray
from batchgen.types import SamplingParams


class SamplingOps(Protocol):
    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, vocab: int, *, allowed: torch.Tensor | None = None
    ) -> Drawn:
        """Draw a token below `vocab` for each row of logits (num_rows, at least vocab) float32.

        `allowed` (num_rows, ceil(vocab / 32)) int32 lets token 32 i + j pass where bit j of word i is set.
        """
        ...


class Sampler:
    """Holds each slot's sampling parameters; `gather` packs those of any set of slots for one call of `sample`."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        """`vocab_size` bounds what is drawn: ids past it (padding rows of the head) never come out."""
        self.vocab_size = vocab_size
        # Per slot, (max_num_seqs,); see SamplingRows
        self._noise_key = np.zeros(max_num_seqs, np.int64)
        self._sample = np.zeros(max_num_seqs, np.int32)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.ones(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._log_min_p = np.zeros(max_num_seqs, np.float32)

    def start(self, slot: int, sampling: SamplingParams, noise_key: int, sample: int) -> None:
        """From now on `slot` is drawn for with these parameters."""
        vocab_size = self.vocab_size
        self._noise_key[slot] = np.uint64(noise_key & 0xFFFF_FFFF_FFFF_FFFF).astype(np.int64)  # its words as they are
        self._sample[slot] = sample
        self._temperature[slot] = 0.0 if sampling.greedy else sampling.temperature
        self._top_k[slot] = vocab_size if sampling.top_k is None else min(sampling.top_k, vocab_size)
        self._top_p[slot] = sampling.top_p if sampling.top_p < 1.0 else np.inf
        self._log_min_p[slot] = np.log(sampling.min_p) if sampling.min_p > 0.0 else -np.inf

    def gather(
        self,
        slots: IntArray,  # (num_rows,)
        positions: IntArray,  # (num_rows,) of the token to draw among the sample's output tokens, from 0
    ) -> IntArray:
        """(NUM_FIELDS, num_rows) int32, for `SamplingRows.unpack`."""
        return pack(
            self._noise_key[slots],
            positions,
            self._sample[slots],
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._log_min_p[slots],
        )
