"""Failed rows run again: only they change, and the accounting is that of a run without failures, whatever dies."""

from __future__ import annotations

import io
import json
import shutil
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fakes import FakeEngine, FakeModel
from faults import WRITES, Died, Fault, MeddledStore
from small_job import FlakyEngine, counters_of, inline, job_of, parts_of, rows_of, start, store_of

from batchgen import cli, job
from batchgen import lease as leases
from batchgen.errors import ConfigError, DataError, Interrupted, NoInputError, StorageError, UsageError
from batchgen.feeder import Feeder
from batchgen.feeder_child import _chosen
from batchgen.io import sinks, sources
from batchgen.io.stores import Store
from batchgen.ledger import Ledger
from batchgen.retry import retry
from batchgen.types import ShardRange
from batchgen.verify import verify

__all__ = ["inline"]

FAILS = {(3, 0), (4, 0), (5, 0), (6, 0), (20, 0)}  # in three of the four shards


@pytest.fixture(autouse=True)
def one_process(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").store.clear()
    monkeypatch.setitem(Ledger.open.__func__.__kwdefaults__, "dead_after", 0.0)  # we die and live on in one process


def again(a_job, folder: Path, engine: FakeEngine | None = None, to: str | None = None, opener=Store, dead_after=0.0):
    model = FakeModel(folder, engine or FakeEngine())
    return retry(a_job, to, model_opener=lambda _: model, store_opener=opener, dead_after=dead_after)


def perfect(tmp_path: Path, folder: Path, **changes):
    """The results and counters of a run in which nothing fails."""
    a_job = job_of(tmp_path, str(tmp_path / "perfect"), **changes)
    start(a_job, folder)
    return rows_of(store_of(a_job)), counters_of(store_of(a_job))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "openai"])
@pytest.mark.parametrize("place", ["local", "memory", "s3"])
def test_the_run_is_then_as_if_nothing_had_failed(tmp_path, model_folder, kind, place, request):
    more = {"output__format": kind}
    rows, counters = perfect(tmp_path, model_folder, **more)
    url = {"local": str(tmp_path / "out"), "memory": "memory://retry", "s3": ""}[place]
    if place == "s3":
        bucket = request.getfixturevalue("s3")
        url, more["output__storage_options"] = bucket.url, bucket.storage_options
    a_job = job_of(tmp_path, url, **more)
    start(a_job, model_folder, FlakyEngine(FAILS))
    store = store_of(a_job)
    assert counters_of(store)["failed"] == {"timeout": 5}
    before = {name: store.read(name) for name in parts_of(store)}
    engine = FlakyEngine()
    summary = again(a_job, model_folder, engine)
    assert summary["retried"] == 5 and summary["rows_failed"] == 0 and summary["complete"]
    assert engine.ran == {3, 4, 5, 6, 20}
    assert rows_of(store) == rows and counters_of(store) == counters
    assert [name for name in before if store.read(name) == before[name]] == [before_last(before)]
    found = verify(store)
    assert found.ok and not found.problems and found.state == "finished"
    assert start(a_job, model_folder)["complete"]


def test_results_that_did_not_fail_stay_as_they_are(tmp_path, model_folder):
    """A good sample of a failed row is kept, though the row runs again; other rows' bytes do not change."""

    class Other(FlakyEngine):
        """Answers otherwise than the engine of the run did."""

        @staticmethod
        def _answer(request, sample):
            return FakeEngine._answer(request, sample)[:1]

    a_job = job_of(tmp_path, output__format="jsonl", sampling__n=2, sampling__temperature=1.0)
    start(a_job, model_folder, FlakyEngine({(3, 1), (8, 0), (8, 1)}))
    store = store_of(a_job)
    before = b"".join(map(store.read, parts_of(store))).split(b"\n")
    assert again(a_job, model_folder, Other())["retried"] == 2
    after = b"".join(map(store.read, parts_of(store))).split(b"\n")
    assert [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == [7, 16, 17]
    assert verify(store).ok


def test_a_parquet_part_keeps_its_schema_its_row_groups_and_every_other_value(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(sinks, "_BLOCK_BYTES", 600)  # several row groups
    changes = {"sampling__n": 2, "sampling__temperature": 1.0, "output__token_ids": True}
    a_job = job_of(tmp_path, output__shard_rows=11, **changes)
    fails = {(3, 1), (4, 0), (4, 1), (9, 0)}
    start(a_job, model_folder, FlakyEngine(fails))
    store = store_of(a_job)
    old = pq.ParquetFile(io.BytesIO(store.read(parts_of(store)[0])))
    before, shape = rows_of(store), [old.metadata.row_group(i).num_rows for i in range(old.num_row_groups)]
    assert len(shape) > 2
    again(a_job, model_folder)
    new = pq.ParquetFile(io.BytesIO(store.read(parts_of(store)[0])))
    assert new.schema_arrow.remove_metadata().equals(old.schema_arrow.remove_metadata(), check_metadata=True)
    assert [new.metadata.row_group(i).num_rows for i in range(new.num_row_groups)] == shape
    failed = {(f"0:{row}", sample) for row, sample in fails}
    for one, other in zip(before, rows_of(store), strict=True):
        assert (one == other) == ((one["id"], one["sample"]) not in failed)
    assert rows_of(store) == perfect(tmp_path, model_folder, **changes)[0]


def test_rows_are_drawn_as_the_run_drew_them(tmp_path, model_folder):
    """With parameters of their own, and defaults that the model brings."""

    class Noting(FlakyEngine):
        def add(self, request):
            drawn.setdefault(request.key.row, []).append((request.sampling, request.noise_key))
            super().add(request)

    def model(fails):
        made = FakeModel(model_folder, Noting(fails))
        made.generation_config = {"temperature": 0.7, "top_p": 0.9, "do_sample": True}
        return made

    own = pa.array(['{"seed": 5}' if row % 2 else None for row in range(6)])
    table = pa.table({"key": [f"k{row}" for row in range(6)], "text": ["text"] * 6, "own": own})
    pq.write_table(table, tmp_path / "rows.parquet")
    a_job = job_of(
        tmp_path, input__path=str(tmp_path / "rows.parquet"), sampling__column="own", sampling__defaults="model"
    )
    drawn: dict[int, list] = {}
    job.run(a_job, model_opener=lambda _: model({(1, 0), (2, 0)}))
    retry(a_job, model_opener=lambda _: model(set()))
    assert [len(drawn[row]) for row in range(6)] == [1, 2, 2, 1, 1, 1]
    assert all(first == again for row in (1, 2) for first, again in [drawn[row]]) and drawn[1][0][0].top_p == 0.9


def test_through_a_feeder_process_of_its_own(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr("batchgen.opening.Feeder", Feeder)
    a_job = job_of(tmp_path)
    start(a_job, model_folder, FlakyEngine(FAILS))
    engine = FlakyEngine()
    assert again(a_job, model_folder, engine)["rows_failed"] == 0
    assert engine.ran == {3, 4, 5, 6, 20} and verify(store_of(a_job)).ok


def test_rows_are_counted_among_those_that_a_filter_leaves():
    """Numbers have gaps there, places have none; a shard may come in several chunks."""

    def chunk(shard: int, numbers: list[int], end: bool = False) -> sources.Chunk:
        rows = [sources.Row(number, {"a": number}) for number in numbers]
        place = ShardRange(0, shard, 10 * shard, 10, 0, 0) if end else None
        return sources.Chunk(shard, rows, place, False, pa.record_batch({"a": pa.array(numbers, pa.int64())}))

    chunks = [
        chunk(0, [1, 4, 5]),
        chunk(0, [7, 9], True),
        chunk(1, [10], True),
        chunk(2, [], True),
        chunk(3, [31], True),
    ]
    wanted = {0: np.array([1, 3]), 3: np.array([0])}
    found = list(_chosen(iter(chunks), wanted))
    assert [[row.number for row in one.rows] for one in found] == [[4], [7], [], [], [31]]
    assert [one.batch["a"].to_pylist() for one in found] == [[4], [7], [], [], [31]]
    assert [one.end is not None for one in found] == [False, True, True, True, True]


def test_a_success_that_a_sleeper_wrote_meanwhile_does_not_stay(tmp_path, model_folder):
    """A worker that stood still just before its last write, and wakes up while parts are being replaced."""
    rows, counters = perfect(tmp_path, model_folder)
    a_job = job_of(tmp_path)
    start(a_job, model_folder, FlakyEngine(FAILS))
    store = store_of(a_job)
    stale = store.read("_SUCCESS")
    again(a_job, model_folder, FlakyEngine(think=lambda: store.create("_SUCCESS", stale)))
    assert rows_of(store) == rows and counters_of(store) == counters and verify(store).ok


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "openai"])
@pytest.mark.parametrize("to", [None, "new"])
def test_of_a_run_with_a_filter(tmp_path, model_folder, kind, to):
    """Its parts lack rows of their shards; the third shard has none."""
    gone = ["k2", "k4", *(f"k{row}" for row in range(12, 18)), "k19"]
    more = {"output__format": kind, "input__where": f"key not in ({', '.join(map(repr, gone))})"}
    rows, counters = perfect(tmp_path, model_folder, **more)
    assert counters["rows"] == 13
    a_job = job_of(tmp_path, **more)
    start(a_job, model_folder, FlakyEngine(FAILS))
    engine = FlakyEngine()
    end = store_of(a_job) if to is None else Store(str(tmp_path / to))
    assert again(a_job, model_folder, engine, to=None if to is None else end.url)["retried"] == 4
    assert engine.ran == {3, 5, 6, 20}
    assert rows_of(end) == rows and counters_of(end) == counters
    found = verify(end)
    assert found.ok and not found.problems


def test_workers_of_other_slots_are_fenced(tmp_path, model_folder):
    a_job = job_of(tmp_path)
    start(a_job, model_folder, FlakyEngine(FAILS))
    store = store_of(a_job)
    asleep = leases.Lease.acquire(store, 5, {}, leases.Watch(store, [5], 0.0))
    again(a_job, model_folder)
    with pytest.raises(Interrupted, match="taken over"):
        asleep.check()


def test_the_command(tmp_path, model_folder, monkeypatch):
    a_job = job_of(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(a_job.to_json()))
    model = FakeModel(model_folder, FlakyEngine())
    monkeypatch.setattr(retry, "__kwdefaults__", retry.__kwdefaults__ | {"model_opener": lambda _: model})
    called = partial(CliRunner().invoke, cli.cli, obj={"debug": False})
    nothing = called(["retry", str(file)])
    assert isinstance(nothing.exception, NoInputError) and "no run in this folder" in str(nothing.exception)
    start(a_job, model_folder, FlakyEngine(FAILS))
    done = called(["retry", str(file), "--to", str(tmp_path / "new")])
    assert done.exit_code == 0 and json.loads(done.stdout.splitlines()[-1])["retried"] == 5
    assert json.loads(called(["retry", str(file)]).stdout.splitlines()[-1])["rows_failed"] == 0
    monkeypatch.setattr("batchgen.retry.retry", lambda *_: (_ for _ in ()).throw(Interrupted("stop", "signal")))
    stopped = called(["retry", str(file)])
    assert isinstance(stopped.exception, Interrupted) and json.loads(stopped.stdout)["reason"] == "signal"


def test_rows_that_fail_again_say_why_they_failed_now(tmp_path, model_folder):
    a_job = job_of(tmp_path)
    start(a_job, model_folder, FlakyEngine(FAILS))

    class Worse(FlakyEngine):
        def _ended(self, one):
            ended = super()._ended(one)
            if ended.error is None:
                return ended
            error = type(ended.error)("out_of_memory", "too long")
            return type(ended)(ended.key, ended.sample, ended.token_ids, "error", None, ended.prompt_tokens, error)

    summary = again(a_job, model_folder, Worse({(4, 0)}))
    assert summary["rows_failed"] == 1 and counters_of(store_of(a_job))["failed"] == {"out_of_memory": 1}
    failed = [row for row in rows_of(store_of(a_job)) if row["error"]]
    assert [(row["id"], row["error"]["message"]) for row in failed] == [("0:4", "too long")]
    assert verify(store_of(a_job)).ok


def test_without_failures_nothing_is_written(tmp_path, model_folder):
    a_job = job_of(tmp_path)
    start(a_job, model_folder)
    names = {path: path.stat().st_mtime_ns for path in Path(a_job.output.path).rglob("*")}
    assert again(a_job, model_folder)["retried"] == 0
    assert again(a_job, model_folder, to=str(tmp_path / "new"))["retried"] == 0
    assert names == {path: path.stat().st_mtime_ns for path in Path(a_job.output.path).rglob("*")}
    assert not (tmp_path / "new").exists()


def test_too_many_that_fail_again_are_judged_as_in_a_run(tmp_path, model_folder):
    start(job_of(tmp_path), model_folder, FlakyEngine(FAILS))
    strict = job_of(tmp_path, errors__max_failed=1)
    with pytest.raises(DataError, match=r"2 of 22 rows have failed still.*timeout 2"):
        again(strict, model_folder, FlakyEngine({(3, 0), (20, 0)}))
    store = store_of(strict)
    assert not store.exists("_SUCCESS") and sum(row["error"] is not None for row in rows_of(store)) == 2
    assert again(strict, model_folder, FlakyEngine({(20, 0)}))["retried"] == 2
    assert store.exists("_SUCCESS") and verify(store).ok


def before_last(names) -> str:
    return sorted(names)[-2]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "openai"])
def test_a_complete_run_in_a_new_folder(tmp_path, model_folder, kind):
    more = {"output__format": kind}
    rows, counters = perfect(tmp_path, model_folder, **more)
    a_job = job_of(tmp_path, **more)
    start(a_job, model_folder, FlakyEngine(FAILS))
    old = store_of(a_job)
    before = {name: old.read(name) for name in old.list()}
    engine = FlakyEngine()
    summary = again(a_job, model_folder, engine, to=str(tmp_path / "new"))
    assert engine.ran == {3, 4, 5, 6, 20} and summary["retried"] == 5 and summary["output"].endswith("new")
    assert before == {name: old.read(name) for name in old.list()}
    new = Store(str(tmp_path / "new"))
    assert rows_of(new) == rows and counters_of(new) == counters
    assert verify(new).ok
    moved = job_of(tmp_path, str(tmp_path / "new"), **more)
    assert start(moved, model_folder)["complete"]
    with pytest.raises(ConfigError, match="complete run of this job already"):
        again(a_job, model_folder, to=str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="name a new one"):
        again(a_job, model_folder, to=str(tmp_path / "perfect"))
    with pytest.raises(ConfigError, match="folder of an input file"):
        again(a_job, model_folder, to=str(tmp_path / "in"))
    with pytest.raises(UsageError, match="own folder"):
        again(a_job, model_folder, to=str(tmp_path / "out"))


def test_where_nothing_can_be_replaced_a_new_folder_is_asked_for(tmp_path, model_folder, monkeypatch):
    a_job = job_of(tmp_path)
    start(a_job, model_folder, FlakyEngine(FAILS))
    monkeypatch.setattr(Store, "can_compare", False)
    with pytest.raises(ConfigError, match="--to NEW_FOLDER"):
        again(a_job, model_folder)
    assert store_of(a_job).exists("_SUCCESS")
    assert again(a_job, model_folder, to=str(tmp_path / "new"))["rows_failed"] == 0


def test_refusals(tmp_path, model_folder):
    with pytest.raises(NoInputError):
        again(job_of(tmp_path), model_folder)
    a_job = job_of(tmp_path)
    start(a_job, model_folder, FlakyEngine(FAILS))
    with pytest.raises(ConfigError, match="seed"):
        again(job_of(tmp_path, sampling__seed=1), model_folder)
    store = store_of(a_job)
    name = parts_of(store)[0]
    part = store.read(name)
    store.delete(name)
    store.delete("_SUCCESS")
    with pytest.raises(ConfigError, match="not complete"):
        again(a_job, model_folder)
    store.create(name, part)
    lease = leases.Lease.acquire(store, 3, {}, leases.Watch(store, [3], 0.0))
    for to in (None, str(tmp_path / "new")):
        with pytest.raises(Interrupted, match="at work on this run") as caught:
            again(a_job, model_folder, to=to, dead_after=30.0)
        assert caught.value.reason == "locked"
    lease.release()
    assert again(a_job, model_folder)["rows_failed"] == 0


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("in_place", [True, False])
def test_dies_at_every_operation_and_is_repeated(tmp_path, model_folder, how, kind, in_place, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 100.0)
    monkeypatch.setattr(leases, "process_runs", lambda pid, started: False)  # the "dead" ones were this one
    more = {"output__format": kind}
    rows, counters = perfect(tmp_path, model_folder, **more)
    first = job_of(tmp_path, str(tmp_path / "first"), **more)
    start(first, model_folder, FlakyEngine(FAILS))
    for at in range(1, 100):
        a_job = job_of(tmp_path, str(tmp_path / f"out{at}"), **more)
        shutil.copytree(first.output.path, a_job.output.path)
        to = None if in_place else str(tmp_path / f"new{at}")
        end = Store(to or a_job.output.path)
        fault = Fault(f"dies {how}", at, lambda call: call.operation in WRITES)

        def failing(url, options, retries, fault=fault, which=to or a_job.output.path):
            return MeddledStore(url, options, meet=fault) if url == which else Store(url, options)

        try:
            again(a_job, model_folder, FlakyEngine(), to, failing)
        except Died:
            assert not end.exists("_SUCCESS") or verify(end).ok
            if at % 2:  # the run completes what is there; what failed and was not replaced still has failed
                start(job_of(tmp_path, end.url, **more), model_folder)
                assert verify(end).ok and counters_of(end)["rows"] == 22
            if in_place or not end.exists("_SUCCESS"):
                again(a_job, model_folder, FlakyEngine(), to)
        assert rows_of(end) == rows and counters_of(end) == counters, at
        assert verify(end).ok
        if not fault.met:
            assert at > 8
            return


class PausingStore(Store):
    """Before its `at`-th writing operation the process stands still: `meanwhile` is called."""

    def __init__(self, url, options=None, *, retries=0, at=0, meanwhile=lambda: None):
        super().__init__(url, options or {}, retries=retries)
        self.at, self.meanwhile, self.count = at, meanwhile, 0

    def _pass(self):
        self.count += 1
        if self.count == self.at:
            self.meanwhile()

    def create(self, name, data):
        self._pass()
        return super().create(name, data)

    def replace(self, name, data):
        self._pass()
        super().replace(name, data)

    def replace_if(self, name, data, version):
        self._pass()
        return super().replace_if(name, data, version)

    def delete(self, name):
        self._pass()
        super().delete(name)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("first", ["retry", "run"])
def test_a_worker_that_stood_still_while_a_retry_was_made_changes_nothing(
    tmp_path, model_folder, kind, place, first, monkeypatch
):
    """The sleeper is stopped before its n-th write; others finish the run and retry its failures; it wakes up."""
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 100.0)
    more = {"output__format": kind}
    rows, counters = perfect(tmp_path, model_folder, **more)
    fenced = 0
    for at in range(1, 100):
        a_job = job_of(tmp_path, str(tmp_path / f"out{at}") if place == "local" else f"memory://sleep{at}", **more)
        if first == "retry":
            start(a_job, model_folder, FlakyEngine(FAILS))

        seen: dict[str, bytes] = {}

        def others(a_job=a_job, seen=seen):
            start(a_job, model_folder, FlakyEngine(FAILS))
            again(a_job, model_folder)
            assert rows_of(store_of(a_job)) == rows
            seen.update({name: store_of(a_job).read(name) for name in parts_of(store_of(a_job))})

        store = PausingStore(a_job.output.path, at=at, meanwhile=others)
        model = FakeModel(model_folder, FlakyEngine(FAILS if first == "run" else set()))
        try:
            if first == "retry":
                again(a_job, model_folder, FlakyEngine(), opener=lambda *_, retries, store=store: store)
            else:
                job.run(a_job, model_opener=lambda _, model=model: model, store_opener=lambda *_, retries, s=store: s)
        except Interrupted as error:
            assert error.reason == "fenced"
            fenced += 1
        except StorageError as error:
            assert "somebody else has changed this part" in str(error)
        if store.count < at:
            assert fenced > 3
            return
        assert seen == {name: store_of(a_job).read(name) for name in seen}, at
        again(a_job, model_folder)
        assert rows_of(store_of(a_job)) == rows and counters_of(store_of(a_job)) == counters
        assert verify(store_of(a_job)).ok
