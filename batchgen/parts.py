"""What stands in a run folder: its parts, what proves them, and the shards of files that were read to their end."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from batchgen.errors import ConfigError, StorageError
from batchgen.io.stores import Store
from batchgen.runfolder import (
    INDEX,
    PROOFS,
    Counters,
    PartProof,
    decode,
    encode,
    index_name,
    parse_part,
    proofs_name,
    put_new,
    read_record,
)
from batchgen.types import ShardRange

logger = logging.getLogger(__name__)

READERS = 32  # requests at once; each holds one file open at most
_COLUMNS = ("first_row", "num_rows", "byte_start", "byte_end")

Key = tuple[int, int]  # input file, shard
Parts = dict[Key, PartProof | None]  # None: committed, its rows not known
_T = TypeVar("_T")
_R = TypeVar("_R")


def _at_once(work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    if not items:
        return []
    with ThreadPoolExecutor(min(READERS, len(items))) as pool:
        return list(pool.map(work, items))


def list_parts(store: Store, part_format: str) -> dict[Key, str]:
    """The names of all parts. A listing only finds candidates: each proves itself."""
    return {key: name for name in store.list(recursive=False) if (key := parse_part(name, part_format)) is not None}


# -- proofs ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Recorded:
    """Proofs of JSONL parts that were written down. `sequence` is the number of the newest record of them."""

    proofs: dict[Key, PartProof] = field(default_factory=dict)
    noted: set[Key] = field(default_factory=set)  # those that no record holds, only a piece
    sequence: int = 0


def read_recorded(store: Store, digest: str | None, notes: Iterable[bytes] = ()) -> Recorded:
    """All proofs of this run, later ones over earlier ones, in the order in which their writers saw each other.

    `notes` are those that pieces carry, which come after the record that their writer knew as the newest.
    """
    names = [name for name in store.list(PROOFS) if name.removeprefix(PROOFS)[:6].isdigit()]
    records = [(int(name.removeprefix(PROOFS)[:6]), False, name) for name in names]
    found = Recorded(sequence=max((sequence for sequence, _, _ in records), default=0))
    content = dict(zip(names, _at_once(lambda name: read_record(store, name), names), strict=True))
    for number, data in enumerate(notes):
        note = decode(data) or {}
        content[f"note {number}"] = note
        records.append((int(note.get("sequence", 0)), True, f"note {number}"))
    for _, is_note, name in sorted(records):
        record = content[name]
        if record is None or (digest is not None and record.get("digest") != digest):
            continue
        try:
            for void in record["void"]:
                found.proofs.pop((int(void[0]), int(void[1])), None)
            for given in record["proofs"]:
                proof = PartProof.from_json(given)
                key = (proof.shard.file, proof.shard.shard)
                found.proofs[key] = proof
                found.noted.add(key) if is_note else found.noted.discard(key)
        except (KeyError, TypeError, ValueError, IndexError):
            logger.warning("%s is damaged; going on without the rest of it", name)
    return found


def proofs_record(
    digest: str, proofs: Sequence[PartProof], void: Iterable[Key] = (), sequence: int | None = None
) -> dict[str, Any]:
    record = {"digest": digest, "proofs": [proof.to_json() for proof in proofs], "void": [list(key) for key in void]}
    return record if sequence is None else record | {"sequence": sequence}


def record_proofs(store: Store, recorded: Recorded, slot: int, epoch: int, record: dict[str, Any]) -> None:
    """Write down proofs of JSONL parts, many in one record."""
    while True:
        recorded.sequence += 1  # a name is used once: after a failure nobody knows whether it was written
        if put_new(store, proofs_name(recorded.sequence, slot, epoch), encode(record)):
            return


def read_parts(
    store: Store, names: Mapping[Key, str], part_format: str, digest: str | None, recorded: Recorded
) -> Parts:
    """The proof of each part; `digest` is what it must be of. StorageError names one that is corrupt."""

    def prove(key: Key) -> PartProof | None:
        name = names[key]
        path = store.path(name)
        proof = _parquet_proof(store, name) if part_format == "parquet" else _jsonl_proof(store, name, key, recorded)
        if proof is not None:
            if digest is not None:
                refuse_foreign(path, proof, digest)
            if (proof.shard.file, proof.shard.shard) != key:
                raise StorageError(f"{path}: this part is corrupt: it holds {proof.shard}")
        return proof

    keys = sorted(names)
    return dict(zip(keys, _at_once(prove, keys), strict=True))


def refuse_foreign(path: str, proof: PartProof, digest: str) -> None:
    if proof.fingerprint != digest:
        raise ConfigError(f"{path}: this part was made by another run; move it out of the folder and run again")


def _parquet_proof(store: Store, name: str) -> PartProof:
    from batchgen.io.sinks import read_proof

    with store.open(name) as file:
        return read_proof(file, store.path(name))


def _jsonl_proof(store: Store, name: str, key: Key, recorded: Recorded) -> PartProof | None:
    """None where a crash came before its proof was written down."""
    proof = recorded.proofs.get(key)
    if proof is None:
        return None
    size = store.size(name)
    if proof.size != size:
        raise StorageError(
            f"{store.path(name)}: this part is corrupt: it has {size} bytes and was committed with {proof.size}. Put a "
            "good copy in its place, or delete it and run again, and its rows are computed anew"
        )
    return proof


def prove_part(
    path: str,
    data: bytes,
    shard: ShardRange,
    *,
    part_format: str,
    digest: str,
    epoch: int,
    filtered: bool = False,
    counters: Counters | None = None,
) -> PartProof:
    """The proof of a whole part, compared with the shard it is for. Lines without `counters` are counted.

    `filtered`: the job may have dropped rows of the shard.
    """
    from batchgen.io.sinks import count_jsonl, verify_parquet

    if part_format == "parquet":
        proof = verify_parquet(data, path)
        refuse_foreign(path, proof, digest)
        if proof.shard != shard:
            raise StorageError(f"{path}: this part is corrupt: it holds {proof.shard} where {shard} belongs")
        return proof
    counters = counters or count_jsonl(data, path, shard, part_format=part_format, filtered=filtered)
    return PartProof(digest, epoch, shard, counters, hashlib.sha256(data).hexdigest(), len(data))


# -- index -------------------------------------------------------------------------------------------------------------


def index_record(digest: str, file: int, shards: Sequence[ShardRange]) -> dict[str, Any]:
    table = [[getattr(shard, column) for column in _COLUMNS] for shard in shards]
    rows = sum(shard.num_rows for shard in shards)
    return {"digest": digest, "file": file, "rows": rows, "columns": _COLUMNS, "shards": table}


def indexed_shards(record: Mapping[str, Any], digest: str) -> list[ShardRange] | None:
    """The shards that a file's record tells; None where it is another run's, or damaged."""
    file = record["file"]
    if record["digest"] != digest:
        return None
    with contextlib.suppress(TypeError, ValueError):
        shards = [ShardRange(file, shard, *map(int, row)) for shard, row in enumerate(record["shards"])]
        ends = [shard.first_row + shard.num_rows for shard in shards]
        if [shard.first_row for shard in shards] == [0, *ends[:-1]][: len(shards)] and [0, *ends][-1] == record["rows"]:
            return shards
    logger.warning("%s is damaged; its file is read again", index_name(file))
    return None


def read_index(store: Store, digest: str) -> dict[int, list[ShardRange]]:
    """The shards of every file that has been read to its end."""
    names = store.list(INDEX)
    found = {}
    for name, record in zip(names, _at_once(lambda name: read_record(store, name), names), strict=True):
        if record is not None and name == index_name(record["file"]):
            shards = indexed_shards(record, digest)
            if shards is not None:
                found[record["file"]] = shards
    return found
