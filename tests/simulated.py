"""A runner without a model: its KV pool holds, for each position, the whole history the position was computed from, so
that a wrong block, a block reused too early or a prefix shared wrongly is seen at the step that attends to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from batchgen.engine.engine import Engine
from batchgen.engine.step import EngineSettings, OutOfMemoryStep, StepPlan, StepResult
from batchgen.types import Completion, Request, RowError

VOCAB = 12
EOS = frozenset({0})


def answer(history: bytes, noise_key: int, sample: int) -> tuple[int, bool]:
    """The next token after a history, and whether its logits were finite: the model of these tests."""
    digest = hashlib.blake2b(history + bytes([sample]) + noise_key.to_bytes(8, "little"), digest_size=4).digest()
    return digest[0] % VOCAB, digest[1] != 0


class Letters:
    """Token 1 is "b", token 2 is "c" ...; 0 has no text."""

    def push(self, token_id: int) -> str:
        return chr(97 + token_id) if token_id else ""


@dataclass
class _Slot:
    history: list[int]  # known and sampled tokens
    num_known: int  # at its start
    noise_key: int
    sample: int
    table: list[int]
    computed: int | None = None


@dataclass
class _Handle:
    plan: StepPlan
    blocks_of: dict[int, set[int]]
    result: StepResult


class SimulatedRunner:
    """Computes at submit, as a device does in its queue, but tells the tokens at collect only."""

    def __init__(
        self, settings: EngineSettings, fails: Callable[[int, StepPlan], bool] = lambda call, plan: False
    ) -> None:
        self.settings = settings
        self.plans: list[StepPlan] = []
        self._fails = fails
        self._calls = 0
        self._slots: dict[int, _Slot] = {}
        self._pool: dict[tuple[int, int], bytes] = {}  # (block, offset) -> digest of the history up to it
        self._open: list[_Handle] = []

    def submit(self, plan: StepPlan) -> _Handle:
        settings, size = self.settings, self.settings.block_size
        self._calls += 1
        self._check_shape(plan)
        in_flight = {slot for handle in self._open for slot in handle.blocks_of}
        for start in plan.slot_starts:
            assert start.slot not in in_flight, "a slot was given away while a step in flight holds it"
            assert start.num_prompt_tokens <= len(start.token_ids) < settings.max_model_len
            history = start.token_ids.tolist()
            self._slots[start.slot] = _Slot(history, len(history), start.noise_key, start.sample, [])
        for slot, first, block_ids in plan.block_appends:
            assert slot in plan.slots.tolist()
            assert first == len(self._slots[slot].table)
            assert all(0 <= block < settings.num_blocks for block in block_ids)
            self._slots[slot].table += block_ids
            assert len(set(self._slots[slot].table)) == len(self._slots[slot].table)
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True))
        fails = self._fails(self._calls, plan)
        written: set[tuple[int, int]] = set()
        for slot, start, length in rows:
            state = self._slots[slot]
            assert start == (state.computed if state.computed is not None else start)
            assert start + length <= len(state.history), "a position is computed before its token exists"
            assert start + length <= state.num_known or length == 1
            assert len(state.table) * size >= start + length
            for position in range(start, start + length):
                place = (state.table[position // size], position % size)
                assert place not in written, "two rows write the same place"
                for handle in self._open:
                    for other, blocks in handle.blocks_of.items():
                        assert other == slot or place[0] not in blocks, "a block was reused while a step reads it"
                written.add(place)
                self._pool[place] = b"torn" if fails else _digest(state.history[: position + 1])
            state.computed = start + length
        if fails:
            raise OutOfMemoryStep("injected")
        for slot, start, length in rows:
            state = self._slots[slot]
            for position in range(start + length):
                seen = self._pool.get((state.table[position // size], position % size))
                assert seen == _digest(state.history[: position + 1]), (
                    f"slot {slot} attends to a wrong key at {position}"
                )
        return _Handle(plan, {slot: set(self._slots[slot].table) for slot, _, _ in rows}, self._sample(plan))

    def sample(self, handle: _Handle) -> None:
        self._open.append(handle)
        self.plans.append(handle.plan)

    def collect(self, handle: _Handle) -> StepResult:
        assert handle is self._open.pop(0), "steps are collected out of order"
        return handle.result

    def _check_shape(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.settings.max_batch_tokens
        assert len(plan.slots) == len(plan.starts) == len(plan.lengths) == len(plan.samples)
        assert len(plan.slots) == len(set(plan.slots.tolist())) <= self.settings.max_num_seqs
        assert (plan.lengths >= 1).all()
        assert {start.slot for start in plan.slot_starts} <= set(plan.slots.tolist())

    def _sample(self, plan: StepPlan) -> StepResult:
        tokens, finite = [], []
        for slot, start, length, samples in zip(plan.slots, plan.starts, plan.lengths, plan.samples, strict=True):
            state = self._slots[int(slot)]
            assert samples == (start + length == len(state.history)), (
                "samples does not tell whether the chunk is the last"
            )
            if samples:
                token, is_finite = answer(_digest(state.history), state.noise_key, state.sample)
                state.history.append(token)
                tokens.append(token)
                finite.append(is_finite)
        return StepResult(plan.step, np.array(tokens, np.int32), np.array(finite, np.bool_))


def expected(request: Request, sample: int, settings: EngineSettings) -> Completion | None:
    """What one sample must come to, computed alone and one token at a time; None when it is not to be run."""
    sampling, prompt = request.sampling, request.prompt_token_ids.tolist()
    resumed = request.resume.get(sample, np.array([], np.int32))
    if resumed is None:
        return None
    limit = settings.max_model_len - len(prompt)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    output: list[int] = []
    pending = resumed.tolist()

    def done(reason: str, stop: str | int | None = None) -> tuple[list[int], str, str | int | None]:
        return output, reason, stop

    def run() -> tuple[list[int], str, str | int | None]:
        while True:
            if len(output) >= limit:
                return done("length")
            if pending:
                token, finite = pending.pop(0), True
            elif len(prompt) + len(output) > settings.num_blocks * settings.block_size:
                return done("out_of_memory")
            else:
                token, finite = answer(_digest(prompt + output), request.noise_key, sample)
            if not finite:
                return done("nonfinite_logits")
            output.append(token)
            if token in EOS and not sampling.ignore_eos:
                return done("stop")
            if token in sampling.stop_token_ids:
                return done("stop", token)
            text = "".join(Letters().push(token) for token in output)
            places = [(text.find(stop), index) for index, stop in enumerate(sampling.stop) if stop in text]
            if places:
                return done("stop", sampling.stop[min(places)[1]])

    if len(prompt) == 0 or len(prompt) >= settings.max_model_len:
        output, reason, stop = [], "empty_prompt" if len(prompt) == 0 else "prompt_too_long", None
    else:
        output, reason, stop = run()
    finish = reason if reason in ("stop", "length") else "error"
    completion = Completion(request.key, sample, np.array(output, np.int32), finish, stop, len(prompt))
    return completion if finish != "error" else _with_code(completion, reason)


def check(completions: list[Completion], requests: list[Request], settings: EngineSettings) -> None:
    """Every sample came out once and as it must."""
    got = {(c.key, c.sample): c for c in completions}
    assert len(got) == len(completions), "a sample came out twice"
    want = {}
    for request in requests:
        for sample in range(request.sampling.n):
            completion = expected(request, sample, settings)
            if completion is not None:
                want[request.key, sample] = completion
    assert got.keys() == want.keys()
    for key, completion in got.items():
        assert summary(completion) == summary(want[key])


def summary(completion: Completion) -> tuple[object, ...]:
    return (
        completion.key,
        completion.sample,
        completion.token_ids.tolist(),
        completion.finish_reason,
        completion.stop_reason,
        completion.prompt_tokens,
        completion.error and completion.error.code,
    )


def make(
    settings: EngineSettings, depth: int = 1, fails: Callable[[int, StepPlan], bool] = lambda call, plan: False
) -> tuple[Engine, SimulatedRunner]:
    runner = SimulatedRunner(settings, fails)
    return Engine(runner, settings=settings, eos_token_ids=EOS, stream_factory=Letters, depth=depth), runner


def run(engine: Engine) -> list[Completion]:
    completions = []
    while engine.has_work:
        completions += engine.step()
        engine._scheduler.blocks.check()
    assert engine._scheduler.blocks.num_used == 0
    assert len(engine._scheduler._free_slots) == engine.settings.max_num_seqs
    return completions


def _digest(history: list[int]) -> bytes:
    return hashlib.blake2b(np.array(history, np.int32).tobytes(), digest_size=8).digest()


def _with_code(completion: Completion, code: str) -> Completion:
    return replace(completion, error=RowError(code, ""))
