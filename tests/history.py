"""A job that is started again and again, and a history of what was promised to it, against which its folder is held.

What storage acknowledged and what the engine made and was given is written down; `check` holds the run folder against
it after whatever happened. Every start answers in a voice of its own, so that an answer shows which start made which
of its tokens: saved ones must come back verbatim, and nothing may be mixed up.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from fakes import FIRST_LETTER, FakeEngine, FakeModel
from faults import WRITES, Call, Died, Do, Fault, MeddledStore, kind_of

from batchgen import feeder, job, spec
from batchgen.errors import BatchgenError
from batchgen.feeder_child import State, Worker
from batchgen.io.stores import Store
from batchgen.planner import EngineLike, Planner
from batchgen.types import Completion, Demand, InFlight, Request, RowKey

Sample = tuple[RowKey, int]
SAMPLES = 2


class InlineChild:
    """The feeder's child without a process of its own: a start takes milliseconds and reads in a fixed order."""

    def __init__(self, task: Any) -> None:
        self._state = State.create()
        self._batches = Worker(task, self._state).run()

    def receive(self, timeout: float | None) -> tuple[str, Any]:
        batch = next(self._batches, None)
        return ("finished", None) if batch is None else ("rows", batch)

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self._state.close()


def feed_inline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(feeder, "_Child", InlineChild)


def let_the_dead_be_dead(patch: pytest.MonkeyPatch) -> None:
    """Starts of this process that died in it do not look alive to the next one."""
    patch.setattr("batchgen.lease.process_runs", lambda pid, started: False)


def write_inputs(folder: Path) -> Path:
    """Two files, five shards of 8 rows, rows with errors, an id that repeats and two equal prompts."""
    folder.mkdir(parents=True)
    rows = [{"key": f"k{i}", "text": f"row {i} " + "x" * (i % 7)} for i in range(25)]
    rows[3] = {"key": "k3"}
    rows[9] = {"key": "k9", "text": ""}
    rows[12] = rows[11]
    lines = [orjson.dumps(row) for row in rows]
    lines[20] = b"{broken"
    folder.joinpath("a.jsonl").write_bytes(b"\n".join(lines[:17]) + b"\n")
    folder.joinpath("b.jsonl").write_bytes(b"\n".join(lines[17:]) + b"\n")
    return folder


def write_equal_inputs(folder: Path) -> Path:
    """Two files, five shards of 8 rows with six prompts in all: each is in shards that are open together and apart."""
    folder.mkdir(parents=True)
    for name, rows in (("a.jsonl", range(17)), ("b.jsonl", range(17, 40))):
        lines = [orjson.dumps({"key": f"k{i}", "text": f"prompt {i % 5 if i < 30 else 5}"}) for i in rows]
        folder.joinpath(name).write_bytes(b"\n".join(lines) + b"\n")
    return folder


def make_job(inputs: Path, out: str, part_format: str = "parquet", **changed: Any) -> spec.JobSpec:
    data: dict[str, Any] = {
        "model": {"path": "fake"},
        "input": {"path": str(inputs), "id": "key"},
        "prompt": {"column": "text", "chat": False},
        "sampling": {"max_tokens": 20, "n": SAMPLES, "temperature": 1.0},
        "output": {"path": out, "format": part_format, "columns": ["text"], "shard_rows": 8, "token_ids": True},
        "checkpoint": {"interval": 1e-9},  # at every step
        "errors": {"max_failed": 0.5, "retries": 2},  # below the faults of `faults.py`, which are not tried again
    }
    for key, value in changed.items():
        section, _, name = key.partition("__")
        data[section][name] = value
    return spec.parse(data)


def read_rows(store: Store, part_format: str) -> list[dict[str, Any]]:
    """All result rows in the order of the parts."""
    rows: list[dict[str, Any]] = []
    for name in store.list():
        if kind_of(name) == "part" and name.endswith(part_format):
            rows += rows_of(store.read(name), part_format)
    return rows


def rows_of(data: bytes, part_format: str) -> list[dict[str, Any]]:
    if part_format == "parquet":
        return pq.read_table(io.BytesIO(data)).to_pylist()
    return [orjson.loads(line) for line in data.splitlines()]


class WatchedEngine(FakeEngine):
    """Knows what it was given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.keys: set[RowKey] = set()

    def add(self, request: Request) -> None:
        self.keys.add(request.key)
        super().add(request)


class WatchedPlanner(Planner):
    """Tells the history what came out, what it gave to a checkpoint and what it was given."""

    def __init__(self, history: History, engine: EngineLike) -> None:
        super().__init__(engine)
        self._history = history

    def add(self, request: Request) -> None:
        self._history.given(request)
        super().add(request)

    def step(self, more: bool) -> list[Completion]:
        done = super().step(more)
        self._history.made(done)
        return done

    def snapshot(self) -> list[InFlight]:
        flying = super().snapshot()
        self._history.shown(flying)
        return flying


class _Model(FakeModel):
    def __init__(self, folder: Path, engine: FakeEngine, loading: float) -> None:
        super().__init__(folder, engine)
        self._loading = loading

    def engine(self, demand: Callable[[], Demand | None]) -> FakeEngine:
        time.sleep(self._loading)
        return super().engine(demand)


class Reference(NamedTuple):
    rows: list[dict[str, Any]]
    counters: dict[str, Any]


class History:
    """All starts of one job. `start` and `check` are what a test calls."""

    def __init__(self, a_job: spec.JobSpec, model_folder: Path, reference: Reference | None) -> None:
        self.job, self._model_folder, self._reference = a_job, model_folder, reference
        self.format = a_job.output.format
        self._inputs = {path: path.read_bytes() for path in sorted(Path(a_job.input.path[0]).iterdir())}
        self.voice = 0
        self._parts: dict[str, bytes] = {}
        self._saved: dict[Sample, tuple[bool, list[int]]] = {}  # (finished, tokens), acknowledged
        self._finished: dict[Sample, list[int]] = {}  # by the start that runs
        self._shown: dict[Sample, tuple[bool, list[int]]] = {}  # to its last checkpoint
        self._lock = threading.Lock()
        self.points: Counter[str] = Counter()  # storage operations that were met
        self.output_tokens = 0  # of all engines
        self._tidied = False  # the start that completed the run could clear up undisturbed
        self._journal: Path | None = None  # where a process that may be killed writes what was promised to it

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    # -- one start

    def start(
        self,
        *meets: Callable[[Call, Do], Any],
        options: job.RunOptions | None = None,
        changed: spec.JobSpec | None = None,
        loading: float = 0.0,
        **engine: Any,
    ) -> dict[str, Any]:
        """Run the job's command once; `meets` are what happens to its storage operations, the outermost first.

        Loading the model takes `loading` seconds.
        """
        self.voice = min(self.voice + 1, 25)
        self._finished, self._shown = {}, {}
        self.engine = WatchedEngine(voice=self.voice, **{"running": 8, "pace": 5} | engine)
        model = _Model(self._model_folder, self.engine, loading)

        def meet(call: Call, do: Do) -> Any:
            for outer in reversed(meets):
                do = _bound(outer, call, do)
            return self._witnessed(call, do)

        was_complete = self.store().exists("_SUCCESS")
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("batchgen.loop.Planner", partial(WatchedPlanner, self))
                summary = job.run(
                    changed or self.job,
                    options,
                    model_opener=lambda _: model,
                    store_opener=lambda url, extra, retries: MeddledStore(url, extra, retries=retries, meet=meet),
                )
            self._tidied |= not was_complete and not meets
            return summary
        finally:
            self.output_tokens += self.engine.output_tokens

    def start_process(self, journal: Path, **settings: Any) -> multiprocessing.process.BaseProcess:
        """`start` in a process of its own, which may be killed; `end_process` learns what had been promised to it."""
        self.voice = min(self.voice + 1, 25)
        self._journal = journal
        process = _processes().Process(target=_start_here, args=(self, settings))
        process.start()
        return process

    def end_process(self, process: multiprocessing.process.BaseProcess) -> int:
        """Its exit code."""
        process.join(60)
        assert process.exitcode is not None, "the process does not end"
        self.learn()
        return int(process.exitcode)

    def learn(self) -> None:
        """Take over what was promised to a process."""
        if self._journal is not None and self._journal.exists():
            for line in self._journal.read_bytes().splitlines():
                for *place, finished, tokens in json.loads(line):
                    self._saved[RowKey(*place[:2]), place[2]] = (finished, tokens)
            self._journal.unlink()
        self._journal = None

    def forget(self, part: str) -> None:
        """Somebody takes a part away."""
        del self._parts[part]
        self._saved.clear()

    def forget_all_saved(self) -> None:
        """Somebody takes pieces away."""
        self._saved.clear()

    @property
    def counters(self) -> dict[str, Any]:
        """What they come to when nothing happens."""
        assert self._reference is not None
        return self._reference.counters

    @property
    def saved_tokens(self) -> int:
        return sum(len(tokens) for _, tokens in self._saved.values())

    def _write_down(self, saved: dict[Sample, tuple[bool, list[int]]]) -> None:
        if self._journal is not None:
            line = [[*key, sample, *state] for (key, sample), state in saved.items()]
            with open(self._journal, "ab", buffering=0) as file:
                file.write(orjson.dumps(line) + b"\n")

    def store(self) -> Store:
        return Store(self.job.output.path, self.job.output.storage_options)

    # -- what was promised

    def _witnessed(self, call: Call, do: Do) -> Any:
        with self._lock:
            self.points[call.point] += 1
            shown = dict(self._shown)
        answer = do()
        if call.operation == "create" and answer:
            with self._lock:
                if kind_of(call.name) == "part":
                    assert call.data is not None
                    assert self._parts.setdefault(call.name, call.data) == call.data, f"{call.name} was created twice"
                if kind_of(call.name) == "piece":
                    self._saved |= shown
                    self._write_down(shown)
        return answer

    def given(self, request: Request) -> None:
        """A row is to be run: all that was saved of it must come along."""
        for sample in range(request.sampling.n):
            finished, tokens = self._saved.get((request.key, sample), (False, []))
            given = request.resume.get(sample, np.empty(0, np.int32))
            assert given is None or given[: len(tokens)].tolist() == tokens, f"{request.key} {sample} lost tokens"
            assert not finished or given is None, f"{request.key} {sample} was finished and is run again"

    def made(self, done: list[Completion]) -> None:
        for completion in done:
            sample = (completion.key, completion.sample)
            assert sample not in self._finished, f"{sample} ended twice"
            self._finished[sample] = completion.token_ids.tolist()

    def shown(self, flying: list[InFlight]) -> None:
        with self._lock:
            self._shown = {(one.key, one.sample): (False, one.token_ids.tolist()) for one in flying}
            self._shown |= {sample: (True, tokens) for sample, tokens in self._finished.items()}

    # -- what is there

    def check(self) -> bool:
        """The folder keeps every promise. Returns whether the run is complete."""
        store = self.store()
        there = {name: store.read(name) for name in store.list() if kind_of(name) == "part"}
        for name, data in self._parts.items():
            assert there.get(name) == data, f"{name} changed"
        for name in there.keys() - self._parts.keys():  # written without an acknowledgement: whole all the same
            assert rows_of(there[name], self.format), f"{name} holds nothing"
        self._parts |= there
        for path, data in self._inputs.items():
            assert path.read_bytes() == data, f"{path} was changed"
        if not store.exists("_SUCCESS"):
            return False
        self._check_complete(store)
        return True

    def check_end(self) -> None:
        """The run is complete, its state is tidy, and another start changes nothing."""
        assert self.check(), "not complete"
        store = self.store()
        before = {name: store.read(name) for name in store.list()}
        if self._tidied:
            assert not [name for name in before if kind_of(name) in ("piece", "trial")]

        def only_reads(call: Call, do: Do) -> Any:
            assert call.operation not in WRITES, f"{call} in a finished run"
            return do()

        assert self.start(only_reads)["status"] == "done"
        assert {name: store.read(name) for name in store.list()} == before

    def _check_complete(self, store: Store) -> None:
        success = json.loads(store.read("_SUCCESS"))
        rows = read_rows(store, self.format)
        assert self._reference is not None
        assert success["counters"] == self._reference.counters
        names = [part["name"] for part in success["parts"]]
        assert names == sorted(self._parts) and success["counters"]["results"] == len(rows)
        assert [part["bytes"] for part in success["parts"]] == [len(self._parts[name]) for name in names]
        counts = [data.count(b"\n") for data in self._inputs.values()]
        places = [(RowKey(i, row), n) for i, count in enumerate(counts) for row in range(count) for n in range(SAMPLES)]
        for sample, row, wanted in zip(places, rows, self._reference.rows, strict=True):
            assert {**row, "text": None, "token_ids": None} == {**wanted, "text": None, "token_ids": None}
            self._check_answer(sample, row, wanted["token_ids"])

    def _check_answer(self, sample: Sample, row: dict[str, Any], wanted: list[int]) -> None:
        tokens = row["token_ids"]
        finished, saved = self._saved.get(sample, (False, []))
        assert tokens[: len(saved)] == saved and (not finished or tokens == saved), f"{sample}: saved tokens changed"
        assert len(tokens) == len(wanted)
        voices = [(token - other) % 26 for token, other in zip(tokens, wanted, strict=True)]
        assert voices == sorted(voices), f"{sample}: tokens of a later start before those of an earlier one"
        if row["error"] is None:
            kept = tokens[:-1] if row["finish_reason"] == "stop" else tokens
            assert row["text"] == "".join(chr(token - FIRST_LETTER + 97) for token in kept)


def _processes() -> Any:
    """Processes forked from one that has imported everything: they start at once."""
    context = multiprocessing.get_context("forkserver")
    here = os.path.dirname(os.path.abspath(__file__))
    if here not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(here), here, os.environ.get("PYTHONPATH", "")])
    context.set_forkserver_preload(["history"])
    return context


def _start_here(history: History, settings: dict[str, Any]) -> None:
    """A process's whole life: one start, which `settings` makes meet a fault, take its time or read like a real one."""
    with open(os.devnull, "w") as nowhere, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", nowhere)
        if not settings.pop("real_feeder", False):
            feed_inline(patch)
        history.voice -= 1
        pause = settings.pop("pause", 0.0)
        point, at, how = settings.pop("fault", ("", 0, Fault.KILLS[0]))
        fault = Fault(how, at, lambda call: call.point == point)
        try:
            history.start(fault, think=lambda: time.sleep(pause), **settings)
        except BatchgenError as error:
            os._exit(error.exit_code)


def _bound(meet: Callable[[Call, Do], Any], call: Call, do: Do) -> Do:
    return lambda: meet(call, do)


def uninterrupted(a_job: spec.JobSpec, model_folder: Path, **engine: Any) -> Reference:
    """What the job comes to when nothing happens to it."""
    whole = History(a_job, model_folder, None)
    whole.voice = -1
    whole.start(**engine)
    success = json.loads(whole.store().read("_SUCCESS"))
    return Reference(read_rows(whole.store(), whole.format), success["counters"])


def ended(start: Callable[[], Any]) -> BatchgenError | Died | None:
    """How a start ended that may fail or die: None where it got through."""
    try:
        start()
    except (BatchgenError, Died) as error:
        return error
    return None
