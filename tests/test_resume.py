"""The same command again: what an earlier start did is kept, what it promised is kept verbatim, and a changed job is
refused. The cases are those that tools of this kind have failed people with."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fakes import FakeEngine, FakeModel
from faults import Call, Died, Do, Fault, kind_of, throttled
from history import History, ended, feed_inline, make_job, read_rows, uninterrupted

from batchgen import job, spec
from batchgen.errors import ConfigError, ExitCode, Interrupted, StorageError
from batchgen.io.stores import Store
from batchgen.lease import DEAD_AFTER_SECONDS
from batchgen.runfolder import decode, encode, lease_name
from batchgen.types import Completion, RowError


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_inline(monkeypatch)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def plain(count: int, note: str = "") -> list[dict[str, Any]]:
    return [{"key": f"k{i}", "text": f"row {i}" + note} for i in range(count)]


def history_of(tmp_path: Path, model_folder: Path, engine: dict[str, Any] | None = None, **changed: Any) -> History:
    """Of a job over `tmp_path/in`."""
    whole = uninterrupted(make_job(tmp_path / "in", f"{tmp_path}/whole", **changed), model_folder, **engine or {})
    return History(make_job(tmp_path / "in", f"{tmp_path}/out", **changed), model_folder, whole)


# -- interruption ------------------------------------------------------------------------------------------------------


class Interrupts:
    """Sends this process a signal at the engine's `at`-th step, and knows when that was."""

    def __init__(self, at: int, number: int = signal.SIGTERM) -> None:
        self._left, self._number, self.when = at, number, 0.0

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.when = time.monotonic()
            os.kill(os.getpid(), self._number)


def test_a_long_answer_goes_on_from_where_it_was(tmp_path: Path, model_folder: Path) -> None:
    """2,000 tokens, of which 1,500 were made before a signal came; the store takes no more than 200 kB/s."""
    write(tmp_path / "in/a.jsonl", plain(16))
    engine = {"length": 2000, "pace": 50, "running": 32}
    history = history_of(tmp_path, model_folder, engine, sampling__max_tokens=2000, checkpoint__interval=60)
    interrupts = Interrupts(31)
    end = ended(lambda: history.start(throttled(200e3), think=interrupts, **engine))
    assert isinstance(end, Interrupted) and end.reason == "signal"
    assert time.monotonic() - interrupts.when < 2
    history.check()
    history.start(**engine)
    assert {len(tokens) for tokens in history.engine.resumed.values()} == {1550}
    assert history.engine.output_tokens == 32 * 450
    history.check_end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_drain_waits_for_no_slow_part(tmp_path: Path, model_folder: Path, number: int) -> None:
    """Parts take the store a second each, and one is being written when the signal comes."""
    chance = np.random.default_rng(0)
    write(tmp_path / "in/a.jsonl", [row | {"note": chance.bytes(10_000).hex()} for row in plain(160)])
    history = history_of(tmp_path, model_folder, checkpoint__interval=60, output__columns=["note"])
    interrupts = Interrupts(12, number)
    end = ended(lambda: history.start(throttled(100e3), think=interrupts))
    assert isinstance(end, Interrupted) and end.reason == "signal"
    assert time.monotonic() - interrupts.when < 4
    history.check()
    history.start()
    history.check_end()


def test_ctrl_c_with_rows_in_flight(tmp_path: Path, model_folder: Path) -> None:
    """F12: the finished ones are kept, the others go on from where they were, none is lost or doubled."""
    write(tmp_path / "in/a.jsonl", plain(60))
    history = history_of(tmp_path, model_folder, checkpoint__interval=60)
    end = ended(lambda: history.start(think=Interrupts(7, signal.SIGINT), running=32, pace=3))
    assert isinstance(end, Interrupted) and end.exit_code == ExitCode.INTERRUPTED
    made, in_flight = history.engine.output_tokens, len(history.engine.snapshot())
    assert in_flight > 16
    history.start()
    assert len(history.engine.resumed) == in_flight
    assert made + history.engine.output_tokens == history.counters["output_tokens"]
    history.check_end()


def test_a_signal_while_a_part_is_written(tmp_path: Path, model_folder: Path) -> None:
    """F3: no half-written file has a name of ours, and rows of finished parts are not computed again."""
    write(tmp_path / "in/a.jsonl", plain(40))
    history = history_of(tmp_path, model_folder, checkpoint__interval=60)
    seen: list[str] = []

    def interrupt(call: Call, do: Do) -> Any:
        if call.point == "create part" and not seen:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            seen.extend(history.store().list())
        return do()

    end = ended(lambda: history.start(interrupt, think=lambda: time.sleep(0.01), running=4))
    assert isinstance(end, Interrupted) and seen and not [name for name in seen if name.startswith("part-")]
    there = len(read_rows(history.store(), "parquet"))
    history.check()
    history.start()
    assert {key for key, _ in history.engine.resumed} <= {key for key in history.engine.keys if key.row * 2 >= there}
    assert min(key.row for key in history.engine.keys) * 2 >= there
    history.check_end()


def test_progress_grows_however_often_it_is_killed(tmp_path: Path, model_folder: Path, dead: None) -> None:
    """F9: one file, killed again and again long before its only shard is whole; at most 1.3 times the work."""
    write(tmp_path / "in/a.jsonl", plain(400))
    history = history_of(tmp_path, model_folder, checkpoint__interval=0.1, output__shard_rows=1000)
    saved, starts, needed = 0, 0, history.counters["output_tokens"]

    def think() -> None:
        time.sleep(0.01)
        if time.monotonic() > deadline:
            raise Died

    while not history.check():
        starts += 1
        assert starts < 60
        deadline = time.monotonic() + 1.0
        ended(lambda: history.start(think=think))
        now = history.saved_tokens
        assert now > saved or history.store().exists("_SUCCESS"), "a start without progress"
        saved = now
    assert starts > 2 and history.output_tokens <= 1.3 * needed
    history.check_end()


# -- two workers -------------------------------------------------------------------------------------------------------


def age_the_lease(store: Store) -> None:
    lease = decode(store.read(lease_name(0)))
    assert lease is not None
    lease["monotonic"] -= DEAD_AFTER_SECONDS + 1
    store.replace(lease_name(0), encode(lease))


def test_a_stopped_process_wakes_up_to_a_finished_run(tmp_path: Path, model_folder: Path) -> None:
    """F17: a second start is locked out while the first lives; once it has stood still past its lease it is taken
    over, and when it wakes up it ends with 75 and changes nothing."""
    write(tmp_path / "in/a.jsonl", plain(60))
    history = history_of(tmp_path, model_folder)
    process = history.start_process(tmp_path / "journal", pause=0.05, running=4, pace=2)
    try:
        while not history.store().list("_batchgen/pieces"):
            time.sleep(0.01)
        locked = ended(history.start)
        assert isinstance(locked, Interrupted) and locked.reason == "locked" and str(process.pid) in str(locked)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        history.learn()
        age_the_lease(history.store())
        history.start()
        assert history.check()
        before = {name: history.store().read(name) for name in history.store().list()}
        os.kill(process.pid, signal.SIGCONT)
        assert history.end_process(process) == ExitCode.INTERRUPTED
    finally:
        process.kill()
    after = {name: history.store().read(name) for name in history.store().list()}
    assert {name: after.get(name) for name in before} == before
    late = sorted(after.keys() - before.keys())  # what it was about to write when it was stopped
    assert len(late) <= 1 and all(kind_of(name) == "piece" for name in late)
    for name in late:
        history.store().delete(name)
    history.check_end()


@pytest.mark.parametrize("loading", [0.0, 60.0], ids=["during the run", "while it loads"])
def test_nothing_is_left_of_a_killed_process(tmp_path: Path, model_folder: Path, loading: float) -> None:
    """E9: its children are gone within 5 s, and the run can be gone on with."""
    write(tmp_path / "in/a.jsonl", plain(30))
    history = history_of(tmp_path, model_folder)
    process = history.start_process(tmp_path / "journal", real_feeder=True, pause=0.05, loading=loading)
    children = []
    while not children and process.is_alive():
        children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.kill()
    history.end_process(process)
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert gone and not alive
    history.start()
    history.check_end()


# -- what is refused and what is not -----------------------------------------------------------------------------------


def test_rows_put_in_at_the_top(tmp_path: Path, model_folder: Path) -> None:
    """F1: the input has changed, which ends with 78 and says how. Equal prompts are two rows; a number is no prompt
    of any other row."""
    rows = [*plain(30), {"key": "n", "text": 123}, {"key": "a", "text": "twice"}, {"key": "b", "text": "twice"}]
    path = tmp_path / "in/a.jsonl"
    write(path, rows)
    history = history_of(tmp_path, model_folder)
    half = history.counters["output_tokens"] // 2
    assert isinstance(ended(lambda: history.start(options=job.RunOptions(max_output_tokens=half))), Interrupted)
    good = path.read_bytes()
    write(path, [*plain(3, "!"), *rows])
    size = path.stat().st_size
    with pytest.raises(ConfigError, match=rf"changed: .*a\.jsonl \({len(good)} bytes then, {size} now\)") as refused:
        history.start()
    assert refused.value.exit_code == ExitCode.CONFIG
    write(tmp_path / "in/b.jsonl", plain(3))
    path.write_bytes(good)
    with pytest.raises(ConfigError, match=r"added: .*b\.jsonl"):
        history.start()
    (tmp_path / "in/b.jsonl").unlink()
    history.start()
    history.check_end()
    found = read_rows(history.store(), "parquet")
    assert [row["id"] for row in found[-4:]] == ["a", "a", "b", "b"]
    assert len(found) == 66


class OtherModel(FakeModel):
    def fingerprint(self) -> str:
        return "another file under the same name"


def test_a_changed_model_is_refused_and_cosmetics_are_not(tmp_path: Path, model_folder: Path) -> None:
    """F18: what results depend on must be what it was (see test_job.py for the job's own keys); the rest may change."""
    write(tmp_path / "in/a.jsonl", plain(30))
    history = history_of(tmp_path, model_folder)
    ended(lambda: history.start(options=job.RunOptions(max_output_tokens=50)))
    with pytest.raises(ConfigError, match=r'model\.content: "fake" then, "another file under the same name" now'):
        job.run(history.job, model_opener=lambda _: OtherModel(model_folder))
    cosmetic = {"engine": {"max_num_seqs": 3}, "checkpoint": {"interval": 9}, "errors": {"max_failed": 0.9}}
    history.start(changed=spec.parse(history.job.to_json() | cosmetic))
    history.check_end()


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
def test_a_corrupt_part_is_named(tmp_path: Path, model_folder: Path, part_format: str) -> None:
    """F4: garbage in a part ends with 74 and says which; taken away, its rows are computed again."""
    write(tmp_path / "in/a.jsonl", plain(30))
    history = history_of(tmp_path, model_folder, part_format=part_format)
    history.start()
    name = f"part-00000-00001.{part_format}"
    history.store().delete("_SUCCESS")
    history.store().replace(name, b"garbage")
    with pytest.raises(StorageError, match=rf"{name}: this part is corrupt") as corrupt:
        history.start()
    assert corrupt.value.exit_code == ExitCode.IO
    history.store().delete(name)
    history.forget(name)
    history.start()
    history.check_end()


NEWEST = ["_batchgen/epoch/0", "_batchgen/lease", "_batchgen/pieces/0", "_batchgen/index", "_batchgen/inputs"]


@pytest.mark.parametrize("folder", [*NEWEST, "_batchgen/job.json"])
@pytest.mark.parametrize("bytes_left", [0, 40])
def test_the_newest_state_is_torn(tmp_path: Path, model_folder: Path, dead: None, folder: str, bytes_left: int) -> None:
    """F11: what was there before it, or the parts, say what it said."""
    write(tmp_path / "in/a.jsonl", plain(30))
    history = history_of(tmp_path, model_folder)
    ended(lambda: history.start(options=job.RunOptions(max_output_tokens=200)))
    store = history.store()
    name = max(store.list(folder), default=folder)
    store.replace(name, store.read(name)[:bytes_left])
    if "pieces" in folder:
        history.forget_all_saved()
    history.start()
    history.check_end()


class SlowRows(FakeEngine):
    """Some rows take too long."""

    def step(self) -> list[Completion]:
        late = RowError("timeout", "the row took longer than allowed")
        return [
            Completion(one.key, one.sample, one.token_ids, "error", None, one.prompt_tokens, late)
            if one.key.row % 100 == 7
            else one
            for one in super().step()
        ]


def test_rows_that_fail_stay_in_their_places(tmp_path: Path, model_folder: Path) -> None:
    """F15: 10 rows of 1,000 time out; the output has 1,000 rows, every key once, each code in its place."""
    write(tmp_path / "in/a.jsonl", plain(1000))
    a_job = make_job(tmp_path / "in", f"{tmp_path}/out", sampling__n=1, output__shard_rows=300)
    summary = job.run(a_job, model_opener=lambda _: FakeModel(model_folder, SlowRows()))
    rows = read_rows(Store(a_job.output.path), "parquet")
    assert [row["id"] for row in rows] == [f"k{i}" for i in range(1000)]
    assert [i for i, row in enumerate(rows) if row["error"] is not None] == list(range(7, 1000, 100))
    assert summary["failed"] == {"timeout": 10} and summary["rows"] == 1000


def test_what_another_writer_stages_stays(tmp_path: Path, model_folder: Path) -> None:
    """F14: a job that ends removes what it staged itself and nothing of others, in its folder or beside it."""
    write(tmp_path / "in/a.jsonl", plain(20))
    history = history_of(tmp_path, model_folder)
    staged = [tmp_path / "out/.tmp-0123-part-00000-00000.parquet", tmp_path / "other/.tmp-4567-part"]
    for path in staged:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"another writer's")
    fault = Fault("fails before", 3, lambda call: call.point == "create piece")
    assert isinstance(ended(lambda: history.start(fault)), StorageError)
    history.start()
    history.check_end()
    assert all(path.read_bytes() == b"another writer's" for path in staged)
    left = [path.name for path in (tmp_path / "out").rglob(".tmp-*")]
    assert left == [staged[0].name]
