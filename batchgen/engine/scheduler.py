"""What runs in the next step: decodes, prefill chunks, admission, preemption. Numbers only, no tensors, no device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from batchgen.engine.blocks import BlockManager
from batchgen.engine.curve import KVCurve
from batchgen.engine.forecast import LengthForecast
from batchgen.engine.sequence import Sequence, TextStream
from batchgen.engine.step import EngineSettings, IntArray, SlotStart, StepPlan, StepResult
from batchgen.errors import ModelError
from batchgen.types import Completion, InFlight, Request, RowError

LEARN_EVERY = 32  # steps between two looks at what running samples show of output lengths
RECENT = 128  # tokens of a slot that are kept in an array before its sample takes them over
SMALLEST_STEP = 8  # tokens; a step of one row and no more tokens than this cannot be made smaller to any use
AMPLE = 0.5  # of the pool; as long as no more than this may be asked for, nothing is worth a closer look
BROKEN_ROWS = 3  # as long as no other logits have been seen, it is the model that is broken
GROW_AFTER = 256  # good steps after which a budget that was halved doubles


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made, and where it stands now.

    `prompt_tokens` counts each sample's prompt once, when it starts; `cached_tokens` of these and of resumed output
    were found in the prefix cache. `recomputed_tokens` were computed again after a preemption. `output_tokens` leaves
    resumed output out.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    running: int = 0
    waiting: int = 0


SlotArray = npt.NDArray[np.intp]  # slots as numpy takes indices: those of another type it converts at each use


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that was planned and whose result is not here yet, with the blocks it made findable."""

    plan: StepPlan
    slots: SlotArray  # the plan's
    registered: list[int]


@dataclass(slots=True, eq=False)
class _Decodes:
    """The running samples as a step finds them."""

    slots: SlotArray  # (num_decodes,) those with one position left to compute
    starts: IntArray  # (num_decodes,) that position
    growing: SlotArray  # those of them that need a block for it
    unfinished: SlotArray  # slots with more positions left


@dataclass(slots=True)
class _Draft:
    """A plan in the making: the prefill rows and what goes with them."""

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    slot_starts: list[SlotStart] = field(default_factory=list)
    block_appends: list[tuple[int, int, list[int]]] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)


class Scheduler:
    """Plans steps and takes in their results, in the same order, with any number of steps in between.

    A sampled token that is still in flight is counted by position; the device feeds it to the next step itself. A stop
    that is seen late leaves a row in the steps in flight: its extra tokens are dropped, and slot and blocks are given
    back when the last of these steps is collected.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        eos_token_ids: frozenset[int],
        stream_factory: Callable[[], TextStream],
    ) -> None:
        self.settings = settings
        self.blocks = BlockManager(settings.num_blocks)
        self._eos_token_ids = eos_token_ids
        self._stream_factory = stream_factory
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # slot -> sample, in order of admission
        self._slots: SlotArray = np.empty(0, np.intp)  # the keys of _running, but for changes not in it yet:
        self._some_left = False  # slots that are not live are still in it
        self._entered: list[int] = []  # slots to be appended
        self._ended: list[Sequence] = []  # finished, but steps in flight still touch them
        self._finished: list[Completion] = []  # not handed out yet
        self._flights: deque[_Flight] = deque()
        self._free_slots = list(range(settings.max_num_seqs - 1, -1, -1))
        self._budget = settings.max_batch_tokens
        self._broken: int | None = 0  # rows with logits that were no numbers, until there are others
        self._good_steps = 0
        self._watermark = max(1, settings.num_blocks // 100)
        self._steps = 0
        self._forecast = LengthForecast(settings.max_model_len)
        self._curve = KVCurve(self._forecast, settings.max_model_len)
        self._growth = 0  # blocks that running samples will still ask for if they all come to their limits
        self._peak = math.inf  # tokens, from above, that those that run may hold at once: of a look ahead not long ago
        self._looked_ahead = False  # the curve is that of the samples that run now
        self._learn_at = 0  # step
        self._refused = False  # the pool had no room for the next sample, and nothing has changed that since
        self._stats = EngineStats(kv_blocks_total=settings.num_blocks)
        # Per slot, (max_num_seqs,)
        self._scheduled = np.zeros(settings.max_num_seqs, np.int32)  # positions computed or in flight
        self._total = np.zeros(settings.max_num_seqs, np.int32)  # tokens known or in flight
        self._limit = np.zeros(settings.max_num_seqs, np.int32)  # tokens at which the sample ends
        self._capacity = np.zeros(settings.max_num_seqs, np.int32)  # tokens its blocks hold
        self._shared = np.zeros(settings.max_num_seqs, np.int32)  # of these, found in the cache at admission
        self._prompt = np.zeros(settings.max_num_seqs, np.int32)
        self._certain = np.zeros(settings.max_num_seqs, np.bool_)  # nothing but the limit can end it
        self._live = np.zeros(settings.max_num_seqs, np.bool_)  # it is in _running
        self._known = np.zeros(settings.max_num_seqs, np.int32)  # tokens known
        self._recent = np.zeros((settings.max_num_seqs, RECENT), np.int32)  # tokens known, not in `tokens` yet
        self._recent_from = np.zeros(settings.max_num_seqs, np.intp)  # token i is at this + i of all that is there
        self._look_at = np.zeros(settings.max_num_seqs, np.int32)  # tokens known at which its sample must look at it
        self._pending = np.zeros(settings.max_num_seqs, np.int32)  # steps in flight that hold it

    # -- what goes in and comes out -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue every sample of a row that is not finished already."""
        num_prompt = len(request.prompt_token_ids)
        error: RowError | None = None
        if num_prompt == 0:
            error = RowError("empty_prompt", "the prompt has no tokens")
        elif num_prompt >= self.settings.max_model_len:
            error = RowError(
                "prompt_too_long",
                f"the prompt has {num_prompt} tokens, which leaves no room for output in a context of "
                f"{self.settings.max_model_len}",
            )
        for sample in range(request.sampling.n):
            if request.resume.get(sample, ()) is None:
                continue
            sequence = Sequence(
                request,
                sample,
                max_model_len=self.settings.max_model_len,
                eos_token_ids=self._eos_token_ids,
                stream_factory=self._stream_factory,
            )
            if error is not None:
                self._complete(sequence, error)
            elif sequence.finish is not None:
                self._complete(sequence)
            else:
                self._waiting.append(sequence)

    def take_finished(self) -> list[Completion]:
        """What ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._flights or self._finished)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def snapshot(self) -> list[InFlight]:
        """The output so far of every unfinished sample that has any."""
        for sequence in self._running.values():
            self._hand_over(sequence)
        unfinished = [*self._running.values(), *self._waiting]
        return [InFlight(s.request.key, s.sample, s.output()) for s in unfinished if s.num_output > 0]

    def stats(self) -> EngineStats:
        return replace(
            self._stats,
            kv_blocks_used=self.blocks.num_used,
            running=len(self._running),
            waiting=len(self._waiting),
        )

    def abandon(self) -> None:
        """Drop every unfinished sample and the steps in flight, whose results will not come."""
        for flight in self._flights:
            for block in flight.registered:
                self.blocks.forget(block)  # it may never have been computed
        self._flights.clear()
        self._pending[:] = 0
        self._release_ended()
        for sequence in list(self._running.values()):
            self._leave_slot(sequence)
        self._waiting.clear()
        self._finished.clear()

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step. None: nothing can run before a step in flight is collected, or there is no work left."""
        decodes = self._decodes()
        if decodes is None:
            return None
        draft = _Draft()
        self._append_blocks(decodes.growing, draft)
        budget = self._budget - len(decodes.slots)
        budget = self._continue_prefills(decodes.unfinished, draft, budget)
        self._admit(draft, budget)
        if not len(decodes.slots) and not draft.slots:
            return None

        slots, starts = decodes.slots, decodes.starts
        lengths, samples = np.ones(len(slots), np.int32), np.ones(len(slots), np.bool_)
        ends = starts + lengths
        self._scheduled[slots] = ends
        self._total[slots] = ends + lengths
        if draft.slots:
            chunks, first = np.array(draft.slots, np.intp), np.array(draft.starts, np.int32)
            chunk_lengths, last = np.array(draft.lengths, np.int32), np.array(draft.samples, np.bool_)
            self._scheduled[chunks] = first + chunk_lengths
            self._total[chunks] += last
            slots, starts = np.concatenate((slots, chunks)), np.concatenate((starts, first))
            lengths, samples = np.concatenate((lengths, chunk_lengths)), np.concatenate((samples, last))
        self._pending[slots] = self._pending.take(slots) + np.int32(1)
        plan = StepPlan(
            self._steps, draft.slot_starts, draft.block_appends, slots.astype(np.int32), starts, lengths, samples
        )
        self._flights.append(_Flight(plan, slots, draft.registered))
        self._steps += 1
        return plan

    def _decodes(self) -> _Decodes | None:
        """What can decode, when the blocks that takes are there; else None: collect first."""
        while True:
            slots = self._running_slots()
            scheduled, total = self._scheduled.take(slots), self._total.take(slots)
            left = total - scheduled
            ready = (left == 1) & (total < self._limit.take(slots))
            decodes, starts = slots[ready][: self._budget], scheduled[ready][: self._budget]
            growing = decodes[starts >= self._capacity.take(decodes)]
            if len(growing) <= self.blocks.num_free and not self._owns_pool(growing):
                return _Decodes(decodes, starts, growing, slots[left > 1])
            if self._flights:
                return None
            self._make_room(growing)

    def _running_slots(self) -> SlotArray:
        """(num_running,) in order of admission."""
        if self._some_left:
            self._slots = self._slots[self._live.take(self._slots)]
            self._some_left = False
        if self._entered:
            self._slots = np.concatenate((self._slots, np.array(self._entered, np.intp)))
            self._entered = []
        return self._slots

    def _owns_pool(self, growing: SlotArray) -> bool:
        """Whether one of these has every block there is: no preemption can help it."""
        pool = self.settings.num_blocks * self.settings.block_size
        if self.settings.max_model_len <= pool or not len(growing):
            return False
        return int(self._capacity.take(growing).max()) >= pool

    def _make_room(self, growing: SlotArray) -> None:
        """End the sample that outgrew the pool, or preempt the one with the least work done. Nothing is in flight."""
        if self._owns_pool(growing):
            sequence = self._running[int(growing[self._capacity[growing].argmax()])]
            self._leave_slot(sequence)
            self._complete(sequence, self._pool_too_small(len(sequence.tokens)))
            return
        slots = self._running_slots()
        work = self._scheduled[slots]
        least = slots[work == work.min()]
        self._preempt(self._running[int(least[-1])])

    def _append_blocks(self, growing: SlotArray, draft: _Draft) -> None:
        running, appends = self._running, draft.block_appends
        for slot, block in zip(growing.tolist(), self.blocks.allocate(len(growing)), strict=True):
            block_ids = running[slot].block_ids
            appends.append((slot, len(block_ids), [block]))
            block_ids.append(block)
        self._capacity[growing] += self.settings.block_size

    def _continue_prefills(self, unfinished: SlotArray, draft: _Draft, budget: int) -> int:
        for slot in unfinished.tolist():
            if budget == 0:
                break
            budget -= self._add_chunk(self._running[slot], draft, budget)
        return budget

    def _admit(self, draft: _Draft, budget: int) -> None:
        """Start waiting samples in order, as long as tokens, slots and blocks last."""
        if not self._waiting or not self._free_slots or self._refused or budget <= 0:
            return
        self._look_around()
        while (
            self._waiting
            and budget > 0
            and self._free_slots
            and len(self._running) < self._budget  # each running sample takes one token of every step
        ):
            sequence = self._waiting[0]
            num_tokens = len(sequence.tokens)
            num_blocks = -(-num_tokens // self.settings.block_size)
            if num_blocks > self.settings.num_blocks:
                self._waiting.popleft()
                self._complete(sequence, self._pool_too_small(num_tokens))
                continue
            hits = self._find_prefix(sequence)
            need = num_blocks - len(hits)
            left = self.blocks.num_free - need - self.blocks.count_free(hits)
            if left < 0 or not self._fits(sequence, need, left):
                self._refused = True
                break
            self._waiting.popleft()
            self._enter_slot(sequence, hits, need, draft)
            budget -= self._add_chunk(sequence, draft, budget)

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the cache that hold its first tokens; never its last one, whose logits are wanted."""
        hits: list[int] = []
        if self.settings.prefix_cache:
            for index in range((len(sequence.tokens) - 1) // self.settings.block_size):
                block = self.blocks.find(sequence.block_hash(index, self.settings.block_size))
                if block is None:
                    break
                hits.append(block)
        return hits

    def _look_around(self) -> None:
        """What `_fits` decides by as long as all that run can come to their limits."""
        slots, size = self._running_slots(), self.settings.block_size
        at_limit = (self._limit.take(slots) + (size - 2)) // size  # blocks; a sample's last token is never computed
        self._growth = int((at_limit - self._capacity.take(slots) // size).sum())
        self._looked_ahead = False
        if self._steps >= self._learn_at:
            self._learn_at = self._steps + LEARN_EVERY
            produced = self._total.take(slots) - self._prompt.take(slots)
            self._curve.learn(produced[~self._certain.take(slots)])
            self._peak = math.inf

    def _look_ahead(self) -> None:
        """What those that run will hold, where not all of them can come to their limits."""
        slots = self._running_slots()
        total = self._total.take(slots)
        own = self._capacity.take(slots) - self._shared.take(slots)  # shared prefixes: counted once, never given back
        self._curve.start(
            total - self._prompt.take(slots), self._limit.take(slots) - total, own, self._certain.take(slots)
        )
        self._looked_ahead, self._peak = True, self._curve.peak

    def _fits(self, sequence: Sequence, need: int, left: int) -> bool:
        """Whether the pool will hold all running samples and this one, which leaves `left` blocks free now: because
        it has room for all of them at their limits, or because others will probably end first. One that would run
        alone is let in whatever it needs."""
        size, num_tokens = self.settings.block_size, len(sequence.tokens)
        growth = self._growth + -(-(sequence.limit - 1) // size) - -(-num_tokens // size)
        if self._running and growth > left:
            if left < self._watermark:
                return False
            sample = sequence.num_output, sequence.limit - num_tokens, need * size, sequence.ends_at_limit
            self._peak += self._curve.most(*sample)
            if self._peak > self.settings.num_blocks * size * AMPLE:
                if not self._looked_ahead:
                    self._look_ahead()
                if not self._curve.admit(*sample, left * size):
                    return False
                self._peak = self._curve.peak
            else:
                self._looked_ahead = False  # the curve knows nothing of this one
        self._growth = growth
        return True

    def _add_chunk(self, sequence: Sequence, draft: _Draft, budget: int) -> int:
        """Put the next chunk of its known tokens into the plan; what it fills can be shared from here on, because
        each layer writes all keys and values of a step before it attends."""
        slot = sequence.slot
        start = self._scheduled.item(slot)
        left = len(sequence.tokens) - start
        length = min(budget, left)
        draft.slots.append(slot)
        draft.starts.append(start)
        draft.lengths.append(length)
        draft.samples.append(length == left)
        draft.registered += self._register(sequence, start, start + length)
        return length

    def _register(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Make the blocks filled by computing [start, end) findable."""
        if not self.settings.prefix_cache:
            return []
        first, last = start // self.settings.block_size, end // self.settings.block_size
        if first == last:
            return []
        sequence.block_hash(last - 1, self.settings.block_size)
        new = self.blocks.register(sequence.block_ids[first:last], sequence.hashes[first:last])
        if new:
            self._refused = False  # the next sample may begin with these
        return new

    # -- samples and slots --------------------------------------------------------------------------------------

    def _enter_slot(self, sequence: Sequence, hits: list[int], need: int, draft: _Draft) -> None:
        num_tokens, size = len(sequence.tokens), self.settings.block_size
        slot = sequence.slot = self._free_slots.pop()
        self.blocks.share(hits)
        sequence.block_ids = hits + self.blocks.allocate(need)
        if self._some_left:  # its slot may be one of theirs
            self._running_slots()
        self._running[slot] = sequence
        self._entered.append(slot)
        self._scheduled[slot] = self._shared[slot] = len(hits) * size
        self._total[slot] = num_tokens
        self._limit[slot] = sequence.limit
        self._capacity[slot] = len(sequence.block_ids) * size
        self._prompt[slot] = sequence.num_prompt
        self._certain[slot] = sequence.ends_at_limit
        self._live[slot] = True
        self._known[slot] = num_tokens
        self._look_again(sequence)
        self._pending[slot] = 0
        draft.slot_starts.append(
            SlotStart(
                slot,
                np.array(sequence.tokens, np.int32),
                sequence.num_prompt,
                sequence.request.sampling,
                sequence.request.noise_key,
                sequence.sample,
            )
        )
        draft.block_appends.append((slot, 0, list(sequence.block_ids)))
        if sequence.num_computed < 0:
            self._stats.prompt_tokens += sequence.num_prompt
            self._stats.cached_tokens += len(hits) * size
        else:
            self._stats.recomputed_tokens += max(0, sequence.num_computed - len(hits) * size)

    def _leave_slot(self, sequence: Sequence) -> None:
        """Out of the running ones; slot and blocks go back when no step in flight holds them."""
        self._hand_over(sequence)
        del self._running[sequence.slot]
        self._live[sequence.slot] = False
        if self._entered:
            self._running_slots()
        self._some_left = True
        if self._pending[sequence.slot]:
            self._ended.append(sequence)
        else:
            self._release(sequence)

    def _hand_over(self, sequence: Sequence) -> None:
        """Give a running sample its recent tokens, which end nothing."""
        self._extend(sequence, self._known.item(sequence.slot))

    def _extend(self, sequence: Sequence, end: int) -> None:
        """Give it those up to token `end`."""
        first = len(sequence.tokens)
        if first < end:
            at = first + self._recent_from.item(sequence.slot)
            sequence.extend(self._recent.ravel()[at : at + end - first])

    def _look_again(self, sequence: Sequence) -> None:
        """Note when a token of a running sample has to be looked at: each one, or the last one and those that leave
        no room for more."""
        slot, known, recent = sequence.slot, len(sequence.tokens), self._recent.shape[1]
        self._recent_from[slot] = slot * recent - known
        self._look_at[slot] = min(sequence.limit, known + recent) if sequence.ends_at_eos else 0

    def _release(self, sequence: Sequence) -> None:
        self._refused = False
        self.blocks.free(sequence.block_ids)
        sequence.block_ids = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue with all its tokens. What it computed stays findable until it is overwritten;
        only now is output worth hashing."""
        self._hand_over(sequence)
        sequence.num_computed = int(self._scheduled[sequence.slot])
        self._register(sequence, 0, sequence.num_computed)
        self._leave_slot(sequence)
        self._waiting.appendleft(sequence)
        self._stats.preemptions += 1

    def _complete(self, sequence: Sequence, error: RowError | None = None) -> None:
        reason, stop_reason = sequence.finish if error is None and sequence.finish else ("error", None)
        self._finished.append(
            Completion(
                sequence.request.key,
                sequence.sample,
                sequence.output(),
                reason,
                stop_reason,
                sequence.num_prompt,
                error,
            )
        )

    def _pool_too_small(self, num_tokens: int) -> RowError:
        size, total = self.settings.block_size, self.settings.num_blocks
        return RowError(
            "out_of_memory",
            f"the row has {num_tokens} tokens, which take {-(-num_tokens // size)} KV blocks of {size}; the whole pool "
            f"has {total} ({total * size} tokens); give the engine more kv_memory or the row fewer tokens",
        )

    # -- results ------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> list[Completion]:
        """Take in the oldest step in flight; what has ended since the last call."""
        flight = self._flights.popleft()
        plan = flight.plan
        assert plan.step == result.step, f"step {result.step} came back, {plan.step} was the oldest in flight"
        self._stats.steps += 1
        self._pending[flight.slots] = self._pending.take(flight.slots) - np.int32(1)
        slots, token_ids = flight.slots[plan.samples], result.token_ids
        live = self._live.take(slots)  # the others ended while this step was in flight
        if not result.finite.all():
            for slot in slots[live & ~result.finite].tolist():
                self._end_broken(self._running[slot])
            live &= result.finite
        if live.any():
            self._broken = None
        elif self._broken is not None and self._broken >= BROKEN_ROWS:
            raise ModelError(
                f"the model's logits held NaN or infinity for the first {self._broken} rows and for no row anything "
                "else: its weights are damaged, or its activations leave the range of model.dtype; try float32 or "
                "bfloat16"
            )
        self._take_in(slots[live], token_ids[live])
        self._release_ended()
        self._good_steps += 1
        if self._good_steps >= GROW_AFTER and self._budget < self.settings.max_batch_tokens:
            self._budget = min(2 * self._budget, self.settings.max_batch_tokens)
            self._good_steps = 0
        return self.take_finished()

    def _take_in(self, slots: SlotArray, token_ids: IntArray) -> None:
        """The next token of each of these. Only those that may end are looked at one by one."""
        self._stats.output_tokens += len(slots)
        places = self._known.take(slots)
        self._recent.ravel()[places + self._recent_from.take(slots)] = token_ids
        known = places + np.int32(1)
        self._known[slots] = known
        looked_at = known >= self._look_at.take(slots)
        for eos in self._eos_token_ids:
            ends = token_ids == eos
            if ends.any():
                looked_at |= ends & ~self._certain.take(slots)
        for slot, end, token_id in zip(
            slots[looked_at].tolist(), known[looked_at].tolist(), token_ids[looked_at].tolist(), strict=True
        ):
            sequence = self._running[slot]
            self._extend(sequence, end - 1)
            sequence.finish = sequence.accept(token_id)
            if sequence.finish is not None:
                self._leave_slot(sequence)
                self._complete(sequence)
                if not sequence.ends_at_limit:
                    stopped = sequence.finish[0] == "stop"
                    self._forecast.learn(sequence.num_prompt, sequence.num_output, stopped=stopped)
            else:
                self._look_again(sequence)

    def _end_broken(self, sequence: Sequence) -> None:
        for block in sequence.block_ids:  # attention may carry NaN to earlier tokens of its chunk (0 * NaN)
            self.blocks.forget(block)
        self._leave_slot(sequence)
        self._complete(sequence, _nonfinite(sequence))
        if self._broken is not None:
            self._broken += 1

    def retreat(self, plan: StepPlan) -> None:
        """The newest step did not fit into memory and never happened; all older ones are collected.

        Its samples go back to the queue in their order and the next steps have at most half its tokens. A single row
        that no smaller step can help ends with an error, and the others get the full budget back.
        """
        flight = self._flights.pop()
        assert flight.plan is plan and not self._flights
        for block in flight.registered:
            self.blocks.forget(block)
        self._scheduled[plan.slots] -= plan.lengths
        self._pending[plan.slots] -= 1
        for start in plan.slot_starts:
            self._scheduled[start.slot] = 0  # what it found in the cache may have been this step's
        sequences = [self._running[slot] for slot in plan.slots.tolist() if slot in self._running]
        for sequence in reversed(sequences):
            self._preempt(sequence)
        self._release_ended()
        self._good_steps = 0
        if len(sequences) == 1 and plan.num_tokens <= SMALLEST_STEP:
            self._complete(self._waiting.popleft(), _step_too_large(plan.num_tokens, len(sequences[0].tokens)))
            self._budget = self.settings.max_batch_tokens
        else:
            self._budget = max(1, plan.num_tokens // 2)

    def _release_ended(self) -> None:
        if self._ended:
            held = [s for s in self._ended if self._pending[s.slot]]
            for sequence in self._ended:
                if not self._pending[sequence.slot]:
                    self._release(sequence)
            self._ended = held


def _nonfinite(sequence: Sequence) -> RowError:
    return RowError(
        "nonfinite_logits",
        f"the model's logits for output token {sequence.num_output} held NaN or infinity; "
        "a wider dtype (model.dtype: float32) may help",
    )


def _step_too_large(step_tokens: int, row_tokens: int) -> RowError:
    return RowError(
        "out_of_memory",
        f"the device has no memory for a step of {step_tokens} tokens of this row alone ({row_tokens} tokens so far); "
        "lower engine.kv_memory to leave more to the model",
    )
