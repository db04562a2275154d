"""What is wrong with a run folder: every part read whole, every record compared with the others. Only reads."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import NoInputError, StorageError
from batchgen.io.files import BATCH, COPIES, ERRORS, OUTPUT
from batchgen.io.readback import Contents, read_contents
from batchgen.io.sinks import corrupt, verify_parquet
from batchgen.io.storage import ObjectMissing
from batchgen.io.stores import Store
from batchgen.jobrecord import fits, last_list, read_job
from batchgen.lease import holder, latest_epoch, seems_alive, slots, who
from batchgen.parts import Recorded, read_recorded
from batchgen.pieces import decode, notes_of
from batchgen.runfolder import (
    INDEX,
    INPUTS,
    JOB,
    PART_FORMATS,
    PROOFS,
    STATE,
    SUCCESS,
    Counters,
    PartProof,
    index_name,
    inputs_name,
    look_up,
    parse_part,
    part_name,
    piece_folder,
)
from batchgen.types import ShardRange

logger = logging.getLogger(__name__)

READERS = 4  # parts in memory at once
LOOKS = 3  # at a folder that changes meanwhile
SHOWN = 20  # problems of one kind that are told one by one

REPAIR = "`batchgen verify JOB --repair` has its rows computed anew"
_ANEW = f"delete {SUCCESS} and run again, or let `batchgen verify JOB --repair` make it anew"
_BACK = "bring it back: nobody can tell which files parts are of"
MOVE = "move it out of the folder; `batchgen verify JOB --repair` does that and computes what is missing"

Key = tuple[int, int]  # input file, shard


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    `cure` is what a repair does with the file: "delete" it, since it holds nothing that can be used; put it "aside",
    since it is whole and out of place; None where a run makes it good, or nobody can.
    """

    file: str
    what: str
    do: str
    cure: str | None = None
    is_warning: bool = False
    version: str | None = None  # of the file that was looked at, where that decides


@dataclass(slots=True)
class Findings:
    """What a look at a run folder found."""

    url: str
    state: str = "stopped"  # "finished", "running", "stopped"
    name: str = ""
    parts: int = 0
    parts_expected: int | None = None  # None until every input file has been read to its end
    counters: Counters = field(default_factory=Counters)  # of parts that prove themselves
    size: int = 0  # bytes of parts
    workers: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)  # of the runs that parts are of
    records_fit: bool = True  # job.json and the lists of inputs are there and of each other

    @property
    def ok(self) -> bool:
        return all(problem.is_warning for problem in self.problems)

    def add(self, file: str, what: str, do: str, cure: str | None = None, *, is_warning: bool = False) -> None:
        self.problems.append(Problem(file, what, do, cure, is_warning))

    def to_json(self) -> dict[str, Any]:
        def plain(is_warning: bool) -> list[dict[str, str]]:
            chosen = [problem for problem in self.problems if problem.is_warning == is_warning]
            return [{"file": problem.file, "what": problem.what, "do": problem.do} for problem in chosen]

        return {
            "output": self.url,
            "name": self.name,
            "state": self.state,
            "ok": self.ok,
            "problems": plain(False),
            "warnings": plain(True),
            "parts": self.parts,
            "parts_expected": self.parts_expected,
            "bytes": self.size,
            "workers": self.workers,
            **self.counters.to_json(),
        }


def verify(store: Store) -> Findings:
    """Look at a finished or a running run. A folder that changed in the meantime is looked at again."""
    for look in range(1, LOOKS + 1):
        before = _mark(store)
        findings = _Look(store).findings()
        if findings.ok or _mark(store) == before or look == LOOKS:
            return findings
        logger.info("%s changed while it was read; looking again", store.url)
    raise AssertionError


def _mark(store: Store) -> tuple[bytes | None, list[int]]:
    """What changes when a run is finished, or one that is finished is taken up again."""
    try:
        success: bytes | None = store.read(SUCCESS)
    except ObjectMissing:
        success = None
    return success, [latest_epoch(store, slot) for slot in slots(store)]


class _Look:
    """One look at a folder. Records are read after what depends on them, so that a growing run looks whole."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found = Findings(store.url)
        self._proofs: dict[Key, PartProof] = {}  # of parts that are whole and in their places
        self._recorded, self._refreshed = Recorded(), 0
        self._filtered = False  # parts may lack rows of their ranges
        self._seen: set[Key] = set()  # parts that are there, whatever their state

    def findings(self) -> Findings:
        found, store = self._found, self._store
        success, is_finished = self._record(SUCCESS)
        names = store.list()
        if not is_finished and not any(name.startswith(STATE) or _any_part(name) for name in names):
            raise NoInputError(f"{store.url}: no run in this folder")
        self._workers()
        job = read_job(store) if look_up(store, JOB)[0] is not None else None
        if job is None:
            self._say_lost(JOB, "`batchgen run JOB` writes it anew where JOB is the job of these parts")
            formats = {key for key in ("parquet", "jsonl") if any(parse_part(name, key) for name in names)}
            part_format = formats.pop() if len(formats) == 1 else "parquet"
        else:
            part_format = job["shape"]["format"]
            found.name = str(job["spec"].get("name", ""))
        digest = None if job is None else job["digest"]
        self._check_parts(names, part_format, digest, job or {})
        if job is None and len(found.digests) > 1:
            found.add(JOB, "the parts beside it are of more than one run", "find out which are to stay")
        files = self._check_inputs(job)
        found.records_fit = job is not None and files is not None
        index = self._check_index(files, digest)
        self._place_unproven(index, part_format, is_finished)
        self._compare(index, files, part_format, is_finished)
        if success is not None:
            self._check_success(success, digest, files, part_format)
            if part_format == "openai":
                self._check_copies()
        found.state = "finished" if is_finished else found.state
        found.problems.sort(key=lambda problem: problem.is_warning)
        return found

    def _record(self, name: str) -> tuple[dict[str, Any] | None, bool]:
        """A record, and whether there is something of its name; says so where it is damaged."""
        record, is_there = look_up(self._store, name)
        if is_there and record is None:
            do = f"delete it and run again, or let {_repair('it')}"
            self._found.add(name, "it is damaged: it cannot be read as what it is", do, "delete")
        return record, is_there

    def _say_lost(self, name: str, do: str) -> None:
        _, is_there = look_up(self._store, name)
        self._found.add(name, "it is damaged" if is_there else "it is missing", do)

    # -- who

    def _workers(self) -> None:
        for slot in slots(self._store):
            epoch = latest_epoch(self._store, slot)
            last = holder(self._store, slot, epoch)
            if not last:
                self._found.add(
                    f"_batchgen/epoch/{slot}", "the record of its last start is damaged", "nothing", is_warning=True
                )
                continue
            is_alive = seems_alive(last)
            how = "at work" if is_alive else "ended" if last.get("released") else "gone without a word"
            self._found.workers.append(f"slot {slot}, start {epoch}: {who(last)}, {how}")
            if is_alive:
                self._found.state = "running"

    # -- parts

    def _check_parts(self, names: Iterable[str], part_format: str, digest: str | None, job: Mapping[str, Any]) -> None:
        parts = {name: key for name in names if (key := parse_part(name, part_format)) is not None}
        for name in names:
            if name not in parts and _any_part(name):
                self._found.add(name, f"this run writes {part_format} parts, and this is none", MOVE, "aside")
        given = (job.get("spec") or {}).get("input") or {}
        self._filtered = not job or given.get("where") is not None
        check = PartCheck(
            part_format,
            digest,
            own_ids=bool(job) and given.get("id") is None and given.get("format") != "openai",
            filtered=self._filtered,
        )
        self._recorded = self._read_recorded(digest)  # with a look at pieces, of any run
        with ThreadPoolExecutor(READERS) as pool:
            for key, seen in zip(parts.values(), pool.map(lambda name: self._look_at(check, name), parts), strict=True):
                if seen is None:  # deleted since it was listed
                    continue
                self._seen.add(key)
                self._found.parts += 1
                if isinstance(seen, Problem):
                    self._found.problems.append(seen)
                else:
                    self._proofs[key] = seen
                    self._found.digests |= {seen.fingerprint} - {""}
                    self._found.counters.add(seen.counters)
                    self._found.size += seen.size

    def _look_at(self, check: PartCheck, name: str) -> PartProof | Problem | None:
        """The proof of a part, or what is wrong with it; None where it is gone."""
        key = parse_part(name, check.part_format)
        assert key is not None
        try:
            seen = check.look(name, self._store.read(name), self._recorded.proofs.get(key))
            if isinstance(seen, Problem):  # before the worst is said: it may have been replaced, or badly transmitted
                if check.part_format != "parquet" and self._refreshed < SHOWN:
                    self._refreshed += 1
                    self._recorded = self._read_recorded(check.digest)
                version = self._store.version(name)
                seen = check.look(name, self._store.read(name), self._recorded.proofs.get(key))
                if isinstance(seen, Problem):
                    seen = replace(seen, version=version)
        except ObjectMissing:
            return None
        except StorageError as error:
            return Problem(name, f"it cannot be read: {error}", "see to the disk or store and look again")
        return seen

    def _read_recorded(self, digest: str | None) -> Recorded:
        """The proofs of parts that cannot carry their own: the newest are in pieces, which are read first."""
        notes = []
        for name in self._pieces() if digest is not None else ():
            try:
                notes.append(notes_of(decode(self._store.read(name), digest or "")))
            except ObjectMissing:  # its rows are in parts by now, its notes in records
                continue
            except (StorageError, ValueError, pa.ArrowException, OSError) as error:
                if name not in {problem.file for problem in self._found.problems}:
                    do = "nothing: what it held is computed again"
                    self._found.add(name, f"this piece of work is of no use: {error}", do, "delete", is_warning=True)
        for name in self._store.list(PROOFS):
            record, is_there = look_up(self._store, name)
            is_known = any(problem.file == name for problem in self._found.problems)
            if is_there and not is_known and (record is None or (digest is not None and record["digest"] != digest)):
                what = "these proofs of parts are damaged" if record is None else "these proofs are of another run"
                self._found.add(name, what, "nothing: parts are read instead", "delete", is_warning=True)
        return read_recorded(self._store, digest, [note for note in notes if note])

    def _pieces(self) -> list[str]:
        return [name for slot in slots(self._store) for name in self._store.list(piece_folder(slot))]

    # -- records

    def _check_inputs(self, job: Mapping[str, Any] | None) -> list[Any] | None:
        """The run's input files; None where their list is lost."""
        files: list[Any] | None = []
        for number in range(1, max(last_list(self._store), 1) + 1):
            name = inputs_name(number)
            record, is_there = look_up(self._store, name)
            if record is None and not is_there and not self._seen:  # the run has just begun
                files = None
            elif record is None:
                do = "`batchgen run JOB` writes it anew where the input is what it was" if name == INPUTS else _BACK
                self._found.add(name, "it is damaged" if is_there else "it is missing", do)
                files = None
            elif name == INPUTS and job is not None and not fits(job, record["files"]):
                do = f"delete it, or let {_repair('it')}"
                self._found.add(name, f"it is not the list that {JOB} was written with", do, "delete")
                files = None
            elif files is not None:
                files += record["files"]
        return files

    def _check_index(self, files: list[Any] | None, digest: str | None) -> dict[int, list[ShardRange]]:
        index: dict[int, list[ShardRange]] = {}
        for name in self._store.list(INDEX):
            record = self._record(name)[0]
            if record is None:
                continue
            try:
                shards = [ShardRange(record["file"], n, *map(int, row)) for n, row in enumerate(record["shards"])]
            except (TypeError, ValueError):
                shards = []
            file = record["file"]
            if digest is not None and record["digest"] != digest:
                what = "it is of another run"
            elif name != index_name(file) or (files is not None and not 0 <= file < len(files)):
                what = f"it is of input file {file}, which the run does not have by this name"
            elif len(shards) != len(record["shards"]) or not _is_chain(shards, record["rows"]):
                what = "its shards do not follow each other from the first row to the last"
            else:
                index[file] = shards
                continue
            self._found.add(name, what, "delete it: the next start reads that file again", "delete")
        return index

    def _compare(
        self,
        index: Mapping[int, list[ShardRange]],
        files: list[Any] | None,
        part_format: str,
        is_finished: bool,
    ) -> None:
        """Parts against the index, and the index against the inputs."""
        found = self._found
        if files is not None and len(index) == len(files):
            found.parts_expected = sum(map(len, index.values()))
        for file, shards in index.items():
            wrong = [shard for shard in shards if (proof := self._proofs.get((file, shard.shard))) is not None
                     and proof.shard != shard]  # fmt: skip
            if wrong:
                name = part_name(file, wrong[0].shard, part_format)
                held = self._proofs[file, wrong[0].shard].shard
                found.add(
                    index_name(file),
                    f"{name} holds {_rows(held)}, and it says {_rows(wrong[0])}; so with {len(wrong)} parts",
                    "delete it: the next start reads that file again",
                    "delete",
                )
            surplus = [key for key in self._seen if key[0] == file and key[1] >= len(shards)]
            for key in sorted(surplus):
                found.add(part_name(*key, part_format), "its input file has no such shard", MOVE, "aside")
        for file in {key[0] for key in self._seen} - index.keys():
            if files is not None and file >= len(files):
                for key in sorted(key for key in self._seen if key[0] == file):
                    found.add(part_name(*key, part_format), "the run has no such input file", MOVE, "aside")
            self._check_neighbours(file, part_format)
        if is_finished:
            for file in range(len(files or ())):
                if file not in index and not any(problem.file == index_name(file) for problem in found.problems):
                    what = f"it is missing, and {SUCCESS} says that the run is complete"
                    found.add(index_name(file), what, f"let {_repair('it')}")
            expected = {(file, shard.shard) for file, shards in index.items() for shard in shards}
            for key in sorted(expected - self._seen):
                what = f"it is missing, and {SUCCESS} says that the run is complete"
                found.add(part_name(*key, part_format), what, f"put it back, or let {_repair('it')}")

    def _place_unproven(self, index: Mapping[int, list[ShardRange]], part_format: str, is_finished: bool) -> None:
        """Parts whose proof is not written down are compared with the shards that they are for."""
        for key, proof in list(self._proofs.items()):
            shards = index.get(key[0], [])
            if proof.epoch or key[1] >= len(shards):
                continue
            name, shard, held = part_name(*key, part_format), shards[key[1]], proof.shard
            end = shard.first_row + shard.num_rows
            is_within = held.first_row < 0 or shard.first_row <= held.first_row <= end - held.num_rows
            if is_within and (held.num_rows == shard.num_rows or (self._filtered and held.num_rows < shard.num_rows)):
                self._proofs[key] = replace(proof, shard=shard)
                if is_finished:
                    what = "its proof is not written down: only what it holds could be checked"
                    self._found.add(name, what, "nothing: the next start writes it", is_warning=True)
            else:
                del self._proofs[key]
                rows = _rows(held) if held.first_row >= 0 else f"{held.num_rows} rows"
                self._found.add(name, f"this part is corrupt: it holds {rows} of {_rows(shard)}", REPAIR, "delete")

    def _check_neighbours(self, file: int, part_format: str) -> None:
        """Of a file that is not read to its end: parts side by side must meet, and others must not overlap."""
        shards = sorted(
            (p.shard for p in self._proofs.values() if p.shard.file == file and p.epoch), key=lambda s: s.shard
        )
        for one, other in pairwise(shards):
            end = one.first_row + one.num_rows
            if end > other.first_row or (other.shard == one.shard + 1 and end != other.first_row):
                what = (
                    f"it begins at row {other.first_row}, and {part_name(file, one.shard, part_format)} ends at {end}"
                )
                self._found.add(part_name(file, other.shard, part_format), what, MOVE, "aside")

    def _check_success(
        self, success: Mapping[str, Any], digest: str | None, files: list[Any] | None, part_format: str
    ) -> None:
        wrong = []
        if digest is not None and success["digest"] != digest:
            wrong.append(f"it is of another run than {JOB}")
        if success["lists"] != last_list(self._store):
            wrong.append("input files were added to the run since")
        elif files is not None and success["files"] != len(files):
            wrong.append(f"it counts {success['files']} input files where the run has {len(files)}")
        listed = {part.get("name"): (part.get("rows"), part.get("bytes")) for part in success["parts"]}
        names = {key: part_name(*key, part_format) for key in self._seen}
        known = {problem.file for problem in self._found.problems}
        if unlisted := sorted(set(names.values()) - listed.keys() - known):
            wrong.append(f"it does not name {_few(unlisted)}")
        for name in sorted(listed.keys() - set(names.values()) - known):
            self._found.add(str(name), f"it is missing, and {SUCCESS} names it", f"put it back, or let {_repair('it')}")
        sizes = {names[key]: (proof.counters.rows, proof.size) for key, proof in self._proofs.items()}
        if other := sorted(name for name, size in sizes.items() if listed.get(name, size) != size):
            wrong.append(f"it gives other rows or sizes of {_few(other)}")
        if listed.keys() == sizes.keys() and success["counters"] != self._found.counters.to_json():
            wrong.append("its counters are not the sum of the parts'")
        for what in wrong:
            self._found.add(SUCCESS, what, f"delete it and run again, or let {_repair('it')}", "delete")

    def _check_copies(self) -> None:
        """The files that an OpenAI run makes of its parts: every line is an answer or an error."""
        size = 0
        for name in COPIES:
            try:
                size += self._store.size(name) if name != BATCH else 0
                self._store.size(name)
            except ObjectMissing:
                self._found.add(name, f"it is missing, and {SUCCESS} says that the run is complete", _ANEW, "delete")
                return
        if size != self._found.size and all(problem.is_warning for problem in self._found.problems):
            what = f"it and {ERRORS} have {size} bytes, and the parts that they are made of {self._found.size}"
            self._found.add(OUTPUT, what, _ANEW, "delete")


@dataclass(frozen=True, slots=True)
class PartCheck:
    """What a part has to be. `own_ids`: its ids are its rows' places; `filtered`: it may lack rows of its range."""

    part_format: str
    digest: str | None
    own_ids: bool = False
    filtered: bool = False

    def look(self, name: str, data: bytes, recorded: PartProof | None) -> PartProof | Problem:
        """The proof of a part that is whole and in its place, or what is wrong with it.

        `recorded` is the proof of a part that cannot carry its own. Without it only what it holds can be judged: its
        proof is of epoch 0 then, and its range begins at row -1 where nothing tells.
        """
        key = parse_part(name, self.part_format)
        assert key is not None
        try:
            if self.part_format == "parquet":
                proof = verify_parquet(data, name)
            else:
                proof = recorded or self._made_up(name, key, data)
                if proof.size != len(data):
                    raise corrupt(name, f"it has {len(data)} bytes and was committed with {proof.size}")
                if proof.checksum != hashlib.sha256(data).hexdigest():
                    raise corrupt(name, "its data does not fit its checksum")
            if self.digest is not None and proof.fingerprint != self.digest:
                return Problem(name, "it was made by another run", MOVE, "aside")
            if (proof.shard.file, proof.shard.shard) != key:
                held = part_name(proof.shard.file, proof.shard.shard, self.part_format)
                return Problem(name, f"it is {held} under another name", MOVE, "aside")
            self._compare(name, read_contents(self.part_format, data, name), proof)
        except StorageError as error:
            return Problem(name, _short(error, name), REPAIR, "delete")
        return proof

    def _made_up(self, name: str, key: Key, data: bytes) -> PartProof:
        """What a part without a proof says by what it holds."""
        contents = read_contents(self.part_format, data, name)
        counters, first, rows = contents.counters(), -1, -1
        if self.own_ids and contents.ids:
            places = self._places(name, key[0], contents)
            first, rows = int(places[0]), int(places[-1] - places[0]) + 1
        shard = ShardRange(*key, first, max(rows, counters.rows), 0, 0)
        return PartProof(self.digest or "", 0, shard, counters, hashlib.sha256(data).hexdigest(), len(data))

    def _compare(self, name: str, contents: Contents, proof: PartProof) -> None:
        """StorageError where a part does not hold what its proof says."""
        if (disorder := contents.disorder()) is not None:
            raise corrupt(name, disorder)
        then, now = proof.counters.to_json(), contents.counters().to_json()
        if now != then:
            differences = [f"it holds {now[key]} {key} and says {then[key]}" for key in now if now[key] != then[key]]
            raise corrupt(name, "; ".join(differences))
        shard, rows = proof.shard, now["rows"]
        if rows > shard.num_rows or (rows < shard.num_rows and not self.filtered):
            raise corrupt(name, f"it holds {rows} rows of a shard of {shard.num_rows}")
        if self.own_ids and contents.ids:
            places = self._places(name, shard.file, contents)
            if places[0] < shard.first_row or places[-1] >= shard.first_row + shard.num_rows:
                raise corrupt(name, f"it holds rows {places[0]} to {places[-1]} and says {_rows(shard)}")

    def _places(self, name: str, file: int, contents: Contents) -> npt.NDArray[np.int64]:
        """The row numbers that ids of the form "file:row" give, as they have to follow each other."""
        pairs = [str(one).split(":") for one in contents.ids]
        if not all(len(pair) == 2 and all(part.isdecimal() for part in pair) for pair in pairs):
            raise corrupt(name, "an id is none that this run gives")
        found = np.array(pairs, np.int64)  # (num_results, 2)
        if (found[:, 0] != file).any():
            raise corrupt(name, f"it holds rows of input file {found[found[:, 0] != file][0, 0]}")
        is_first = contents.samples == 0
        steps, rows = np.diff(found[:, 1]), found[is_first, 1]
        if (steps[~is_first[1:]] != 0).any():
            raise corrupt(name, "the samples of a row have different ids")
        steps = np.diff(rows)
        wrong = np.flatnonzero(steps < 1 if self.filtered else steps != 1)
        if len(wrong):
            raise corrupt(name, f"row {rows[wrong[0] + 1]} follows row {rows[wrong[0]]}")
        return rows


# -- small things ------------------------------------------------------------------------------------------------------


def _any_part(name: str) -> bool:
    return any(parse_part(name, part_format) is not None for part_format in PART_FORMATS)


def _is_chain(shards: list[ShardRange], rows: int) -> bool:
    ends = [0, *(shard.first_row + shard.num_rows for shard in shards)]
    return ends[-1] == rows and all(
        s.first_row == end and s.num_rows >= 0 for s, end in zip(shards, ends, strict=False)
    )


def _rows(shard: ShardRange) -> str:
    return f"rows {shard.first_row} to {shard.first_row + shard.num_rows - 1}" if shard.num_rows else "no rows"


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parts, first {names[0]}"


def _repair(what: str) -> str:
    return f"`batchgen verify JOB --repair` make {what} good"


def _short(error: StorageError, name: str) -> str:
    """What is wrong, without the file's name and what to do, which are told apart from it."""
    return str(error).removeprefix(f"{name}: ").partition(". Nothing is written")[0]


def lines(findings: Findings) -> Iterator[str]:
    """What was found, for a person: problems first, then counts."""
    counts: dict[str, int] = {}
    for problem in findings.problems:
        kind = f"{problem.what} {problem.do}" if problem.cure is None else problem.do
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= SHOWN:
            mark = "warning: " if problem.is_warning else ""
            yield f"{mark}{problem.file}: {problem.what}; {problem.do}"
    for count in counts.values():
        if count > SHOWN:
            yield f"... and {count - SHOWN} more of this kind (--json tells all)"
    wrong = sum(not problem.is_warning for problem in findings.problems)
    counters = findings.counters
    expected = "" if findings.parts_expected is None else f" of {findings.parts_expected:,}"
    rows = [
        ("state", findings.state),
        ("problems", f"{wrong:,}"),
        ("warnings", f"{len(findings.problems) - wrong:,}"),
        ("parts", f"{findings.parts:,}{expected} ({findings.size / 1e6:,.1f} MB)"),
        ("rows", f"{counters.rows:,}"),
        ("failed rows", f"{counters.rows_failed:,}"),
        ("results", f"{counters.results:,}"),
        *(("worker", worker) for worker in findings.workers),
    ]
    width = max(len(name) for name, _ in rows)
    yield f"{findings.name or 'run'} in {findings.url}"
    for name, value in rows:
        yield f"  {name:<{width}}  {value}"
