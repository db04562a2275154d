"""The process that `bench data` measures: a real job whose engine answers at once, and what it says of itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen import job, spec, weights
from batchgen.engine.scheduler import EngineStats
from batchgen.engine.step import EngineSettings
from batchgen.io.stores import Store
from batchgen.runfolder import STATE
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, Demand, InFlight, Request

WARM = 0.1  # share of the rows after which the steady state is measured


class InstantEngine:
    """Answers whatever it is given in the next step, with the prompt's first tokens."""

    settings = EngineSettings(4096, 4096, num_blocks=0, block_size=16, max_model_len=1 << 16)

    def __init__(self, answer_tokens: int, rows: int) -> None:
        self._answer_tokens = answer_tokens
        self._warm_rows = int(rows * WARM)
        self._waiting: list[Request] = []
        self._stats = EngineStats()
        self._warm: tuple[float, int] | None = None  # when the steady state began, and the rows done by then
        self._last = (0.0, 0)
        self.rows = 0
        self.ready: float | None = None  # time of day of the first step

    def steady_rate(self) -> float | None:
        """Rows per second from the end of the warm-up to the last step; None where there was nothing between."""
        if self._warm is None or self._last[0] <= self._warm[0]:
            return None
        return (self._last[1] - self._warm[1]) / (self._last[0] - self._warm[0])

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return 0

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        self._last = (time.time(), self.rows)
        self.ready = self.ready or self._last[0]
        if self._warm is None and self.rows >= self._warm_rows:
            self._warm = self._last
        done = []
        for request in self._waiting:
            prompt = request.prompt_token_ids
            answer = prompt[: self._answer_tokens].copy()  # as an engine's own: no view that keeps a batch alive
            done.append(Completion(request.key, 0, answer, "length", None, len(prompt)))
            self._stats.prompt_tokens += len(prompt)
            self._stats.output_tokens += len(answer)
        self._waiting.clear()
        self.rows += len(done)
        return done

    def stats(self) -> EngineStats:
        return self._stats

    def snapshot(self) -> list[InFlight]:
        return []


class TokenizerOnly:
    """A model of which nothing but the tokenizer is real."""

    device, dtype = "cpu", "float32"
    generation_config: Mapping[str, Any] = {}

    def __init__(self, path: str, max_model_len: int, engine: InstantEngine) -> None:
        self.tokenizer_path, self.max_model_len = str(weights.resolve(path)), max_model_len
        self.tokenizer = Tokenizer.load(self.tokenizer_path)
        self._engine = engine

    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint()

    def engine(self, demand: Callable[[], Demand | None]) -> InstantEngine:
        return self._engine


class CountingStore(Store):
    """Counts what is written, and dies once `die_at` rows are in parts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written: Counter[str] = Counter()
        self.written_bytes: Counter[str] = Counter()
        self.die_at: int | None = None
        self._rows = 0

    def create(self, name: str, data: bytes) -> bool:
        created = super().create(name, data)
        self._count(name, data)
        if self.die_at is not None and _kind(name) == "parts":
            self._rows += _rows_of(name, data)
            if self._rows >= self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return created

    def replace(self, name: str, data: bytes) -> None:
        super().replace(name, data)
        self._count(name, data)

    def replace_if(self, name: str, data: bytes, version: str) -> bool:
        replaced = super().replace_if(name, data, version)
        self._count(name, data)
        return replaced

    def _count(self, name: str, data: bytes) -> None:
        self.written[_kind(name)] += 1
        self.written_bytes[_kind(name)] += len(data)


def _kind(name: str) -> str:
    if name.startswith("part-"):
        return "parts"
    kinds = {f"{STATE}pieces/": "pieces", f"{STATE}lease/": "heartbeats"}
    return next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), "records")


def _rows_of(name: str, data: bytes) -> int:
    if name.endswith(".parquet"):
        return int(pq.read_metadata(pa.BufferReader(data)).num_rows)
    return data.count(b"\n")


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run the job in `task` (see bench_data) and say how it went."""
    libraries = psutil.Process().memory_info().rss
    engine = InstantEngine(task["answer_tokens"], task["rows"])
    stores: list[CountingStore] = []

    def open_store(*args: Any, **options: Any) -> Store:
        store = CountingStore(*args, **options)
        store.die_at = task["die_at"]
        stores.append(store)
        return store

    summary = job.run(
        spec.parse(task["job"], where="bench data"),
        model_opener=lambda asked: TokenizerOnly(asked.model.path, task["max_model_len"], engine),
        store_opener=open_store,
    )
    cpu = os.times()
    return {
        "started": task["started"],
        "ready": engine.ready,
        "ended": time.time(),
        "rows": engine.rows + summary.get("copied", 0),  # some prompts of few tokens are equal
        "steady_rows_per_s": engine.steady_rate(),
        "libraries_bytes": libraries,
        "main_cpu_s": cpu.user + cpu.system,
        "feeder_cpu_s": cpu.children_user + cpu.children_system,
        "objects": dict(stores[0].written),
        "object_bytes": dict(stores[0].written_bytes),
        "summary": summary,
    }


if __name__ == "__main__":
    report = run(orjson.loads(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(orjson.dumps(report, option=orjson.OPT_SERIALIZE_NUMPY))
