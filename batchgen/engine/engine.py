"""Requests in, completions out: drives scheduler and runner, one scheduling round at a time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from batchgen.engine.scheduler import EngineStats, Scheduler
from batchgen.engine.sequence import TextStream
from batchgen.engine.step import EngineSettings, OutOfMemoryStep, StepPlan, StepResult
from batchgen.errors import BatchgenError
from batchgen.types import Completion, InFlight, Request

__all__ = ["Engine", "EngineSettings", "EngineStats", "StepRunner"]


class StepRunner(Protocol):
    """What the engine needs of a runner. Handles are collected in the order in which they were submitted."""

    def submit(self, plan: StepPlan) -> Any: ...

    def sample(self, handle: Any) -> None: ...

    def collect(self, handle: Any) -> StepResult: ...


class Engine:
    """Runs requests until each of their samples is complete.

    `depth` is how many steps are open at once: 1 waits for each step, 2 prepares one while another runs. The result
    does not depend on it. `stream_factory` gives the incremental text in which stop strings are looked for.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        settings: EngineSettings,
        eos_token_ids: Iterable[int],
        stream_factory: Callable[[], TextStream],
        depth: int = 1,
    ) -> None:
        self.runner = runner
        self._scheduler = Scheduler(settings, eos_token_ids=frozenset(eos_token_ids), stream_factory=stream_factory)
        self._depth = depth
        self._handles: deque[Any] = deque()  # oldest first
        self.settings = settings

    def add(self, request: Request) -> None:
        """Queue a row; its samples come out of `step` in any order."""
        self._scheduler.add(request)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Samples that are queued, preempted ones included."""
        return self._scheduler.num_waiting

    def step(self) -> list[Completion]:
        """One scheduling round: fill the pipeline, then wait for its oldest step."""
        scheduler = self._scheduler
        while len(self._handles) < self._depth:
            plan = scheduler.plan()
            if plan is None:
                break
            try:
                handle = self.runner.submit(plan)
                self.runner.sample(handle)
            except OutOfMemoryStep:
                done = self._drain()
                scheduler.retreat(plan)
                return done + scheduler.take_finished()
            self._handles.append(handle)
        if self._handles:
            return self._collect()
        done = scheduler.take_finished()
        if not done and scheduler.has_work:
            raise BatchgenError(
                f"the engine stands still: {self.num_waiting} samples wait and {self.num_running} run, but no step can "
                f"be planned with {self.stats()}; this is a bug in the scheduler, please report it"
            )
        return done

    def _drain(self) -> list[Completion]:
        return [completion for _ in range(len(self._handles)) for completion in self._collect()]

    def _collect(self) -> list[Completion]:
        return self._scheduler.update(self.runner.collect(self._handles.popleft()))

    def snapshot(self) -> list[InFlight]:
        """The output so far of every unfinished sample that has any: what a checkpoint keeps."""
        return self._scheduler.snapshot()

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Run requests, read as they are needed, and yield completions as they come. Leaving early drops the rest."""
        source = iter(requests)
        more = True
        try:
            while more or self.has_work:
                while more and self.num_waiting < self.settings.max_num_seqs:
                    request = next(source, None)
                    if request is None:
                        more = False
                    else:
                        self.add(request)
                yield from self.step()
        except BaseException:  # the caller left, or a request could not be made: nothing of it may come out later
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Wait for the steps in flight and drop every sample. What failed may have left the runner in any state."""
        with contextlib.suppress(Exception):
            while self._handles:
                self.runner.collect(self._handles.popleft())
        self._handles.clear()
        self._scheduler.abandon()
