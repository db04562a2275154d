"""Measures everything but the model: a synthetic input goes through a real job whose engine answers at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import orjson
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from batchgen import weights
from batchgen.errors import BatchgenError, ConfigError
from batchgen.io.storage import local_path
from batchgen.io.stores import Store
from batchgen.tokenizer import Tokenizer

SEED = 0
TEXT_WORDS = 400_000  # every prompt is a piece of one text of so many words
VOCABULARY = 20_000  # distinct words, at most
ROWS_AT_ONCE = 10_000  # written to the input
SAMPLE_SECONDS = 0.05  # between two looks at the processes
PLAIN_WORD = re.compile(r" ?[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run. `folder` None is a temporary one; `model` None a tokenizer with a token for each byte.

    `carried_bytes` is the size of a text column that goes into the results beside the id.
    """

    rows: int = 200_000
    prompt_tokens: int = 100
    answer_tokens: int = 32
    files: int = 1
    input_format: str = "parquet"
    output_format: str = "parquet"
    carried_bytes: int = 0
    model: str | None = None
    folder: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)


def measure(workload: Workload, *, resume: bool = False) -> dict[str, Any]:
    """Run the workload; with `resume`, kill the job when half of its rows are committed, and measure the second start.

    A folder that is given keeps input and results; it must be empty.
    """
    with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as scratch:
        folder = (workload.folder or scratch).rstrip("/")
        if Store(folder, workload.storage_options).list():
            raise ConfigError(f"--folder: {folder} is not empty; name one that is new, or delete what it holds")
        model = workload.model or str(byte_tokenizer(Path(scratch, "bytes")))
        began = time.perf_counter()
        _write_input(workload, folder, Tokenizer.load(weights.resolve(model)))
        written = time.perf_counter() - began
        task = {
            "job": _job(workload, folder, model),
            "rows": workload.rows,
            "answer_tokens": workload.answer_tokens,
            "max_model_len": 8 * workload.prompt_tokens + workload.answer_tokens + 1024,
            "die_at": None,
        }
        if resume:
            _start({**task, "die_at": workload.rows // 2}, killed=True)
        told, watch = _start(task)
    summary = told["summary"]
    if (summary["rows"], summary["rows_failed"]) != (workload.rows, 0):
        raise BatchgenError(f"of {workload.rows} rows {summary['rows']} came out, {summary['rows_failed']} failed")
    return {"input_written_s": round(written, 2), **_figures(workload, told, watch, resumed=resume)}


def _figures(workload: Workload, told: Mapping[str, Any], watch: _Watch, *, resumed: bool) -> dict[str, Any]:
    rows, summary = told["rows"], told["summary"]
    seconds = told["ended"] - told["started"]
    libraries = {"main": told["libraries_bytes"], "feeder": _libraries("batchgen.feeder_child")}

    def per_100k(cpu_seconds: float) -> float:
        return round(cpu_seconds / rows * 100_000, 2)

    return {
        "bench": "data",
        "rows": workload.rows,
        "input_format": workload.input_format,
        "output_format": workload.output_format,
        "files": workload.files,
        "model": workload.model,
        "resumed": resumed,
        "rows_of_this_start": rows,
        "prompt_tokens_per_row": round(summary["prompt_tokens"] / summary["rows"], 1),
        "output_tokens_per_row": round(summary["output_tokens"] / summary["rows"], 1),
        "seconds": round(seconds, 2),
        "ready_s": round(told["ready"] - told["started"], 2),
        "rows_per_s": round(rows / seconds, 1),
        "steady_rows_per_s": None if told["steady_rows_per_s"] is None else round(told["steady_rows_per_s"], 1),
        "main_cpu_s_per_100k": per_100k(told["main_cpu_s"]),
        "feeder_cpu_s_per_100k": per_100k(told["feeder_cpu_s"]),
        "libraries_mib": {name: size >> 20 for name, size in libraries.items()},
        "peak_rss_mib": {name: size >> 20 for name, size in watch.peak_rss.items()},
        "rss_mib_over_time": {name: watch.course(name) for name in watch.peak_rss},
        "peak_open_files": watch.peak_files,
        "objects": told["objects"],
        "object_bytes": told["object_bytes"],
    }


# -- the job -----------------------------------------------------------------------------------------------------------


def _job(workload: Workload, folder: str, model: str) -> dict[str, Any]:
    options = dict(workload.storage_options)
    return {
        "name": "bench-data",
        "model": {"path": model},
        "input": {
            "path": f"{folder}/input",
            "format": workload.input_format,
            "id": "id",
            "storage_options": options,
        },
        "prompt": {"column": "prompt"},
        "sampling": {"max_tokens": workload.answer_tokens},
        "output": {
            "path": f"{folder}/output",
            "format": workload.output_format,
            "columns": ["carried"] if workload.carried_bytes else [],
            "storage_options": options,
        },
    }


class _Watch:
    """What the job's two processes take while they run: memory and open files, looked at from outside."""

    def __init__(self, pid: int) -> None:
        self._main = psutil.Process(pid)
        self._feeder: psutil.Process | None = None
        self.peak_rss = {"main": 0, "feeder": 0}
        self.peak_files = {"main": 0, "feeder": 0}
        self._rss: dict[str, list[int]] = {"main": [], "feeder": []}

    def look(self) -> None:
        self._look_at("main", self._main)
        try:
            if self._feeder is None or not self._feeder.is_running():
                self._feeder = next(iter(self._main.children()), None)
        except psutil.Error:
            self._feeder = None
        if self._feeder is not None:
            self._look_at("feeder", self._feeder)

    def _look_at(self, name: str, process: psutil.Process) -> None:
        try:
            rss, files = process.memory_info().rss, process.num_fds()
        except psutil.Error:
            return
        if not rss:  # it has just ended
            return
        self._rss[name].append(rss)
        self.peak_rss[name] = max(self.peak_rss[name], rss)
        self.peak_files[name] = max(self.peak_files[name], files)

    def course(self, name: str, points: int = 10) -> list[int]:
        """Memory at `points` moments of the run, in MiB: flat, or not."""
        seen = self._rss[name]
        return [seen[(len(seen) - 1) * i // (points - 1)] >> 20 for i in range(points)] if seen else []


def _start(task: Mapping[str, Any], *, killed: bool = False) -> tuple[dict[str, Any], _Watch]:
    """One start of the job in a process of its own: what it tells, and what was seen of it."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with tempfile.TemporaryFile() as told:
        started = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "batchgen.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=told,
            env={**os.environ, "PYTHONPATH": paths},
        )
        try:
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(orjson.dumps({**task, "started": started}))
            watch = _Watch(process.pid)
            while process.poll() is None:
                watch.look()
                time.sleep(SAMPLE_SECONDS)
        finally:
            process.kill()
            process.wait()
        if killed and process.returncode == -signal.SIGKILL:
            return {}, watch
        if killed or process.returncode != 0:
            raise BatchgenError(f"the measured job ended with exit code {process.returncode}; see above")
        told.seek(0)
        return orjson.loads(told.read()), watch


def _libraries(module: str) -> int:
    """Bytes that a process takes when it has imported `module` and done nothing yet."""
    program = f"import sys, {module}, psutil; sys.stdout.write(str(psutil.Process().memory_info().rss))"
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths}
    return int(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout)


# -- its input ---------------------------------------------------------------------------------------------------------


def byte_tokenizer(folder: Path, *, chat_template: str | None = None) -> Path:
    """A model folder without weights: a token for each byte, then <|endoftext|>, <|im_start|>, <|im_end|> (256 on)."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = RustTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 256, "max_position_embeddings": 4096}))
    return folder


class _Text:
    """One long text; prompts are pieces of it. Words are the tokenizer's own, the common ones often and the rare ones
    seldom, as in real text: a tokenizer's speed depends on it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._rng = np.random.default_rng(SEED)
        words = self._vocabulary(tokenizer)
        weights_ = 1.0 / (np.arange(len(words)) + 10)
        drawn = self._rng.choice(len(words), TEXT_WORDS, p=weights_ / weights_.sum())
        ends = self._rng.choice([" ", ", ", ". ", "\n\n"], TEXT_WORDS, p=[0.87, 0.06, 0.06, 0.01])
        pieces = [words[word] + end for word, end in zip(drawn.tolist(), ends.tolist(), strict=True)]
        self._offsets = np.zeros(TEXT_WORDS + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=self._offsets[1:])
        self._text = "".join(pieces)
        sample = 20_000
        tokens = tokenizer.encode(self._text[: self._offsets[sample]], add_special_tokens=False)
        self._words_per_token = sample / len(tokens)

    def _vocabulary(self, tokenizer: Tokenizer) -> list[str]:
        decoded = tokenizer.decode_batch([[i] for i in range(tokenizer.vocab_size)], skip_special_tokens=True)
        known = list(dict.fromkeys(text.strip() for text in decoded if len(text) > 2 and PLAIN_WORD.fullmatch(text)))
        if len(known) < 1000:  # it knows no words: syllables make some
            syllables = [a + b for a in "bcdfglmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "on")]
            known = ["".join(self._rng.choice(syllables, 1 + i % 3)) for i in range(VOCABULARY // 4)]
        known = known[:VOCABULARY]
        pairs = self._rng.integers(0, len(known), (len(known) // 4, 2))
        return known + [known[a] + known[b] for a, b in pairs.tolist()]  # words of several tokens

    def pieces(self, count: int, tokens: int) -> list[str]:
        """`count` texts of half to one and a half times as many tokens."""
        mean = tokens * self._words_per_token
        lengths = np.maximum(1, self._rng.uniform(0.5 * mean, 1.5 * mean, count).round().astype(np.int64))
        starts = self._rng.integers(0, np.maximum(1, TEXT_WORDS - lengths))
        begin, end = self._offsets[starts], self._offsets[np.minimum(starts + lengths, TEXT_WORDS)]
        return [self._text[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]

    def filler(self, count: int, characters: int) -> list[str]:
        starts = self._rng.integers(0, max(1, len(self._text) - characters), count)
        return [self._text[a : a + characters] for a in starts.tolist()]


def _write_input(workload: Workload, folder: str, tokenizer: Tokenizer) -> None:
    """The input files, of about equally many rows."""
    text = _Text(tokenizer)
    around = 0
    if tokenizer.chat_template is not None:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
        around = len(tokenizer.encode(rendered, add_special_tokens=False)) - 1
    tokens = max(1, workload.prompt_tokens - around)
    write = {"parquet": _write_parquet, "jsonl": _write_jsonl}[workload.input_format]
    bounds = np.linspace(0, workload.rows, workload.files + 1).astype(np.int64).tolist()
    for number, (first, end) in enumerate(pairwise(bounds)):
        with _create(f"{folder}/input/{number:05d}.{workload.input_format}", workload.storage_options) as file:
            write(file, _rows(workload, text, tokens, first, end))


def _rows(workload: Workload, text: _Text, tokens: int, first: int, end: int) -> Iterator[dict[str, list[Any]]]:
    """Columns of some rows at a time."""
    for start in range(first, end, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, end - start)
        columns: dict[str, list[Any]] = {
            "id": list(range(start, start + count)),
            "prompt": text.pieces(count, tokens),
        }
        if workload.carried_bytes:
            columns["carried"] = text.filler(count, workload.carried_bytes)
        yield columns


def _create(path: str, storage_options: Mapping[str, Any]) -> BinaryIO:
    local = local_path(path)
    if local is not None:
        os.makedirs(os.path.dirname(local), exist_ok=True)
        return open(local, "wb")
    import fsspec

    return cast(BinaryIO, fsspec.open(path, "wb", **storage_options).open())


def _write_parquet(file: BinaryIO, blocks: Iterator[dict[str, list[Any]]]) -> None:
    writer = None
    for columns in blocks:
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _write_jsonl(file: BinaryIO, blocks: Iterator[dict[str, list[Any]]]) -> None:
    for columns in blocks:
        for values in zip(*columns.values(), strict=True):
            file.write(orjson.dumps(dict(zip(columns, values, strict=True)), option=orjson.OPT_APPEND_NEWLINE))
