"""The orchestrator: spec -> feeder -> engine -> collector -> sink -> ledger, with signals, limits and progress."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from batchgen import __version__, ledger
from batchgen.carry import input_fields
from batchgen.collector import Collector, OpenShard, results_of
from batchgen.errors import BatchgenError, ConfigError, DataError, Interrupted, NoInputError, StorageError
from batchgen.feeder import Feeder, RowBatch
from batchgen.io import sinks, sources
from batchgen.io.files import InputFile, expand
from batchgen.io.storage import local_path
from batchgen.io.stores import Store
from batchgen.lease import Heart
from batchgen.ledger import Ledger
from batchgen.metrics import Meter
from batchgen.report import Progress, table
from batchgen.runfolder import TRIAL, Counters
from batchgen.spec import JobSpec, SamplingSpec
from batchgen.tokenizer import Tokenizer
from batchgen.types import NO_TOKENS, Completion, InFlight, Request, RowError, RowKey, ShardRange, TokenIds

logger = logging.getLogger(__name__)

MAX_WAITING = 4096  # samples read ahead of the engine
MAX_OPEN_ROWS = 65_536  # in shards that are not committed
MAX_OPEN_TOKENS = 32 << 20  # of their prompts
BATCHES_AT_ONCE = 8  # between two steps
MAX_PENDING_BYTES = 16 << 20  # finished samples that are in no checkpoint yet
EXAMPLES = 3  # failures that an error message shows
ROWS_BEFORE_JUDGING = 1000  # a share of failed rows is judged from here on while the number of rows is not known


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
    """SIGTERM, SIGINT and SIGUSR1 end a start.

    While a run is being opened there is nothing to save: the first signal raises Interrupted at once. From
    `wait_for_loop` on the loop finds it in `name` and drains, which waits for nothing but the step that runs and the
    checkpoint, so that a second signal has nothing to shorten.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.name: str | None = None
        self._opening = True
        self._before: dict[int, Any] = {}

    def wait_for_loop(self) -> None:
        self._opening = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.name = self.name is None, signal.Signals(number).name
        if self._opening and first:
            raise Interrupted(f"{self.name} received before the first step; run the same command again", "signal")

    def __enter__(self) -> StopSignal:
        try:
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        except ValueError:  # not in the main thread: a notebook or a test; its owner handles signals
            self._before = {}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


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
            "sampling": resolved_sampling(spec, model).model_dump(mode="json", include=set(SamplingSpec.FROM_MODEL)),
        }
    return sections


def resolved_sampling(spec: JobSpec, model: ModelLike) -> SamplingSpec:
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
        spec, store, overwrite = self._spec, self.store, self._options.overwrite
        record = None if overwrite else ledger.read_job(store)
        success = None if overwrite else ledger.read_success(store)
        try:
            files = expand(spec.input.path, spec.input.storage_options, allow_empty=spec.input.allow_empty)
        except NoInputError:
            if success is None:
                raise
            logger.warning("%s: the input of this finished run is gone; it was not compared", store.url)
            files = []
        listed = [asdict(file) for file in files]
        _refuse_mixed_folders(spec, files, store)

        def prove(number: int) -> str:
            return sources.content_proof(files[number], spec.input.storage_options)

        if success is not None:
            if self._options.must_be_new:
                raise ConfigError(f"{store.url}: --must-be-new, but this folder holds a finished run")
            same_model = record is not None and record["spec"]["model"] == spec.to_json()["model"]
            now = fingerprint(spec, None if same_model else self._model_opener(_pinned(spec, record)))
            ledger.check_same(store, fingerprint=now, inputs=listed or None, prove=prove)
            there = set(store.list())
            if gone := [part["name"] for part in success["parts"] if part["name"] not in there]:
                raise StorageError(
                    f"{store.url}: this run is finished, but {len(gone)} of its parts are gone, first {gone[0]}; "
                    "put them back, or delete _SUCCESS and run again to compute them anew"
                )
            logger.info("%s: this run is finished already, nothing to do", store.url)
            return self._summary(success["counters"], status="done", complete=True, resumed=True)
        formats = [sources.detect(file, spec.input.format, spec.input.storage_options) for file in files]
        fields = input_fields(spec, files, formats)
        schema = sinks.result_schema(id_field=fields.id, carried=fields.carried, token_ids=spec.output.token_ids)
        model = self._model_opener(_pinned(spec, record))
        _check_stop_ids(spec, model)
        if overwrite:  # the last moment: whatever is wrong with the job has been said
            ledger.overwrite(store)
        with ExitStack() as stack:
            stack.callback(store.sweep)
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
            heart = stack.enter_context(Heart(book.heartbeat))
            unread = [number for number in range(len(files)) if self.limit is not None or not book.is_done(number)]
            feeder = stack.enter_context(
                Feeder(
                    spec,
                    [files[number] for number in unread],
                    [formats[number] for number in unread],
                    model.tokenizer_path,
                    model.max_model_len,
                    book.done,
                    self.limit,
                    fields=fields,
                )
            )
            before = book.totals()
            if book.epoch > 1:
                logger.info("going on: %s rows are committed, %s samples saved", f"{before.rows:,}", f"{book.saved:,}")
            logger.info("loading %s in %s", spec.model.path, model.dtype)
            meter = Meter(rows_before=before.rows, rows_failed_before=before.rows_failed)
            meter.sizes = {number: files[number].size for number in unread}
            progress = Progress(meter)
            stack.callback(progress.close)
            loop = _Loop(self, spec, files, schema, book, feeder, model, meter, progress, heart)
            self._stop.wait_for_loop()
            loop.run()
            progress.close()
            return self._end(book, loop)

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

    def _end(self, book: Ledger, loop: _Loop) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._began, 3)
        speed = round(loop.tokens / max(loop.seconds, 1e-9), 1)
        if self.limit is None:
            counters = book.finish({"seconds_of_last_start": seconds})["counters"]
        else:
            totals = book.totals()
            totals.add(loop.trial)
            counters = totals.to_json()
        return self._summary(
            counters,
            status="done",
            complete=self.limit is None,
            resumed=book.epoch > 1,
            seconds=seconds,
            tokens_per_second=speed,
            **({"trial": self.store.path(TRIAL.rstrip("/"))} if loop.trial.rows else {}),
        )

    def _summary(self, counters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        summary = {"name": self._spec.name, "output": self.store.url, **counters, **more}
        print(table(summary), file=sys.stderr)
        return summary


def _refuse_mixed_folders(spec: JobSpec, files: Sequence[InputFile], store: Store) -> None:
    """Results among the input would be input of the next start."""
    home = os.path.realpath(local_path(store.url) or store.url)
    for pattern in spec.input.path:
        folder, found, _ = (local_path(pattern) or pattern).partition("**")
        finds_folders = folder.rstrip("/").endswith("/*")  # which are read as folders
        if found or finds_folders or os.path.isdir(folder):
            base = os.path.realpath(folder.rstrip("/").removesuffix("*") or ".")
            if home == base or home.startswith(base.rstrip("/") + "/"):
                raise ConfigError(
                    f"output.path: {store.url} is inside the input, {pattern}; results need a place of their own"
                )
    for file in files:
        if os.path.dirname(os.path.realpath(local_path(file.path) or file.path)) == home:
            raise ConfigError(
                f"output.path: {store.url} is the folder of an input file, {file.path}; results need one of their own"
            )


def _check_stop_ids(spec: JobSpec, model: ModelLike) -> None:
    size = model.tokenizer.vocab_size
    for token_id in spec.sampling.stop_token_ids:
        if not 0 <= token_id < size:
            raise ConfigError(f"sampling.stop_token_ids: {token_id}, but the model's ids are 0 to {size - 1}")


def _pinned(spec: JobSpec, record: Mapping[str, Any] | None) -> JobSpec:
    """With `dtype: auto`, the dtype of the first start: another machine would choose another, and other answers."""
    if record is None or spec.model.dtype != "auto":
        return spec
    pinned = record["fingerprint"].get("model", {}).get("dtype", "auto")
    model = spec.model.model_copy(update={"dtype": pinned})
    return spec.model_copy(update={"model": model})


class _Loop:
    """Reads, steps, commits and checkpoints until every row is in a part, or until there is a reason to stop."""

    def __init__(
        self,
        start: _Start,
        spec: JobSpec,
        files: Sequence[InputFile],
        schema: pa.Schema,
        book: Ledger,
        feeder: Feeder,
        model: ModelLike,
        meter: Meter,
        progress: Progress,
        heart: Heart,
    ) -> None:
        self._start, self._spec, self._files, self._schema = start, spec, files, schema
        self._ledger, self._feeder = book, feeder
        self._meter, self._progress, self._heart = meter, progress, heart
        self._tokenizer = model.tokenizer
        self._engine = model.engine()
        self._params = resolved_sampling(spec, model).params()
        self._collector = Collector(self._params.n)
        self._done = book.done
        self._shards: dict[int, dict[int, ShardRange]] = {
            file: {shard: known for shard, known in shards.items() if known is not None}
            for file, shards in self._done.items()
        }
        self._has_warned = False
        self._examples: list[str] = []  # the first failures, for people
        self._saved = self._began = time.monotonic()
        self._ticked = 0.0
        self.seconds = 0.0
        self.tokens = 0  # of prompts and answers, by this start's engine
        self.trial = Counters()  # of shards that a row limit cut off

    def run(self) -> None:
        """Raises Interrupted (progress is saved) or DataError (too many failed rows); saves progress whatever fails."""
        try:
            self._run()
        except StorageError:
            raise
        except Interrupted as error:
            if error.reason == "feeder":
                self._ledger.checkpoint(self._engine.snapshot())
            raise
        except Exception:
            with contextlib.suppress(BatchgenError):  # what failed first is what is to be told
                self._ledger.checkpoint(self._engine.snapshot())
            raise

    def _run(self) -> None:
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
        for _ in range(BATCHES_AT_ONCE):
            rows, tokens = self._collector.read_rows, self._collector.read_tokens
            if self._engine.num_waiting >= MAX_WAITING or rows >= MAX_OPEN_ROWS or tokens >= MAX_OPEN_TOKENS:
                return
            batch = self._feeder.poll() if self._engine.has_work else self._feeder.get(timeout=0.1)
            if batch is None:
                return
            self._admit(batch)

    def _admit(self, batch: RowBatch) -> None:
        if batch.shard not in self._done.get(batch.file, {}) and (batch.num_rows or batch.end is not None):
            self._collector.add(batch)
        if batch.num_rows or batch.end is not None:
            self._meter.note_share(batch.file, batch.next_row, batch.share)
        failed = {index: RowError(code, message) for index, code, message in batch.errors}
        names = batch.noise_names()
        for index in range(batch.num_rows):
            key = RowKey(batch.file, batch.first_row + index)
            error = failed.get(index)
            if error is None:
                token_ids = batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]
                self._submit(key, token_ids, noise_key(self._params.seed, names[index]))
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
        error = completion.error
        if error is not None and completion.sample == 0 and len(self._examples) < EXAMPLES:
            path = self._files[completion.key.file].path
            self._examples.append(f"{path} row {completion.key.row}: {error.code}: {error.message}")

    def _commit(self, shard: OpenShard) -> None:
        output = self._spec.output
        results = results_of(
            shard,
            self._tokenizer,
            include_stop=self._params.include_stop,
            skip_special=output.skip_special_tokens,
        )
        counters = results.counters()
        self._warn_of_repeated_ids(results)
        metadata = self._ledger.part_metadata(results.shard, counters)
        data = sinks.build_part(output.format, self._schema, results, metadata)
        if shard.cut_off:
            self._ledger.checkpoint([])
            self._ledger.show_trial(results.shard, data)
            self.trial.add(counters)
        else:
            self._ledger.commit_part(results.shard, data, counters)

    def _warn_of_repeated_ids(self, results: sinks.ShardResults) -> None:
        if self._spec.input.id is None or self._has_warned:
            return
        ids = pa.Table.from_batches(results.inputs).column(0).drop_null()
        try:
            distinct = pc.count_distinct(ids).as_py()
        except pa.ArrowException:  # lists, structs: ids that nobody counts
            return
        if distinct < len(ids):
            self._has_warned = True
            logger.warning(
                "ids repeat in column %s: rows of one id draw the same random numbers, and results cannot be joined by "
                "it alone",
                self._spec.input.id,
            )

    # -- between steps

    def _tend(self) -> None:
        """What is to be done now and then; each part of it decides for itself whether it is time."""
        now = time.monotonic()
        self._heart.check()
        if now - self._ticked >= 1.0:
            self._ticked = now
            stats = self._engine.stats()
            self._meter.tick(stats.prompt_tokens, stats.output_tokens)
            self._show_progress()
            if self._feeder.finished:
                self._meter.exact_total = self._meter.rows_done + self._collector.open_rows
            self._progress.update(stats.kv_blocks_used / max(stats.kv_blocks_total, 1), stats.running)
        self._judge_failures()
        reason = self._start.reason_to_stop(self._engine.stats().output_tokens)
        if reason is not None:
            self._drain(reason)
        due = now - self._saved >= self._spec.checkpoint.interval
        if due or self._ledger.pending_bytes >= MAX_PENDING_BYTES:
            self._ledger.checkpoint(self._engine.snapshot())
            self._saved = time.monotonic()

    def _show_progress(self) -> None:
        failed = self._meter.rows_failed_before + sum(self._meter.failed.values())
        self._ledger.show_progress(rows_done=self._meter.rows_done, rows_failed=failed)

    def _drain(self, reason: str) -> None:
        self._show_progress()
        self._ledger.checkpoint(self._engine.snapshot())
        rows = f"{self._meter.rows_done:,} rows are finished"
        why = "a limit of this start is reached" if reason == "limit" else f"{self._start.stop_name} received"
        raise Interrupted(f"{why}: progress is saved, {rows}; run the same command again to go on", reason=reason)

    def _judge_failures(self) -> None:
        """DataError when more rows failed than the job allows, earlier starts included.

        A share is one of all rows, those that wait included: bad rows are finished sooner than good ones. A trial,
        which sees some of the rows, passes it only when all of them failed.
        """
        failed = self._meter.rows_failed_before + sum(self._meter.failed.values())
        seen = self._meter.rows_done + self._collector.open_rows
        allowed = self._spec.errors.max_failed
        if isinstance(allowed, float):
            known = self._feeder.finished or seen >= ROWS_BEFORE_JUDGING
            if self._start.limit is not None:  # a trial says little of all rows, unless nothing works at all
                allowed = 1.0 - 1e-9
            if not known or failed <= allowed * seen:
                return
        elif failed <= allowed:
            return
        codes = ", ".join(f"{code} {count:,}" for code, count in self._meter.failed.most_common())
        if codes:
            codes = f": {codes} in this start, first\n  " + "\n  ".join(self._examples)
        raise DataError(
            f"{failed:,} of {seen:,} rows failed, more than errors.max_failed allows{codes}\nFinished rows are kept: "
            "to go on with them, allow more failures and run again; after a change of prompt or input use another "
            "output.path, or --overwrite"
        )
