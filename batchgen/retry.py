"""`retry`: the failed rows of a committed run are run again, and their results take the old ones' places.

The unit is a row: all samples of a failed one run again, and those that did not fail before stay as they were. Each
part is replaced when the last of its failed rows has ended, so that a retry that is interrupted goes on with what is
left. Where nothing may be replaced, all goes into a new folder.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen import __version__, job, opening
from batchgen.damage import finish_repair
from batchgen.errors import ConfigError, DataError, Interrupted, NoInputError, StorageError, UsageError
from batchgen.io import sinks
from batchgen.io.files import refuse_mixed_folders
from batchgen.io.readback import read_contents, splice
from batchgen.io.stores import Store
from batchgen.jobrecord import check_same, read_job
from batchgen.lease import DEAD_AFTER_SECONDS, Heart, alone, refuse_company
from batchgen.ledger import MANY_PROOFS, Ledger, Written
from batchgen.loop import ModelLike
from batchgen.metrics import Meter
from batchgen.opening import columns_of, input_files, open_loop, pinned, refuse_empty
from batchgen.parts import Parts, Recorded, list_parts, prove_part, read_index, read_parts, read_recorded
from batchgen.report import table
from batchgen.runfolder import INDEX, INPUT_LISTS, JOB, SUCCESS, Counters, PartProof, part_name, put_new
from batchgen.runstatus import read_success
from batchgen.spec import JobSpec
from batchgen.types import Completion, InFlight, RowKey, ShardRange

logger = logging.getLogger(__name__)

READERS = 4  # parts in memory at once

Key = tuple[int, int]  # input file, shard


def retry(
    spec: JobSpec,
    to: str | None = None,
    *,
    model_opener: Callable[[JobSpec], ModelLike] = job.open_model,
    store_opener: Callable[..., Store] = Store,
    dead_after: float = DEAD_AFTER_SECONDS,
) -> dict[str, Any]:
    """Run the failed rows of a job's run again; returns the summary, in which `retried` counts them.

    With `to` the run stays as it is, and a complete one with the new results is made in that folder. ConfigError where
    the run is another job's or not complete, DataError where more rows than the job allows have failed again.
    """

    def opened(path: str) -> Store:
        return store_opener(path, spec.output.storage_options, retries=spec.errors.retries)

    store = opened(spec.output.path)
    target = None if to is None else opened(to)
    with job.StopSignal() as stop:
        return _Retry(spec, store, target, model_opener, stop, dead_after).run()


class _Retry:
    """One retry of a run. Decides, as a start of a job does, when its loop ends early."""

    limit: int | None = None

    def __init__(
        self,
        spec: JobSpec,
        store: Store,
        target: Store | None,
        model_opener: Callable[[JobSpec], ModelLike],
        stop: job.StopSignal,
        dead_after: float,
    ) -> None:
        self._spec, self._store, self._target = spec, store, target
        self._model_opener, self._stop, self._dead_after = model_opener, stop, dead_after
        self._began = time.monotonic()

    def reason_to_stop(self, output_tokens: int) -> tuple[str, str] | None:
        return None if self._stop.name is None else ("signal", f"{self._stop.name} received")

    def _pulse(self, heart: Heart) -> None:
        heart.check()
        if (why := self.reason_to_stop(0)) is not None:
            raise Interrupted(f"{why[1]}: the new results are kept; run the same command again", why[0])

    def run(self) -> dict[str, Any]:
        spec, store, target = self._spec, self._store, self._target
        if spec.input.limit is not None:
            raise ConfigError("input.limit: a trial is never complete, and has nothing to retry; take the key out")
        finish_repair(store, {"version": __version__}, self._dead_after)
        record = read_job(store)
        if record is None:
            raise NoInputError(f"{store.url}: no run in this folder; `batchgen run` begins one")
        if target is not None and target.path() == store.path():
            raise UsageError(f"--to {target.url}: this is the run's own folder; name a new one, or leave --to out")
        model = self._model_opener(pinned(spec, record))
        files, prove = input_files(spec, store)
        columns = columns_of(spec, files)
        inputs, fingerprint = [asdict(file) for file in files], opening.fingerprint(spec, model, columns[2])
        check_same(store, fingerprint=fingerprint, inputs=inputs, prove=prove)
        success = read_success(store)
        if success is not None and not success["counters"]["rows_failed"]:
            logger.info("%s: no row of this run has failed, nothing to retry", store.url)
            return self._summary(store, success["counters"], retried=0)
        if target is None and not store.can_compare:
            raise ConfigError(
                f"{store.url}: this store cannot replace a file only if nobody else has changed it, so that parts must "
                "stay as they are there; use --to NEW_FOLDER, which writes a complete run with the new results"
            )
        info = {"version": __version__, "device": model.device}
        with ExitStack() as stack:
            if target is None:
                hearts = [stack.enter_context(alone(store, info, self._dead_after, but=0))]
            else:
                hearts = []
                refuse_mixed_folders(spec.input.path, files, target.url)
                refuse_company(store, self._dead_after)
                _begin_copy(store, target)
            home = target or store
            stack.callback(home.sweep)
            book = Replacing.open(
                home,
                spec=spec.to_json(),
                fingerprint=fingerprint,
                inputs=inputs,
                shape=opening.shape(spec),
                must_be_new=False,
                info=info,
                prove=prove,
                dead_after=self._dead_after,
            )
            assert isinstance(book, Replacing)
            stack.callback(book.close)
            heart = stack.enter_context(Heart(lambda: _beat(book, hearts)))
            book.look_for_failures(store, heart)
            if book.todo:
                logger.info("%s rows of %s parts have failed", f"{book.failed_rows:,}", f"{len(book.todo):,}")
                again, meter = sorted(book.places), Meter(exact_total=book.failed_rows)
                rules = _lenient(spec)
                with open_loop(self, rules, files, columns, again, book, model, meter, heart, book.places) as loop:
                    self._stop.wait_for_loop()
                    book.begin()
                    loop.run()
            counters = book.totals()
            _judge(spec, counters, home)
            book.finish(
                {"seconds_of_last_start": round(time.monotonic() - self._began, 3)}, partial(self._pulse, heart)
            )
            return self._summary(home, counters.to_json(), retried=book.failed_rows)

    def _summary(self, store: Store, counters: Mapping[str, Any], *, retried: int) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._began, 3)
        head = {"name": self._spec.name, "output": store.url, **counters}
        summary = {**head, "status": "done", "complete": True, "retried": retried, "seconds": seconds}
        print(table(summary), file=sys.stderr)
        return summary


def _beat(book: Ledger, hearts: Iterable[Heart]) -> None:
    book.heartbeat()
    for heart in hearts:
        heart.check()


def _lenient(spec: JobSpec) -> JobSpec:
    """Failures are judged at the end, among all rows of the run."""
    return spec.model_copy(update={"errors": spec.errors.model_copy(update={"max_failed": 1.0})})


def _judge(spec: JobSpec, counters: Counters, store: Store) -> None:
    """DataError where a run with so many failed rows would not have been finished either."""
    refuse_empty(spec, counters)
    allowed = spec.errors.max_failed
    most = allowed * counters.rows if isinstance(allowed, float) else allowed
    if counters.rows_failed > most:
        codes = ", ".join(f"{code} {count:,}" for code, count in counters.failed.most_common())
        raise DataError(
            f"{store.url}: {counters.rows_failed:,} of {counters.rows:,} rows have failed still, more than "
            f"errors.max_failed allows: {codes}\nThe new results are kept and the run is not marked complete: retry "
            "again, or allow more failures and run the job, which completes it"
        )


class Replacing(Ledger):
    """A committed run whose failed rows get new results, part by part.

    It takes the place of a run's ledger in the loop. What one retry did of a part that it could not replace any more
    is not saved: the next one runs these rows again.
    """

    reads_back = False

    # what is to be done

    def look_for_failures(self, source: Store, heart: Heart) -> None:
        """Find the failed rows of the run in `source`, which is this one unless its results go into a new folder.

        Into that everything else is copied first.
        """
        self._source, self._in_place = source, source is self._store
        self._old = self._parts if self._in_place else self._parts_in(source)
        if not self._is_complete():
            raise ConfigError(
                f"{source.url}: this run is not complete; run the job to its end, then retry what has failed"
            )
        failed = {key: proof for key, proof in self._old.items() if proof is not None and proof.counters.rows_failed}
        self.failed_rows = sum(proof.counters.rows_failed for proof in failed.values())
        if not self._in_place:
            self._copy([key for key in self._old if key not in failed and key not in self._parts], heart)
            failed = {key: proof for key, proof in failed.items() if key not in self._parts}
        self.todo: dict[Key, PartProof] = failed
        with ThreadPoolExecutor(READERS) as pool:
            places = dict(zip(failed, pool.map(self._failed_places, failed), strict=True))
        heart.check()
        self.places: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
        for (file, shard), found in places.items():
            self.places.setdefault(file, {})[shard] = found

    def _parts_in(self, store: Store) -> Parts:
        """The proofs of all parts of this run that another folder holds."""
        digest, part_format = self._job.digest, self.shape["format"]
        recorded = read_recorded(store, digest) if part_format != "parquet" else Recorded()
        names = list_parts(store, part_format)
        parts = read_parts(store, names, part_format, digest, recorded)
        index = read_index(store, digest)
        for key in [key for key, proof in parts.items() if proof is None]:
            shards = index.get(key[0], [])
            if key[1] < len(shards):
                data = store.read(names[key])
                parts[key] = self._proved(store.path(names[key]), data, shards[key[1]])
        return parts

    def _proved(self, path: str, data: bytes, shard: ShardRange, known: PartProof | None = None) -> PartProof:
        """What a part says of itself; one of lines is counted, unless its proof is known."""
        return prove_part(
            path,
            data,
            shard,
            part_format=self.shape["format"],
            digest=self._job.digest,
            epoch=self.epoch if known is None else known.epoch,
            counters=None if known is None else known.counters,
            filtered=bool(self._job.fingerprint.get("input", {}).get("where")),
        )

    def _is_complete(self) -> bool:
        expected = {(file, shard.shard) for file, shards in self._index.items() for shard in shards}
        whole = len(self._index) == self._job.num_files and expected == self._old.keys()
        return whole and None not in self._old.values()

    def _failed_places(self, key: Key) -> npt.NDArray[np.int64]:
        """Of a part: its failed rows, counted within it."""
        return read_contents(self.shape["format"], self._old_part(key)[0], self._name_of(key)).failed_places()

    def _old_part(self, key: Key) -> tuple[bytes, str]:
        """A part as it was, whole and proven, and its version."""
        name = self._name_of(key)
        path, version, data = self._source.path(name), self._source.version(name), self._source.read(name)
        known = self._old[key]
        assert known is not None
        try:
            proof = self._proved(path, data, known.shard, known)
            if version is None or proof.checksum != known.checksum:
                raise sinks.corrupt(path, "it is not what was committed")
        except StorageError:
            self._lease.check()  # who has taken the run over may have replaced it
            raise
        return data, version

    def _name_of(self, key: Key) -> str:
        return part_name(*key, self.shape["format"])

    def _copy(self, keys: Sequence[Key], heart: Heart) -> None:
        """Parts of which no row failed, as they are."""

        def copy(key: Key) -> Written:
            heart.check()
            known = self._old[key]
            assert known is not None
            return super(Replacing, self).write_part(known.shard, self._old_part(key)[0], known.counters)

        logger.info("copying %s parts to %s", f"{len(keys):,}", self._store.url)
        with ThreadPoolExecutor(READERS) as pool:
            for written in pool.map(copy, keys):
                super().acknowledge(written)

    def begin(self) -> None:
        """From here on the run is not complete, until `finish`."""
        if not self._in_place:
            return
        self._lease.check()
        self._store.delete(SUCCESS)
        if self.shape["format"] != "parquet":  # a part that is replaced must not be judged by its old proof
            self._save_proofs([*self.todo])

    # as the loop sees a ledger

    @property
    def done(self) -> dict[int, dict[int, ShardRange | None]]:
        found: dict[int, dict[int, ShardRange | None]] = {}
        for (file, shard), proof in self._old.items():
            if (file, shard) not in self.todo and proof is not None:
                found.setdefault(file, {})[shard] = proof.shard
        return found

    def take(self, key: RowKey, sample: int) -> Completion | InFlight | None:
        return None

    @property
    def pending_bytes(self) -> int:
        return 0

    def record(self, completion: Completion) -> None:
        pass

    def checkpoint(self, in_flight: Iterable[InFlight], *, last: bool = False) -> bool:
        if self._unrecorded and (last or len(self._unrecorded) >= MANY_PROOFS):
            self._save_proofs()
        return False

    def pieces_of(self, shard: ShardRange) -> list[str]:
        return []

    def commit_index(self, file: int, shards: Sequence[ShardRange]) -> None:
        pass

    def show_progress(self, *, rows_done: int, rows_failed: int) -> None:
        pass

    def write_part(self, shard: ShardRange, data: bytes, counters: Counters) -> Written:
        """Put the results of a part's failed rows, which `data` has, into it, and the part in the old one's place."""
        key = shard.file, shard.shard
        name = self._name_of(key)
        path = self._store.path(name)
        known = self._old[key]
        if known is None or known.shard != shard:
            raise ConfigError(f"{path}: {shard} is not what it was when the part was made: the input has changed")
        old, version = self._old_part(key)
        new, counters = splice(self.shape["format"], old, data, path, partial(self.part_metadata, shard))
        if not self._in_place:
            return super().write_part(shard, new, counters)
        proof = self._prove(shard, new, counters)
        self._lease.check()
        if not self._replace(name, new, version):
            self._lease.check()
            raise StorageError(
                f"{path}: somebody else has changed this part while its rows were run again; it stays as it is. Let "
                "`batchgen verify` look at the run"
            )
        return Written(proof, True)

    def _replace(self, name: str, data: bytes, version: str) -> bool:
        try:
            return self._store.replace_if(name, data, version)
        except StorageError:  # it may have been done all the same
            if self._store.read(name) == data:
                return True
            raise

    def acknowledge(self, written: Written) -> bool:
        if not self._in_place:
            return super().acknowledge(written)
        proof = written.proof
        self._parts[proof.shard.file, proof.shard.shard] = proof
        if self.shape["format"] != "parquet":
            self._unrecorded.append(proof)
        return True

    def totals(self) -> Counters:
        totals = Counters()
        for proof in self._parts.values():
            if proof is not None:
                totals.add(proof.counters)
        return totals


# -- a new folder ------------------------------------------------------------------------------------------------------


def _begin_copy(source: Store, target: Store) -> None:
    """Give a new folder the records of the run; one that holds the beginning of this copy is gone on with."""
    part_format = read_job(source)
    assert part_format is not None
    names = [JOB, *source.list(INPUT_LISTS), *source.list(INDEX)]
    records = {name: source.read(name) for name in names}
    if not target.exists(JOB) and (target.exists(SUCCESS) or list_parts(target, part_format["shape"]["format"])):
        raise ConfigError(f"--to {target.url}: this folder holds results already; name a new one")
    if read_success(target) is not None and target.read(JOB) == records[JOB]:
        raise ConfigError(f"--to {target.url}: this folder holds a complete run of this job already; name a new one")
    for name, data in records.items():
        if not put_new(target, name, data):
            raise ConfigError(f"--to {target.url}: this folder holds another run ({name} differs); name a new one")
