"""The run folder's only writer: what is committed, what a restart goes on from, and when a run is complete."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from batchgen import runfolder
from batchgen.errors import BatchgenError, ConfigError, Interrupted, StorageError
from batchgen.io.files import COPIES
from batchgen.io.stores import Store
from batchgen.jobrecord import JobRecord, check_same, establish, read_job
from batchgen.lease import DEAD_AFTER_SECONDS, Heart, Lease, holder, latest_epoch, now, seems_alive, who
from batchgen.runfolder import (
    FORMAT_VERSION,
    INDEX,
    INPUTS,
    JOB,
    PART_FORMATS,
    STATE,
    SUCCESS,
    TRIAL,
    Counters,
    PartProof,
    index_name,
    parse_part,
    part_name,
    proof_name,
    put_new,
    put_record,
    read_record,
)
from batchgen.types import Completion, InFlight, RowKey, ShardRange

if TYPE_CHECKING:  # pyarrow is slow to import, and `status` of a finished run does without
    from batchgen.pieces import Pieces

logger = logging.getLogger(__name__)

SLOT = 0  # the place of a plain run's one worker

__all__ = ["Ledger", "RunStatus", "check_same", "overwrite", "peek", "read_job", "read_success"]

_Parts = dict[tuple[int, int], PartProof | None]  # (file, shard): its proof; None: committed, its rows not known


@dataclass(frozen=True, slots=True)
class Written:
    """A part that stands in the folder: `ours`, or another worker's of the same rows."""

    name: str
    proof: PartProof
    ours: bool


class Ledger:
    """A run folder opened by the worker that holds it. Made by `Ledger.open`."""

    def __init__(self, store: Store, job: JobRecord, lease: Lease, parts: _Parts, pieces: Pieces) -> None:
        self._store, self._job, self._lease, self._parts, self._pieces = store, job, lease, parts, pieces
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
        dead_after: float = DEAD_AFTER_SECONDS,
    ) -> Ledger:
        """Begin the run in this folder, or take it up where it stands.

        `spec` is the resolved job without secrets. `fingerprint` is what results depend on, `shape` what the first
        start fixes (`format` of the output among it): a run that had other ones is a ConfigError naming them.
        `inputs` hold path, size, mtime, etag; `prove(i)` gives the content proof of one that is not plainly the same.
        `info` (version, device) is written down. A living worker in the folder is Interrupted("locked").
        """
        from batchgen.pieces import Pieces

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
        )
        lease = Lease.acquire(store, SLOT, dict(info), dead_after=dead_after)
        try:
            with Heart(lease.beat) as heart:  # thousands of parts take their time on a slow store
                store.sweep()
                parts = _read_parts(store, job.shape["format"], job.digest)
                if job.is_new and None in parts.values():
                    raise ConfigError(
                        f"{store.url}: this folder holds parts of a run whose {JOB} is gone, so that nobody can tell "
                        "which; move them out of the folder and run again"
                    )
                ledger = cls(store, job, lease, parts, Pieces(store, SLOT, lease.epoch, job.digest))
                for file, shards in _read_index(store).items():
                    ledger._learn(file, shards)
                ledger._pieces.load(ledger._committed_ranges())
            heart.check()
        except BaseException:
            _release(lease)
            raise
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
        """Samples of open shards that earlier starts left, finished or begun."""
        return len(self._pieces.restored)

    @property
    def pending_bytes(self) -> int:
        """Finished samples that are in no piece and no part yet."""
        return self._pieces.pending_bytes

    def record(self, completion: Completion) -> None:
        """Have a finished sample in the next checkpoint, unless its part is committed before."""
        self._pieces.record(completion)

    def checkpoint(self, in_flight: Iterable[InFlight]) -> bool:
        """Save what is finished and what is in flight; False where there is nothing new."""
        return self._pieces.checkpoint(in_flight)

    # parts

    def part_metadata(self, shard: ShardRange, counters: Counters) -> dict[str, str]:
        """What `sinks.build_part` writes into a part about these rows."""
        return runfolder.metadata_of(self._job.digest, self._lease.epoch, shard, counters)

    def commit_part(self, shard: ShardRange, data: bytes, counters: Counters) -> bool:
        """Create the part of a shard, which commits it. False where another worker's stands there: ours is dropped."""
        return self.acknowledge(self.write_part(shard, data, counters))

    def write_part(self, shard: ShardRange, data: bytes, counters: Counters) -> Written:
        """The storage work of a commit; may run in another thread. To be acknowledged in this one."""
        name = part_name(shard.file, shard.shard, self.shape["format"])
        proof = self._proof(name, data, shard, counters)
        self._lease.check()
        ours = put_new(self._store, name, data)
        if not ours:
            standing = self._store.read(name)
            proof = self._proof(name, standing, shard, None)
            logger.warning("%s was committed by another worker; it stands", self._store.path(name))
        return Written(name, proof, ours)

    def acknowledge(self, written: Written) -> bool:
        """Count a part that is written, and forget what is kept of its rows. False where it is another worker's."""
        self._know(written.name, written.proof)
        self._pieces.committed(written.proof.shard)
        return written.ours

    def pieces_of(self, shard: ShardRange) -> list[str]:
        """The pieces that hold rows of an open shard."""
        return self._pieces.names_of(shard)

    def read_back(self, shard: ShardRange, names: Sequence[str]) -> dict[tuple[int, int], Completion]:
        """The finished samples of a shard in these pieces, by row and sample; may run in another thread."""
        return self._pieces.read_back(shard, names)

    def _proof(self, name: str, data: bytes, shard: ShardRange, counters: Counters | None) -> PartProof:
        """The proof of a whole part, compared with the shard it is for."""
        from batchgen.io.sinks import count_jsonl, verify_parquet

        path = self._store.path(name)
        if self.shape["format"] == "parquet":
            proof = verify_parquet(data, path)
            _refuse_foreign(path, proof, self._job.digest)
            if proof.shard != shard:
                raise StorageError(f"{path}: this part is corrupt: it holds {proof.shard} where {shard} belongs")
            return proof
        counters = counters or count_jsonl(data, path, shard, part_format=self.shape["format"])
        checksum = hashlib.sha256(data).hexdigest()
        return PartProof(self._job.digest, self._lease.epoch, shard, counters, checksum, len(data))

    def _know(self, name: str, proof: PartProof) -> None:
        """A part is proven: write its proof down where it cannot carry it, and count what it holds."""
        if self.shape["format"] != "parquet":
            standing = put_record(self._store, proof_name(name), proof.to_json())
            if standing.get("checksum") != proof.checksum:  # of a part that somebody deleted
                self._store.replace(proof_name(name), runfolder.encode(proof.to_json()))
        key = (proof.shard.file, proof.shard.shard)
        if self._parts.get(key) is None:
            self._totals.add(proof.counters)
        self._parts[key] = proof

    def show_trial(self, shard: ShardRange, data: bytes) -> None:
        """Let people see results of a shard that a row limit cut off; nothing of the run depends on them."""
        self._lease.check()
        self._store.replace(TRIAL + part_name(shard.file, shard.shard, self.shape["format"]), data)

    # index and end

    def commit_index(self, file: int, shards: Sequence[ShardRange]) -> None:
        """Write down the shards of a file that has been read to its end."""
        assert [(shard.file, shard.shard) for shard in shards] == [(file, number) for number in range(len(shards))]
        rows = sum(shard.num_rows for shard in shards)
        columns = ("first_row", "num_rows", "byte_start", "byte_end")
        table = [[getattr(shard, column) for column in columns] for shard in shards]
        record = {"file": file, "rows": rows, "columns": columns, "shards": table}
        self._lease.check()
        standing = put_record(self._store, index_name(file), record)
        if standing["shards"] != table:
            raise ConfigError(
                f"{self._store.path(index_name(file))}: input file number {file} had {standing['rows']} rows in "
                f"{len(standing['shards'])} shards when it was first read to its end, and has {rows} rows in "
                f"{len(shards)} now: it was changed under the run. Bring the old file back, or give the job another "
                "output.path"
            )
        unproven = [shard for shard in shards if self._parts.get((file, shard.shard), ...) is None]
        self._learn(file, list(shards))
        for shard in unproven:
            self._pieces.committed(shard)

    def _learn(self, file: int, shards: list[ShardRange]) -> None:
        """The shards of a file are known: parts must fit them, and parts without a proof get one."""
        self._index[file] = shards
        for shard in shards:
            name = part_name(file, shard.shard, self.shape["format"])
            proof = self._parts.get((file, shard.shard))
            if (file, shard.shard) not in self._parts:
                continue
            if proof is None:  # a crash came between a JSONL part and its proof
                self._know(name, self._proof(name, self._store.read(name), shard, None))
            elif proof.shard != shard:
                raise StorageError(
                    f"{self._store.path(name)}: this part holds {proof.shard}, the index of its file says {shard}; "
                    f"delete the part or {index_name(file)}, whichever is wrong, and run again"
                )

    def finish(self, extra: Mapping[str, Any], pulse: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Write _SUCCESS: only when every file is indexed and every part is there and proven. Returns what it says.

        What an OpenAI run has besides its parts is made first. That takes its time: `pulse` is called meanwhile, and
        may raise what ends this start.
        """
        expected = [(shard.file, shard.shard) for file in sorted(self._index) for shard in self._index[file]]
        format_ = self.shape["format"]
        there = {key for name in self._store.list(recursive=False) if (key := parse_part(name, format_)) is not None}
        unread = [file for file in range(self._job.num_files) if file not in self._index]
        missing = [key for key in expected if self._parts.get(key) is None or key not in there]
        surplus = sorted(there.difference(expected))
        if unread or missing or surplus:
            raise StorageError(
                f"{self._store.url}: the run is not complete: files not read to their end {unread[:5]}, parts missing "
                f"{[part_name(*key, format_) for key in missing[:5]]}, parts that no input has "
                f"{[part_name(*key, format_) for key in surplus[:5]]}; run again"
            )
        self._lease.check()
        proofs = [proof for key in expected if (proof := self._parts[key]) is not None]
        parts = [
            {"name": part_name(*key, format_), "rows": proof.shard.num_rows, "bytes": proof.size}
            for key, proof in zip(expected, proofs, strict=True)
        ]
        own = {
            "format_version": FORMAT_VERSION,
            "name": self._job.name,
            "digest": self._job.digest,
            "started": self._job.created,
            "finished": now(),
            "epoch": self._lease.epoch,
            "files": self._job.num_files,
            "counters": self._totals.to_json(),
            "parts": parts,
        }
        if format_ == "openai":
            self._publish([part_name(*key, format_) for key in expected], own, pulse)
        for name in self._store.list(TRIAL):  # the parts hold it all now
            self._store.delete(name)
        summary = put_record(self._store, SUCCESS, {**extra, **own})
        self._pieces.clear()
        return summary

    def _publish(self, parts: Sequence[str], summary: Mapping[str, Any], pulse: Callable[[], None]) -> None:
        from batchgen.io import answers

        listed = read_record(self._store, INPUTS) or {"files": []}
        created, completed = (
            int(datetime.fromisoformat(summary[when]).timestamp()) for when in ("started", "finished")
        )
        answers.publish(
            self._store,
            parts,
            self._totals,
            digest=self._job.digest,
            inputs=[file["path"] for file in listed["files"]],
            created=created,
            completed=completed,
            pulse=pulse,
        )
        self._lease.check()

    # the slot

    def show_progress(self, *, rows_done: int, rows_failed: int) -> None:
        """What the next heartbeats tell `status`: rows finished, committed or not."""
        self._lease.progress = {"rows_done": rows_done, "rows_failed": rows_failed}

    def heartbeat(self) -> None:
        """Show that this worker lives; call it often, it acts every 5 s. Interrupted("fenced") when replaced."""
        self._lease.beat()

    def close(self) -> None:
        """Give the slot back."""
        _release(self._lease)

    def _committed_ranges(self) -> dict[int, list[ShardRange]]:
        ranges: dict[int, list[ShardRange]] = {}
        for proof in self._parts.values():
            if proof is not None:
                ranges.setdefault(proof.shard.file, []).append(proof.shard)
        return ranges


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except Interrupted:  # another worker has the slot: its lease is not ours to touch
        pass
    except BatchgenError as error:
        logger.warning("the lease stays behind, the next start may wait for it: %s", error)


# -- reading a folder --------------------------------------------------------------------------------------------------


def _refuse_foreign(path: str, proof: PartProof, digest: str) -> None:
    if proof.fingerprint != digest:
        raise ConfigError(f"{path}: this part was made by another run; move it out of the folder and run again")


def _read_parts(store: Store, part_format: str, digest: str | None) -> _Parts:
    """Every part in the folder with its proof; a listing only finds candidates."""
    names = [name for name in store.list(recursive=False) if parse_part(name, part_format) is not None]
    read = _parquet_proof if part_format == "parquet" else _jsonl_proof
    parts: _Parts = {}
    with ThreadPoolExecutor(8) as pool:
        for name, proof in zip(names, pool.map(lambda name: read(store, name), names), strict=True):
            key = parse_part(name, part_format)
            assert key is not None
            if proof is not None:
                if digest is not None:
                    _refuse_foreign(store.path(name), proof, digest)
                if (proof.shard.file, proof.shard.shard) != key:
                    raise StorageError(f"{store.path(name)}: this part is corrupt: it holds {proof.shard}")
            parts[key] = proof
    return parts


def _parquet_proof(store: Store, name: str) -> PartProof:
    from batchgen.io.sinks import read_proof

    with store.open(name) as file:
        return read_proof(file, store.path(name))


def _jsonl_proof(store: Store, name: str) -> PartProof | None:
    """The record beside a JSONL part; None where a crash came before it was written."""
    record, size = read_record(store, proof_name(name)), store.size(name)
    if record is None:
        return None
    try:
        proof = PartProof.from_json(record)
    except (KeyError, TypeError, ValueError):
        logger.warning("%s is damaged; going on without it", store.path(proof_name(name)))
        return None
    if proof.size != size:
        raise StorageError(
            f"{store.path(name)}: this part is corrupt: it has {size} bytes and was committed with {proof.size}. Put a "
            "good copy in its place, or delete it and run again, and its rows are computed anew"
        )
    return proof


def _read_index(store: Store) -> dict[int, list[ShardRange]]:
    """The shards of every file that has been read to its end."""
    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(lambda name: read_record(store, name), store.list(INDEX)))
    return {
        record["file"]: [ShardRange(record["file"], shard, *row) for shard, row in enumerate(record["shards"])]
        for record in records
        if record is not None
    }


def read_success(store: Store) -> dict[str, Any] | None:
    """What _SUCCESS says of a finished run; None where there is none, or only a damaged one."""
    return read_record(store, SUCCESS)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as its folder shows it. `state`: "empty", "running", "stopped" or "finished".

    Rows and failures count as the last heartbeat told, tokens where they are committed; totals are None until every
    input file has been read to its end.
    """

    state: str
    name: str = ""
    files: int = 0
    shards_done: int = 0
    shards_total: int | None = None
    rows_done: int = 0
    rows_total: int | None = None
    rows_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    started: str | None = None
    updated: str | None = None
    epoch: int = 0
    host: str | None = None
    pid: int | None = None


def peek(store: Store) -> RunStatus:
    """The state of the run in a folder; changes nothing."""
    success = read_success(store)
    if success is not None:
        counters, shards = Counters.from_json(success["counters"]), len(success["parts"])
        return RunStatus(
            "finished",
            success["name"],
            success["files"],
            shards_done=shards,
            shards_total=shards,
            rows_done=counters.rows,
            rows_total=counters.rows,
            rows_failed=counters.rows_failed,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            started=success["started"],
            updated=success["finished"],
            epoch=success["epoch"],
        )
    job = read_job(store)
    if job is None:
        return RunStatus("empty")
    inputs = read_record(store, INPUTS)
    files = 0 if inputs is None else len(inputs["files"])
    index = _read_index(store)
    whole = inputs is not None and len(index) == files
    ranges = {(file, shard.shard): shard for file, shards in index.items() for shard in shards}
    parts = _read_parts(store, job["shape"]["format"], None)
    totals = Counters()
    for key, proof in parts.items():
        if proof is not None:
            totals.add(proof.counters)
        elif key in ranges:
            totals.rows += ranges[key].num_rows
    epoch = latest_epoch(store, SLOT)
    last = holder(store, SLOT, epoch) if epoch else {}
    progress = last.get("progress", {})
    return RunStatus(
        "running" if last and seems_alive(last) else "stopped",
        str(job["spec"].get("name", "")),
        files,
        shards_done=len(parts),
        shards_total=len(ranges) if whole else None,
        rows_done=max(totals.rows, progress.get("rows_done", 0)),
        rows_total=sum(shard.num_rows for shard in ranges.values()) if whole else None,
        rows_failed=max(totals.rows_failed, progress.get("rows_failed", 0)),
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        started=job["created"],
        updated=last.get("time"),
        epoch=epoch,
        host=last.get("host"),
        pid=last.get("pid"),
    )


def overwrite(store: Store) -> None:
    """Delete the run in this folder and nothing else: _SUCCESS first, job.json last, so that it can be repeated."""
    if not store.exists(JOB):
        if read_success(store) is not None:
            store.delete(SUCCESS)
        return
    epoch = latest_epoch(store, SLOT)
    last = holder(store, SLOT, epoch) if epoch else {}
    if last and seems_alive(last):
        raise Interrupted(f"{store.url}: {who(last)} is at work on this run; end it first", reason="locked")
    job = read_record(store, JOB)
    formats = tuple(PART_FORMATS) if job is None else (job["shape"]["format"],)
    names = store.list()
    parts = [name for name in names if any(parse_part(name, part_format) for part_format in formats)]
    copies = [name for name in names if name in COPIES and "openai" in formats]
    state = [name for name in names if name.startswith(STATE) and name != JOB]
    for name in [SUCCESS, *copies, *parts, *state, JOB]:
        store.delete(name)
