"""What guards a run: the watchdog over a main thread that stands still, and children that outlive nobody."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import byte_tokenizer

from batchgen import spec, watchdog
from batchgen.errors import ExitCode, Interrupted
from batchgen.watchdog import Watchdog

TESTS = str(Path(__file__).parent)


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(*children: psutil.Process) -> None:
    """Within five seconds; what is not, does not outlive the test either."""
    try:
        wait_for(lambda: not any(lives(child) for child in children), 5)
    finally:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts Python processes that do not outlive the test."""
    started: list[subprocess.Popen] = []

    def run(code: str, *arguments: object, **more: object) -> subprocess.Popen:
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE} | more
        started.append(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


# -- the watchdog ------------------------------------------------------------------------------------------------------

START = """
import os, subprocess, sys, threading, time
from batchgen.watchdog import Watchdog

"""


@pytest.mark.parametrize("hang", ["os.read(os.pipe()[0], 1)", "lock.acquire()"])
def test_a_main_thread_that_hangs_is_left_with_75(python: Callable, hang: str) -> None:
    code = f"""
lock = threading.Lock()
lock.acquire()
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)

def never_comes_back():
    {hang}

with Watchdog(0.5, grace=0.2):
    never_comes_back()
"""
    process = python(START + code)
    child = psutil.Process(int(process.stdout.readline()))
    out, err = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED == 75
    assert out == '{"status":"interrupted","reason":"stalled"}\n'
    assert "no progress for 0.5 s" in err and "in never_comes_back" in err
    gone(child)


def test_a_main_thread_that_hangs_on_a_full_pipe(python: Callable) -> None:
    """Nobody reads stderr: the dump cannot be written, and the process leaves all the same."""
    code = """
with Watchdog(0.5, grace=0.2):
    while True:
        sys.stderr.write("x" * 1000)
"""
    read, write = os.pipe()
    try:
        process = python(START + code, stderr=write)
        os.close(write)
        assert process.wait(timeout=20) == 75
        assert json.loads(process.stdout.read()) == {"status": "interrupted", "reason": "stalled"}
    finally:
        os.close(read)


def test_a_stopped_process_does_not_stall(python: Callable) -> None:
    """Stopped for longer than the timeout, then going on at its own pace."""
    code = """
with Watchdog(1.5, grace=0.2) as dog:
    print("ready", flush=True)
    for _ in range(10):
        time.sleep(0.2)
        dog.touch()
print("through", flush=True)
"""
    process = python(START + code)
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "through\n", "")


def test_one_that_hangs_after_it_was_stopped_is_left(python: Callable) -> None:
    code = """
with Watchdog(1.0, grace=0.2) as dog:
    print("ready", flush=True)
    time.sleep(60)
"""
    process = python(START + code)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    continued = time.monotonic()
    assert process.wait(timeout=20) == 75
    assert time.monotonic() - continued > 0.9, "the count starts anew"


class Left:
    """Stands for leaving, which a test cannot do."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        self.event.set()


def test_one_that_is_touched_lives_on(capfd: pytest.CaptureFixture) -> None:
    left = Left()
    with Watchdog(1.5, on_stall=left, grace=0.1) as dog:
        for _ in range(25):
            time.sleep(0.1)
            dog.touch()
            dog.check()
    assert not left.event.is_set() and capfd.readouterr().err == ""


def test_a_loop_that_turns_without_progress_ends_by_itself(capfd: pytest.CaptureFixture) -> None:
    """It saves for longer than the grace, and is not disturbed."""
    left = Left()
    with (
        pytest.raises(Interrupted, match=r"no progress for 0\.3 s") as interrupted,
        Watchdog(0.3, on_stall=left, grace=0.3) as dog,
    ):
        try:
            while True:
                time.sleep(0.01)
                dog.check()
        finally:
            time.sleep(1.0)
    assert interrupted.value.reason == "stalled" and not left.event.is_set()
    assert "test_a_loop_that_turns_without_progress_ends_by_itself" in capfd.readouterr().err


def test_saving_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SAVING_SECONDS", 0.3)
    left = Left()
    with Watchdog(0.2, on_stall=left, grace=0.1) as dog:
        wait_for(lambda: dog.stalled)
        with pytest.raises(Interrupted):
            dog.check()
        assert left.event.wait(10)


def test_a_late_step_is_progress(capfd: pytest.CaptureFixture) -> None:
    """The dump is there already, but what moves is let live: and is watched on."""
    left = Left()
    with Watchdog(0.8, on_stall=left, grace=5.0) as dog:
        for _ in range(2):
            wait_for(lambda: dog.stalled)
            dog.touch()
            assert not dog.stalled
            dog.check()
    assert not left.event.is_set() and capfd.readouterr().err.count("no progress") == 2


def test_no_timeout_watches_nothing() -> None:
    with Watchdog(None) as dog:
        dog.touch()
        dog.check()
        assert not dog.stalled and not dog._thread.is_alive()


# -- children ----------------------------------------------------------------------------------------------------------

JOB = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from fakes import FakeEngine, FakeModel
from batchgen import job, spec

pause = float(sys.argv[5])

class Model(FakeModel):
    def engine(self, demand):
        if sys.argv[4] == "load":
            print("loading", flush=True)
            time.sleep(pause)
        return super().engine(demand)

def think():
    if sys.argv[4] == "run":
        print("running", flush=True)
        time.sleep(pause)

if sys.argv[4] == "feeder":  # the moment after the child's birth
    print("starting", flush=True)

a_job = spec.parse(__import__("json").loads(Path(sys.argv[1]).read_text()))
job.run(a_job, model_opener=lambda _: Model(Path(sys.argv[2]), FakeEngine(running=8, pace=2, think=think)))
"""


@pytest.mark.parametrize(("when", "said"), [("load", "loading"), ("run", "running"), ("feeder", "starting")])
def test_kill_9_leaves_no_child_and_a_restart_works(tmp_path: Path, python: Callable, when: str, said: str) -> None:
    model = byte_tokenizer(tmp_path / "model")
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(200)]}), tmp_path / "rows.parquet")
    written = {
        "model": {"path": "fake"},
        "input": {"path": str(tmp_path / "rows.parquet")},
        "prompt": {"column": "text", "chat": False},
        "sampling": {"max_tokens": 100},
        "output": {"path": str(tmp_path / "out"), "shard_rows": 16},
    }
    (tmp_path / "job.json").write_text(json.dumps(spec.parse(written).to_json()))
    arguments = (tmp_path / "job.json", model, TESTS)
    process = python(JOB, *arguments, when, 60, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == said + "\n"
    children = wait_for(lambda: psutil.Process(process.pid).children(recursive=True))
    process.kill()
    process.wait()
    gone(*children)
    again = python(JOB, *arguments, "through", 0)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert json.loads((tmp_path / "out/_SUCCESS").read_bytes())["counters"]["rows"] == 200


FEEDER = """
import sys, time
from pathlib import Path
from batchgen import feeder, spec
from batchgen.io.files import expand

without = feeder.BOOT.replace("die_with(parent)", "")
assert without != feeder.BOOT
feeder.BOOT = without
made = spec.parse(__import__("json").loads(Path(sys.argv[1]).read_text()))
files = expand(made.input.path, {}, allow_empty=False)
with feeder.Feeder(made, files, ["parquet"], sys.argv[2], 4096, {}, None, stuck_seconds=1000) as feed:
    child = feed._child
    while child._state.read()[2] < 0:  # until it is at a row
        time.sleep(0.01)
    print(child._process.pid, flush=True)
    time.sleep(60)
"""


def test_where_the_system_does_not_kill_children_they_see_it_themselves(tmp_path: Path, python: Callable) -> None:
    """Even one that renders, reads nothing and sends nothing."""
    model = byte_tokenizer(tmp_path / "model")
    pq.write_table(pa.table({"n": [99_999]}), tmp_path / "rows.parquet")
    written = {
        "model": {"path": "fake"},
        "input": {"path": str(tmp_path / "rows.parquet")},
        "prompt": {"template": "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}", "chat": False},
        "sampling": {"max_tokens": 100},
        "output": {"path": str(tmp_path / "out")},
    }
    (tmp_path / "job.json").write_text(json.dumps(spec.parse(written).to_json()))
    process = python(FEEDER, tmp_path / "job.json", model)
    child = psutil.Process(int(process.stdout.readline()))
    time.sleep(0.2)
    assert lives(child)
    process.kill()
    process.wait()
    gone(child)


@pytest.mark.parametrize("moment", ["before it asks", "after"])
def test_a_parent_that_is_gone_before_the_child_asks_for_it(python: Callable, moment: str) -> None:
    code = """
import os, sys
if os.fork() == 0:
    parent, moment = os.getppid(), sys.argv[1]
    from batchgen.lifeline import die_with
    import time
    if moment == "before it asks":
        while os.getppid() == parent:
            time.sleep(0.01)
    print(os.getpid(), flush=True)
    die_with(parent)
    print("lives", flush=True)
    time.sleep(60)
else:
    input()
"""
    process = python(code, moment, stdin=subprocess.PIPE)
    if moment == "after":
        child = psutil.Process(int(process.stdout.readline()))
        assert process.stdout.readline() == "lives\n"
        process.kill()
        gone(child)
    else:
        time.sleep(0.2)
        process.kill()
        process.wait()
        assert process.stdout.readline().strip().isdigit()
        assert process.stdout.readline() == "", "it has left without another word"
