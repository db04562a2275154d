"""The loop of one start: rows to the engine, finished samples to shards, shards to parts, until all is done."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from batchgen.collector import Collector
from batchgen.errors import BatchgenError, DataError, Interrupted, StorageError
from batchgen.feeder import Feeder, RowBatch
from batchgen.io.files import InputFile, check_unchanged
from batchgen.lease import Heart
from batchgen.ledger import Ledger
from batchgen.metrics import Meter
from batchgen.partwriter import Built, PartWriter
from batchgen.planner import EngineLike, Planner
from batchgen.report import Progress
from batchgen.runfolder import Counters
from batchgen.spec import JobSpec, SamplingSpec
from batchgen.tokenizer import Tokenizer
from batchgen.types import (
    NO_TOKENS,
    Completion,
    Demand,
    Request,
    RowError,
    RowKey,
    SamplingParams,
    ShardRange,
    TokenIds,
)
from batchgen.watchdog import Watchdog
from batchgen.writer import Writer

logger = logging.getLogger(__name__)

MAX_OPEN_TOKENS = 16 << 20  # of prompts of rows that are not finished; the planner may hold them twice for a moment
MAX_OPEN_BYTES = 256 << 20  # of finished samples and carried columns in shards that are not committed
BATCHES_AT_ONCE = 8  # between two steps
MAX_PENDING_BYTES = 16 << 20  # finished samples that are in no checkpoint yet
CPU_STEP_SECONDS = 5.0  # of processor time that count as progress; waiting takes far less
EXAMPLES = 3  # failures that an error message shows
ROWS_BEFORE_JUDGING = 1000  # a share of failed rows is judged from here on while the number of rows is not known


class ModelLike(Protocol):
    """A model before its weights are loaded; `engine()` loads them, then asks what is to be done with them."""

    tokenizer_path: str
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]
    max_model_len: int
    dtype: str
    device: str

    def fingerprint(self) -> str: ...
    def engine(self, demand: Callable[[], Demand | None]) -> EngineLike: ...


class StartLike(Protocol):
    """What decides when a start ends early."""

    limit: int | None

    def reason_to_stop(self, output_tokens: int) -> tuple[str, str] | None: ...


def noise_key(seed: int, name: str) -> int:
    """The 64-bit key of a row's random draws, from the seed and the row's name (its id, or its place without one).

    So draws do not depend on how the input is cut into files where rows have ids; rows of one id draw the same noise.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def resolved_sampling(spec: JobSpec, model: ModelLike) -> SamplingSpec:
    return spec.sampling.with_defaults(model.generation_config)


class Loop:
    """Reads, steps, commits and checkpoints until every row is in a part, or until there is a reason to stop."""

    def __init__(
        self,
        start: StartLike,
        spec: JobSpec,
        files: Sequence[InputFile],
        book: Ledger,
        feeder: Feeder,
        parts: PartWriter,
        writer: Writer[Built],
        model: ModelLike,
        meter: Meter,
        progress: Progress,
        heart: Heart,
        watchdog: Watchdog,
    ) -> None:
        self._start, self._spec, self._files = start, spec, files
        self._ledger, self._feeder, self._parts, self._writer = book, feeder, parts, writer
        self._meter, self._progress, self._heart = meter, progress, heart
        self._watchdog = watchdog
        self._state: tuple[int, ...] = ()  # changes with every bit of progress
        self._batches_read = self._samples_finished = self._parts_written = 0
        self._planner = Planner(model.engine(feeder.demand))
        self._params = resolved_sampling(spec, model).params()
        self._collector = Collector(self._params)
        self._done = book.done
        self._failed_before = book.totals().failed
        self._shards: dict[int, dict[int, ShardRange]] = {
            file: {shard: known for shard, known in shards.items() if known is not None}
            for file, shards in self._done.items()
        }
        self._examples: list[str] = []  # the first failures, for people
        self._saved = self._began = time.monotonic()
        self._ticked = 0.0
        self.seconds = 0.0
        self.waited = 0.0  # seconds of these in which the engine had nothing to do while rows were still to come
        self.started: float | None = None  # when the first step began, by the monotonic clock
        self.tokens = 0  # of prompts and answers, by this start's engine
        self.copied = 0  # results that it need not compute, because an equal one was there
        self.trial = Counters()  # of shards that a row limit cut off

    def run(self) -> None:
        """Raises Interrupted (progress is saved) or DataError (too many failed rows); saves progress whatever fails."""
        try:
            self._run()
        except StorageError:
            raise
        except Interrupted as error:
            if error.reason in ("feeder", "stalled", "device"):
                self._ledger.checkpoint(self._planner.snapshot(), last=True)
            raise
        except Exception:
            with contextlib.suppress(BatchgenError):  # what failed first is what is to be told
                self._ledger.checkpoint(self._planner.snapshot(), last=True)
            raise

    def _run(self) -> None:
        while True:
            held_back = self._read()
            if self.started is None and self._planner.has_work:
                self.started = time.monotonic()
            for completion in self._planner.step(more=not self._feeder.finished):
                self._finish(completion)
            self._commit()
            is_idle = not self._planner.has_work and (held_back or self._feeder.finished)
            for built in self._writer.done(0.1 if is_idle else 0.0):
                self._parts_written += 1
                if built.written is None:
                    self.trial.add(built.counters)
                else:
                    self._ledger.acknowledge(built.written)
            if self._feeder.finished and is_idle and not len(self._collector) and not self._writer.busy:
                break
            self._tend()
        self.seconds = time.monotonic() - self._began
        stats = self._planner.stats()
        self.tokens = stats.prompt_tokens + stats.output_tokens
        self.copied = self._planner.num_copied
        self._judge_failures()

    # -- rows in

    def _read(self) -> bool:
        """Take what the feeder has; True where that has to wait, because too much is open already."""
        if self._collector.droppable >= MAX_OPEN_BYTES // 2 and self._collector.size >= MAX_OPEN_BYTES:
            self._checkpoint()
            self._collector.drop(MAX_OPEN_BYTES // 2)
        for _ in range(BATCHES_AT_ONCE):
            collector, planner, writer = self._collector, self._planner, self._writer
            much = collector.open_tokens >= MAX_OPEN_TOKENS or collector.size >= MAX_OPEN_BYTES
            # where nobody else makes room, the shard that is read has to be read to its end
            if planner.full or (much and (planner.has_work or writer.busy)):
                return True
            patience = 0.01 if writer.busy else 0.1
            batch = self._feeder.poll() if planner.has_work else self._wait_for_rows(patience)
            if batch is None:
                break
            self._admit(batch)
        return False

    def _wait_for_rows(self, timeout: float) -> RowBatch | None:
        began = time.monotonic()
        batch = self._feeder.get(timeout)
        self.waited += time.monotonic() - began
        return batch

    def _admit(self, batch: RowBatch) -> None:
        self._batches_read += 1
        if batch.shard not in self._done.get(batch.file, {}) and (batch.num_rows or batch.end is not None):
            self._collector.add(batch)
        if batch.num_rows or batch.end is not None:
            self._meter.note_share(batch.file, batch.next_row, batch.share)
        failed = {index: RowError(code, message) for index, code, message in batch.errors}
        names = batch.noise_names()
        for index, row in enumerate(batch.rows.tolist()):
            key = RowKey(batch.file, row)
            params = self._params if batch.params is None else batch.params[index]
            error = failed.get(index)
            if error is None:
                token_ids = batch.token_ids[batch.offsets[index] : batch.offsets[index + 1]]
                self._submit(key, token_ids, params, noise_key(params.seed, names[index]))
            else:
                for sample in range(params.n):
                    self._finish(Completion(key, sample, NO_TOKENS, "error", None, 0, error))
        if batch.end is not None and not batch.cut_off:
            self._shards.setdefault(batch.file, {})[batch.shard] = batch.end
        if batch.last_of_file:
            check_unchanged(self._files[batch.file], self._spec.input.storage_options)
            shards = self._shards.get(batch.file, {})
            self._ledger.commit_index(batch.file, [shards[number] for number in sorted(shards)])

    def _submit(self, key: RowKey, token_ids: TokenIds, params: SamplingParams, noise: int) -> None:
        """Give a row to the planner, less what earlier starts did of it."""
        resume: dict[int, TokenIds | None] = {}
        finished = []
        for sample in range(params.n):
            earlier = self._ledger.take(key, sample)
            if isinstance(earlier, Completion):
                resume[sample] = None
                finished.append(earlier)
            elif earlier is not None:
                resume[sample] = earlier.token_ids
        if len(finished) < params.n:
            self._planner.add(Request(key, token_ids, params, noise, resume))
        for completion in finished:
            self._keep(completion)

    # -- results

    def _finish(self, completion: Completion) -> None:
        """A sample has ended in this start."""
        self._ledger.record(completion)
        self._keep(completion)

    def _keep(self, completion: Completion) -> None:
        self._samples_finished += 1
        self._meter.finish_sample(completion)
        row_is_finished, code = self._collector.finish(completion)
        if row_is_finished:
            self._meter.finish_row(code)
        error = completion.error
        if error is not None and completion.sample == 0 and len(self._examples) < EXAMPLES:
            path = self._files[completion.key.file].path
            self._examples.append(f"{path} row {completion.key.row}: {error.code}: {error.message}")

    def _commit(self) -> None:
        """Hand complete shards to the writer; what it has no room for waits."""
        while not self._writer.full and (shard := self._collector.pop_complete()) is not None:
            assert shard.end is not None
            if shard.cut_off:
                self._ledger.checkpoint([])
                if shard.dropped:
                    logger.warning("the last rows are too many to be shown as a trial; they are saved")
                    continue
            known = self._shards.get(shard.end.file, {})
            earlier = {number: place for number, place in known.items() if number < shard.end.shard}
            pieces = self._ledger.pieces_of(shard.end) if shard.dropped else ()
            self._writer.add(partial(self._parts.write, shard, pieces, earlier))

    # -- between steps

    def _tend(self) -> None:
        """What is to be done now and then; each part of it decides for itself whether it is time."""
        now = time.monotonic()
        self._heart.check()
        self._watch()
        if now - self._ticked >= 1.0:
            self._ticked = now
            stats = self._planner.stats()
            self._meter.tick(stats.prompt_tokens, stats.output_tokens)
            self._meter.copied = self._planner.num_copied
            self._show_progress()
            if self._feeder.finished:
                self._meter.exact_total = self._meter.rows_done + self._collector.open_rows
            self._progress.update(stats.kv_blocks_used / max(stats.kv_blocks_total, 1), stats.running)
        self._judge_failures()
        reason = self._start.reason_to_stop(self._planner.stats().output_tokens)
        if reason is not None:
            self._drain(*reason)
        due = now - self._saved >= self._spec.checkpoint.interval
        if due or self._ledger.pending_bytes >= MAX_PENDING_BYTES:
            self._checkpoint()

    def _checkpoint(self) -> None:
        self._ledger.checkpoint(self._planner.snapshot())
        self._saved = time.monotonic()

    def _show_progress(self) -> None:
        failed = self._meter.rows_failed_before + sum(self._meter.failed.values())
        self._ledger.show_progress(rows_done=self._meter.rows_done, rows_failed=failed)

    def _watch(self) -> None:
        """Tell the watchdog of any progress: rows read, tokens computed, samples finished, parts written.

        While the engine has nothing to do, processor time counts too: the feeder may be passing over gigabytes of a
        compressed file that are done, the writer may read a large shard again.
        """
        stats = self._planner.stats()
        computed = (stats.prompt_tokens, stats.output_tokens, self._samples_finished)
        state: tuple[int, ...] = (*computed, self._batches_read, self._parts_written)
        if not self._planner.has_work:
            state += (int(self._feeder.cpu_seconds() / CPU_STEP_SECONDS), int(time.process_time() / CPU_STEP_SECONDS))
        if state != self._state:
            self._state = state
            self._watchdog.touch()
        self._watchdog.check()

    def _drain(self, reason: str, why: str) -> None:
        self._show_progress()
        self._ledger.checkpoint(self._planner.snapshot(), last=True)
        rows = f"{self._meter.rows_done:,} rows are finished"
        raise Interrupted(f"{why}: progress is saved, {rows}; run the same command again to go on", reason=reason)

    def _judge_failures(self) -> None:
        """DataError when more rows failed than the job allows, earlier starts included.

        A share is one of all rows, those that wait or are still to be read included: bad rows are finished sooner than
        good ones, and may stand together. A trial, which sees some of the rows, passes it only when all of them failed.
        """
        failed = self._meter.rows_failed_before + sum(self._meter.failed.values())
        seen = self._meter.rows_done + self._collector.open_rows
        allowed = self._spec.errors.max_failed
        if isinstance(allowed, float):
            known = self._feeder.finished or seen >= ROWS_BEFORE_JUDGING
            total = seen
            if self._start.limit is not None:  # a trial says little of all rows, unless nothing works at all
                allowed = 1.0 - 1e-9
            elif self._spec.input.where is None and not self._feeder.finished:  # how many pass a filter nobody knows
                total = max(seen, self._meter.total_rows or 0)
            if not known or failed <= allowed * total:
                return
        elif failed <= allowed:
            return
        codes = _listed(self._meter.failed)
        if codes:
            codes = f": {codes} in this start, first\n  " + "\n  ".join(self._examples)
        if self._failed_before:
            codes += f"\n  and in results of earlier starts: {_listed(self._failed_before)}"
        raise DataError(
            f"{failed:,} of {seen:,} rows failed, more than errors.max_failed allows{codes}\nIf the job file or the "
            "input is wrong, correct it and use another output.path, or --overwrite. If these rows may fail, allow "
            "more of them and run again: finished rows are kept"
        )


def _listed(failed: Counter[str]) -> str:
    return ", ".join(f"{code} {count:,}" for code, count in failed.most_common())
