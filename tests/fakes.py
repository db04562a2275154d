"""Stand-ins for tests: an engine that answers from a hash of the prompt, a byte tokenizer, a store that fails."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from batchgen.bench_data import byte_tokenizer
from batchgen.engine.scheduler import EngineStats
from batchgen.io.stores import Store
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, InFlight, Request, RowKey

__all__ = ["CHATML", "Died", "FailingStore", "FakeEngine", "FakeModel", "byte_tokenizer", "fake_tokens"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fake_tokens(prompt: np.ndarray, sample: int, max_tokens: int) -> np.ndarray:
    """The fake model's whole answer: lower-case letters (as byte tokens), as many as the prompt's hash says."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt, dtype=np.int32).tobytes() + bytes([sample])).digest()
    length = min(1 + digest[0] % 24, max_tokens)
    # "a" is byte 97; the byte-level alphabet sorted puts printable ASCII first, "!" (33) at id 0
    return np.frombuffer(digest[1 : 1 + length], dtype=np.uint8).astype(np.int32) % 26 + (97 - 33)


class FakeEngine:
    """The Engine's surface without a model: `running` samples grow by `pace` tokens each step.

    `think` is called at every step: a test can sleep, kill or count there.
    """

    def __init__(self, running: int = 64, pace: int = 8, think: Callable[[], None] = lambda: None) -> None:
        self._limit, self._pace, self._think = running, pace, think
        self._waiting: list[tuple[Request, int, int]] = []
        self._running: list[tuple[Request, int, int]] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.resumed: dict[tuple[RowKey, int], np.ndarray] = {}  # tokens handed back by a checkpoint

    def add(self, request: Request) -> None:
        for sample in range(request.sampling.n):
            done = request.resume.get(sample, np.empty(0, np.int32))
            if done is not None:
                self._waiting.append((request, sample, len(done)))
                if len(done):
                    self.resumed[request.key, sample] = done
                self.prompt_tokens += len(request.prompt_token_ids)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @staticmethod
    def _answer(request: Request, sample: int) -> np.ndarray:
        limit = 4096 if request.sampling.max_tokens is None else request.sampling.max_tokens
        return fake_tokens(request.prompt_token_ids, sample, limit)

    def step(self) -> list[Completion]:
        self._think()
        room = self._limit - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]
        done, still = [], []
        for request, sample, produced in self._running:
            answer = self._answer(request, sample)
            self.output_tokens += min(self._pace, len(answer) - produced)
            if produced + self._pace < len(answer):
                still.append((request, sample, produced + self._pace))
            else:
                limit = request.sampling.max_tokens
                reason = "length" if limit is not None and len(answer) >= limit else "stop"
                done.append(Completion(request.key, sample, answer, reason, None, len(request.prompt_token_ids)))
        self._running = still
        return done

    def stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, running=self.num_running)

    def snapshot(self) -> list[InFlight]:
        return [
            InFlight(request.key, sample, self._answer(request, sample)[:produced])
            for request, sample, produced in [*self._running, *self._waiting]
            if produced
        ]


class FakeModel:
    """The Model's surface around a FakeEngine; `folder` comes from `byte_tokenizer`."""

    device, dtype = "cpu", "float32"

    def __init__(self, folder: Path, engine: FakeEngine | None = None, max_model_len: int = 4096) -> None:
        self.tokenizer_path, self.max_model_len = str(folder), max_model_len
        self.tokenizer = Tokenizer.load(folder)
        self.generation_config: dict[str, object] = {}
        self.engines: list[FakeEngine] = []
        self._engine = engine or FakeEngine()

    def fingerprint(self) -> str:
        return "fake"

    def engine(self) -> FakeEngine:
        self.engines.append(self._engine)
        return self._engine


class Died(BaseException):
    """Stands for the process's death in a test that stays in one process: no handler catches it."""


class FailingStore(Store):
    """A Store whose `at`-th writing operation fails: "before" it happens, "after" it (unacknowledged), or kills us."""

    def __init__(
        self, url: str, storage_options: dict | None = None, *, retries: int = 0, at: int = 0, how: str = "before"
    ) -> None:
        super().__init__(url, storage_options or {}, retries=retries)
        self.at, self.how, self.count = at, how, 0

    def _guard(self, operation: Callable[[], object]) -> object:
        self.count += 1
        if self.count != self.at:
            return operation()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "before":
            raise Died(f"before operation {self.count}")
        operation()
        raise Died(f"after operation {self.count}")

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._guard(lambda: super(FailingStore, self).create(name, data)))

    def replace(self, name: str, data: bytes) -> None:
        self._guard(lambda: super(FailingStore, self).replace(name, data))

    def replace_from(self, name: str, chunks: Iterable[bytes]) -> None:
        self._guard(lambda: super(FailingStore, self).replace_from(name, chunks))

    def replace_if(self, name: str, data: bytes, version: str) -> bool:
        return bool(self._guard(lambda: super(FailingStore, self).replace_if(name, data, version)))

    def delete(self, name: str) -> None:
        self._guard(lambda: super(FailingStore, self).delete(name))
