"""Every slot of a run held at once: for those who change what is committed, beside whom nobody may be at work."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from batchgen.errors import BatchgenError, Interrupted
from batchgen.io.stores import Store
from batchgen.lease import Heart, Lease, Watch, holder, slots, who

logger = logging.getLogger(__name__)


def refuse_company(store: Store, dead_after: float) -> None:
    """Interrupted("locked") where a slot of the run has a living worker. Only reads."""
    found = slots(store)
    watch = Watch(store, found, dead_after)
    for slot in found:
        lives, epoch = watch.verdict(slot)
        if lives:
            raise Interrupted(
                f"{store.url}: {who(holder(store, slot, epoch))} is at work on this run, and this needs it alone: wait "
                "for it, or end it and run again",
                reason="locked",
            )


@contextmanager
def alone(store: Store, info: Mapping[str, Any], dead_after: float, *, but: int | None = None) -> Iterator[Heart]:
    """Hold all slots that the run ever had, 0 among them, except `but`, which the caller takes.

    Whoever worked on one of them before is fenced. Check the heart before each write.
    """
    refuse_company(store, dead_after)
    leases: dict[int, Lease] = {}
    try:
        while left := sorted({0, *slots(store)} - leases.keys() - {but}):  # a slot may have been started just now
            watch = Watch(store, left, dead_after)
            for slot in left:
                leases[slot] = Lease.acquire(store, slot, dict(info), watch)
        with Heart(lambda: _beat(leases.values())) as heart:
            yield heart
    finally:
        for lease in leases.values():
            try:
                lease.release()
            except Interrupted:  # another worker has the slot: its lease is not ours to touch
                pass
            except BatchgenError as error:
                logger.warning("the lease stays behind, the next start may wait for it: %s", error)


def _beat(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.beat()
