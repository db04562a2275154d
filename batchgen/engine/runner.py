"""All device state but the KV pool: runs plans through the decoder and keeps what slots hold between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from batchgen_kernels.draws import SamplingRows

from batchgen.attention.base import AttentionBackend, AttentionMetadata
from batchgen.engine.sampler import Sampler, SamplingOps
from batchgen.engine.step import EngineSettings, IntArray, OutOfMemoryStep, StepPlan, StepResult
from batchgen.models.decoder import Decoder
from batchgen.types import TokenIds

OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")  # how torch's CPU allocator says it


@dataclass(slots=True, eq=False)
class Handle:
    """A step on its way: its logits first, then its tokens."""

    plan: StepPlan
    logits: torch.Tensor | None  # (num_samples, vocab_size)
    tokens: torch.Tensor | None = None  # (num_samples,) int64
    finite: torch.Tensor | None = None  # (num_samples,) bool


class Runner:
    """Runs one step after the other: `submit` starts the forward pass, `sample` picks the tokens, `collect` brings
    them to the host. A sampled token is fed to the next step without passing through the host.

    The backend's pool is allocated already. Raises OutOfMemoryStep from submit and sample.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        settings: EngineSettings,
        *,
        ops: SamplingOps,
        vocab_limit: int,
    ) -> None:
        """`vocab_limit` is the tokenizer's number of ids: the model may have more, for padding."""
        self._decoder = decoder
        self._block_size = settings.block_size
        self._pool_tokens = settings.num_blocks * settings.block_size
        assert backend.block_size == settings.block_size
        self._ops = ops
        self._sampler = Sampler(settings.max_num_seqs, min(vocab_limit, decoder.config.vocab_size))
        max_blocks = -(-settings.max_model_len // settings.block_size)
        # Per slot, (max_num_seqs, ...)
        self._block_table = np.zeros((settings.max_num_seqs, max_blocks), np.int32)
        self._known: list[TokenIds] = [np.empty(0, np.int32)] * settings.max_num_seqs
        self._num_known = np.zeros(settings.max_num_seqs, np.int32)
        self._num_prompt = np.zeros(settings.max_num_seqs, np.int32)
        self._last_token = torch.zeros(settings.max_num_seqs, dtype=torch.int64)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Handle:
        for start in plan.slot_starts:
            self._known[start.slot] = start.token_ids
            self._num_known[start.slot] = len(start.token_ids)
            self._num_prompt[start.slot] = start.num_prompt_tokens
            self._sampler.start(start.slot, start.sampling, start.noise_key, start.sample)
        for slot, first, block_ids in plan.block_appends:
            self._block_table[slot, first : first + len(block_ids)] = block_ids
        with _out_of_memory():
            return Handle(plan, self._forward(plan))

    def _forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits of the sampling rows, (num_samples, vocab_size); None when there are none."""
        num_tokens = plan.num_tokens
        slots, lengths = plan.slots, plan.lengths
        query_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        context_lens = plan.starts + lengths
        # Columns up to the longest context; the rest of the table is not read
        block_table = self._block_table[:, : -(-int(context_lens.max()) // self._block_size)][slots]

        positions = np.arange(num_tokens) + np.repeat(plan.starts - query_starts[:-1], lengths)
        blocks = block_table[np.repeat(np.arange(len(slots)), lengths), positions // self._block_size]
        slot_mapping = blocks.astype(np.int64) * self._block_size + positions % self._block_size

        metadata = _metadata(query_starts, context_lens, block_table, slot_mapping, int(lengths.max()))
        last_tokens = query_starts[1:][plan.samples].astype(np.int64) - 1  # (num_samples,)
        if num_tokens == len(last_tokens):  # nothing but decodes: the last layer's work is the others'
            sample_metadata = metadata
        else:
            sample_metadata = _metadata(
                np.arange(len(last_tokens) + 1, dtype=np.int32),
                context_lens[plan.samples],
                block_table[plan.samples],
                slot_mapping[last_tokens],
                1,
            )
        logits = self._decoder.forward(
            self._input_ids(plan, query_starts),
            torch.from_numpy(positions),
            metadata,
            torch.from_numpy(last_tokens),
            sample_metadata,
        )
        return logits if len(last_tokens) else None

    def _input_ids(self, plan: StepPlan, query_starts: IntArray) -> torch.Tensor:
        """(num_tokens,) int64: known tokens from the host, sampled ones from the device."""
        host = np.zeros(plan.num_tokens, np.int64)
        fed = plan.starts >= self._num_known[plan.slots]  # past what the host told: one sampled token
        for row in np.flatnonzero(~fed).tolist():
            start, end = int(query_starts[row]), int(query_starts[row + 1])
            first = int(plan.starts[row])
            host[start:end] = self._known[plan.slots[row]][first : first + end - start]
        input_ids = torch.from_numpy(host)
        input_ids[torch.from_numpy(query_starts[:-1][fed])] = self._last_token[torch.from_numpy(plan.slots[fed])]
        return input_ids

    @torch.inference_mode()
    def sample(self, handle: Handle, allowed: torch.Tensor | None = None) -> None:
        """Draw the step's tokens; `allowed` (num_samples, ceil(ids that can be drawn / 32)) int32 is a mask of bits."""
        if handle.logits is None:
            return
        plan = handle.plan
        slots = plan.slots[plan.samples]
        positions = (plan.starts + plan.lengths)[plan.samples] - self._num_prompt[slots]
        with _out_of_memory():
            rows = SamplingRows.unpack(torch.from_numpy(self._sampler.gather(slots, positions)))
            drawn = self._ops.sample(handle.logits, rows, self._sampler.vocab_size, allowed=allowed)
            handle.tokens, handle.finite = drawn.tokens, drawn.finite
        handle.logits = None
        self._last_token[torch.from_numpy(slots)] = handle.tokens

    def collect(self, handle: Handle) -> StepResult:
        if handle.tokens is None or handle.finite is None:
            return StepResult(handle.plan.step, np.empty(0, np.int32), np.empty(0, np.bool_))
        return StepResult(handle.plan.step, handle.tokens.to(torch.int32).numpy(), handle.finite.numpy())

    @torch.inference_mode()
    def logits_of(self, token_ids: TokenIds) -> torch.Tensor:
        """Logits (num_tokens, vocab_size) at every position of one sequence: for measuring a model, not for a job.

        Keys and values go into the pool's first blocks, whatever these held: nothing may run afterwards. The pool must
        hold the sequence, as it does one that was answered.
        """
        length = len(token_ids)
        assert length <= self._pool_tokens
        positions = np.arange(length)
        blocks = np.arange(-(-length // self._block_size), dtype=np.int32)[None]
        metadata = _metadata(np.array([0, length], np.int32), np.array([length], np.int32), blocks, positions, length)
        ids = torch.from_numpy(token_ids.astype(np.int64))
        return self._decoder.forward(ids, torch.from_numpy(positions), metadata)


def _metadata(
    query_starts: IntArray,
    context_lens: IntArray,
    block_table: IntArray,
    slot_mapping: npt.NDArray[np.int64],
    max_query_len: int,
) -> AttentionMetadata:
    return AttentionMetadata(
        torch.from_numpy(query_starts),
        torch.from_numpy(context_lens),
        torch.from_numpy(block_table),
        torch.from_numpy(slot_mapping),
        max_query_len,
        int(context_lens.max(initial=0)),
    )


@contextmanager
def _out_of_memory() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryStep(str(error)) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        raise OutOfMemoryStep(str(error)) from error
