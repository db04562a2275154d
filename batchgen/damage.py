"""Taking damaged files away: planned and written down, so that any later start of the run finishes what has begun."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchgen.io.stores import Store
from batchgen.lease import DEAD_AFTER_SECONDS, alone
from batchgen.runfolder import SUCCESS, encode, look_up, put_new
from batchgen.verify import Problem

logger = logging.getLogger(__name__)

PLAN = "_batchgen/repair.json"
ASIDE = "_batchgen/aside/"  # whole parts that were out of place


def plan(store: Store, problems: Sequence[Problem]) -> None:
    """Write down what is to be taken away, as it was seen: what changes after that stays."""
    versions = [problem.version or store.version(problem.file) for problem in problems]
    files = [
        {"name": problem.file, "version": version, "cure": problem.cure}
        for problem, version in zip(problems, versions, strict=True)
        if problem.cure is not None and version is not None and problem.file != SUCCESS
    ]
    store.replace(PLAN, encode({"files": files}))


def carry_out(store: Store, check: Callable[[], None]) -> list[str]:
    """Take away what the plan names; returns what was. `check` raises where somebody else has the run."""
    check()
    record, is_there = look_up(store, PLAN)
    if not is_there:  # somebody else has carried it out, and may have finished the run since
        return []
    if store.exists(SUCCESS):  # first: it must never say that what is damaged is complete
        store.delete(SUCCESS)
    taken = []
    for file in (record or {}).get("files", ()):
        check()
        if _take_away(store, file["name"], file["version"], aside=file["cure"] == "aside"):
            taken.append(file["name"])
    check()
    store.delete(PLAN)
    return taken


def _take_away(store: Store, name: str, version: str, *, aside: bool) -> bool:
    """Delete a file that is no good, or put it aside; False where it is not what was looked at any more."""
    if aside and store.version(name) == version:
        data = store.read(name)
        if not put_new(store, ASIDE + name, data):  # one of this name is there already
            put_new(store, f"{ASIDE}{hashlib.sha256(data).hexdigest()[:16]}-{name}", data)
    now = store.version(name)
    if now != version:
        if now is not None:
            logger.warning("%s has changed since it was looked at; it is left as it is", store.path(name))
        return False
    store.delete(name)
    return True


def finish_repair(store: Store, info: Mapping[str, Any], dead_after: float = DEAD_AFTER_SECONDS) -> None:
    """Go on with a repair that died when it had begun to take files away."""
    if store.exists(PLAN):
        logger.warning("%s: a repair of this run was not finished; going on with it", store.url)
        with alone(store, info, dead_after) as heart:
            carry_out(store, heart.check)
