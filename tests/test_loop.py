"""The loop under special loads: rows that take very long, shards that do not fit into memory, limits and filters."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModel, byte_tokenizer
from test_job import job_of, results, start, write_rows

from batchgen import job, loop
from batchgen.errors import Interrupted
from batchgen.types import Completion, RowKey


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("model") / "bytes")


class Stragglers(FakeEngine):
    """Rows that `is_slow` picks end only when `count` of them are held, or after a while in which nothing comes."""

    def __init__(self, is_slow: Callable[[RowKey], bool], count: int) -> None:
        super().__init__()
        self._is_slow, self._count = is_slow, count
        self._held: list[Completion] = []
        self._last_news = time.monotonic()
        self.most_held = 0

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._held)

    def step(self) -> list[Completion]:
        done = super().step()
        if done:
            self._last_news = time.monotonic()
        self._held += [one for one in done if self._is_slow(one.key)]
        self.most_held = max(self.most_held, len(self._held))
        done = [one for one in done if not self._is_slow(one.key)]
        if len(self._held) == self._count or time.monotonic() - self._last_news > 10:
            done, self._held = done + self._held, []
        return done


@pytest.mark.parametrize("source", ["rows.parquet", "rows.jsonl"])
def test_a_straggler_in_every_shard_holds_up_neither_reading_nor_memory(
    tmp_path: Path, model_folder: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"row {i} " + "x" * 200 for i in range(2000)]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / source
    table = pa.table({"key": [f"k{i}" for i in range(2000)], "text": texts})
    if source.endswith("parquet"):
        pq.write_table(table, path, row_group_size=100)
    else:
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in table.to_pylist()))
    plain = job_of(tmp_path, path, output__path=str(tmp_path / "plain"), output__columns=["text"])
    start(plain, FakeModel(model_folder))

    sizes = []
    monkeypatch.setattr(loop, "MAX_OPEN_BYTES", 64 << 10)
    engine = Stragglers(lambda key: key.row % 16 == 3, 125)
    drop = loop.Collector.drop

    def spy(self: loop.Collector, size: int) -> None:
        drop(self, size)
        sizes.append(self.size)

    monkeypatch.setattr(loop.Collector, "drop", spy)
    held = job_of(tmp_path, path, output__path=str(tmp_path / "held"), output__columns=["text"])
    start(held, FakeModel(model_folder, engine))
    assert engine.most_held == 125, "reading stopped for the sake of rows that take long"
    assert sizes and max(sizes) <= 40 << 10
    assert results(held) == results(plain)


def test_a_shard_larger_than_the_bound_is_finished(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_OPEN_BYTES", 8 << 10)
    a_job = job_of(tmp_path, write_rows(tmp_path / "in", 600), output__shard_rows=1000)
    assert start(a_job, FakeModel(model_folder))["rows"] == 600
    assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in range(600)]


class Standing(FakeEngine):
    """Answers some rows, then turns without getting anywhere."""

    steps = 0

    def step(self) -> list[Completion]:
        self.steps += 1
        if self.steps > 3:
            time.sleep(0.01)
            return []
        return super().step()


def test_an_engine_that_gets_nowhere_is_ended_with_its_work_saved(
    tmp_path: Path, model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """E7: no progress for a while ends with 75 and the stacks of all threads, and the job can be gone on with."""
    a_job = job_of(tmp_path, write_rows(tmp_path / "in", 100), errors__stall_timeout=3.0, checkpoint__interval="1h")
    with pytest.raises(Interrupted, match=r"no progress for 3 s") as stopped:
        start(a_job, FakeModel(model_folder, Standing(pace=2)))
    assert stopped.value.reason == "stalled"
    assert "loop.py" in capfd.readouterr().err
    again = FakeEngine()
    assert start(a_job, FakeModel(model_folder, again))["rows"] == 100
    assert again.resumed, "tokens of rows in flight were not saved"
    assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in range(100)]


class Dying(FakeEngine):
    """Answers some rows, then its GPU is gone."""

    steps = 0

    def step(self) -> list[Completion]:
        self.steps += 1
        if self.steps > 3:
            raise Interrupted("the GPU was lost", reason="device")
        return super().step()


def test_a_lost_device_ends_the_start_with_its_work_saved(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path / "in", 100), checkpoint__interval="1h")
    with pytest.raises(Interrupted, match="the GPU was lost"):
        start(a_job, FakeModel(model_folder, Dying(pace=2)))
    again = FakeEngine()
    assert start(a_job, FakeModel(model_folder, again))["rows"] == 100
    assert again.resumed, "tokens of rows in flight were not saved"


def test_a_spot_notice_drains(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path / "in", 400))
    monkeypatch.setattr(job.SpotWatch, "__enter__", lambda self: self)
    monkeypatch.setattr(job.SpotWatch, "__exit__", lambda self, *exc: None)
    steps = iter(range(10**6))
    monkeypatch.setattr(
        job.SpotWatch, "notice", property(lambda self: "AWS spot: terminate" if next(steps) > 3 else None)
    )
    engine = FakeEngine(think=lambda: time.sleep(0.01))
    with pytest.raises(Interrupted, match="AWS spot: terminate: progress is saved") as stopped:
        start(a_job, FakeModel(model_folder, engine), job.RunOptions(spot="aws"))
    assert stopped.value.reason == "spot"
    assert start(a_job, FakeModel(model_folder))["rows"] == 400


def test_rows_that_need_no_engine_wait_for_the_writer(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed rows never reach the engine; with a slow store behind the writer they must not pile up in memory."""
    monkeypatch.setattr(loop, "MAX_OPEN_BYTES", 64 << 10)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"key": f"k{i}", "carried": "x" * 500}) + b"\n" for i in range(4000)))
    write = loop.PartWriter.write
    monkeypatch.setattr(loop.PartWriter, "write", lambda *given: (time.sleep(0.02), write(*given))[1])
    largest, add = 0, loop.Collector.add

    def watched(self: loop.Collector, batch: object) -> None:
        nonlocal largest
        add(self, batch)  # type: ignore[arg-type]
        largest = max(largest, self.size)

    monkeypatch.setattr(loop.Collector, "add", watched)
    a_job = job_of(tmp_path, path, output__columns=["carried"], errors__max_failed=4000)
    assert start(a_job, FakeModel(model_folder))["rows_failed"] == 4000
    assert largest < (64 << 10) + 512 * 1000  # the bound, and a few batches


def test_bad_rows_that_stand_together_do_not_end_a_good_job(tmp_path: Path, model_folder: Path) -> None:
    """A share of failed rows is one of all rows, those that are not read yet included."""
    path = tmp_path / "rows.jsonl"
    bad = [{"key": f"k{i}", "other": "x" * 20} for i in range(60)]
    good = [{"key": f"k{i}", "text": "fine" + "x" * 20} for i in range(60, 6000)]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in [*bad, *good]))
    slow = FakeEngine(running=200, think=lambda: time.sleep(0.001))
    assert start(job_of(tmp_path, path, errors__max_failed=0.02), FakeModel(model_folder, slow))["rows_failed"] == 60


def test_filtered_rows_count_against_the_limit(tmp_path: Path, model_folder: Path) -> None:
    """A limit is one of input rows, whether or not a filter lets any of them through."""
    for name, first in (("a.jsonl", 100), ("b.jsonl", 0)):
        write_rows(tmp_path / "in", 10, name, start=first)
    for where, limit, kept in (
        ('key == "k0"', 7, []),
        ('key == "k0"', 11, ["k0"]),
        ('key == "k103"', 7, ["k103"]),
        ('key == "k109"', 7, []),
    ):
        a_job = job_of(tmp_path, tmp_path / "in", input__where=where, output__path=str(tmp_path / f"{where}{limit}"))
        summary = start(a_job, FakeModel(model_folder), job.RunOptions(limit=limit))
        assert summary["rows"] == len(kept), (where, limit)
        assert start(a_job, FakeModel(model_folder))["rows"] == 1


def test_shards_that_a_filter_empties_are_progress(tmp_path: Path, model_folder: Path) -> None:
    """The watchdog must not take a run for dead whose rows are all dropped, or all wait for the writer."""
    a_job = job_of(
        tmp_path,
        write_rows(tmp_path / "in", 3000, "rows.jsonl"),
        input__where='key == "k2999"',
        errors__stall_timeout=0.7,
        output__shard_rows=100,
    )
    write = loop.PartWriter.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.PartWriter, "write", lambda *given: (time.sleep(0.1), write(*given))[1])
        assert start(a_job, FakeModel(model_folder))["rows"] == 1


@pytest.mark.parametrize("slow", ["input", "model"])
def test_time_without_rows_to_work_on_is_told(
    tmp_path: Path, model_folder: Path, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path / "in", 600, "rows.jsonl"))
    if slow == "input":
        receive, began = loop.Feeder._receive, time.monotonic()

        def late(self: loop.Feeder, timeout: float | None) -> object:
            time.sleep(timeout or 0.0)
            return receive(self, 0.0) if time.monotonic() - began > 1.5 else None

        monkeypatch.setattr(loop.Feeder, "demand", lambda self: None)
        monkeypatch.setattr(loop.Feeder, "_receive", late)
        engine = FakeEngine(running=600)
    else:
        engine = FakeEngine(running=16, think=lambda: time.sleep(0.02))
    summary = start(a_job, FakeModel(model_folder, engine))
    assert summary["rows"] == 600 and 0 < summary["startup_seconds"] < summary["seconds"]
    waited = summary["waiting_share"] * summary["seconds"]
    assert waited > 0.5 if slow == "input" else summary["waiting_share"] < 0.02


def test_ids_that_repeat_in_different_shards_are_warned_of(
    tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.parquet", "b.parquet"):
        write_rows(tmp_path / "in", 40, name)
    start(job_of(tmp_path, tmp_path / "in"), FakeModel(model_folder))
    assert caplog.text.count("ids repeat in column key") == 1


def test_a_signal_that_somebody_swallowed_still_ends_the_start(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a run is opened, foreign code may take the exception for a failure of its own."""
    opened = []

    def opener(spec: object) -> FakeModel:
        with contextlib.suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        opened.append(FakeModel(model_folder))
        return opened[0]

    with pytest.raises(Interrupted, match="SIGTERM received before the first step"):
        job.run(job_of(tmp_path, write_rows(tmp_path / "in", 10)), model_opener=opener)
    assert not opened[0].engines
