"""A small real job with a fake engine, for tests of what is done to its run folder afterwards."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModel

from batchgen import job, opening, spec
from batchgen.feeder_child import RowBatch, State, Task, Worker
from batchgen.io.stores import Store
from batchgen.types import NO_TOKENS, Completion, RowError

ROWS, SHARD_ROWS = 22, 6  # 4 shards


class InlineFeeder:
    """The feeder's surface without a process of its own."""

    def __init__(self, spec, files, formats, model_path, max_model_len, done, limit, *, fields, only=None):
        known = {file: dict(shards) for file, shards in done.items()}
        self._task = Task(spec, tuple(files), tuple(formats), model_path, max_model_len, fields, known, limit, only)
        self.finished = False

    def __enter__(self) -> InlineFeeder:
        self._batches: Iterator[RowBatch] = Worker(self._task, State.create()).run()
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def demand(self) -> None:
        return None

    def cpu_seconds(self) -> float:
        return 0.0

    def poll(self) -> RowBatch | None:
        batch = next(self._batches, None)
        self.finished = batch is None
        return batch

    def get(self, timeout: float) -> RowBatch | None:
        return self.poll()


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.templates.timer", contextlib.nullcontext)  # wants the main thread
    monkeypatch.setattr(opening, "Feeder", InlineFeeder)


class FlakyEngine(FakeEngine):
    """Fails the samples that `fails` names: (row, sample) pairs."""

    def __init__(self, fails: set[tuple[int, int]] = frozenset(), **more: Any) -> None:
        super().__init__(**more)
        self.fails, self.ran = fails, set()

    def add(self, request):
        self.ran.add(request.key.row)
        super().add(request)

    def step(self) -> list[Completion]:
        return [self._ended(completion) for completion in super().step()]

    def _ended(self, one: Completion) -> Completion:
        if (one.key.row, one.sample) not in self.fails:
            return one
        error = RowError("timeout", "the device was away")
        return Completion(one.key, one.sample, NO_TOKENS, "error", None, one.prompt_tokens, error)


def write_input(folder: Path, count: int = ROWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"key": [f"k{i}" for i in range(count)], "text": [f"row {i} " + "x" * (i % 7) for i in range(count)]}
    )
    path = folder / "rows.parquet"
    if not path.exists():
        pq.write_table(table, path, row_group_size=5)
    return path


def job_of(tmp_path: Path, output: str | None = None, **changes: Any) -> spec.JobSpec:
    data: dict[str, Any] = {
        "model": {"path": "fake"},
        "input": {"path": str(write_input(tmp_path / "in"))},
        "prompt": {"column": "text", "chat": False},
        "sampling": {"max_tokens": 20},
        "output": {"path": output or str(tmp_path / "out"), "columns": ["key"], "shard_rows": SHARD_ROWS},
        "checkpoint": {"interval": 3600},
        "errors": {"max_failed": 100},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data.setdefault(section, {})[name] = value
    if data["output"].get("format") == "openai":
        del data["output"]["columns"]
    return spec.parse(data)


def start(a_job: spec.JobSpec, folder: Path, engine: FakeEngine | None = None) -> dict[str, Any]:
    model = FakeModel(folder, engine or FakeEngine())
    return job.run(a_job, model_opener=lambda _: model)


def store_of(a_job: spec.JobSpec) -> Store:
    return Store(a_job.output.path, a_job.output.storage_options)


def parts_of(store: Store) -> list[str]:
    return [name for name in store.list(recursive=False) if name.startswith("part-")]


def rows_of(store: Store) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in parts_of(store):
        data = store.read(name)
        if name.endswith(".parquet"):
            rows += pq.read_table(io.BytesIO(data)).to_pylist()
        else:
            rows += [orjson.loads(line) for line in data.split(b"\n")[:-1]]
    return rows


def counters_of(store: Store) -> dict[str, Any]:
    return orjson.loads(store.read("_SUCCESS"))["counters"]
