"""What a run is: job.json and the list of its inputs, written once; a start that differs is refused by name."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from batchgen.errors import ConfigError
from batchgen.io.stores import Store
from batchgen.runfolder import FORMAT_VERSION, INPUTS, JOB, put_record, read_record

logger = logging.getLogger(__name__)

WAYS_OUT = (
    "Run the job as it was to go on with that run, give this one another output.path, or use --overwrite to delete "
    "that run's results"
)
_SHOWN = 10
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A run as its folder describes it. `digest` stands in every part and piece: job, shape and input content."""

    name: str
    created: str
    fingerprint: dict[str, Any]
    shape: dict[str, Any]
    num_files: int
    digest: str
    is_new: bool = False  # written by this start


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
) -> JobRecord:
    """Write down what this run is, or check that the run in the folder is this one."""
    now = _plain({"fingerprint": fingerprint, "shape": shape})
    job = read_job(store)
    if job is not None:
        if must_be_new:
            raise ConfigError(f"{store.url}: --must-be-new, but this folder holds a run, started {job.get('created')}")
        _refuse(store, _changes(job["fingerprint"], now["fingerprint"]) + _changes(job["shape"], now["shape"], "shape"))
    listed = read_record(store, INPUTS)
    if listed is None:
        files = _proven(inputs, prove)
    else:
        files = listed["files"]
        _compare_inputs(store, files, inputs, prove)
    digest = _digest(now if job is None else job, files)  # a number may be written in two ways: the first one counts
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
    if listed is None:
        put_record(store, INPUTS, {"files": files})
    name = str(job["spec"].get("name", ""))
    return JobRecord(name, job["created"], job["fingerprint"], job["shape"], len(files), digest, is_new)


def check_same(
    store: Store,
    *,
    fingerprint: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]] | None,
    prove: Callable[[int], str] | None,
) -> None:
    """Refuse a start that differs from the run in the folder in one of the sections given.

    For a finished run, where the sections that cost time (a model's content) are left out. `prove` is called for
    files that are not plainly the same only.
    """
    job, listed = read_job(store), read_record(store, INPUTS)
    if job is None or listed is None:
        raise ConfigError(
            f"{store.url}: the run in this folder is finished, but {JOB if job is None else INPUTS} is gone or "
            f"damaged, so that nobody can tell whether it was this job. {WAYS_OUT}"
        )
    then = {key: value for key, value in job["fingerprint"].items() if key in fingerprint}
    _refuse(store, _changes(then, _plain(fingerprint)))
    if inputs is not None:
        _compare_inputs(store, listed["files"], inputs, prove)


def _refuse(store: Store, changes: list[str]) -> None:
    if changes:
        lines = "".join(f"\n  {change}" for change in changes)
        raise ConfigError(f"{store.url}: this folder holds a run of another job:{lines}\n{WAYS_OUT}")


def _plain(value: Any) -> Any:
    """The value as it comes back from JSON: tuples are lists, numbers are themselves."""
    return orjson.loads(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


def _digest(job: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> str:
    content = {key: job[key] for key in ("fingerprint", "shape")}
    content["inputs"] = [[file["size"], file["proof"]] for file in files]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


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


def _proven(inputs: Sequence[Mapping[str, Any]], prove: Callable[[int], str] | None) -> list[dict[str, Any]]:
    """The input list with a content proof for each file."""
    with ThreadPoolExecutor(8) as pool:
        proofs = list(pool.map(lambda i: _proof(inputs, i, prove), range(len(inputs))))
    return [{**_plain(file), "proof": proof} for file, proof in zip(inputs, proofs, strict=True)]


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
) -> None:
    """ConfigError where the input's content changed; a warning where files only moved."""

    def same(old: Mapping[str, Any], i: int) -> bool:
        return _plainly_same(old, now[i]) or (old["size"] == now[i]["size"] and old["proof"] == _proof(now, i, prove))

    if len(then) == len(now) and all(same(old, i) for i, old in enumerate(then)):
        moved = [(old["path"], new["path"]) for old, new in zip(then, now, strict=True) if old["path"] != new["path"]]
        if moved:
            logger.warning("%d input files have moved, the first from %s to %s; same content", len(moved), *moved[0])
        return
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
    raise ConfigError(
        f"{store.url}: the input is not the one this run was started with:"
        + "".join(f"\n  {line}" for line in lines)
        + f"\n{WAYS_OUT}"
    )
