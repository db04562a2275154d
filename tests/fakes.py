"""Stand-ins for tests: an engine that answers from a hash of the prompt, a byte tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from batchgen.bench_data import byte_tokenizer
from batchgen.engine.scheduler import EngineStats
from batchgen.engine.step import EngineSettings
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, Demand, InFlight, Request, RowKey

__all__ = ["CHATML", "FIRST_LETTER", "FakeEngine", "FakeModel", "byte_tokenizer", "fake_tokens"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# "a" is byte 97; the byte-level alphabet sorted puts printable ASCII first, "!" (33) at id 0
FIRST_LETTER = 97 - 33


def fake_tokens(prompt: np.ndarray, sample: int, max_tokens: int) -> np.ndarray:
    """The fake model's whole answer: lower-case letters (as byte tokens), as many as the prompt's hash says."""
    digest = hashlib.blake2b(np.ascontiguousarray(prompt, dtype=np.int32).tobytes() + bytes([sample])).digest()
    length = min(1 + digest[0] % 24, max_tokens)
    return np.frombuffer(digest[1 : 1 + length], dtype=np.uint8).astype(np.int32) % 26 + FIRST_LETTER


class FakeEngine:
    """The Engine's surface without a model: `running` samples grow by `pace` tokens each step.

    `think` is called at every step: a test can sleep, kill or count there. `voice` shifts the letters of every token
    that this engine makes, so that an answer tells which start made which part of it; lengths stay the same.
    `length` is that of every answer, where it is given.
    """

    def __init__(
        self,
        running: int = 64,
        pace: int = 8,
        think: Callable[[], None] = lambda: None,
        voice: int = 0,
        length: int | None = None,
    ) -> None:
        self._limit, self._pace, self._think, self._voice, self._length = running, pace, think, voice, length
        self.settings = EngineSettings(running, running, num_blocks=1024, block_size=4, max_model_len=4096)
        self._waiting: list[tuple[Request, int, np.ndarray]] = []  # with the tokens made so far
        self._running: list[tuple[Request, int, np.ndarray]] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.resumed: dict[tuple[RowKey, int], np.ndarray] = {}  # tokens handed back by a checkpoint

    def add(self, request: Request) -> None:
        for sample in range(request.sampling.n):
            done = request.resume.get(sample, np.empty(0, np.int32))
            if done is not None:
                self._waiting.append((request, sample, done))
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

    def answer(self, request: Request, sample: int) -> np.ndarray:
        """The whole answer, in this engine's voice."""
        limit = 4096 if request.sampling.max_tokens is None else request.sampling.max_tokens
        tokens = fake_tokens(request.prompt_token_ids, sample, limit)
        if self._length is not None:
            tokens = np.resize(tokens, min(self._length, limit))
        return (tokens - FIRST_LETTER + self._voice) % 26 + FIRST_LETTER

    def step(self) -> list[Completion]:
        self._think()
        room = self._limit - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]
        done, still = [], []
        for request, sample, before in self._running:
            answer = self.answer(request, sample)
            more = answer[len(before) : len(before) + self._pace]
            self.output_tokens += len(more)
            made = np.concatenate([before, more])
            if len(made) < len(answer):
                still.append((request, sample, made))
            else:
                limit = request.sampling.max_tokens
                reason = "length" if limit is not None and len(made) >= limit else "stop"
                done.append(Completion(request.key, sample, made, reason, None, len(request.prompt_token_ids)))
        self._running = still
        return done

    def stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, running=self.num_running)

    def snapshot(self) -> list[InFlight]:
        everything = [*self._running, *self._waiting]
        return [InFlight(request.key, sample, made) for request, sample, made in everything if len(made)]


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

    def engine(self, demand: Callable[[], Demand | None]) -> FakeEngine:
        demand()
        self.engines.append(self._engine)
        return self._engine
