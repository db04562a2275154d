"""The run folder's only writer: what is committed, what a restart goes on from, and when a run is complete.

A worker that was superseded (it stood still, another start took its slot) asks before each write whether it still has
the slot, and ends with Interrupted("fenced") if not. It may also stand still between that question and the write. What
the write does then, where the store creates a file only if there is none ("atomic"), and elsewhere ("lease-only"):

    part             atomic: fills a free name with valid rows, which others then keep; a taken one stays as it is.
                     lease-only: may put its own valid rows over the same shard's; never half a part
    proofs, index    new names or equal content, both of this run's digest; a fact written twice
    piece            a name of its own start; entries that a later start of the slot has overruled are not read
    piece deleted    only pieces it knows by name, whose rows are all in parts: of no use to anybody
    lease            the newer worker's is gone until that one's next heartbeat; meanwhile its epoch record speaks
                     for it, and a third start watches instead of judging
    epoch            created if absent, so that the later of two starts takes the next number (lease-only: the later
                     record stands, and the earlier start does not find itself in it)
    trial            replaces or deletes what people look at; nothing depends on it
    _SUCCESS         was complete when the question was asked, and parts never go. Written after the run was extended
                     or begun anew it counts for nothing (`read_success`) and is replaced at the end
    _SUCCESS deleted, by an extension that another start has finished meanwhile: the next start writes it again
    inputs list      atomic: created if absent, another start's list is never changed
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from batchgen import runfolder
from batchgen.errors import BatchgenError, ConfigError, Interrupted, PermissionDenied, StorageError
from batchgen.io.storage import ObjectMissing
from batchgen.io.stores import Store
from batchgen.jobrecord import JobRecord, establish, extend_inputs, last_list, read_job, read_lists
from batchgen.lease import DEAD_AFTER_SECONDS, Heart, Lease, Watch, now, slots
from batchgen.parts import (
    Parts,
    Recorded,
    index_record,
    indexed_shards,
    list_parts,
    proofs_record,
    prove_part,
    read_index,
    read_parts,
    read_recorded,
    record_proofs,
)
from batchgen.runfolder import (
    FORMAT_VERSION,
    JOB,
    SUCCESS,
    TRIAL,
    Counters,
    PartProof,
    index_name,
    part_name,
    put_new,
    put_record,
)
from batchgen.runstatus import read_success
from batchgen.types import Completion, InFlight, RowKey, ShardRange

if TYPE_CHECKING:  # pyarrow is slow to import, and `status` of a finished run does without
    from batchgen.pieces import Pieces

logger = logging.getLogger(__name__)

MANY_PROOFS = 512  # that pieces carry, until they get a record of their own


@dataclass(frozen=True, slots=True)
class Written:
    """A part that stands in the run folder. `ours`: as this worker made it; False: as another one did, before."""

    proof: PartProof
    ours: bool


class Ledger:
    """A run folder opened by the worker that holds a slot of it. Made by `Ledger.open`.

    One thread uses it. Beside that, other threads may call `heartbeat`, `write_part`, `standing` and `read_back`,
    which change nothing in it.
    """

    reads_back = True  # what is finished can be dropped from memory: `read_back` gives it

    def __init__(
        self,
        store: Store,
        slot: int,
        job: JobRecord,
        lease: Lease,
        parts: Parts,
        recorded: Recorded,
        pieces: Pieces,
    ) -> None:
        self._store, self._slot, self._job, self._lease, self._pieces = store, slot, job, lease, pieces
        self._parts, self._recorded = parts, recorded
        self._unrecorded: list[PartProof] = []  # proofs of JSONL parts that are in no record yet
        self._num_noted = 0  # how many of them pieces of this start carry
        self._index: dict[int, list[ShardRange]] = {}
        self._totals = Counters()
        for proof in parts.values():
            if proof is not None:
                self._totals.add(proof.counters)

    @classmethod
    def open(
        cls,
        store: Store,
        *,
        spec: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        inputs: Sequence[Mapping[str, Any]],
        shape: Mapping[str, Any],
        must_be_new: bool,
        info: Mapping[str, Any],
        prove: Callable[[int], str] | None = None,
        slot: int = 0,
        extend: bool = False,
        dead_after: float = DEAD_AFTER_SECONDS,
    ) -> Ledger:
        """Begin the run in this folder, or take it up where it stands.

        `spec` is the resolved job without secrets. `fingerprint` is what results depend on, `shape` what the first
        start fixes (`format` of the output among it): a run that had other ones is a ConfigError naming them.
        `inputs` hold path, size, mtime, etag, in the order that `arrange` gives; `prove(i)` gives the content proof
        of one that is not plainly the same. `extend` takes new ones into the run. `info` (version, device) is written
        down.

        A living worker in the slot is Interrupted("locked"). What dead workers of other slots left is taken over;
        workers of other machines that may live are watched for `dead_after` seconds, all at the same time.
        """
        strangers = list_parts(store, shape["format"]) if read_job(store) is None else {}
        job = establish(
            store,
            spec=spec,
            fingerprint=fingerprint,
            inputs=inputs,
            shape=shape,
            must_be_new=must_be_new,
            prove=prove,
            info=info,
            created=now(),
            extend=extend,
        )
        others = [other for other in slots(store) if other != slot]
        watch = Watch(store, [slot, *others], dead_after)
        lease = Lease.acquire(store, slot, dict(info), watch)
        try:
            with Heart(lease.beat) as heart:  # thousands of parts take their time on a slow store, and so does watching
                store.sweep()
                job = extend_inputs(store, job, lease.check)
                dead = [other for other in others if not watch.lives(other)]
                ledger = cls._read(store, slot, job, lease, dead)
                if job.is_new and any(ledger._parts.get(key, ...) is None for key in strangers):
                    raise ConfigError(
                        f"{store.url}: this folder holds parts of a run whose {JOB} is gone, so that nobody can tell "
                        "which; move them out of the folder and run again"
                    )
            heart.check()
        except BaseException as error:
            if isinstance(error, (ConfigError, StorageError)):  # it may have read what its successor was changing
                with contextlib.suppress(StorageError, PermissionDenied):
                    lease.check()
            lease.release()
            raise
        return ledger

    @classmethod
    def _read(cls, store: Store, slot: int, job: JobRecord, lease: Lease, dead_slots: Sequence[int]) -> Ledger:
        from batchgen.pieces import Pieces

        part_format = job.shape["format"]
        pieces = Pieces(store, slot, lease.epoch, lease.attempt, job.digest)
        # proofs before parts are listed: what is proven must be among them
        recorded = read_recorded(store, job.digest, pieces.read(dead_slots))
        names = list_parts(store, part_format)
        parts = read_parts(store, names, part_format, job.digest, recorded)
        ledger = cls(store, slot, job, lease, parts, recorded, pieces)
        ledger._unrecorded = [recorded.proofs[key] for key in sorted(recorded.noted) if key in names]
        if gone := [key for key in recorded.proofs if key not in names]:
            logger.warning(
                "%d parts are gone that were committed, first %s; their rows are computed anew",
                len(gone),
                store.path(part_name(*gone[0], part_format)),
            )
            ledger._save_proofs(gone)  # a new part of that name must not be judged by the old one's proof
        ledger._learn(read_index(store, job.digest))
        pieces.load(ledger._committed_ranges())
        if len(ledger._unrecorded) >= MANY_PROOFS:
            ledger._save_proofs()
        pieces.sweep()
        return ledger

    # what stands

    @property
    def shape(self) -> dict[str, Any]:
        """What the first start fixed."""
        return self._job.shape

    @property
    def epoch(self) -> int:
        return self._lease.epoch

    @property
    def done(self) -> dict[int, dict[int, ShardRange | None]]:
        """Committed shards by file and number; None where the shard's rows are not known."""
        found: dict[int, dict[int, ShardRange | None]] = {}
        for (file, shard), proof in self._parts.items():
            found.setdefault(file, {})[shard] = None if proof is None else proof.shard
        return found

    def is_done(self, file: int) -> bool:
        """Whether every shard of an input file is committed, so that it need not be read again."""
        return file in self._index and all((file, shard.shard) in self._parts for shard in self._index[file])

    def totals(self) -> Counters:
        """What the committed parts hold."""
        totals = Counters()
        totals.add(self._totals)
        return totals

    def take(self, key: RowKey, sample: int) -> Completion | InFlight | None:
        """What earlier starts left of this sample: its end, its first tokens or nothing. Answers once."""
        return self._pieces.take(key, sample)

    # pieces

    @property
    def saved(self) -> int:
        """Samples of open shards that earlier starts left, finished or begun, and that nobody took yet."""
        return self._pieces.left

    @property
    def pending_bytes(self) -> int:
        """Finished samples that are in no piece and no part yet."""
        return self._pieces.pending_bytes

    def record(self, completion: Completion) -> None:
        """Have a finished sample in the next checkpoint, unless its part is committed before."""
        self._pieces.record(completion)

    def checkpoint(self, in_flight: Iterable[InFlight], *, last: bool = False) -> bool:
        """Save what is finished and what is in flight; False where there is nothing new.

        `last` (the worker is about to end) saves and does nothing else; otherwise pieces are tidied up too.
        """
        self._lease.check()
        before = self._num_noted
        try:
            wrote = self._pieces.checkpoint(in_flight, self._notes, last=last)
        except BaseException:
            self._num_noted = before
            raise
        if len(self._unrecorded) >= MANY_PROOFS or (self._unrecorded and not wrote):
            self._save_proofs()
        return wrote

    def pieces_of(self, shard: ShardRange) -> list[str]:
        """What `read_back` needs to know. The pieces stay until the shard's part is acknowledged."""
        return self._pieces.pieces_of(shard)

    def read_back(self, shard: ShardRange, names: Sequence[str]) -> dict[tuple[int, int], Completion]:
        """The finished samples of an open shard that are in the pieces `names`, by row and sample.

        Any thread may call it. StorageError where a piece is gone or damaged: the next start computes its rows anew,
        unless the shard is `standing` already.
        """
        try:
            return self._pieces.read_back(shard, names)
        except StorageError:
            self._lease.check()
            raise

    # parts

    def part_metadata(self, shard: ShardRange, counters: Counters) -> dict[str, str]:
        """What `sinks.build_part` writes into a part about these rows."""
        return runfolder.metadata_of(self._job.digest, self._lease.epoch, shard, counters)

    def write_part(self, shard: ShardRange, data: bytes, counters: Counters) -> Written:
        """Create the part of a shard in the store, which commits it; `acknowledge` has to follow.

        Where another worker's stands there already ours is dropped. Any thread may call it.
        """
        name = self._name(shard)
        proof = self._prove(shard, data, counters)
        self._lease.check()
        ours = put_new(self._store, name, data)
        if not ours:
            proof = self._prove_standing(shard)
            logger.warning("%s was committed by another worker; it stands", self._store.path(name))
        return Written(proof, ours)

    def standing(self, shard: ShardRange) -> Written | None:
        """The shard's part, where one stands already. A worker of another slot that took this one for dead has
        committed it, and deleted the pieces that nobody needed after it. Any thread may call it."""
        try:
            return Written(self._prove_standing(shard), ours=False)
        except ObjectMissing:
            return None

    def acknowledge(self, written: Written) -> bool:
        """Count a part that stands, and forget its rows; touches no store. True where it is ours."""
        self._know(written.proof)
        self._pieces.committed(written.proof.shard)
        return written.ours

    def _prove(self, shard: ShardRange, data: bytes, counters: Counters | None = None) -> PartProof:
        return prove_part(
            self._path(shard),
            data,
            shard,
            part_format=self.shape["format"],
            digest=self._job.digest,
            epoch=self._lease.epoch,
            filtered=bool(self._job.fingerprint.get("input", {}).get("where")),
            counters=counters,
        )

    def _know(self, proof: PartProof) -> None:
        key = (proof.shard.file, proof.shard.shard)
        if self._parts.get(key) is None:
            self._totals.add(proof.counters)
            if self.shape["format"] != "parquet":
                self._unrecorded.append(proof)
        self._parts[key] = proof

    def _notes(self, everything: bool) -> bytes:
        """Proofs that a piece is to carry: those that no other one does, or all that are in no record."""
        proofs = self._unrecorded[0 if everything else self._num_noted :]
        self._num_noted = len(self._unrecorded)
        if not proofs:
            return b""
        return runfolder.encode(proofs_record(self._job.digest, proofs, sequence=self._recorded.sequence))

    def _save_proofs(self, void: Sequence[tuple[int, int]] = ()) -> None:
        self._lease.check()
        record = proofs_record(self._job.digest, self._unrecorded, void)
        record_proofs(self._store, self._recorded, self._slot, self.epoch, record)
        self._unrecorded, self._num_noted = [], 0
        self._pieces.forget_notes()

    def show_trial(self, shard: ShardRange, data: bytes) -> None:
        """Let people see results of a shard that a row limit cut off; nothing of the run depends on them."""
        self._lease.check()
        self._store.replace(TRIAL + self._name(shard), data)

    # index and end

    def commit_index(self, file: int, shards: Sequence[ShardRange]) -> None:
        """Write down the shards of a file that has been read to its end."""
        assert [(shard.file, shard.shard) for shard in shards] == [(file, number) for number in range(len(shards))]
        record, name = index_record(self._job.digest, file, shards), index_name(file)
        self._lease.check()
        standing = put_record(self._store, name, record)
        known = indexed_shards(standing, self._job.digest)
        if known is None:  # damaged; or of a run that was deleted, by a worker that had not noticed
            self._store.replace(name, runfolder.encode(record))
        elif known != list(shards):
            raise ConfigError(
                f"{self._store.path(name)}: input file number {file} had {standing['rows']} rows in "
                f"{len(standing['shards'])} shards when it was first read to its end, and has {record['rows']} rows in "
                f"{len(shards)} now: it was changed under the run. Bring the old file back, or give the job another "
                "output.path"
            )
        unproven = [shard for shard in shards if self._parts.get((file, shard.shard), ...) is None]
        self._learn({file: list(shards)})
        for shard in unproven:
            self._pieces.committed(shard)

    def _learn(self, index: Mapping[int, list[ShardRange]]) -> None:
        """The shards of files are known: parts must fit them, and parts without a proof get one."""
        self._index |= index
        committed = [shard for shards in index.values() for shard in shards if (shard.file, shard.shard) in self._parts]
        for shard in committed:
            proof = self._parts[shard.file, shard.shard]
            if proof is not None and proof.shard != shard:
                raise StorageError(
                    f"{self._path(shard)}: this part holds {proof.shard}, the index of its file says {shard}; delete "
                    f"the part or {index_name(shard.file)}, whichever is wrong, and run again"
                )
        # a crash came between a JSONL part and its proof
        unproven = [shard for shard in committed if self._parts[shard.file, shard.shard] is None]
        with ThreadPoolExecutor(4) as pool:
            for proof in pool.map(self._prove_standing, unproven):
                self._know(proof)

    def _prove_standing(self, shard: ShardRange) -> PartProof:
        return self._prove(shard, self._store.read(self._name(shard)))

    def _name(self, shard: ShardRange) -> str:
        return part_name(shard.file, shard.shard, self.shape["format"])

    def _path(self, shard: ShardRange) -> str:
        return self._store.path(self._name(shard))

    def _catch_up(self) -> dict[tuple[int, int], str]:
        """Learn what workers of other slots have committed since this one began. Returns the names of all parts."""
        part_format = self.shape["format"]
        names = list_parts(self._store, part_format)
        new = {key: name for key, name in names.items() if key not in self._parts}
        if new:
            recorded = read_recorded(self._store, self._job.digest) if part_format != "parquet" else Recorded()
            for key, proof in read_parts(self._store, new, part_format, self._job.digest, recorded).items():
                self._parts[key] = None
                if proof is not None:
                    self._know(proof)
        if len(self._index) < self._job.num_files or new:
            self._learn(read_index(self._store, self._job.digest))
        return names

    def finish(self, extra: Mapping[str, Any], pulse: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Write _SUCCESS: only when every file is indexed and every part is there and proven. Returns what it says.

        Whichever worker comes first writes it; another one finds it there. What an OpenAI run has besides its parts is
        made first. That takes its time: `pulse` is called meanwhile, and may raise what ends this start.
        """
        there = self._catch_up()
        expected = [(shard.file, shard.shard) for file in sorted(self._index) for shard in self._index[file]]
        format_ = self.shape["format"]
        unread = [file for file in range(self._job.num_files) if file not in self._index]
        missing = [key for key in expected if self._parts.get(key) is None or key not in there]
        surplus = sorted(set(there).difference(expected))
        if unread or missing or surplus:
            raise StorageError(
                f"{self._store.url}: the run is not complete: files not read to their end {unread[:5]}, parts missing "
                f"{[part_name(*key, format_) for key in missing[:5]]}, parts that no input has "
                f"{[part_name(*key, format_) for key in surplus[:5]]}; run again"
            )
        if self._unrecorded:
            self._save_proofs()
        self._lease.check()
        summary = self._success(expected, extra)
        if format_ == "openai":
            self._publish(summary, pulse)
        if trial := self._store.list(TRIAL):  # the parts hold it all now
            for name in trial:
                self._store.delete(name)
        self._lease.check()
        if last_list(self._store) != self._job.num_lists:
            raise Interrupted(
                f"{self._store.url}: input files were added to this run while it was at work; what it had committed "
                "is kept, run again with --extend to go on",
                reason="fenced",
            )
        summary = self._write_success(summary)
        self._pieces.clear()
        return summary

    def _success(self, expected: Sequence[tuple[int, int]], extra: Mapping[str, Any]) -> dict[str, Any]:
        totals, parts = Counters(), []
        for key in expected:
            proof = self._parts[key]
            assert proof is not None
            totals.add(proof.counters)
            name = part_name(*key, self.shape["format"])
            counts = {"rows": proof.counters.rows, "results": proof.counters.results}
            parts.append({"name": name, **counts, "bytes": proof.size})
        return {
            **extra,
            "format_version": FORMAT_VERSION,
            "name": self._job.name,
            "digest": self._job.digest,
            "started": self._job.created,
            "finished": now(),
            "epoch": self._lease.epoch,
            "files": self._job.num_files,
            "lists": self._job.num_lists,
            "counters": totals.to_json(),
            "parts": parts,
        }

    def _publish(self, summary: Mapping[str, Any], pulse: Callable[[], None]) -> None:
        from batchgen.io import answers

        first, later = read_lists(self._store)
        created, completed = (
            int(datetime.fromisoformat(summary[when]).timestamp()) for when in ("started", "finished")
        )
        answers.publish(
            self._store,
            [part["name"] for part in summary["parts"]],
            Counters.from_json(summary["counters"]),
            digest=self._job.digest,
            inputs=[file["path"] for files in [first, *later] if files is not None for file in files],
            created=created,
            completed=completed,
            pulse=pulse,
        )

    def _write_success(self, summary: dict[str, Any]) -> dict[str, Any]:
        if put_new(self._store, SUCCESS, data := runfolder.encode(summary)):
            return summary
        standing = read_success(self._store)
        if standing is not None and all(standing[name] == summary[name] for name in ("counters", "parts")):
            return standing
        self._store.replace(SUCCESS, data)  # damaged, or of an earlier state of the run or of its parts
        return summary

    # the slot

    def show_progress(self, *, rows_done: int, rows_failed: int) -> None:
        """What the next heartbeats tell `status`: rows finished, committed or not; and tokens of parts, whose proofs
        may not be written down yet."""
        own = {"rows_done": rows_done, "rows_failed": rows_failed}
        committed = {"prompt_tokens": self._totals.prompt_tokens, "output_tokens": self._totals.output_tokens}
        self._lease.progress = own | committed

    def heartbeat(self) -> None:
        """Show that this worker lives; call it often, it acts every 5 s. Interrupted("fenced") when replaced."""
        self._lease.beat()

    def close(self, failed: str | None = None) -> None:
        """Give the slot back; `failed` as `Lease.release` takes it."""
        try:
            if self._unrecorded:
                self._save_proofs()
        except Interrupted:  # another worker has the slot
            return
        except BatchgenError as error:
            logger.warning("the next start has to read some parts again: %s", error)
        self._lease.release(failed)

    def _committed_ranges(self) -> dict[int, list[ShardRange]]:
        ranges: dict[int, list[ShardRange]] = {}
        for proof in self._parts.values():
            if proof is not None:
                ranges.setdefault(proof.shard.file, []).append(proof.shard)
        return ranges
