"""What scheduler and runner say to each other: plain data that pickles, so that the runner may live elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.types import SamplingParams, TokenIds

IntArray = npt.NDArray[np.int32]


class OutOfMemoryStep(Exception):
    """Raised by the runner's submit or sample: this step did not fit into the device's memory and never happened."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine's sizes, all resolved. `num_blocks` is the whole KV pool, `max_model_len` counts prompt and output."""

    max_num_seqs: int
    max_batch_tokens: int
    num_blocks: int
    block_size: int
    max_model_len: int
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class SlotStart:
    """From this step on `slot` holds this sample. Replaces whatever the slot held before.

    `token_ids` are all tokens known when it is admitted: the prompt, then output kept from before a preemption or
    an earlier start. Positions at or past its end are fed with the token the device itself sampled last.
    """

    slot: int
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: SamplingParams
    noise_key: int
    sample: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One forward pass over a flat ragged batch: row i computes positions [starts[i], starts[i] + lengths[i]).

    Rows are `num_rows` live slots, each at most once. `samples[i]` is true where the chunk reaches the end of the
    tokens known or in flight, so that its last position yields the next token. `block_appends` are (slot, first
    index in its block table, block ids), applied before the pass and after `slot_starts` (which empty the slot's
    table). The fields hold no token the device sampled in a step not yet collected.
    """

    step: int
    slot_starts: list[SlotStart]
    block_appends: list[tuple[int, int, list[int]]]
    slots: IntArray  # (num_rows,)
    starts: IntArray  # (num_rows,)
    lengths: IntArray  # (num_rows,) all >= 1
    samples: npt.NDArray[np.bool_]  # (num_rows,)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step sampled: one entry for each plan row with `samples` true, in plan order.

    `finite[i]` is false where the row's logits held NaN or infinity; its token is meaningless then.
    """

    step: int
    token_ids: IntArray  # (num_samples,)
    finite: npt.NDArray[np.bool_]  # (num_samples,)
