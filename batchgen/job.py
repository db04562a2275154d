"""The orchestrator: spec -> feeder -> engine -> collector -> sink -> ledger, with signals, limits and progress."""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Protocol

import numpy as np

from batchgen import __version__, ledger
from batchgen.carry import input_fields
from batchgen.collector import Collector, OpenShard, results_of, texts
from batchgen.errors import ConfigError, DataError, Interrupted
from batchgen.feeder import Feeder, RowBatch
from batchgen.io import sinks, sources
from batchgen.io.files import InputFile, Store, expand
from batchgen.lease import HEARTBEAT_SECONDS
from batchgen.ledger import Ledger
from batchgen.metrics import Meter
from batchgen.report import Progress, table
from batchgen.spec import JobSpec, SamplingSpec
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, InFlight, Request, RowError, RowKey, SamplingParams, ShardRange, TokenIds

logger = logging.getLogger(__name__)

MAX_WAITING = 4096  # samples read ahead of the engine
MAX_OPEN_SHARDS = 16
MAX_PENDING_BYTES = 16 << 20  # finished samples that are in no checkpoint yet
ROWS_BEFORE_JUDGING = 1000  # a share of failed rows is judged from here on while the number of rows is not known
TRIAL = "_batchgen/trial/"  # what a limited run shows of a shard that it cut off


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line asks of one start; none of it is in the fingerprint.

    `max_runtime` is in seconds from the start of `run`.
    """

    limit: int | None = None
    must_be_new: bool = False
    overwrite: bool = False
    max_runtime: float | None = None
    max_output_tokens: int | None = None


class EngineLike(Protocol):
    """The engine as the job sees it."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Completion]: ...
    def snapshot(self) -> list[InFlight]: ...
    def stats(self) -> Any: ...


class ModelLike(Protocol):
    """A model before its weights are loaded; `engine()` loads them."""

    tokenizer_path: str
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]
    max_model_len: int
    dtype: str
    device: str

    def fingerprint(self) -> str: ...
    def engine(self) -> EngineLike: ...


def open_model(spec: JobSpec) -> ModelLike:
    """The real model of a job; torch is imported here, so that a finished job never pays for it."""
    from batchgen.loader import Model

    return Model(spec.model, spec.engine, skip_special_tokens=spec.output.skip_special_tokens)


def run(
    spec: JobSpec,
    options: RunOptions | None = None,
    *,
    model_opener: Callable[[JobSpec], ModelLike] = open_model,
    store_opener: Callable[..., Store] = Store,
) -> dict[str, Any]:
    """Run a job to its end, or go on with it where an earlier start left it; returns the summary.

    Raises Interrupted (progress saved, run again), DataError (too many failed rows), ConfigError (the folder holds
    another job) and the other errors of `batchgen.errors`.
    """
    options = options or RunOptions()
    store = store_opener(spec.output.path, spec.output.storage_options, retries=spec.errors.retries)
    with StopSignal() as stop:
        return _Start(spec, options, store, model_opener, stop).run()


class StopSignal(AbstractContextManager["StopSignal"]):
    """SIGTERM, SIGINT and SIGUSR1 ask for a drain, which the loop sees in `name`.

    A drain waits for nothing but the step that runs and the checkpoint, so a second signal has nothing to shorten.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name

    def __enter__(self) -> StopSignal:
        try:
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        except ValueError:  # not in the main thread: a notebook or a test; its owner handles signals
            self._before = {}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


NO_TOKENS: TokenIds = np.empty(0, np.int32)


def noise_key(seed: int, name: str) -> int:
    """The 64-bit key of a row's random draws, from the seed and the row's name (its id, or its place without one).

    So draws do not depend on how the input is cut into files where rows have ids; rows of one id draw the same noise.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def fingerprint(spec: JobSpec, model: ModelLike | None = None) -> dict[str, Any]:
    """What the results depend on, by section; without `model`, what the job file says of it.

    Where files lie is not in it: model and tokenizer count by their content, the input too (which the ledger proves).
    """
    sections: dict[str, Any] = {
        "task": spec.task,
        "input": {"id": spec.input.id, "format": spec.input.format},
        "prompt": spec.prompt.model_dump(mode="json"),
        "sampling": spec.sampling.model_dump(mode="json"),
        "output": spec.output.model_dump(
            mode="json", include={"format", "columns", "token_ids", "skip_special_tokens"}
        ),
        "engine": {"kv_dtype": spec.engine.kv_dtype},
    }
    if model is not None:
        sections["model"] = {
            "content": model.fingerprint(),
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "sampling": _resolved(spec, model).model_dump(mode="json", include=set(SamplingSpec.FROM_MODEL)),
        }
    return sections


def _resolved(spec: JobSpec, model: ModelLike) -> SamplingSpec:
    return spec.sampling.with_defaults(model.generation_config)


class _Start:
    """One start of a job: opens everything, loops until the last row or a reason to stop, and says how it went."""

    def __init__(
        self,
        spec: JobSpec,
        options: RunOptions,
        store: Store,
        model_opener: Callable[[JobSpec], ModelLike],
        stop: StopSignal,
    ) -> None:
        self._spec, self._options, self.store, self._stop = spec, options, store, stop
        self._model_opener = model_opener
        self._began = time.monotonic()
        self.limit = min((n for n in (options.limit, spec.input.limit) if n is not None), default=None)

    def run(self) -> dict[str, Any]:
        spec, store = self._spec, self.store
        if self._options.overwrite:
            ledger.overwrite(store)
        files = expand(spec.input.path, spec.input.storage_options, allow_empty=spec.input.allow_empty)
        listed = [asdict(file) for file in files]

        def prove(number: int) -> str:
            return sources.content_proof(files[number], spec.input.storage_options)

        record = ledger.read_job(store)
        if (success := ledger.read_success(store)) is not None:
            if self._options.must_be_new:
                raise ConfigError(f"{store.url}: --must-be-new, but this folder holds a finished run")
            same_model = record is not None and record["spec"]["model"] == spec.to_json()["model"]
            now = fingerprint(spec, None if same_model else self._model_opener(spec))
            ledger.check_same(store, fingerprint=now, inputs=listed, prove=prove)
            logger.info("%s: this run is finished already, nothing to do", store.url)
            return self._summary(success["counters"], status="done", complete=True, resumed=True)
        formats = [sources.detect(file, spec.input.format, spec.input.storage_options) for file in files]
        model = self._model_opener(_pinned(spec, record))
        with ExitStack() as stack:
            book = Ledger.open(
                store,
                spec=spec.to_json(),
                fingerprint=fingerprint(spec, model),
                inputs=listed,
                prove=prove,
                shape={"format": spec.output.format, "shard_rows": spec.output.shard_rows},
                must_be_new=self._options.must_be_new,
                info={"version": __version__, "device": model.device},
            )
            stack.callback(book.close)
            if not store.atomic_create:
                logger.warning(
                    "%s: this store cannot create a file only where there is none; nothing but the heartbeat keeps a "
                    "second worker away from this run",
                    store.url,
                )
            heart = stack.enter_context(_Heart(book))
            feeder = stack.enter_context(
                Feeder(spec, files, formats, model.tokenizer_path, model.max_model_len, book.done, self.limit)
            )
            meter = Meter(rows_before=book.totals().rows)
            progress = Progress(meter)
            stack.callback(progress.close)
            loop = _Loop(self, spec, files, formats, book, feeder, model, meter, progress, heart)
            loop.run()
            progress.close()
            return self._end(book, loop, meter)

    @property
    def stop_name(self) -> str | None:
        return self._stop.name

    def reason_to_stop(self, output_tokens: int) -> str | None:
        """Why this start is to end before the last row, "signal" or "limit"; None while it may go on."""
        if self._stop.name is not None:
            return "signal"
        runtime, tokens = self._options.max_runtime, self._options.max_output_tokens
        if runtime is not None and time.monotonic() - self._began >= runtime:
            return "limit"
        return "limit" if tokens is not None and output_tokens >= tokens else None

    def _end(self, book: Ledger, loop: _Loop, meter: Meter) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        own = {"seconds": round(seconds, 3)}
        if self.limit is None:
            success = book.finish({"seconds_of_last_start": round(seconds, 3)})
            counters = success["counters"]
        else:
            totals = book.totals()
            for results in loop.trial:
                totals.add(results.counters())
            counters = totals.to_json()
        own["tokens_per_second"] = round(loop.tokens / max(loop.seconds, 1e-9), 1)
        return self._summary(counters, status="done", complete=self.limit is None, resumed=book.epoch > 1, **own)

    def _summary(self, counters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        summary = {"name": self._spec.name, "output": self.store.url, **counters, **more}
        print(table(summary), file=sys.stderr)
        return summary


def _pinned(spec: JobSpec, record: Mapping[str, Any] | None) -> JobSpec:
    """With `dtype: auto`, the dtype of the first start: another machine would choose another, and other answers."""
    if record is None or spec.model.dtype != "auto":
        return spec
    model = spec.model.model_copy(update={"dtype": record["fingerprint"]["model"]["dtype"]})
    return spec.model_copy(update={"model": model})


class _Heart(AbstractContextManager["_Heart"]):
    """Beats beside everything else, so that neither loading a model nor a long step looks like death."""

    def __init__(self, book: Ledger) -> None:
        self._book = book
        self._end = threading.Event()
        self._fenced: Interrupted | None = None
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_SECONDS):
            try:
                self._book.heartbeat()
            except Interrupted as fenced:
                self._fenced = fenced
                return

    def check(self) -> None:
        """Raises Interrupted("fenced") where another worker has taken over."""
        if self._fenced is not None:
            raise self._fenced

    def __enter__(self) -> _Heart:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


class _TotalRows:
    """How many rows the input has, estimated from the part of it that is read."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._sizes = {file.number: file.size for file in files}
        self._seen: dict[int, tuple[int, float]] = {}  # by file: rows up to here, the share that they are

    def note(self, batch: RowBatch) -> None:
        if batch.share > 0:
            self._seen[batch.file] = (batch.next_row, batch.share)

    def estimate(self) -> int | None:
        """None before anything is read. Files that are not begun count by their size."""
        rows = sum(seen / share for seen, share in self._seen.values())
        size = sum(self._sizes[file] for file in self._seen)
        return round(rows * sum(self._sizes.values()) / size) if size else None


class _Loop:
    """Reads, steps, commits and checkpoints until every row is in a part, or until there is a reason to stop."""

    def __init__(
        self,
        start: _Start,
        spec: JobSpec,
        files: list[InputFile],
        formats: list[str],
        book: Ledger,
        feeder: Feeder,
        model: ModelLike,
        meter: Meter,
        progress: Progress,
        heart: _Heart,
    ) -> None:
        self._start, self._spec, self._ledger, self._feeder = start, spec, book, feeder
        self._meter, self._progress, self._heart = meter, progress, heart
        fields = input_fields(spec, files, formats)
        self._schema = sinks.result_schema(id_field=fields.id, carried=fields.carried, token_ids=spec.output.token_ids)
        self._tokenizer = model.tokenizer
        self._engine = model.engine()
        self._params = _resolved(spec, model).params()
        self._collector = Collector(self._params.n)
        self._done = book.done
        self._shards: dict[int, dict[int, ShardRange]] = {
            file: {shard: known for shard, known in shards.items() if known is not None}
            for file, shards in self._done.items()
        }
        self._total = _TotalRows(files)
        self._saved = time.monotonic()
        self._ticked = 0.0
        self._began = time.monotonic()
        self.seconds = 0.0
        self.tokens = 0  # of prompts and answers, by this start's engine
        self.trial: list[sinks.ShardResults] = []

    def run(self) -> None:
        """Raises Interrupted (progress is saved) or DataError (too many failed rows)."""
        while True:
            self._read()
            for completion in self._engine.step() if self._engine.has_work else []:
                self._finish(completion)
            for shard in self._collector.pop_complete():
                self._commit(shard)
            if self._feeder.finished and not self._engine.has_work and not len(self._collector):
                break
            self._tend()
        self.seconds = time.monotonic() - self._began
        stats = self._engine.stats()
        self.tokens = stats.prompt_tokens + stats.output_tokens
        self._judge_failures()

    # -- rows in

    def _read(self) -> None:
        while self._engine.num_waiting < MAX_WAITING and len(self._collector) < MAX_OPEN_SHARDS:
            batch = self._feeder.poll() if self._engine.has_work else self._feeder.get(timeout=0.1)
            if batch is None:
                return
            self._admit(batch)

    def _admit(self, batch: RowBatch) -> None:
        if batch.shard not in self._done.get(batch.file, {}) and (batch.num_rows or batch.end is not None):
            self._collector.add(batch)
        self._total.note(batch)
        failed = {index: RowError(code, message) for index, code, message in batch.errors}
        for index in range(batch.num_rows):
            key = RowKey(batch.file, batch.first_row + index)
            error = failed.get(index)
            if error is None:
                token_ids = batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]
                self._submit(key, token_ids, noise_key(self._params.seed, batch.noise_name(index)))
            else:
                for sample in range(self._params.n):
                    self._finish(Completion(key, sample, NO_TOKENS, "error", None, 0, error))
        if batch.end is not None and not batch.cut_off:
            self._shards.setdefault(batch.file, {})[batch.shard] = batch.end
        if batch.last_of_file:
            shards = self._shards.get(batch.file, {})
            self._ledger.commit_index(batch.file, [shards[number] for number in sorted(shards)])

    def _submit(self, key: RowKey, token_ids: TokenIds, noise: int) -> None:
        """Give a row to the engine, less what earlier starts did of it."""
        resume: dict[int, TokenIds | None] = {}
        finished = []
        for sample in range(self._params.n):
            earlier = self._ledger.take(key, sample)
            if isinstance(earlier, Completion):
                resume[sample] = None
                finished.append(earlier)
            elif earlier is not None:
                resume[sample] = earlier.token_ids
        if len(finished) < self._params.n:
            self._engine.add(Request(key, token_ids, self._params, noise, resume))
        for completion in finished:
            self._keep(completion)

    # -- results

    def _finish(self, completion: Completion) -> None:
        """A sample has ended in this start."""
        self._ledger.record(completion)
        self._keep(completion)

    def _keep(self, completion: Completion) -> None:
        self._meter.finish_sample(completion)
        row_is_finished, code = self._collector.finish(completion)
        if row_is_finished:
            self._meter.finish_row(code)

    def _commit(self, shard: OpenShard) -> None:
        output = self._spec.output
        results = results_of(
            shard,
            self._tokenizer,
            include_stop=self._params.include_stop,
            skip_special=output.skip_special_tokens,
        )
        counters = results.counters()
        metadata = self._ledger.part_metadata(results.shard, counters)
        data = sinks.build_part(output.format, self._schema, results, metadata)
        if shard.cut_off:
            name = f"{TRIAL}part-{results.shard.file:05d}-{results.shard.shard:05d}.{output.format}"
            self._ledger.checkpoint([])
            self._start.store.replace(name, data)
            self.trial.append(results)
        else:
            self._ledger.commit_part(results.shard, data, counters)

    # -- between steps

    def _tend(self) -> None:
        """What is to be done now and then; each part of it decides for itself whether it is time."""
        now = time.monotonic()
        self._heart.check()
        if now - self._ticked >= 1.0:
            self._ticked = now
            stats = self._engine.stats()
            self._meter.tick(stats.prompt_tokens, stats.output_tokens)
            self._meter.total_is_exact = self._feeder.finished
            self._meter.total_rows = (
                self._meter.rows_done + self._collector.open_rows if self._feeder.finished else self._total.estimate()
            )
            self._progress.update(stats.kv_blocks_used / max(stats.kv_blocks_total, 1), stats.running)
        self._judge_failures()
        reason = self._start.reason_to_stop(self._engine.stats().output_tokens)
        if reason is not None:
            self._drain(reason)
        due = now - self._saved >= self._spec.checkpoint.interval
        if due or self._ledger.pending_bytes >= MAX_PENDING_BYTES:
            self._ledger.checkpoint(self._engine.snapshot())
            self._saved = time.monotonic()

    def _drain(self, reason: str) -> None:
        self._ledger.checkpoint(self._engine.snapshot())
        rows = f"{self._meter.rows_done:,} rows are finished"
        why = "a limit of this start is reached" if reason == "limit" else f"{self._start.stop_name} received"
        raise Interrupted(f"{why}: progress is saved, {rows}; run the same command again to go on", reason=reason)

    def _judge_failures(self) -> None:
        """DataError when more rows failed than the job allows. A share is one of all rows: a trial cannot pass it."""
        failed, seen = sum(self._meter.failed.values()), self._meter.rows_done
        allowed = self._spec.errors.max_failed
        if self._feeder.finished:
            seen += self._collector.open_rows
        if isinstance(allowed, float):
            known = self._feeder.finished or seen >= ROWS_BEFORE_JUDGING
            if not known or self._start.limit is not None or failed <= allowed * seen:
                return
        elif failed <= allowed:
            return
        codes = ", ".join(f"{code} {count:,}" for code, count in self._meter.failed.most_common())
        self._ledger.checkpoint(self._engine.snapshot())
        raise DataError(
            f"{failed:,} of {seen:,} rows failed, more than errors.max_failed ({allowed}) allows: {codes}. Finished "
            "rows are kept; mend the input, or allow more and run again"
        )


def preview(
    spec: JobSpec, n: int, *, model_opener: Callable[[JobSpec], ModelLike] = open_model
) -> Iterator[dict[str, Any]]:
    """The first `n` rows: the prompt as the model sees it, and its answers. Writes nothing."""
    files = expand(spec.input.path, spec.input.storage_options, allow_empty=spec.input.allow_empty)
    formats = [sources.detect(file, spec.input.format, spec.input.storage_options) for file in files]
    model = model_opener(spec)
    params = _resolved(spec, model).params()
    with Feeder(spec, files, formats, model.tokenizer_path, model.max_model_len, {}, n) as feeder:
        engine = model.engine()
        while not feeder.finished:
            batch = feeder.get(timeout=1.0)
            if batch is not None and batch.num_rows:
                yield from _answers(batch, engine, model.tokenizer, spec, params)


def _answers(
    batch: RowBatch, engine: EngineLike, tokenizer: Tokenizer, spec: JobSpec, params: SamplingParams
) -> Iterator[dict[str, Any]]:
    """One previewed batch, run to its end."""
    errors = {index: RowError(code, message) for index, code, message in batch.errors}
    prompts = [batch.token_ids[start:end] for start, end in zip(batch.offsets, batch.offsets[1:], strict=False)]
    done: dict[tuple[int, int], Completion] = {}
    for index, prompt in enumerate(prompts):
        key = RowKey(batch.file, batch.first_row + index)
        if index not in errors:
            engine.add(Request(key, prompt, params, noise_key(params.seed, batch.noise_name(index))))
    while engine.has_work:
        done.update(((one.key.row - batch.first_row, one.sample), one) for one in engine.step())
    shown = tokenizer.decode_batch(prompts, skip_special_tokens=False)
    places = sorted(done)
    skip_special = spec.output.skip_special_tokens
    answered = texts(
        [done[place] for place in places], tokenizer, include_stop=params.include_stop, skip_special=skip_special
    )
    text_of = dict(zip(places, answered, strict=True))
    for index in range(batch.num_rows):
        for sample in range(params.n if index not in errors else 1):
            one = done.get((index, sample))
            error = errors.get(index) if one is None else one.error
            yield {
                "id": batch.noise_name(index),
                "prompt": shown[index] if one is not None else None,
                "prompt_tokens": one.prompt_tokens if one is not None else None,
                "text": text_of[index, sample] if one is not None and error is None else None,
                "finish_reason": "error" if one is None else one.finish_reason,
                "error": None if error is None else asdict(error),
            }
