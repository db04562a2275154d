"""Two workers on one run folder, in every order that hypothesis thinks of: they stand still, die, lose their clocks,
their lease and their storage, and whatever they do, nothing acknowledged changes and nothing is lost."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import fsspec
import hypothesis.strategies as st
import pytest
import scripted_job
from faults import WRITES, Call, Died, Do, MeddledStore
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted_job import FILES, SAMPLES, Witness

from batchgen.errors import Interrupted, StorageError
from batchgen.io.stores import Store
from batchgen.lease import DEAD_AFTER_SECONDS, latest_epoch
from batchgen.runfolder import SUCCESS, lease_name, parse_part
from batchgen.types import RowKey

MACHINES = {"here": (1000.0, 0.0), "there": (5.0, 7200.0)}  # name: what its monotonic and its wall clock are ahead
SECONDS_OF_AN_OPERATION = 0.3
PATIENCE = 30.0  # real seconds, for a thread that should answer at once


class World:
    """What all workers share: the folder, the time, and which of their processes live."""

    def __init__(self, part_format: str) -> None:
        fsspec.filesystem("memory").store.clear()
        self.url = "memory://run"
        self.store = Store(self.url)
        self.witness = Witness(part_format)
        self.seconds = 0.0
        self.workers: list[Worker] = []  # by process number

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for what workers take from their machines."""
        patch.setattr("batchgen.lease.time", self)
        patch.setattr("batchgen.lease.worker", self.process)
        patch.setattr("batchgen.lease.machine", lambda: self.current().machine)
        patch.setattr("batchgen.ledger.Heart", _no_heart)
        ours = {"process_runs": self.process_runs, "now": self.now, "ThreadPoolExecutor": _InThisThread}
        for module in [module for path, module in sys.modules.items() if path.startswith("batchgen.")]:
            for name, value in ours.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)

    def finish(self) -> None:
        """One more start gets the job done, and everything is as it was promised."""
        last = Worker(self, "here", 4)
        last.go("", 1000)
        assert not last.lives
        last.judge()
        assert last.end is None, "the run cannot be finished"
        self.witness.look(self.store)
        assert self.store.exists(SUCCESS)

    def epoch(self) -> int:
        return latest_epoch(self.store, 0)

    def current(self) -> Worker:
        """The worker whose thread asks."""
        return next(worker for worker in self.workers if worker.thread is threading.current_thread())

    def process_runs(self, number: int, started: float) -> bool:
        return self.workers[number].lives

    # what the lease takes from the machine

    def monotonic(self) -> float:
        return self.seconds + MACHINES[self.current().machine][0]

    def sleep(self, seconds: float) -> None:
        def nap() -> None:
            self.seconds += seconds

        self.current().meet(Call("sleep", ""), nap)

    def now(self) -> str:
        ahead = MACHINES[self.current().machine][1]
        moment = datetime(2030, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=self.seconds + ahead)
        return moment.isoformat(timespec="seconds")

    def process(self) -> dict[str, Any]:
        worker = self.current()
        return {"host": worker.machine, "pid": worker.number, "process_started": 0.0, "machine": worker.machine}


class _Job(scripted_job.Job):
    """The scripted job; nothing is promised to it once a later start exists."""

    world: World

    @property
    def zombie(self) -> bool:
        return hasattr(self, "ledger") and self.world.epoch() > self.ledger.epoch

    @zombie.setter
    def zombie(self, value: bool) -> None:
        pass


class Worker:
    """One start in a thread that stops before each of its storage operations until `go` lets it."""

    def __init__(self, world: World, machine: str, pace: int) -> None:
        self.world, self.machine, self.number = world, machine, len(world.workers)
        self.lives, self.troubled = True, False
        self.end: BaseException | None = None
        self.rivals = [worker for worker in world.workers if worker.lives]  # at its start
        self.job = _Job(MeddledStore(world.url, meet=self.meet), world.witness)
        self.job.world, self.pace = world, pace
        self._order, self.next = "", Call("", "")
        self._may_go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, daemon=True)
        world.workers.append(self)
        self.thread.start()
        self._wait()

    def _live(self) -> None:
        try:
            self.job.run(dead_after=DEAD_AFTER_SECONDS)
        except BaseException as error:
            self.end = error
        self.lives = False
        self._stands.release()

    def _wait(self) -> None:
        assert self._stands.acquire(timeout=PATIENCE), "the worker hangs"

    def meet(self, call: Call, do: Do) -> Any:
        """In the worker's thread: stand still, then do as ordered."""
        if self._order.startswith("dies"):
            raise Died
        self.next = call
        self._stands.release()
        self._may_go.acquire()
        if self._order == "dies before":
            raise Died
        if self._order == "fails before" and call.operation != "sleep":
            raise StorageError("the store is away")
        result = do()
        self.world.seconds += SECONDS_OF_AN_OPERATION
        if call.point == "create part" and self.job.zombie:
            self._break_promises(call.name)
        if self._order == "dies after":
            raise Died
        if self._order == "fails after" and call.operation != "sleep":
            raise StorageError("timeout: nobody knows whether it was done")
        return result

    def _break_promises(self, part: str) -> None:
        """A part stands, whoever made it: what a later start saved of its rows is not in it."""
        place = parse_part(part, self.world.witness.format)
        assert place is not None
        shard = scripted_job.shards(place[0])[place[1]]
        for row in range(shard.first_row, shard.first_row + shard.num_rows):
            for sample in range(SAMPLES):
                self.world.witness.saved.pop((RowKey(place[0], row), sample), None)

    def go(self, order: str = "", steps: int = 1) -> None:
        """Let it do so many operations, in the way `order` says."""
        self.troubled |= order.startswith("fails")
        for _ in range(steps):
            if not self.lives:
                return
            self._order, scripted_job.PACE = order, self.pace
            self._may_go.release()
            self._wait()

    def go_before_write(self, number: int) -> None:
        """Let it work until the `number`-th change that it is about to make from now on."""
        while self.lives and (number := number - (self.next.operation in WRITES)) > 0:
            self.go()

    def judge(self) -> None:
        """It has ended: in a way that what happened to it explains."""
        error, latest = self.end, self.world.epoch()
        if error is None:
            assert self.world.store.exists(SUCCESS)
        elif isinstance(error, Interrupted) and error.reason == "fenced":
            assert latest > self.job.ledger.epoch, "fenced by nobody"
        elif isinstance(error, Interrupted) and error.reason == "locked":
            assert self.rivals or self.number + 1 < len(self.world.workers), "locked out by nobody"
        elif isinstance(error, StorageError):
            assert self.troubled, error
        elif not isinstance(error, Died):
            raise error


class _InThisThread:
    """Stands in for a thread pool, so that a worker is one thread."""

    def __init__(self, size: int) -> None:
        self.map = map

    def __enter__(self) -> _InThisThread:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@contextlib.contextmanager
def _no_heart(beat: Any) -> Iterator[Any]:
    yield type("Heart", (), {"check": staticmethod(lambda: None)})


def test_a_worker_wakes_up_at_any_moment_of_its_successor() -> None:
    """The first stands still before its n-th change of the folder, the second comes to its m-th, the first wakes up
    and goes on as far as it gets, the second dies, and a third must find what the second was promised."""
    chance, fenced = random.Random(0), 0
    for _ in range(150):
        with pytest.MonkeyPatch.context() as patch:
            world = World(chance.choice(["parquet", "jsonl"]))
            world.install(patch)
            first = Worker(world, "here", chance.choice([1, 4]))
            first.go_before_write(chance.randrange(1, 35))
            world.seconds += DEAD_AFTER_SECONDS + 1
            second = Worker(world, "here", chance.choice([1, 4]))
            second.go_before_write(chance.randrange(1, 40))
            world.witness.look(world.store)
            first.go("", 1000)
            first.judge()
            fenced += isinstance(first.end, Interrupted)
            world.witness.look(world.store)
            second.go("dies before")
            world.finish()
    assert fenced > 60


SLOTS = st.integers(0, 1)
POINTS = ["create epoch", "create piece", "create part", "replace lease", "delete piece", "create _SUCCESS"]


class TwoWorkers(RuleBasedStateMachine):
    """See the module's docstring."""

    @initialize(part_format=st.sampled_from(["parquet", "jsonl"]))
    def begin(self, part_format: str) -> None:
        self.world = World(part_format)
        self.workers: list[Worker | None] = [None, None]
        self.patch = pytest.MonkeyPatch()
        self.world.install(self.patch)

    def _worker(self, slot: int, machine: str = "here", pace: int = 4) -> Worker:
        """The one at work in this place; a new start where there is none."""
        worker = self.workers[slot]
        if worker is None:
            worker = self.workers[slot] = Worker(self.world, machine, pace)
        return worker

    def _look(self, slot: int) -> None:
        worker = self.workers[slot]
        if worker is not None and not worker.lives:
            self.workers[slot] = None
            worker.judge()

    @rule(slot=SLOTS, machine=st.sampled_from(list(MACHINES)), pace=st.sampled_from([1, 4]), steps=st.integers(1, 40))
    def work(self, slot: int, machine: str, pace: int, steps: int) -> None:
        self._worker(slot, machine, pace).go("", steps)
        self._look(slot)

    @rule(
        slot=SLOTS, machine=st.sampled_from(list(MACHINES)), pace=st.sampled_from([1, 4]), point=st.sampled_from(POINTS)
    )
    def work_up_to(self, slot: int, machine: str, pace: int, point: str) -> None:
        """Stop before the next operation of this kind, long enough to be taken for dead."""
        worker = self._worker(slot, machine, pace)
        worker.go()
        while worker.lives and worker.next.point != point:
            worker.go()
        self.world.seconds += DEAD_AFTER_SECONDS + 1
        self._look(slot)

    @rule(slot=SLOTS, order=st.sampled_from(["fails before", "fails after"]), steps=st.integers(1, 4))
    def storage_fails(self, slot: int, order: str, steps: int) -> None:
        self._worker(slot).go(order, steps)
        self._look(slot)

    @rule(slot=SLOTS, order=st.sampled_from(["dies before", "dies after"]))
    def crash(self, slot: int, order: str) -> None:
        self._worker(slot).go(order)
        self._look(slot)

    @rule(seconds=st.sampled_from([3.0, 31.0, 7200.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.seconds += seconds

    @rule(torn=st.booleans())
    def the_lease_is_lost(self, torn: bool) -> None:
        if torn and self.world.store.exists(lease_name(0)):
            self.world.store.replace(lease_name(0), b"{")
        else:
            self.world.store.delete(lease_name(0))

    @precondition(lambda self: self.world.store.exists(SUCCESS))
    @rule()
    def a_finished_run_stays_as_it_is(self) -> None:
        self.world.witness.complete(self.world.store)

    @invariant()
    def nothing_promised_is_broken(self) -> None:
        if hasattr(self, "world"):
            self.world.witness.look(self.world.store)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            for worker in self.workers:
                if worker is not None:
                    worker.go("dies before")
            self.world.finish()
        finally:
            self.patch.undo()


assert sum(map(sum, FILES)) == 7  # a job small enough that two workers often meet at its end

TwoWorkers.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
test_two_workers = TwoWorkers.TestCase
