"""What a run is: job.json and the lists of its inputs, written once; a start that differs is refused by name."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import orjson

from batchgen.errors import ConfigError, Interrupted
from batchgen.io.partitions import partitions
from batchgen.io.stores import Store
from batchgen.runfolder import (
    FORMAT_VERSION,
    INPUT_LISTS,
    INPUTS,
    JOB,
    SUCCESS,
    inputs_name,
    parse_part,
    put_record,
    read_record,
)

logger = logging.getLogger(__name__)

WAYS_OUT = (
    "Run the job as it was to go on with that run, give this one another output.path, or use --overwrite to delete "
    "that run's results"
)
_SHOWN = 10
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A run as its folder describes it. `digest` stands in every part and piece: job, shape and first input content."""

    name: str
    created: str
    fingerprint: dict[str, Any]
    shape: dict[str, Any]
    num_files: int
    digest: str
    num_lists: int = 1  # of input files: one of the first start, one of each extension
    is_new: bool = False  # written by this start
    added: Sequence[dict[str, Any]] = ()  # files of this start that the run does not have yet, see `extend`


def read_job(store: Store) -> dict[str, Any] | None:
    """job.json of the run in this folder, None where there is none: its `shape` holds what the first start fixed."""
    job = read_record(store, JOB)
    if job is not None and job.get("format_version", 0) > FORMAT_VERSION:
        raise ConfigError(
            f"{store.url}: this run was made by batchgen {job.get('batchgen', '?')} in run folder format "
            f"{job['format_version']}; this batchgen reads format {FORMAT_VERSION}. Use the newer one"
        )
    return job


def establish(
    store: Store,
    *,
    spec: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    shape: Mapping[str, Any],
    must_be_new: bool,
    prove: Callable[[int], str] | None,
    info: Mapping[str, Any],
    created: str,
    extend: bool = False,
) -> JobRecord:
    """Write down what this run is, or check that the run in the folder is this one.

    `inputs` are in the order that `arrange` gives. With `extend` new ones may follow the run's own; they are in
    `added`, and `extend_inputs` makes them the run's.
    """
    now = _plain({"fingerprint": fingerprint, "shape": shape})
    job = read_job(store)
    if job is not None:
        if must_be_new:
            raise ConfigError(f"{store.url}: --must-be-new, but this folder holds a run, started {job.get('created')}")
        _refuse(store, _changes(job["fingerprint"], now["fingerprint"]) + _changes(job["shape"], now["shape"], "shape"))
    first, later = read_lists(store)
    known = [file for files in later if files is not None for file in files]
    if first is None:  # or damaged: what it held is what no later list holds, and the digest proves it
        first_files, added = _proven(inputs[: max(len(inputs) - len(known), 0)], prove), []
        if known:
            _compare_inputs(store, [*first_files, *known], inputs, prove)
    else:
        first_files = first
        if None in later and not extend:
            _refuse_damaged_lists(store, first, later, None)
        added = _compare_inputs(store, [*first_files, *known], inputs, prove, extend=extend)
    _refuse_damaged_lists(store, first, later, shape["format"] if added else None)
    digest = _digest(now if job is None else job, first_files)  # a number may be written in two ways
    is_new = job is None
    if job is None:
        own = {"format_version": FORMAT_VERSION, "created": created, "spec": spec, **now, "digest": digest}
        own = _plain(own | {"batchgen": info.get("version")})
        job = put_record(store, JOB, own)
        if must_be_new and job is not own:
            raise ConfigError(f"{store.url}: --must-be-new, but another start has just begun a run here")
        # two first starts at once: the slower one finds the other's record and compares like any later start
        _refuse(store, _changes(job["fingerprint"], now["fingerprint"]) + _changes(job["shape"], now["shape"], "shape"))
    if job["digest"] != digest:
        raise ConfigError(
            f"{store.url}: the input is not the one this run was started with (its list {INPUTS} is missing or was "
            f"changed, so the difference is not known). {WAYS_OUT}"
        )
    if first is None:
        put_record(store, INPUTS, {"files": first_files})
    return JobRecord(
        name=str(job["spec"].get("name", "")),
        created=job["created"],
        fingerprint=job["fingerprint"],
        shape=job["shape"],
        num_files=len(first_files) + len(known),
        digest=digest,
        num_lists=1 + len([files for files in later if files is not None]),
        is_new=is_new,
        added=added,
    )


def extend_inputs(store: Store, job: JobRecord, check: Callable[[], None]) -> JobRecord:
    """Make `job.added` files of the run. `check` raises where this worker has lost the run.

    _SUCCESS goes first, so that it never stands beside an incomplete run; whoever dies here is followed by a start
    that does it again.
    """
    if not job.added:
        return job
    check()
    store.delete(SUCCESS)
    check()
    name, record = inputs_name(job.num_lists + 1), {"files": list(job.added)}
    if put_record(store, name, record)["files"] != _plain(record["files"]):
        raise Interrupted(f"{store.path(name)}: another start is extending this run; run again", reason="locked")
    logger.info("%s: %d new input files", store.url, len(job.added))
    return replace(job, num_files=job.num_files + len(job.added), num_lists=job.num_lists + 1, added=())


def check_same(
    store: Store,
    *,
    fingerprint: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]] | None,
    prove: Callable[[int], str] | None,
    extend: bool = False,
) -> bool:
    """Refuse a start that differs from the run in the folder in one of the sections given.

    For a finished run, where the sections that cost time (a model's content) are left out. `prove` is called for
    files that are not plainly the same only. False where the job is the same and `extend` brings new files.
    """
    job, (first, later) = read_job(store), read_lists(store)
    if job is None or first is None or None in later:
        gone = JOB if job is None else INPUTS if first is None else inputs_name(2 + later.index(None))
        raise ConfigError(
            f"{store.url}: the run in this folder is finished, but {gone} is gone or damaged, so that nobody can tell "
            f"whether it was this job. {WAYS_OUT}"
        )
    then = {key: value for key, value in job["fingerprint"].items() if key in fingerprint}
    _refuse(store, _changes(then, _plain(fingerprint)))
    if inputs is None:
        return True
    known = [*first, *(file for files in later if files is not None for file in files)]
    return not _compare_inputs(store, known, inputs, prove, extend=extend)


def _refuse(store: Store, changes: list[str]) -> None:
    if changes:
        lines = "".join(f"\n  {change}" for change in changes)
        raise ConfigError(f"{store.url}: this folder holds a run of another job:{lines}\n{WAYS_OUT}")


def _plain(value: Any) -> Any:
    """The value as it comes back from JSON: tuples are lists, numbers are themselves."""
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def _digest(job: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> str:
    content = {key: job[key] for key in ("fingerprint", "shape")}
    content["inputs"] = [[file["size"], file["proof"], partitions(file["path"])] for file in files]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def digest_of(
    store: Store,
    *,
    fingerprint: Mapping[str, Any],
    shape: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    prove: Callable[[int], str] | None,
) -> str:
    """The digest of a run of this job, made without the records of the run that may be damaged."""
    later = read_lists(store)[1]
    first = len(inputs) - sum(len(files) for files in later if files is not None)
    return _digest(_plain({"fingerprint": fingerprint, "shape": shape}), _proven(inputs[:first], prove))


def fits(job: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run's list of input files is the one that its job.json was written with."""
    try:
        return bool(_digest(job, files) == job["digest"])
    except (KeyError, TypeError):
        return False


# -- fingerprint -------------------------------------------------------------------------------------------------------


def _changes(then: Any, now: Any, path: str = "") -> list[str]:
    """Every leaf that differs, one line each: `sampling.temperature: 0.0 then, 0.7 now`."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [*then, *(key for key in now if key not in then)]
        pairs = [(f"{path}.{key}".lstrip("."), then.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys]
    elif isinstance(then, list) and isinstance(now, list) and any(isinstance(item, dict) for item in then + now):
        longest = range(max(len(then), len(now)))
        pairs = [
            (f"{path}[{i}]", then[i] if i < len(then) else _ABSENT, now[i] if i < len(now) else _ABSENT)
            for i in longest
        ]
    else:
        same = then == now and (then is _ABSENT) == (now is _ABSENT) and isinstance(then, bool) == isinstance(now, bool)
        return [] if same else [f"{path}: {_shown(then)} then, {_shown(now)} now"]
    return [line for pair_path, a, b in pairs for line in _changes(a, b, pair_path)]


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = orjson.dumps(value).decode()
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


# -- inputs ------------------------------------------------------------------------------------------------------------

_Files = list[dict[str, Any]]


def read_lists(store: Store) -> tuple[_Files | None, list[_Files | None]]:
    """The files of the first start, and those of each extension; None for a list that is missing or damaged."""
    last = last_list(store)
    lists = []
    for number in range(1, last + 1):
        record = read_record(store, inputs_name(number))
        lists.append(None if record is None else record["files"])
    return (lists[0], lists[1:]) if lists else (None, [])


def last_list(store: Store) -> int:
    """How many lists of input files the run has: 1, and one more for each extension."""
    names = store.list(INPUT_LISTS)
    numbers = [int(digits) for name in names if (digits := name[len(INPUT_LISTS) : -len(".json")]).isdigit()]
    return max((number for number in numbers if inputs_name(number) in names), default=0)


def arrange(store: Store, inputs: Sequence[Mapping[str, Any]], prove: Callable[[int], str] | None = None) -> list[int]:
    """The order in which `inputs` are the files of the run in this folder: those it has, as it numbered them, then
    new ones as they are given. Numbers of files go by this order.

    A file is known by its path; one that moved by its size and then its name, or its content (`prove(i)` tells it).
    Nothing is decided here: who opens the run compares all of it.
    """
    first, later = read_lists(store)
    known = [*(first or []), *(file for files in later for file in files or [])]
    at = {file["path"]: i for i, file in enumerate(inputs)}
    found = {i: at[file["path"]] for i, file in enumerate(known) if file["path"] in at}
    left = sorted(set(range(len(inputs))) - set(found.values()))
    for i, file in enumerate(known):
        if i not in found:
            alike = [j for j in left if inputs[j]["size"] == file["size"]]
            if len(alike) > 1 and prove is not None:
                base = [j for j in alike if _base(inputs[j]) == _base(file)]
                alike = base if len(base) == 1 else [j for j in alike if _proof(inputs, j, prove) == file["proof"]]
            if alike:
                found[i] = alike[0]
                left.remove(alike[0])
    ordered = [found[i] for i in range(len(known)) if i in found]
    return [*left, *ordered] if first is None else [*ordered, *left]  # a lost first list: what is left was in it


def _base(file: Mapping[str, Any]) -> str:
    return str(file["path"]).rpartition("/")[2]


def _refuse_damaged_lists(
    store: Store, first: _Files | None, later: list[_Files | None], part_format: str | None
) -> None:
    """A later list cannot be told from the digest. The last one can be made anew, by an extension that brings files
    (which `part_format` says), as long as no part depends on how it numbered its files."""
    if None not in later:
        return
    name = inputs_name(2 + later.index(None))
    if part_format is not None and later.index(None) == len(later) - 1 and first is not None:
        before = len(first) + sum(len(files) for files in later if files is not None)
        keys = [parse_part(part, part_format) for part in store.list(recursive=False)]
        if all(key is None or key[0] < before for key in keys):
            logger.warning("%s is damaged and no part depends on it; it is made anew", store.path(name))
            return
    raise ConfigError(
        f"{store.path(name)}: this list of input files is missing or damaged, and nobody can tell which files parts "
        "are of. Put a good copy in its place, or give the job another output.path, or use --overwrite"
    )


def _proven(
    inputs: Sequence[Mapping[str, Any]], prove: Callable[[int], str] | None, which: Sequence[int] | None = None
) -> _Files:
    """The input list, or `which` of it, with a content proof for each file."""
    chosen = range(len(inputs)) if which is None else which
    with ThreadPoolExecutor(8) as pool:
        proofs = list(pool.map(lambda i: _proof(inputs, i, prove), chosen))
    return [{**_plain(inputs[i]), "proof": proof} for i, proof in zip(chosen, proofs, strict=True)]


def _proof(inputs: Sequence[Mapping[str, Any]], i: int, prove: Callable[[int], str] | None) -> str:
    given = inputs[i].get("proof")
    if given is None:
        assert prove is not None, "inputs without a proof need a way to make it"
        return prove(i)
    return str(given)


def _plainly_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Equal path, size and etag or modification time: nothing has to be read."""
    mark = "etag" if then.get("etag") is not None and now.get("etag") is not None else "mtime"
    return then.get(mark) is not None and all(then.get(key) == now.get(key) for key in ("path", "size", mark))


def _compare_inputs(
    store: Store,
    then: Sequence[Mapping[str, Any]],
    now: Sequence[Mapping[str, Any]],
    prove: Callable[[int], str] | None,
    *,
    extend: bool = False,
) -> _Files:
    """ConfigError where the input's content changed; a warning where files only moved.

    Returns the files that come after those of the run, which only `extend` allows, each with its proof.
    """

    def same(old: Mapping[str, Any], i: int) -> bool:
        if partitions(old["path"]) != partitions(now[i]["path"]):  # columns that its folders give
            return False
        return _plainly_same(old, now[i]) or (old["size"] == now[i]["size"] and old["proof"] == _proof(now, i, prove))

    is_all_there = len(now) >= len(then) and all(same(old, i) for i, old in enumerate(then))
    if is_all_there and (extend or len(now) == len(then)):
        pairs = zip(then, now, strict=False)
        moved = [(old["path"], new["path"]) for old, new in pairs if old["path"] != new["path"]]
        if moved:
            logger.warning("%d input files have moved, the first from %s to %s; same content", len(moved), *moved[0])
        return _proven(now, prove, range(len(then), len(now)))
    before, after = {file["path"]: file for file in then}, {file["path"]: i for i, file in enumerate(now)}
    changed = [path for path, i in after.items() if path in before and not same(before[path], i)]
    found = {
        "added": [path for path in after if path not in before],
        "removed": [path for path in before if path not in after],
        "changed": [f"{path} ({before[path]['size']} bytes then, {now[after[path]]['size']} now)" for path in changed],
    }
    lines = [f"{what}: {path}" for what, paths in found.items() for path in paths[:_SHOWN]]
    lines += [f"{what}: {len(p) - _SHOWN} more" for what, p in found.items() if len(p) > _SHOWN]
    lines = lines or ["the files are the same, in another order"]
    ways = WAYS_OUT
    if is_all_there:
        ways = f"Use --extend to take the new files into this run. {WAYS_OUT}"
    elif extend:
        ways = f"--extend takes new files only while all the run's own are there and unchanged. {WAYS_OUT}"
    raise ConfigError(
        f"{store.url}: the input is not the one this run was started with:"
        + "".join(f"\n  {line}" for line in lines)
        + f"\n{ways}"
    )
