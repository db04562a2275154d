"""All device state but the KV pool: runs plans through the decoder and keeps what slots hold between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from batchgen_kernels.draws import Drawn, SamplingRows

from batchgen.attention.base import AttentionBackend, AttentionMetadata
from batchgen.device import Cpu, Device, device_error, is_out_of_memory
from batchgen.engine.graphs import DecodeGraphs
from batchgen.engine.sampler import Sampler, SamplingOps
from batchgen.engine.step import EngineSettings, IntArray, OutOfMemoryStep, StepPlan, StepResult
from batchgen.models.decoder import Decoder
from batchgen.types import TokenIds

LongArray = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Handle:
    """A step on its way: its hidden states first, then its tokens."""

    plan: StepPlan
    hidden: torch.Tensor | None  # (num_samples, hidden_size), None where nothing is sampled
    # waits for (2, num_samples): tokens, whether logits were finite
    arrived: Callable[[], npt.NDArray[Any]] | None = None


class _Inputs(NamedTuple):
    """A step's tokens, on the host."""

    tokens: LongArray  # (3, num_tokens): ids, positions, slot mapping; the id -1 - s is the token that slot s drew last
    query_starts: IntArray  # (num_rows + 1,)
    context_lens: IntArray  # (num_rows,)
    last_tokens: LongArray  # (num_samples,) of the rows that sample: places among the tokens


class Runner:
    """Runs one step after the other: `submit` starts the forward pass, `sample` picks the tokens, `collect` brings
    them to the host. A sampled token is fed to the next step without passing through the host, and nothing but
    `collect` waits for the device: steps may be submitted while older ones run.

    The backend's pool is allocated already. Raises OutOfMemoryStep from submit and sample, Interrupted from all three
    when the device is lost.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        settings: EngineSettings,
        *,
        ops: SamplingOps,
        vocab_limit: int,
        device: Device | None = None,
    ) -> None:
        """`vocab_limit` is the tokenizer's number of ids: the model may have more, for padding. None: the CPU."""
        self._decoder, self._backend, self._ops = decoder, backend, ops
        self._device = device or Cpu()
        self._settings = settings
        self._block_size = settings.block_size
        assert backend.block_size == settings.block_size
        self._sampler = Sampler(settings.max_num_seqs, min(vocab_limit, decoder.config.vocab_size))
        max_blocks = -(-settings.max_model_len // settings.block_size)
        # Per slot, (max_num_seqs, ...)
        self._known: list[TokenIds] = [np.empty(0, np.int32)] * settings.max_num_seqs
        self._num_known = np.zeros(settings.max_num_seqs, np.int32)
        self._num_prompt = np.zeros(settings.max_num_seqs, np.int32)
        self._host_table = np.zeros((settings.max_num_seqs, max_blocks), np.int32)
        self._block_table = torch.zeros(self._host_table.shape, dtype=torch.int32, device=self._device.torch_device)
        self._last_token = torch.zeros(settings.max_num_seqs, dtype=torch.int64, device=self._device.torch_device)
        self._graphs: DecodeGraphs | None = None
        if self._device.captures:
            self._graphs = DecodeGraphs(self._device, backend, self._forward, settings.max_num_seqs)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Handle:
        for start in plan.slot_starts:
            self._known[start.slot] = start.token_ids
            self._num_known[start.slot] = len(start.token_ids)
            self._num_prompt[start.slot] = start.num_prompt_tokens
            self._sampler.start(start.slot, start.sampling, start.noise_key, start.sample)
        with self._errors():
            self._append_blocks(plan)
            hidden = self._hidden(plan, self._inputs(plan))
            return Handle(plan, hidden if len(hidden) else None)

    def _append_blocks(self, plan: StepPlan) -> None:
        if not plan.block_appends:
            return
        width = self._host_table.shape[1]
        places = np.concatenate([np.arange(f, f + len(ids)) + slot * width for slot, f, ids in plan.block_appends])
        blocks = np.concatenate([np.asarray(ids, np.int32) for _, _, ids in plan.block_appends])
        self._host_table.reshape(-1)[places] = blocks
        self._block_table.view(-1)[self._device.upload(places)] = self._device.upload(blocks)

    def _inputs(self, plan: StepPlan) -> _Inputs:
        slots, lengths = plan.slots, plan.lengths
        query_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        context_lens = plan.starts + lengths
        of_token = np.repeat(slots, lengths)  # (num_tokens,)

        tokens = np.empty((3, plan.num_tokens), np.int64)
        ids, positions, slot_mapping = tokens
        np.add(np.arange(plan.num_tokens), np.repeat(plan.starts - query_starts[:-1], lengths), out=positions)
        blocks = self._host_table[of_token, positions // self._block_size]
        slot_mapping[:] = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        np.subtract(-1, of_token, out=ids)
        known = np.flatnonzero(plan.starts < self._num_known[slots])  # the others are fed with what they drew
        for row in known.tolist():
            start, end, first = int(query_starts[row]), int(query_starts[row + 1]), int(plan.starts[row])
            ids[start:end] = self._known[slots[row]][first : first + end - start]
        last_tokens = query_starts[1:][plan.samples].astype(np.int64) - 1
        return _Inputs(tokens, query_starts, context_lens, last_tokens)

    def _hidden(self, plan: StepPlan, inputs: _Inputs) -> torch.Tensor:
        """Of the rows that sample, (num_samples, hidden_size)."""
        num_tokens = inputs.tokens.shape[1]
        all_decode = num_tokens == len(inputs.last_tokens)

        def metadata(slot_mapping: torch.Tensor) -> AttentionMetadata:
            return self._metadata(inputs.query_starts, inputs.context_lens, plan.slots, slot_mapping)

        if all_decode and self._graphs is not None:
            return self._graphs.run(inputs.tokens, metadata)
        packed = self._device.upload(np.concatenate((inputs.tokens.reshape(-1), inputs.last_tokens)))
        tokens, last_tokens = packed[: 3 * num_tokens].view(3, num_tokens), packed[3 * num_tokens :]
        step = metadata(tokens[2])
        self._backend.prepare(step)
        if all_decode:  # the last layer's work is the others'
            return self._forward(tokens, step)
        num_samples = len(last_tokens)
        sampled = self._metadata(
            np.arange(num_samples + 1, dtype=np.int32),
            inputs.context_lens[plan.samples],
            plan.slots[plan.samples],
            tokens[2].index_select(0, last_tokens),
        )
        if num_samples:
            self._backend.prepare(sampled)
        return self._forward(tokens, step, last_tokens, sampled)

    def _metadata(
        self, query_starts: IntArray, context_lens: IntArray, slots: IntArray, slot_mapping: torch.Tensor
    ) -> AttentionMetadata:
        return AttentionMetadata(query_starts, context_lens, slots, self._block_table, self._host_table, slot_mapping)

    def _forward(
        self,
        tokens: torch.Tensor,  # (3, num_tokens) as _Inputs has them
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor | None = None,
        sample_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        ids, positions, _ = tokens
        ids = torch.where(ids < 0, self._last_token[(-1 - ids).clamp_min(0)], ids)
        return self._decoder.forward(ids, positions, metadata, sample_rows, sample_metadata)

    @torch.inference_mode()
    def sample(self, handle: Handle, masks: torch.Tensor | None = None) -> None:
        """Draw the step's tokens; `masks` (num_samples, words of 32 ids) has a bit for each token that is allowed."""
        if handle.hidden is None:
            return
        plan = handle.plan
        slots = plan.slots[plan.samples]
        positions = (plan.starts + plan.lengths)[plan.samples] - self._num_prompt[slots]
        with self._errors():
            drawn = self._draw(handle.hidden, slots, positions, masks)
            handle.arrived = self._device.download(torch.stack((drawn.tokens, drawn.finite.long())))
        handle.hidden = None

    def _draw(
        self, hidden: torch.Tensor, slots: IntArray, positions: IntArray, masks: torch.Tensor | None = None
    ) -> Drawn:
        rows = SamplingRows.unpack(self._device.upload(self._sampler.gather(slots, positions)))
        drawn = self._ops.sample(self._decoder.logits(hidden), rows, self._sampler.vocab_size, allowed=masks)
        self._last_token[self._device.upload(slots.astype(np.int64))] = drawn.tokens
        return drawn

    def collect(self, handle: Handle) -> StepResult:
        """Waits for the step."""
        if handle.arrived is None:
            return StepResult(handle.plan.step, np.empty(0, np.int32), np.empty(0, np.bool_))
        with self._errors():
            tokens, finite = handle.arrived()
        return StepResult(handle.plan.step, tokens.astype(np.int32), finite.astype(np.bool_))

    @torch.inference_mode()
    def largest_step(self) -> None:
        """Run the step that takes the most memory, on one token and padding: to measure it before the pool is made."""
        settings, one = self._settings, np.ones(1, np.int32)
        slot_mapping = np.full(settings.max_batch_tokens, -1)
        slot_mapping[0] = 0
        tokens = np.stack((np.zeros_like(slot_mapping), np.zeros_like(slot_mapping), slot_mapping))
        with self._errors():
            uploaded = self._device.upload(tokens)
            step = self._metadata(np.array([0, 1], np.int32), one, np.zeros(1, np.int32), uploaded[2])
            self._backend.prepare(step)
            hidden = self._forward(uploaded, step)[: settings.max_num_seqs]
            self._draw(hidden, np.zeros(len(hidden), np.int32), np.zeros(len(hidden), np.int32))

    @torch.inference_mode()
    def logits_of(self, token_ids: TokenIds) -> torch.Tensor:
        """Logits (num_tokens, vocab_size) at every position of one sequence: for measuring a model, not for a job.

        Keys and values go into the pool's first blocks, whatever these held: nothing may run afterwards. The pool must
        hold the sequence, as it does one that was answered.
        """
        length = len(token_ids)
        num_blocks = -(-length // self._block_size)
        assert num_blocks <= self._settings.num_blocks
        blocks = np.arange(num_blocks, dtype=np.int32)
        self._host_table[0, :num_blocks] = blocks
        self._block_table[0, :num_blocks] = self._device.upload(blocks)
        tokens = np.stack((token_ids.astype(np.int64), np.arange(length), np.arange(length)))
        uploaded = self._device.upload(tokens)
        lengths = np.array([0, length], np.int32)
        step = self._metadata(lengths, lengths[1:], np.zeros(1, np.int32), uploaded[2])
        self._backend.prepare(step)
        return self._decoder.logits(self._forward(uploaded, step))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self._device.give_back()
                raise OutOfMemoryStep(str(error)) from error
            meant = device_error(error)
            if meant is None:
                raise
            raise meant from error
