"""The scheduler measured: a workload's lengths through the real scheduler, against a device that is only a formula.

Nearly every step of a large batch ends a row and lets one in, so there is nothing to jump over: each step is planned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import EngineSettings, StepPlan, StepResult
from batchgen.errors import ConfigError
from batchgen.types import Request, RowKey, SamplingParams
from batchgen.workloads import WORKLOADS, random_prompt

EOS, OTHER = 0, 1  # what the device answers; that prompts hold these ids too ends nothing
UNCERTAIN_LIMIT = 4096  # max_tokens of rows whose length the scheduler is not told
PEAK_ROWS = 10_000  # rows with which the unconstrained peak is found: the pool has filled up long before


@dataclass(frozen=True, slots=True)
class Device:
    """A step takes the longer of reading the weights and multiplying by them, and then the time to read its KV.

    The defaults are about an 8-billion-parameter model in bf16 on one large accelerator.
    """

    parameters: float = 8e9
    parameter_bytes: float = 2.0
    kv_bytes: float = 131_072.0  # of one token
    flops: float = 6e14  # per second
    bandwidth: float = 4e12  # bytes per second

    def seconds(self, num_tokens: float, context: float, steps: float = 1.0) -> float:
        """`context` is the tokens attended to, summed over rows."""
        weights = steps * self.parameters * self.parameter_bytes / self.bandwidth
        return max(weights, 2 * self.parameters * num_tokens / self.flops) + context * self.kv_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Simulation:
    """What is simulated. `blocks` None: `kv_share` of what the workload would use if the pool were without end.

    With `certain` the scheduler knows each row's length beforehand, otherwise rows end by EOS below a generous limit.
    """

    workload: str = "mixed"
    rows: int = 10_000
    certain: bool = False
    kv_share: float = 0.25
    blocks: int | None = None
    block_size: int = 16
    max_num_seqs: int | None = None
    max_batch_tokens: int = 8192
    seed: int = 0
    device: Device = Device()


def simulate(what: Simulation) -> dict[str, Any]:
    """Run all rows; what happened, in modelled seconds, and what the scheduler itself cost."""
    if what.workload not in WORKLOADS:
        raise ConfigError(f"workload {what.workload!r}: expected one of {', '.join(WORKLOADS)}")
    rows = _Rows(what)
    blocks = what.blocks
    if blocks is None:
        first = _Run(replace(what, rows=min(what.rows, PEAK_ROWS), max_num_seqs=None, certain=True), rows, None)
        first.run()
        blocks = max(1, int(first.peak * what.kv_share))
    run = _Run(what, rows, blocks)
    run.run()
    return run.found()


class _Rows:
    """Lengths of all rows, and prompts cut from one array as they are needed: a million take no memory to speak of."""

    def __init__(self, what: Simulation) -> None:
        rng = np.random.default_rng(what.seed)
        workload = WORKLOADS[what.workload]
        self.shared = random_prompt(rng, workload.shared)
        self.own, self.outputs = workload.lengths(rng, what.rows)
        self._text = random_prompt(rng, 1 << 20)
        self._starts = rng.integers(0, len(self._text) - int(self.own.max()), what.rows)

    @property
    def inputs(self) -> npt.NDArray[np.int64]:
        return self.own + len(self.shared)

    def requests(self, count: int, certain: bool) -> Iterator[Request]:
        for row in range(count):
            start = self._starts[row]
            prompt = self._text[start : start + self.own[row]].copy()
            prompt[:2] = divmod(row, 1 << 15)  # no two begin alike
            if len(self.shared):
                prompt = np.concatenate([self.shared, prompt])
            limit = int(self.outputs[row]) if certain else UNCERTAIN_LIMIT
            sampling = SamplingParams(max_tokens=limit, ignore_eos=certain)
            yield Request(RowKey(0, row), prompt, sampling, row)


class _Run:
    """One simulated job. `blocks` None: as many as all rows could ever use."""

    def __init__(self, what: Simulation, rows: _Rows, blocks: int | None) -> None:
        self._what, self._rows = what, rows
        totals = (rows.inputs + rows.outputs)[: what.rows]
        seqs = what.max_num_seqs or min(what.rows, what.max_batch_tokens)
        if blocks is None:
            blocks = int((-(-totals // what.block_size)).sum())
        self._settings = EngineSettings(
            seqs, what.max_batch_tokens, blocks, what.block_size, int(rows.inputs.max()) + UNCERTAIN_LIMIT
        )
        self._scheduler = Scheduler(self._settings, eos_token_ids=frozenset({EOS}), stream_factory=_never_called)
        self._total = np.zeros(seqs, np.int64)  # (max_num_seqs,) tokens at which the slot's row ends
        self.peak = 0  # blocks
        self._steps = self._computed = self._context = 0
        self._seconds = 0.0
        self._host: list[float] = []  # scheduler seconds of each step
        self._running: list[int] = []
        self._full_at: int | None = None  # the step from which on a row has waited for blocks
        self._empty_at = 0  # the step from which on no row waited
        self._at_empty = 0.0  # modelled time
        self._used: list[int] = []  # blocks, of each step

    def run(self) -> None:
        scheduler, settings = self._scheduler, self._settings
        requests = self._rows.requests(self._what.rows, self._what.certain)
        more = True
        clock = time.perf_counter  # process_time is a system call: 20 microseconds in a virtual machine
        while True:
            wanted = max(0, settings.max_batch_tokens // 8 - scheduler.num_waiting) if more else 0
            new = list(islice(requests, wanted))
            more = more and len(new) == wanted
            began = clock()
            for request in new:
                scheduler.add(request)
            plan = scheduler.plan()
            spent = clock() - began
            if plan is None:
                break
            self._note(plan, more)
            result = self._answer(plan)
            began = clock()
            scheduler.update(result)
            self._host.append(spent + clock() - began)
        assert not scheduler.has_work

    def _note(self, plan: StepPlan, more: bool) -> None:
        scheduler = self._scheduler
        num_tokens, context = plan.num_tokens, int((plan.starts + plan.lengths).sum())
        self._seconds += self._what.device.seconds(num_tokens, context)
        self._computed += num_tokens
        self._context += context
        self._used.append(scheduler.blocks.num_used)
        self.peak = max(self.peak, scheduler.blocks.num_used)
        self._running.append(scheduler.num_running)
        if more or scheduler.num_waiting:
            room = num_tokens < self._settings.max_batch_tokens and scheduler.num_running < self._settings.max_num_seqs
            if room and self._full_at is None:
                self._full_at = self._steps
            self._empty_at = self._steps + 1
            self._at_empty = self._seconds
        self._steps += 1

    def _answer(self, plan: StepPlan) -> StepResult:
        rows = self._rows
        for start in plan.slot_starts:
            row = start.noise_key
            self._total[start.slot] = len(rows.shared) + rows.own[row] + rows.outputs[row]
        ends = (plan.starts + plan.lengths + 1)[plan.samples]
        tokens = np.where(ends >= self._total[plan.slots[plan.samples]], EOS, OTHER).astype(np.int32)
        return StepResult(plan.step, tokens, np.ones(len(tokens), np.bool_))

    def found(self) -> dict[str, Any]:
        what, stats, steps = self._what, self._scheduler.stats(), self._steps
        full = self._full_at if self._full_at is not None else self._empty_at
        used = np.array(self._used[full : self._empty_at]) / self._settings.num_blocks
        host = np.array(self._host[: self._empty_at or None]) * 1000  # the tail is cheap
        tail = np.array(self._running[self._empty_at :])
        bound = self._lower_bound()
        return {
            "bench": "scheduler",
            **{name: value for name, value in asdict(what).items() if name not in ("blocks", "device")},
            **asdict(what.device),
            "max_num_seqs": self._settings.max_num_seqs,
            "kv_blocks": self._settings.num_blocks,
            "steps": steps,
            "mean_running": round(float(np.mean(self._running)), 1),
            "occupancy": round(float(used.mean()), 4) if len(used) else None,
            "lowest_occupancy": round(float(used.min()), 4) if len(used) else None,
            "full_steps": len(used),
            "computed_tokens": self._computed,
            "cached_tokens": stats.cached_tokens,
            "recomputed_tokens": stats.recomputed_tokens,
            "recomputed_share": round(stats.recomputed_tokens / self._computed, 5),
            "preemptions": stats.preemptions,
            "makespan_s": round(self._seconds, 2),
            "lower_bound_s": round(bound, 2),
            "makespan_ratio": round(self._seconds / bound, 4),
            "tail_s": round(self._seconds - self._at_empty, 2),
            "tail_mean_running": round(float(tail.mean()), 1) if len(tail) else 0.0,
            "scheduler_ms_per_step": round(float(host.mean()), 4),
            "scheduler_ms_per_step_p99": round(float(np.quantile(host, 0.99)), 4),
            "scheduler_us_per_row_and_step": round(
                float(1000 * host.sum() / np.sum(self._running[: self._empty_at or None])), 3
            ),
        }

    def _lower_bound(self) -> float:
        """The least time for this work on this device: as few steps as the pool, the batch or the longest row allow,
        all of them equally full, each token computed once, each prompt read once and each decode's context once."""
        rows, what, settings = self._rows, self._what, self._settings
        inputs, outputs = rows.inputs, rows.outputs
        shared = len(rows.shared)
        tokens = int((rows.own + outputs - 1).sum()) + shared
        context = int((inputs + (outputs - 1) * inputs + (outputs - 1) * outputs // 2).sum())
        held = _blocks_up_to(inputs + outputs - 1, what.block_size) - _blocks_up_to(inputs - 1, what.block_size)
        held -= shared // what.block_size * outputs
        steps = max(
            held.sum() / max(1, settings.num_blocks - shared // what.block_size),
            outputs.sum() / settings.max_num_seqs,
            tokens / settings.max_batch_tokens,
            outputs.max(),
        )
        return what.device.seconds(tokens, context, float(steps))


def _blocks_up_to(tokens: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """The blocks that a row holds at 1, 2, ... `tokens` tokens, summed up."""
    full, rest = tokens // size, tokens % size
    total: npt.NDArray[np.int64] = size * full * (full + 1) // 2 + rest * (full + 1)
    return total


def _never_called() -> Any:
    raise AssertionError("no row has a stop string")
