"""What a call of `sample` takes and gives, in all its forms: rows as the host packs them, penalties, bias, logprobs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

NUM_FIELDS = 8  # 32-bit words of a row


class SamplingRows(NamedTuple):
    """How each row is drawn for; all (num_rows,), views of one packed tensor."""

    keys: torch.Tensor  # int64, of the noise
    positions: torch.Tensor  # int32, of the token to draw among the sample's output tokens, from 0
    samples: torch.Tensor  # int32
    temperature: torch.Tensor  # float32, 0 where greedy
    top_k: torch.Tensor  # int32, the vocabulary's size or more where off
    top_p: torch.Tensor  # float32, infinite where off: no rounded sum reaches it
    log_min_p: torch.Tensor  # float32, minus infinity where off

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> SamplingRows:
        """From what `pack` made, (NUM_FIELDS, num_rows) int32 and contiguous, on whatever device."""
        positions, samples, temperature, top_k, top_p, log_min_p = packed[2:].unbind()
        return cls(
            packed[:2].view(-1).view(torch.int64),
            positions,
            samples,
            temperature.view(torch.float32),
            top_k,
            top_p.view(torch.float32),
            log_min_p.view(torch.float32),
        )


def pack(
    keys: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int32],
    samples: npt.NDArray[np.int32],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int32],
    top_p: npt.NDArray[np.float32],
    log_min_p: npt.NDArray[np.float32],
) -> npt.NDArray[np.int32]:
    """The fields of SamplingRows, each (num_rows,), as bit patterns -> (NUM_FIELDS, num_rows)."""
    packed = np.empty((NUM_FIELDS, len(keys)), np.int32)
    packed[:2].reshape(-1).view(np.int64)[:] = keys
    packed[2:4] = positions, samples
    packed[4:].view(np.float32)[[0, 2, 3]] = temperature, top_p, log_min_p
    packed[5] = top_k
    return packed


class Penalties(NamedTuple):
    """What tokens a row has seen, and what each costs.

    The logit of a token of prompt or output is divided by `repetition` if positive, multiplied with it if not. Then a
    token of the output loses `frequency` for each time it is there, and `presence` once.
    """

    repetition: torch.Tensor  # (num_rows,) float32, 1 where off
    frequency: torch.Tensor  # (num_rows,) float32, 0 where off
    presence: torch.Tensor  # (num_rows,) float32, 0 where off
    history: torch.Tensor  # (num_slots, max_len) int32: prompt, then output
    slots: torch.Tensor  # (num_rows,) int32, which line of the history is the row's
    num_prompt: torch.Tensor  # (num_rows,) int32
    num_tokens: torch.Tensor  # (num_rows,) int32, prompt and output


class Bias(NamedTuple):
    """What is added to single logits, after penalties."""

    ids: torch.Tensor  # (num_rows, max_ids) int32, none twice in a row; -1 for no token
    values: torch.Tensor  # (num_rows, max_ids) float32


class Logprobs(NamedTuple):
    """Log-softmax of a row's logits after penalties, bias and mask, but before temperature and limits: of the drawn
    token, and of the likeliest ones, likeliest first, equals by id."""

    drawn: torch.Tensor  # (num_rows,) float32
    ids: torch.Tensor  # (num_rows, num_logprobs) int64
    values: torch.Tensor  # (num_rows, num_logprobs) float32


class Drawn(NamedTuple):
    """Tokens, and whether the model's logits of the row were all finite."""

    tokens: torch.Tensor  # (num_rows,) int64
    finite: torch.Tensor  # (num_rows,) bool
    logprobs: Logprobs | None
