"""The plain data that crosses every layer: row keys, requests, sampling parameters, completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]  # (num_tokens,)
NO_TOKENS: TokenIds = np.empty(0, np.int32)


class RowKey(NamedTuple):
    """A row's identity inside a run: input file number and row number in that file, both from 0."""

    file: int
    row: int


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Rows [first_row, first_row + num_rows) of one input file, committed together as one part.

    `byte_start` and `byte_end` are offsets into the uncompressed file where the format has them (JSONL), else 0.
    """

    file: int
    shard: int
    first_row: int
    num_rows: int
    byte_start: int
    byte_end: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row's tokens are drawn and where they stop. Validated by `spec.SamplingSpec` before it gets here.

    `max_tokens` None means what is left of the context. Temperatures below 1e-5 are greedy.
    `top_k` None, `top_p` 1.0 and `min_p` 0.0 are off. `stop_token_ids` are the row's own, beside the model's EOS ids.
    """

    max_tokens: int | None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    n: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One row, rendered and encoded: what the engine runs.

    `noise_key` is a 64-bit hash of the sampling seed and the row's name: the key of its Philox4x32 random draws.
    `resume[sample]` holds output tokens that an earlier start already produced for that sample; they are kept
    verbatim and generation goes on after them. Samples absent from `resume` start from nothing; a sample mapped to
    None is finished already and is not run.
    """

    key: RowKey
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    noise_key: int
    resume: dict[int, TokenIds | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row failed: one of `errors.ROW_CODES` and a message a person can act on."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """What an unfinished sample has produced so far: a checkpoint keeps it, `Request.resume` gives it back."""

    key: RowKey
    sample: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished sample of one row.

    `finish_reason` is "stop", "length" or "error". `stop_reason` is the stop string or the stop token id that ended
    it (None for the model's own EOS and for "length"). `token_ids` are all generated tokens, the stopping one
    included; the text is cut at a stop string when it is detokenised.
    """

    key: RowKey
    sample: int
    token_ids: TokenIds
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    error: RowError | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What is known of a job's samples before its engine is made: what the engine has to have room for."""

    prompts: Sequence[TokenIds]  # one for each sample
    max_tokens: Sequence[int]  # of output, for each sample; the context may end before
    complete: bool  # these are all samples; else others like them are still to come
