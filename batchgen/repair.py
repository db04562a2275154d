"""`verify --repair`: damaged files are taken away while nobody else is at work, then the run computes them anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from batchgen import __version__, job, opening
from batchgen.damage import carry_out, plan
from batchgen.errors import ConfigError
from batchgen.io.stores import Store
from batchgen.jobrecord import check_same, digest_of, read_job
from batchgen.lease import DEAD_AFTER_SECONDS, alone
from batchgen.loop import ModelLike
from batchgen.spec import JobSpec
from batchgen.verify import Findings, verify

logger = logging.getLogger(__name__)


def repair(
    spec: JobSpec,
    *,
    model_opener: Callable[[JobSpec], ModelLike] = job.open_model,
    store_opener: Callable[..., Store] = Store,
    dead_after: float = DEAD_AFTER_SECONDS,
) -> dict[str, Any]:
    """Make the run of a job whole again; returns the run's summary, with the names of what was taken away or missing.

    A part that proves itself is never deleted: out of its place it is kept under `_batchgen/aside/`. Where all is
    well nothing is written. A worker of another machine that may live is watched for `dead_after` seconds.
    """
    store = store_opener(spec.output.path, spec.output.storage_options, retries=spec.errors.retries)
    found = verify(store)
    if found.ok:
        logger.info("%s: nothing is wrong with this run (%s), nothing to repair", store.url, found.state)
        return {"name": spec.name, "output": store.url, "status": found.state, "repaired": []}
    for problem in found.problems:
        logger.warning("%s: %s", problem.file, problem.what)
    _refuse_other_job(spec, store, found, model_opener)
    with alone(store, {"version": __version__}, dead_after) as heart:
        heart.check()
        parts = {problem.file for problem in found.problems if problem.file.startswith("part-")}
        missing = {name for name in parts if not store.exists(name)}
        plan(store, found.problems)
        taken = carry_out(store, heart.check)
    logger.info("running the job to make anew what is missing; taken away: %s", ", ".join(taken) or "nothing")
    summary = job.run(spec, model_opener=model_opener, store_opener=store_opener)
    return {**summary, "repaired": sorted({*taken, *missing})}


def _refuse_other_job(
    spec: JobSpec, store: Store, found: Findings, model_opener: Callable[[JobSpec], ModelLike]
) -> None:
    """ConfigError where the run in the folder is not this job's, before anything is taken away from it."""
    record = read_job(store)
    files, prove = opening.input_files(spec, store)
    now = opening.fingerprint(spec, model_opener(opening.pinned(spec, record)), opening.columns_of(spec, files)[2])
    inputs = [asdict(file) for file in files]
    if found.records_fit:
        check_same(store, fingerprint=now, inputs=inputs, prove=prove)
        return
    known = found.digests if record is None else {record["digest"]}
    if known and digest_of(store, fingerprint=now, shape=opening.shape(spec), inputs=inputs, prove=prove) not in known:
        raise ConfigError(
            f"{store.url}: the run in this folder is not this job's (its records are damaged, so the difference is not "
            "known). Nothing was changed; repair it with the job file that it was started with"
        )
