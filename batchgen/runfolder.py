"""The run folder's layout: names of its files, safe reading and creating of its records, what proves a part."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from batchgen.errors import StorageError
from batchgen.io.storage import ObjectMissing
from batchgen.io.stores import Store
from batchgen.types import ShardRange

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
STATE = "_batchgen/"
JOB = "_batchgen/job.json"
INPUT_LISTS = "_batchgen/inputs/"
INPUTS = f"{INPUT_LISTS}000001.json"
EPOCHS = "_batchgen/epoch/"
LEASES = "_batchgen/lease/"
PIECES = "_batchgen/pieces/"
PROOFS = "_batchgen/proofs/"
INDEX = "_batchgen/index/"
TRIAL = "_batchgen/trial/"
SUCCESS = "_SUCCESS"
CHECKSUM = "sha256"  # of the rest of a record, as it is written
PART_FORMATS = {"parquet": "parquet", "jsonl": "jsonl", "openai": "jsonl"}  # how the files' names end

_PART = re.compile(r"part-(\d{5,})-(\d{5,})\.(\w+)")


def part_name(file: int, shard: int, part_format: str) -> str:
    return f"part-{file:05d}-{shard:05d}.{PART_FORMATS[part_format]}"


def parse_part(name: str, part_format: str) -> tuple[int, int] | None:
    """(file, shard) of a part's name; None for any other file."""
    match = _PART.fullmatch(name)
    if match is None or match[3] != PART_FORMATS[part_format]:
        return None
    file, shard = int(match[1]), int(match[2])
    return (file, shard) if part_name(file, shard, part_format) == name else None


def index_name(file: int) -> str:
    return f"{INDEX}{file:05d}.json"


def inputs_name(number: int) -> str:
    """The list of input files of the first start (number 1), or of what an extension added."""
    return f"{INPUT_LISTS}{number:06d}.json"


def proofs_name(sequence: int, slot: int, epoch: int) -> str:
    """Names sort in the order in which their writers saw each other, so that a later record corrects an earlier one."""
    return f"{PROOFS}{sequence:06d}-{slot}-{epoch:06d}.json"


def epoch_folder(slot: int) -> str:
    return f"{EPOCHS}{slot}/"


def epoch_name(slot: int, epoch: int) -> str:
    return f"{epoch_folder(slot)}{epoch:06d}.json"


def lease_name(slot: int) -> str:
    return f"{LEASES}{slot}.json"


def piece_folder(slot: int) -> str:
    return f"{PIECES}{slot}/"


def piece_name(slot: int, epoch: int, number: int, attempt: str) -> str:
    """`attempt` keeps a start whose run was deleted, and begun anew by another, away from that one's pieces."""
    return f"{piece_folder(slot)}{epoch:06d}-{number:06d}-{attempt[:8]}.arrow"


# -- records -----------------------------------------------------------------------------------------------------------


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as JSON, with a checksum of its own: the same bytes for equal content."""
    own = {key: value for key, value in record.items() if key != CHECKSUM}
    return _bytes({**own, CHECKSUM: hashlib.sha256(_bytes(own)).hexdigest()})


def _bytes(record: Mapping[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def decode(data: bytes) -> dict[str, Any] | None:
    """The record in `data`; None where it is torn, changed by hand, or not a record at all."""
    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict):
        return None
    given = record.pop(CHECKSUM, None)
    if given is not None and given != hashlib.sha256(_bytes(record)).hexdigest():
        return None
    return record


_WORKER: dict[str, type] = {
    "epoch": int,
    "attempt": str,
    "host": str,
    "pid": int,
    "process_started": float,
    "machine": str,
    "time": str,
    "monotonic": float,
}

# What a record must hold to be one; by its name, or a folder above it.
NEEDS: dict[str, dict[str, type]] = {
    JOB: {"format_version": int, "created": str, "spec": dict, "fingerprint": dict, "shape": dict, "digest": str},
    INPUT_LISTS: {"files": list},
    EPOCHS: _WORKER,
    LEASES: {**_WORKER, "counter": int, "released": bool},
    INDEX: {"digest": str, "file": int, "rows": int, "shards": list},
    PROOFS: {"digest": str, "proofs": list, "void": list},
    SUCCESS: {
        "digest": str,
        "name": str,
        "started": str,
        "finished": str,
        "epoch": int,
        "files": int,
        "lists": int,
        "counters": dict,
        "parts": list,
    },
}


def _is_whole(name: str, record: dict[str, Any]) -> bool:
    version = record.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        return True  # of a later release, which says itself what it needs
    needs = next((needs for place, needs in NEEDS.items() if name == place or name.startswith(place)), {})
    return all(isinstance(record.get(key), kind) for key, kind in needs.items())


def look_up(store: Store, name: str) -> tuple[dict[str, Any] | None, bool]:
    """The record called `name`, None where it is missing or damaged; and whether there is anything of this name."""
    try:
        record = decode(store.read(name))
    except ObjectMissing:
        return None, False
    return (record if record is not None and _is_whole(name, record) else None), True


def read_record(store: Store, name: str) -> dict[str, Any] | None:
    """The record called `name`; None where it is missing, or damaged (which a warning says)."""
    record, is_there = look_up(store, name)
    if record is None and is_there:
        logger.warning("%s in the run folder is damaged; going on without it", name)
    return record


def put_new(store: Store, name: str, data: bytes) -> bool:
    """Create `name`; False where it holds something else already.

    A store that fails may have written all the same, and a retry inside the store may find its own first try: what
    stands there is read back and compared before anything is decided.
    """
    try:
        if store.create(name, data):
            return True
    except StorageError:
        if not _holds(store, name, data):
            raise
        return True
    return store.read(name) == data


def _holds(store: Store, name: str, data: bytes) -> bool:
    try:
        return store.read(name) == data
    except StorageError:
        return False


def put_record(store: Store, name: str, record: dict[str, Any]) -> dict[str, Any]:
    """Create a record once. Returns what stands there after: `record`, or the one that was there before it.

    A damaged one is replaced.
    """
    data = encode(record)
    if put_new(store, name, data):
        return record
    standing = read_record(store, name)
    if standing is None:
        store.replace(name, data)
        return record
    return standing


# -- what proves a part ------------------------------------------------------------------------------------------------


_BY_NAME = ("failed", "finish_reasons")  # the fields of Counters that are tables


@dataclass(slots=True)
class Counters:
    """What result rows hold: input rows, result rows, failures by code and ends by reason (result rows), tokens.

    A row's prompt tokens count once, whatever its number of samples.
    """

    rows: int = 0
    rows_failed: int = 0  # input rows with at least one failed sample
    results: int = 0
    truncated: int = 0  # input rows
    prompt_tokens: int = 0
    output_tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counters) -> None:
        self.rows += other.rows
        self.rows_failed += other.rows_failed
        self.results += other.results
        self.truncated += other.truncated
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.failed.update(other.failed)
        self.finish_reasons.update(other.finish_reasons)

    def to_json(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in self.__slots__ if name not in _BY_NAME}
        return counts | {name: dict(getattr(self, name)) for name in _BY_NAME}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Counters:
        values: dict[str, Any] = {name: int(data[name]) for name in cls.__slots__ if name not in _BY_NAME}
        return cls(**values | {name: Counter(data[name]) for name in _BY_NAME})


@dataclass(frozen=True, slots=True)
class PartProof:
    """What a part says of itself: the run and start that made it, its rows, what they hold, a checksum of its data.

    A Parquet part carries it in its footer, a JSONL part in a record of many proofs.
    """

    fingerprint: str
    epoch: int
    shard: ShardRange
    counters: Counters
    checksum: str  # sha256 hex of the data: a Parquet file up to its footer, a JSONL file whole
    size: int  # bytes of the whole part

    def to_json(self) -> dict[str, Any]:
        shard = asdict(self.shard)
        counters = self.counters.to_json()
        own = {"version": FORMAT_VERSION, "fingerprint": self.fingerprint, "epoch": self.epoch, "counters": counters}
        return own | shard | {"checksum": self.checksum, "size": self.size}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PartProof:
        """Raises KeyError, TypeError or ValueError where `data` is no proof."""
        shard = ShardRange(**{name: int(data[name]) for name in ShardRange.__slots__})
        counters = Counters.from_json(data["counters"])
        checksum = str(data["checksum"])
        return cls(str(data["fingerprint"]), int(data["epoch"]), shard, counters, checksum, int(data["size"]))


def metadata_of(fingerprint: str, epoch: int, shard: ShardRange, counters: Counters) -> dict[str, str]:
    """The proof of a part about to be built, as key-value metadata; the builder adds the checksum."""
    proof = PartProof(fingerprint, epoch, shard, counters, "", 0).to_json()
    del proof["checksum"], proof["size"]
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in proof.items()}


def proof_from_metadata(metadata: dict[str, str], size: int) -> PartProof:
    """Raises KeyError, TypeError or ValueError where `metadata` is no proof."""
    data = {
        key: value if key in {"fingerprint", "checksum"} else orjson.loads(value) for key, value in metadata.items()
    }
    return PartProof.from_json(data | {"size": size})
