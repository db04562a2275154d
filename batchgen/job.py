"""The orchestrator: spec -> feeder -> engine -> collector -> sink -> ledger, with signals, limits and progress."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any

from batchgen import __version__, runstatus
from batchgen.damage import finish_repair
from batchgen.errors import ConfigError, Interrupted, NoInputError, StorageError
from batchgen.io.files import COPIES, refuse_mixed_folders
from batchgen.io.stores import Store
from batchgen.jobrecord import check_same, read_job
from batchgen.lease import Heart
from batchgen.ledger import Ledger
from batchgen.loop import Loop, ModelLike
from batchgen.metrics import Meter
from batchgen.opening import (
    columns_of,
    fingerprint,
    input_files,
    open_loop,
    pinned,
    refuse_empty,
    shape,
)
from batchgen.report import table
from batchgen.runfolder import TRIAL
from batchgen.runstatus import read_success
from batchgen.spec import JobSpec
from batchgen.spot import Kind, SpotWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line asks of one start; none of it is in the fingerprint.

    `max_runtime` is in seconds from the start of `run`.
    """

    limit: int | None = None
    must_be_new: bool = False
    overwrite: bool = False
    extend: bool = False  # take new input files into the run
    max_runtime: float | None = None
    max_output_tokens: int | None = None
    spot: Kind | None = None  # whose notices of interruption are watched


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

    Its `seconds` and `startup_seconds` (up to the first step) begin with this call, not with the process: this one may
    have lived for long, or have asked its user something.

    Raises Interrupted (progress saved, run again), DataError (too many failed rows), ConfigError (the folder holds
    another job) and the other errors of `batchgen.errors`.
    """
    options = options or RunOptions()
    store = store_opener(spec.output.path, spec.output.storage_options, retries=spec.errors.retries)
    with StopSignal() as stop, nullcontext() if options.spot is None else SpotWatch(options.spot) as spot:
        return _Start(spec, options, store, model_opener, stop, spot).run()


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

    def check(self) -> None:
        """Whoever was called when the signal came may have taken Interrupted for a failure of its own."""
        if self.name is not None:
            raise self._interrupted()

    def wait_for_loop(self) -> None:
        self._opening = False
        self.check()

    def _interrupted(self) -> Interrupted:
        return Interrupted(f"{self.name} received before the first step; run the same command again", "signal")

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.name = self.name is None, signal.Signals(number).name
        if self._opening and first:
            raise self._interrupted()

    def __enter__(self) -> StopSignal:
        try:
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        except ValueError:  # not in the main thread: a notebook or a test; its owner handles signals
            self._before = {}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Start:
    """One start of a job: opens everything, loops until the last row or a reason to stop, and says how it went."""

    def __init__(
        self,
        spec: JobSpec,
        options: RunOptions,
        store: Store,
        model_opener: Callable[[JobSpec], ModelLike],
        stop: StopSignal,
        spot: SpotWatch | None,
    ) -> None:
        self._spec, self._options, self.store, self._stop, self._spot = spec, options, store, stop, spot
        self._model_opener = model_opener
        self._began = time.monotonic()
        self.limit = min((n for n in (options.limit, spec.input.limit) if n is not None), default=None)

    def run(self) -> dict[str, Any]:
        spec, store, overwrite = self._spec, self.store, self._options.overwrite
        if not overwrite:
            finish_repair(store, {"version": __version__})
        record = None if overwrite else read_job(store)
        success = None if overwrite else read_success(store)
        try:
            files, prove = input_files(spec, None if overwrite else store)
        except NoInputError:
            if success is None:
                raise
            logger.warning("%s: the input of this finished run is gone; it was not compared", store.url)
            files, prove = [], None
        refuse_mixed_folders(spec.input.path, files, store.url)
        listed = [asdict(file) for file in files]
        if success is not None:
            if self._options.must_be_new:
                raise ConfigError(f"{store.url}: --must-be-new, but this folder holds a finished run")
            same_model = record is not None and record["spec"]["model"] == spec.to_json()["model"]
            now = fingerprint(spec, None if same_model else self._model_opener(pinned(spec, record)))
            extend = self._options.extend
            if not check_same(store, fingerprint=now, inputs=listed or None, prove=prove, extend=extend):
                success = None
        if success is not None:
            there = set(store.list(recursive=False))
            names = [part["name"] for part in success["parts"]] + [*COPIES] * (spec.output.format == "openai")
            if gone := [name for name in names if name not in there]:
                raise StorageError(
                    f"{store.url}: this run is finished, but {len(gone)} of its files are gone, first {gone[0]}; "
                    "put them back, or have them computed anew by `batchgen verify JOB --repair`"
                )
            more = "; --limit has no effect on it" if self.limit is not None else ""
            logger.info("%s: this run is finished already, nothing to do%s", store.url, more)
            return self._summary(success["counters"], status="done", complete=True, resumed=True)
        columns = columns_of(spec, files)
        model = self._model_opener(pinned(spec, record))
        _check_stop_ids(spec, model)
        if overwrite:  # the last moment: whatever is wrong with the job has been said
            runstatus.overwrite(store)
        with ExitStack() as stack:
            stack.callback(store.sweep)
            book = Ledger.open(
                store,
                spec=spec.to_json(),
                fingerprint=fingerprint(spec, model, columns[2]),
                inputs=listed,
                prove=prove,
                shape=shape(spec),
                must_be_new=self._options.must_be_new,
                extend=self._options.extend,
                info={"version": __version__, "device": model.device},
            )
            stack.push(partial(_close, book))
            if (done := read_success(store)) is not None:  # by a worker that was still at it when this start looked
                return self._summary(done["counters"], status="done", complete=True, resumed=True)
            if not store.atomic_create:
                logger.warning(
                    "%s: this store cannot create a file only where there is none; nothing but the heartbeat keeps a "
                    "second worker away from this run",
                    store.url,
                )
            heart = stack.enter_context(Heart(book.heartbeat))
            unread = [number for number in range(len(files)) if self.limit is not None or not book.is_done(number)]
            before = book.totals()
            if book.epoch > 1:
                logger.info("going on: %s rows are committed, %s samples saved", f"{before.rows:,}", f"{book.saved:,}")
            quantised = f", quantised to {spec.model.quantization}" if spec.model.quantization else ""
            logger.info("loading %s in %s%s", spec.model.path, model.dtype, quantised)
            if self._spot is not None and self._spot.notice is not None:  # loading a model is not worth its while
                raise Interrupted(f"{self._spot.notice}; run the same command again, on another machine", "spot")
            self._stop.check()
            meter = Meter(rows_before=before.rows, rows_failed_before=before.rows_failed)
            finished = [shards for number, shards in book.done.items() if number not in set(unread)]
            meter.rows_elsewhere = sum(shard.num_rows for shards in finished for shard in shards.values() if shard)
            with open_loop(self, spec, files, columns, unread, book, model, meter, heart) as loop:
                self._stop.wait_for_loop()
                loop.run()
            return self._end(book, loop)

    def reason_to_stop(self, output_tokens: int) -> tuple[str, str] | None:
        """Why this start is to end before the last row: (reason, in words); None while it may go on."""
        if self._stop.name is not None:
            return "signal", f"{self._stop.name} received"
        if self._spot is not None and self._spot.notice is not None:
            return "spot", self._spot.notice
        runtime, tokens = self._options.max_runtime, self._options.max_output_tokens
        if runtime is not None and time.monotonic() - self._began >= runtime:
            return "limit", "the time limit of this start is reached"
        if tokens is not None and output_tokens >= tokens:
            return "limit", "the token limit of this start is reached"
        return None

    def _stop_if_asked(self) -> None:
        """While files are made of finished parts, which the next start can do as well."""
        if self._stop.name is not None:
            raise Interrupted(
                f"{self._stop.name} received: every row is finished; run the same command again to complete the folder",
                reason="signal",
            )

    def _end(self, book: Ledger, loop: Loop) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._began, 3)
        speed = round(loop.tokens / max(loop.seconds, 1e-9), 1)
        if self.limit is None:
            refuse_empty(self._spec, book.totals())
            counters = book.finish({"seconds_of_last_start": seconds}, self._stop_if_asked)["counters"]
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
            **({"copied": loop.copied} if loop.copied else {}),
            startup_seconds=None if loop.started is None else round(loop.started - self._began, 3),
            waiting_share=round(loop.waited / max(loop.seconds, 1e-9), 4),
            **({"trial": self.store.path(TRIAL.rstrip("/"))} if loop.trial.rows else {}),
        )

    def _summary(self, counters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        summary = {"name": self._spec.name, "output": self.store.url, **counters, **more}
        print(table(summary), file=sys.stderr)
        return summary


def _close(book: Ledger, kind: object, error: BaseException | None, trace: object) -> None:
    """The end of a start, as `status` shows it: one that was interrupted has not failed."""
    failed = isinstance(error, Exception) and not isinstance(error, Interrupted)
    book.close(f"{error or type(error).__name__}" if failed else None)


def _check_stop_ids(spec: JobSpec, model: ModelLike) -> None:
    size = model.tokenizer.vocab_size
    for token_id in spec.sampling.stop_token_ids:
        if not 0 <= token_id < size:
            raise ConfigError(f"sampling.stop_token_ids: {token_id}, but the model's ids are 0 to {size - 1}")
