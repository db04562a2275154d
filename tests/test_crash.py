"""A job that crashes anywhere: nothing is lost, nothing is doubled, and the same command goes on."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import time
from pathlib import Path

import fsspec
import pytest
from faults import WRITES, Died, Fault
from history import (
    History,
    Reference,
    ended,
    feed_inline,
    make_job,
    uninterrupted,
    write_equal_inputs,
    write_inputs,
)
from powercut import PowerCut

from batchgen.errors import StorageError
from batchgen.io.stores import Store

FORMATS = ("parquet", "jsonl")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "in")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, inputs: Path, model_folder: Path) -> dict[str, Reference]:
    folder = tmp_path_factory.mktemp("whole")
    return {kind: uninterrupted(make_job(inputs, f"{folder}/{kind}", kind), model_folder) for kind in FORMATS}


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_inline(monkeypatch)


@pytest.mark.parametrize("part_format", FORMATS)
@pytest.mark.parametrize("how", Fault.HOWS)
def test_a_fault_at_any_storage_operation(
    inputs: Path, model_folder: Path, references: dict[str, Reference], dead: None, how: str, part_format: str
) -> None:
    """One fault at the n-th operation of a start, reads too, for every n; then the same command again."""
    for at in range(1, 1000):
        fsspec.filesystem("memory").store.clear()
        history = History(make_job(inputs, "memory://run", part_format), model_folder, references[part_format])
        fault = Fault(how, at)
        end = ended(lambda: history.start(fault))  # noqa: B023 - called at once
        assert end is None or isinstance(end, Died if how.startswith("dies") else StorageError)
        if how == "is done but not acknowledged" and fault.call is not None and fault.call.operation == "create":
            assert end is None, f"{fault.call.point} was done, and the run ended"  # it is read back
        complete = history.check()
        if complete and not fault.met:
            assert at > 60
            return
        history.start()
        history.check_end()
    raise AssertionError("the job never ended")


@pytest.mark.parametrize("how", ["dies before", "dies after"])
def test_a_fault_while_equal_rows_wait_for_each_other(tmp_path: Path, model_folder: Path, dead: None, how: str) -> None:
    """Greedy rows that follow another one: each comes out once, whenever the start ends, and what was saved of any
    stays as it was. A third start meets a fault too, when the second has made tokens of its own."""
    inputs = write_equal_inputs(tmp_path / "in")
    greedy = {"sampling__temperature": 0.0}
    reference = uninterrupted(make_job(inputs, f"{tmp_path}/whole", **greedy), model_folder)
    for at in range(1, 1000, 6):
        fsspec.filesystem("memory").store.clear()
        history = History(make_job(inputs, "memory://run", **greedy), model_folder, reference)
        faults = [Fault(how, at), Fault(how, 20 + 7 * at % 60)]
        for fault, running in zip(faults, (6, 1), strict=True):  # what six have begun waits for a turn
            ended(lambda: history.start(fault, running=running, pace=2))  # noqa: B023 - called at once
            complete = history.check()
            assert len(history.engine.keys) <= 6
        if complete and not faults[0].met:
            assert at > 60
            return
        history.start()
        history.check_end()
    raise AssertionError("the job never ended")


# -- power cuts --------------------------------------------------------------------------------------------------------

KEPT = {"nothing more": 0.0, "some more": 0.5, "nearly everything": 0.9}  # of what was not fsynced


def test_what_the_disk_acknowledged_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation of a store, cut off at each system call: before it is acknowledged the old or the new, then the
    new; and never anything torn under a name of ours."""
    work = [
        ("create", "a/b/one", b"one" * 9),
        ("create", "a/b/one", b"other"),
        ("create", "a/two", b"two" * 9),
        ("replace", "a/two", b"second" * 9),
        ("replace", "three", b"three" * 9),
        ("delete", "a/b/one"),
        ("create", "a/b/one", b"again" * 9),
        ("delete", "three"),
    ]
    chance = random.Random(0)
    for at in range(1, 1000):
        for after, share in itertools.product((False, True), KEPT.values()):
            folder = tmp_path / f"{at}-{after}-{share}"
            disk = PowerCut(folder, at, after)
            promised: dict[str, bytes] = {}
            doing: tuple[str, bytes | None] | None = None
            with monkeypatch.context() as patch:
                disk.install(patch)
                store = Store(str(folder))
                try:
                    for operation, name, *data in work:
                        doing = (name, data[0] if data else None)
                        answer = getattr(store, operation)(name, *data)
                        if operation == "delete":
                            promised.pop(name, None)
                        elif answer is not False:
                            promised[name] = data[0]
                        doing = None
                except Died:
                    pass
            found = Store(str(disk.after(tmp_path / "next", lambda share=share: chance.random() < share)))
            there = {name: found.read(name) for name in found.list()}
            if doing is not None and there.get(doing[0]) == doing[1]:  # nobody knew yet
                promised.pop(doing[0], None)
                there.pop(doing[0], None)
            assert there == promised, f"cut {'after' if after else 'before'} call {at}, in {doing}"
            shutil.rmtree(tmp_path / "next")
        if not disk.met:
            assert at > 40
            return
    raise AssertionError("the work never ended")


@pytest.mark.parametrize("part_format", FORMATS)
@pytest.mark.parametrize("kept", KEPT)
def test_a_power_cut_at_any_system_call(
    tmp_path: Path,
    inputs: Path,
    model_folder: Path,
    references: dict[str, Reference],
    monkeypatch: pytest.MonkeyPatch,
    dead: None,
    kept: str,
    part_format: str,
) -> None:
    """A job loses power twice, the second time when it had gone on from what the first time left of it."""
    chance, out = random.Random(f"{kept} {part_format}"), tmp_path / "out"
    for first in range(1, 2000, 23):
        history = History(make_job(inputs, str(out), part_format), model_folder, references[part_format])
        met: list[bool] = []
        for at in (first, chance.randrange(1, 150)):
            disk = PowerCut(out, at, after=chance.random() < 0.5)
            with monkeypatch.context() as patch:
                disk.install(patch)
                ended(history.start)
            met.append(disk.met)
            disk.after(tmp_path / "next", lambda: chance.random() < KEPT[kept])
            shutil.rmtree(out)
            (tmp_path / "next").rename(out)
            history.check()
            if not disk.met:
                break
        history.start()
        history.check_end()
        shutil.rmtree(out)
        if not met[0]:
            assert first > 100
            return
    raise AssertionError("the job never ended")


@pytest.mark.parametrize("names", [("a/b/one",), *itertools.permutations(["a/b/one", "a/two", "three"])])
def test_a_power_cut_after_a_process_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """What a dead process had not fsynced must not take along what the next one acknowledged."""
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        disk = PowerCut(folder, at)
        with monkeypatch.context() as patch:
            disk.install(patch)
            for _ in range(2):
                store = Store(str(folder))
                try:
                    for name in names:
                        store.create(name, name.encode())
                except Died:
                    disk.next_process()
        found = Store(str(disk.after(tmp_path / "next")))
        there = {name: found.read(name) for name in found.list()}
        assert there == {name: name.encode() for name in names}, f"the process died before call {at}"
        shutil.rmtree(tmp_path / "next")
        if disk.count < at:
            return
    raise AssertionError("the work never ended")


# -- kill -9 -----------------------------------------------------------------------------------------------------------

POINTS = {f"create {kind}" for kind in ("job", "inputs", "epoch", "index", "piece", "part", "_SUCCESS")} | {
    "replace lease",
    "delete piece",
}


@pytest.mark.parametrize("part_format", FORMATS)
def test_kill_9_at_every_point(
    tmp_path: Path, inputs: Path, model_folder: Path, references: dict[str, Reference], part_format: str
) -> None:
    """A process is killed before and after each kind of write, at the first and at a later one of its kind."""
    whole = History(make_job(inputs, f"{tmp_path}/whole", part_format), model_folder, references[part_format])
    whole.start()
    points = {point: count for point, count in whole.points.items() if point.split()[0] in WRITES}
    assert points.keys() >= POINTS
    for (point, count), how in itertools.product(points.items(), Fault.KILLS):
        out = f"{tmp_path}/{point} {how}"
        history = History(make_job(inputs, out, part_format), model_folder, references[part_format])
        for at in sorted({1, (count + 1) // 2}):
            killed = history.start_process(tmp_path / "journal", fault=(point, at, how))
            code = history.end_process(killed)
            assert code == -signal.SIGKILL or (code == 0 and at > 1), f"{point} {at} {how}"
            history.check()
        history.start()
        history.check_end()


def test_kill_9_at_random_times(
    tmp_path: Path, inputs: Path, model_folder: Path, references: dict[str, Reference]
) -> None:
    """With the real feeder process, again and again until a start gets through."""
    chance, kills, code = random.Random(7), 0, -signal.SIGKILL
    history = History(make_job(inputs, f"{tmp_path}/out"), model_folder, references["parquet"])
    while code == -signal.SIGKILL:
        starts = len(history.store().list("_batchgen/epoch"))
        process = history.start_process(tmp_path / "journal", real_feeder=True, pause=0.01, running=4, pace=2)
        while process.is_alive() and len(history.store().list("_batchgen/epoch")) == starts:
            time.sleep(0.01)
        process.join(chance.random() * (0.3 + kills / 10))
        process.kill()
        code = history.end_process(process)
        kills += code == -signal.SIGKILL
        assert kills < 40, "no progress under kills"
        history.check()
    assert code == 0 and kills
    history.check_end()
