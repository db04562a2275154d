"""A job that crashes anywhere: nothing is lost, nothing is doubled, and the same command goes on."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fakes import CHATML, byte_tokenizer
from faults import Fault
from history import History, Reference, ended, feed_inline, let_the_dead_be_dead, make_job, uninterrupted, write_inputs

FORMATS = ("parquet", "jsonl")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("model") / "bytes", chat_template=CHATML)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "in")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, inputs: Path, model_folder: Path) -> dict[str, Reference]:
    folder = tmp_path_factory.mktemp("whole")
    return {kind: uninterrupted(make_job(inputs, f"{folder}/{kind}", kind), model_folder) for kind in FORMATS}


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_inline(monkeypatch)
    let_the_dead_be_dead(monkeypatch)


@pytest.mark.parametrize("part_format", FORMATS)
@pytest.mark.parametrize("how", Fault.HOWS)
def test_a_fault_at_any_storage_operation(
    inputs: Path, model_folder: Path, references: dict[str, Reference], how: str, part_format: str
) -> None:
    """One fault at the n-th operation of a start, reads too, for every n; then the same command again."""
    for at in range(1, 1000):
        fsspec.filesystem("memory").store.clear()
        history = History(make_job(inputs, "memory://run", part_format), model_folder, references[part_format])
        fault = Fault(how, at)
        ended(lambda: history.start(fault))  # noqa: B023 - called at once
        complete = history.check()
        if complete and not fault.met:
            assert at > 60
            return
        history.start()
        history.check_end()
    raise AssertionError("the job never ended")
