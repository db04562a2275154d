"""A run as its folder shows it: finished or not, how far, who is at work; and how to delete it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from batchgen.io.files import COPIES
from batchgen.io.stores import Store
from batchgen.jobrecord import last_list, read_job, read_lists
from batchgen.lease import DEAD_AFTER_SECONDS, holder, latest_epoch, refuse_company, seems_alive, slots
from batchgen.parts import list_parts, read_index, read_parts, read_recorded
from batchgen.runfolder import JOB, PART_FORMATS, STATE, SUCCESS, Counters, parse_part, read_record

logger = logging.getLogger(__name__)


def read_success(store: Store) -> dict[str, Any] | None:
    """What _SUCCESS says of a finished run; None where there is none, or only one that counts for nothing.

    A worker that stood still while its run was extended, or deleted and begun anew, may have left the one it wrote
    when it woke up.
    """
    success = read_record(store, SUCCESS)
    if success is None:
        return None
    job = read_job(store)  # first of all: a later release may have written both in its own way
    if (job is not None and job["digest"] != success["digest"]) or last_list(store) > success["lists"]:
        logger.warning("%s is of an earlier state of this run; going on without it", store.path(SUCCESS))
        return None
    return success


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`state`: "empty", "running", "stopped", "failed" or "finished"; `error` is why it failed.

    Rows and failures count as the last heartbeat told, tokens those of parts; totals are None until every input file
    has been read to its end. Epoch, host and process are those of the worker that was seen last.
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
    error: str | None = None


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
    first, later = read_lists(store)
    files = sum(len(files) for files in [first, *later] if files is not None)
    index = read_index(store, job["digest"])
    whole = first is not None and len(index) == files
    ranges = {(file, shard.shard): shard for file, shards in index.items() for shard in shards}
    part_format = job["shape"]["format"]
    recorded = read_recorded(store, job["digest"])
    parts = read_parts(store, list_parts(store, part_format), part_format, None, recorded)
    totals = Counters()
    for key, proof in parts.items():
        if proof is not None:
            totals.add(proof.counters)
        elif key in ranges:
            totals.rows += ranges[key].num_rows
    workers = [holder(store, slot, latest_epoch(store, slot)) for slot in slots(store)]
    living = [worker for worker in workers if worker and seems_alive(worker)]
    last = max(living or workers, key=lambda worker: str(worker.get("time")), default={})

    def told(name: str, committed: int) -> int:
        return max([committed, *(int(worker.get("progress", {}).get(name, 0)) for worker in workers)])

    return RunStatus(
        "running" if living else "failed" if last.get("failed") else "stopped",
        str(job["spec"].get("name", "")),
        files,
        shards_done=len(parts),
        shards_total=len(ranges) if whole else None,
        rows_done=told("rows_done", totals.rows),
        rows_total=sum(shard.num_rows for shard in ranges.values()) if whole else None,
        rows_failed=told("rows_failed", totals.rows_failed),
        prompt_tokens=told("prompt_tokens", totals.prompt_tokens),
        output_tokens=told("output_tokens", totals.output_tokens),
        started=job["created"],
        updated=last.get("time"),
        epoch=last.get("epoch", 0),
        host=last.get("host"),
        pid=last.get("pid"),
        error=None if living else last.get("failed"),
    )


def overwrite(store: Store, dead_after: float = DEAD_AFTER_SECONDS) -> None:
    """Delete the run in this folder and nothing else: _SUCCESS first, job.json last, so that it can be repeated.

    A worker of another machine that may live is watched for `dead_after` seconds.
    """
    if not store.exists(JOB):
        if read_record(store, SUCCESS) is not None:
            store.delete(SUCCESS)
        return
    refuse_company(store, dead_after)
    job = read_record(store, JOB)
    formats = tuple(PART_FORMATS) if job is None else (job["shape"]["format"],)
    names = store.list()
    parts = [name for name in names if any(parse_part(name, part_format) for part_format in formats)]
    copies = [name for name in names if name in COPIES and "openai" in formats]
    state = [name for name in names if name.startswith(STATE) and name != JOB]
    for name in [SUCCESS, *copies, *parts, *state, JOB]:
        store.delete(name)
