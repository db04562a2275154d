"""Whole jobs on an object store over HTTP: faults, kills and two starts at once end in one complete set of rows."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import Fault
from history import History, Reference, ended, feed_inline, let_the_dead_be_dead, make_job, uninterrupted, write_inputs
from s3 import Bucket

from batchgen.errors import ExitCode

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "in")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, inputs: Path, model_folder: Path) -> Reference:
    return uninterrupted(make_job(inputs, str(tmp_path_factory.mktemp("whole") / "out")), model_folder)


@pytest.fixture
def history(s3: Bucket, inputs: Path, model_folder: Path, reference: Reference) -> History:
    changed = {"output__storage_options": s3.storage_options, "checkpoint__interval": 0.05, "errors__retries": 2}
    a_job = make_job(inputs, s3.url, **changed)
    return History(a_job, model_folder, reference)


@pytest.mark.parametrize("how", Fault.HOWS)
def test_faults_at_some_operations(history: History, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """One fault after another in one folder, each start further than the one before."""
    feed_inline(monkeypatch)
    let_the_dead_be_dead(monkeypatch)
    chance = random.Random(how)
    for _ in range(5):
        ended(lambda: history.start(Fault(how, chance.randrange(5, 50))))
        history.check()
    history.start()
    history.check_end()


@pytest.fixture
def command(tmp_path: Path, history: History, model_folder: Path) -> list[str]:
    (tmp_path / "job.json").write_text(json.dumps(history.job.model_dump(mode="json")))
    return [sys.executable, f"{HERE}/fake_command.py", str(model_folder), "0.05", "run", str(tmp_path / "job.json")]


def launch(command: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_the_command_is_killed_twice_and_started_twice_at_once(
    history: History, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two starts at the same moment one does the work and the other ends with 75."""
    feed_inline(monkeypatch)
    chance = random.Random(0)
    for kill in range(2):
        with launch(command) as process:
            while len(history.store().list("_batchgen/epoch")) == kill:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            time.sleep(chance.random())
            process.kill()
        history.check()
    with launch(command) as one, launch(command) as other:
        said = [process.communicate(timeout=60) for process in (one, other)]
    assert sorted([one.returncode, other.returncode]) == [ExitCode.DONE, ExitCode.INTERRUPTED], said
    loser = said[one.returncode == ExitCode.DONE]
    assert json.loads(loser[0].splitlines()[-1])["reason"] == "locked"
    history.check_end()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_that_fails_is_asked_again(
    s3: Bucket, history: History, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Answers of 500 in place of the n-th write, or behind it: the job goes on as if nothing had been."""
    feed_inline(monkeypatch)
    left = {3, 4, 8, 13, 21, 26}

    def fault(request: dict) -> tuple[str, int, str] | None:
        nonlocal count
        count += request["REQUEST_METHOD"] == "PUT"
        if count in left and request["REQUEST_METHOD"] == "PUT":
            left.remove(count)
            return when, 500, "InternalError"
        return None

    count = 0
    s3.server.fault = fault
    history.start()
    s3.server.fault = lambda request: None
    assert len(left) < 4
    history.check_end()
