"""Logits to tokens: greedy, or drawn with noise that depends on the row, the position and the token alone."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from batchgen.engine.step import IntArray
from batchgen.types import SamplingParams

CHUNK_ELEMENTS = 1 << 22  # logits that are sampled at once: bounds what softmax, noise and sort take beside them
WIDTHS = (64, 1024)  # most likely tokens looked at before the whole vocabulary is sorted


class SamplingOps(Protocol):
    def keyed_gumbel(
        self, keys: torch.Tensor, positions: torch.Tensor, samples: torch.Tensor, vocab: int
    ) -> torch.Tensor:
        """Gumbel noise (num_rows, vocab) float32 for int64 keys, int32 positions and samples, each (num_rows,)."""
        ...


class Sampler:
    """Holds each slot's sampling parameters and draws for any set of slots.

    A token is the argmax of logit / temperature + noise over the tokens that top_k, then top_p, then min_p leave.
    Tokens are ranked by logit, among equals by id; nothing depends on which rows are drawn together.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, ops: SamplingOps) -> None:
        """`vocab_size` bounds what is drawn: ids past it (padding rows of the head) never come out."""
        self._vocab_size = vocab_size
        self._ops = ops
        # Per slot, (max_num_seqs,)
        self._greedy = np.ones(max_num_seqs, np.bool_)
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._top_k = np.ones(max_num_seqs, np.int64)  # vocab_size where off
        self._top_p = np.ones(max_num_seqs, np.float32)  # infinite where off: no rounded sum reaches it
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._noise_key = np.zeros(max_num_seqs, np.int64)
        self._sample = np.zeros(max_num_seqs, np.int32)

    def start(self, slot: int, sampling: SamplingParams, noise_key: int, sample: int) -> None:
        """From now on `slot` is drawn for with these parameters."""
        vocab_size = self._vocab_size
        self._greedy[slot] = sampling.greedy
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = vocab_size if sampling.top_k is None else min(sampling.top_k, vocab_size)
        self._top_p[slot] = sampling.top_p if sampling.top_p < 1.0 else np.inf
        self._min_p[slot] = sampling.min_p
        self._noise_key[slot] = np.uint64(noise_key & 0xFFFF_FFFF_FFFF_FFFF).astype(
            np.int64
        )  # its two words as they are
        self._sample[slot] = sample

    def sample(
        self,
        logits: torch.Tensor,  # (num_samples, at least vocab_size) float32
        slots: IntArray,  # (num_samples,)
        positions: IntArray,  # (num_samples,) of the token to draw among the sample's output tokens, from 0
        allowed: torch.Tensor | None = None,  # (num_samples, vocab_size) bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (num_samples,) int64, and whether each row's logits were all finite (num_samples,) bool."""
        logits = logits[:, : self._vocab_size]
        finite = logits.sum(dim=1).isfinite()  # one infinity or NaN is enough to show in the sum
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        greedy = self._greedy[slots]
        if greedy.all():
            return _argmax(logits), finite
        tokens = torch.empty(len(slots), dtype=torch.int64)
        limited = (self._top_k[slots] < self._vocab_size) | (self._top_p[slots] < 1.0)
        chunk = max(1, CHUNK_ELEMENTS // self._vocab_size)
        if greedy.any():
            rows = torch.from_numpy(np.flatnonzero(greedy))
            tokens[rows] = _argmax(logits[rows])
        for kind, draw in ((~greedy & ~limited, self._draw), (~greedy & limited, self._draw_limited)):
            chosen = np.flatnonzero(kind)
            for first in range(0, len(chosen), chunk):
                part = chosen[first : first + chunk]
                rows = torch.from_numpy(part)
                tokens[rows] = draw(*self._scale(logits[rows], slots[part], positions[part]), slots[part])
        return tokens, finite

    def _scale(self, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """logit / temperature with the row's largest at 0, and the noise: each (num_rows, vocab_size)."""
        scaled = logits / torch.from_numpy(self._temperature[slots])[:, None]
        scaled -= scaled.amax(dim=1, keepdim=True)
        noise = self._ops.keyed_gumbel(
            torch.from_numpy(self._noise_key[slots]),
            torch.from_numpy(np.ascontiguousarray(positions, np.int32)),
            torch.from_numpy(self._sample[slots]),
            self._vocab_size,
        )
        return scaled, noise

    def _draw(self, scaled: torch.Tensor, noise: torch.Tensor, slots: IntArray) -> torch.Tensor:
        """From all tokens that min_p leaves -> (num_rows,)."""
        min_p = torch.from_numpy(self._min_p[slots])
        if min_p.any():
            scaled = scaled.masked_fill(scaled < min_p.log()[:, None], -torch.inf)
        return _argmax(scaled + noise)

    def _draw_limited(self, scaled: torch.Tensor, noise: torch.Tensor, slots: IntArray) -> torch.Tensor:
        """From the tokens that top_k, top_p and min_p leave -> (num_rows,).

        Only the likeliest tokens are ranked. A row whose limits may lie beyond them, or among tokens as likely as the
        last of them, is ranked again with more.
        """
        vocab_size = self._vocab_size
        top_k, top_p, min_p = (torch.from_numpy(x[slots])[:, None] for x in (self._top_k, self._top_p, self._min_p))
        total = scaled.exp().sum(dim=1, keepdim=True)  # what probabilities are shares of where top_k is off
        tokens = torch.empty(len(slots), dtype=torch.int64)
        rows = torch.arange(len(slots))  # whose tokens are not drawn yet
        for width in (*(width for width in WIDTHS if width < vocab_size), vocab_size):
            values, ids = _rank(scaled, width)  # (num_rows, width)
            kept = torch.arange(width) < top_k
            mass = values.exp() * kept
            share = mass / torch.where(top_k < vocab_size, mass.sum(dim=1, keepdim=True), total)
            before = share.cumsum(dim=1).roll(1, dims=1)  # the mass of all likelier tokens
            before[:, 0] = 0.0
            kept &= before < top_p
            last = values.gather(1, kept.sum(dim=1, keepdim=True) - 1)
            known = (last > values[:, -1:]) & ((top_k < width) | (top_k == vocab_size))
            drawn = known[:, 0] if width < vocab_size else torch.ones(len(rows), dtype=torch.bool)
            kept &= values >= min_p.log()
            scores = (values + noise.gather(1, ids)).masked_fill(~kept, -torch.inf)
            tokens[rows[drawn]] = ids.gather(1, _argmax(scores)[:, None])[drawn, 0]
            if drawn.all():
                break
            rows, scaled, noise, top_k, top_p, min_p, total = (
                x[~drawn] for x in (rows, scaled, noise, top_k, top_p, min_p, total)
            )
        return tokens


def _rank(scaled: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row, largest first, equals by id -> values and ids, each (num_rows, width)."""
    if width == scaled.shape[1]:
        values, ids = scaled.sort(dim=1, descending=True, stable=True)
        return values, ids
    ids = scaled.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = scaled.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """(num_rows, n) -> (num_rows,), the lowest index among equals. On a CPU numpy's, which is vectorised: 128 rows of
    49,152 took it 3 ms, torch 14 ms."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(axis=1))
    return x.argmax(dim=1)
