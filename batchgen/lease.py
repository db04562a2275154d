"""Who works on a slot: epochs, which fence an older worker, and the heartbeat, which keeps a second one out."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from typing import Any

from batchgen.errors import BatchgenError, Interrupted, PermissionDenied, StorageError
from batchgen.io.stores import Store
from batchgen.processes import machine, process_runs, started
from batchgen.runfolder import EPOCHS, encode, epoch_folder, epoch_name, lease_name, put_new, read_record

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 30.0
_EPOCH = re.compile(rf"{EPOCHS}(\d+)/(\d+)\.json")


def now() -> str:
    """The time of day for people, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def worker() -> dict[str, Any]:
    """This process, as epochs and leases name it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "process_started": started(pid), "machine": machine()}


def who(record: dict[str, Any]) -> str:
    return f"process {record.get('pid', '?')} on {record.get('host', '?')} (last seen {record.get('time', '?')})"


def alive(record: dict[str, Any], timeout: float = DEAD_AFTER_SECONDS) -> bool | None:
    """Whether the worker that wrote `record` lives; None where that cannot be told from this machine and record."""
    if record.get("released"):
        return False
    if record.get("machine") != machine():
        return None
    if not process_runs(int(record["pid"]), float(record["process_started"])):
        return False
    if time.monotonic() - float(record["monotonic"]) < timeout:
        return True
    # An epoch's own record only says when it began: its lease is gone, or an older worker has just written over it.
    return False if "counter" in record else None


def seems_alive(record: dict[str, Any]) -> bool:
    """`alive`, with the time of day deciding for a worker on another machine: good enough to report."""
    here = alive(record)
    if here is not None:
        return here
    age = datetime.now(timezone.utc) - datetime.fromisoformat(str(record["time"]))
    return age.total_seconds() < DEAD_AFTER_SECONDS


def latest_epoch(store: Store, slot: int) -> int:
    """The highest epoch of the slot, 0 where it was never started."""
    return _latest_epochs(store, epoch_folder(slot)).get(slot, 0)


def slots(store: Store) -> list[int]:
    """Every slot that was ever started."""
    return sorted(_latest_epochs(store, EPOCHS))


def _latest_epochs(store: Store, folder: str) -> dict[int, int]:
    latest: dict[int, int] = {}
    for name in store.list(folder):
        if match := _EPOCH.fullmatch(name):
            latest[int(match[1])] = max(latest.get(int(match[1]), 0), int(match[2]))
    return latest


def holder(store: Store, slot: int, epoch: int) -> dict[str, Any]:
    """The last sign of the worker of `epoch`: its lease, or the epoch's own record where there is no lease of it."""
    lease = read_record(store, lease_name(slot))
    if lease is not None and lease.get("epoch") == epoch:
        return lease
    return read_record(store, epoch_name(slot, epoch)) or {}


class Watch:
    """Whether the workers of slots live, found out for all of them at the same time.

    One of this machine is known at once. One of another machine lives if its counter moves; it is taken for dead when
    that has stood still for `dead_after` seconds on this machine's monotonic clock. Times of day are never compared.
    """

    def __init__(self, store: Store, slots: Iterable[int], dead_after: float) -> None:
        self._store, self._dead_after = store, dead_after
        self._known: dict[int, tuple[bool, int]] = {}  # whether it lives, and which epoch that was found out of
        self._seen: dict[int, tuple[int, dict[str, Any], float]] = {}  # undecided: epoch, first sight of it, deadline
        self._look(slots)

    def lives(self, slot: int) -> bool:
        """Waits until it is known; what is learned of the other slots meanwhile is kept."""
        return self.verdict(slot)[0]

    def verdict(self, slot: int) -> tuple[bool, int]:
        """Whether the slot's worker lives, and its epoch (0 where the slot was never started)."""
        while slot not in self._known:
            soonest = min(deadline for _, _, deadline in self._seen.values())
            time.sleep(min(1.0, max(soonest - time.monotonic(), 0.0)))
            self._look(list(self._seen))
        return self._known[slot]

    def vacant(self, slot: int) -> int:
        """The epoch of the slot's last start, which has ended. Interrupted("locked") names its worker if it lives."""
        lives, epoch = self.verdict(slot)
        if lives:
            raise Interrupted(
                f"{self._store.url}: {who(holder(self._store, slot, epoch))} is at work on this run"
                f"{f' in slot {slot}' if slot else ''}; wait for it, or end it and run again",
                reason="locked",
            )
        return epoch

    def forget(self, slot: int) -> None:
        """Somebody has just started on it: what was found out is of the start before."""
        self._known.pop(slot, None)
        self._look([slot])

    def _look(self, slots: Iterable[int]) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._look_at, slots))

    def _look_at(self, slot: int) -> None:
        began = time.monotonic()
        epoch = latest_epoch(self._store, slot)
        record = holder(self._store, slot, epoch) if epoch else {}
        known = alive(record, self._dead_after) if record else None if epoch else False
        first = self._seen.get(slot)
        if known is None and (first is None or first[0] != epoch):
            self._seen[slot] = epoch, record, began + self._dead_after
            logger.warning(
                "%s may still be at work on this run; watching it for up to %.0f s", who(record), self._dead_after
            )
            return
        if known is None and first is not None:
            if record.get("counter", 0) > first[1].get("counter", 0):  # a lease lost meanwhile is no sign of life
                known = True
            elif began < first[2]:
                return
        self._known[slot] = bool(known), epoch
        self._seen.pop(slot, None)


class Lease:
    """A slot held by this process. Only the epoch guards data; the heartbeat saves others from starting in vain."""

    def __init__(self, store: Store, slot: int, epoch: int, record: dict[str, Any]) -> None:
        self.epoch = epoch
        self.progress: dict[str, int] = {}  # for `status`; replaced whole
        self._store, self._slot, self._record = store, slot, record
        self._counter = 0
        self._due = 0.0
        self._lock = threading.Lock()

    @classmethod
    def acquire(cls, store: Store, slot: int, info: dict[str, Any], watch: Watch) -> Lease:
        """Start the slot's next epoch, unless a living worker has the slot: Interrupted("locked") names it."""
        while True:
            epoch = watch.vacant(slot)
            record = {**info, **worker(), "slot": slot, "epoch": epoch + 1, "attempt": uuid.uuid4().hex}
            record |= {"time": now(), "monotonic": time.monotonic()}
            if put_new(store, epoch_name(slot, epoch + 1), encode(record)):
                lease = cls(store, slot, epoch + 1, record)
                lease._try_to_write()  # the epoch is what counts: a start that gave up here would look alive
                return lease
            logger.info("another worker started on this run at the same moment; looking again")
            watch.forget(slot)

    @property
    def attempt(self) -> str:
        """Names this start among all, also after the run was deleted and begun anew."""
        return str(self._record["attempt"])

    def check(self) -> None:
        """Interrupted("fenced") where a newer worker has taken the slot over, or the run was deleted under us.

        Changes nothing in this process, so that any thread may ask.
        """
        latest = latest_epoch(self._store, self._slot)
        own = read_record(self._store, epoch_name(self._slot, self.epoch))
        if latest == self.epoch and own is not None and own.get("attempt") == self._record["attempt"]:
            return
        other = read_record(self._store, epoch_name(self._slot, latest)) if latest else None
        if other is not None and other.get("attempt") != self._record["attempt"]:
            by = f"taken over by process {other['pid']} on {other['host']}, at work since {other['time']},"
        else:
            by = "deleted"
        raise Interrupted(
            f"this run was {by} while this process stood still for longer than {DEAD_AFTER_SECONDS:.0f} s; "
            "what it had committed before is kept, it ends here",
            reason="fenced",
        )

    def beat(self) -> None:
        """Show that this worker lives, at most every 5 s. Safe to call from another thread.

        A lease object that is gone is written again by the worker that has the slot's latest epoch, and by no other.
        """
        if time.monotonic() < self._due:
            return
        with self._lock:
            try:
                self.check()
            except (StorageError, PermissionDenied) as error:
                self._missed(error)
                return
            self._try_to_write()

    def release(self, failed: str | None = None) -> None:
        """Let the next start have the slot at once, where it is still ours. `failed` says why this one came to no good
        end, for `status`."""
        try:
            with self._lock:
                self.check()
                self._record |= {"failed": failed} if failed else {}
                self._write(released=True)
        except Interrupted:  # another worker has the slot: its lease is not ours to touch
            pass
        except BatchgenError as error:
            logger.warning("the lease stays behind, the next start may wait for it: %s", error)

    def _try_to_write(self) -> None:
        """A heartbeat saves money and guards no data: commits will tell if the store is gone."""
        try:
            self._write(released=False)
        except (StorageError, PermissionDenied) as error:
            self._missed(error)

    def _missed(self, error: BatchgenError) -> None:
        self._due = time.monotonic() + HEARTBEAT_SECONDS
        logger.warning("the heartbeat could not be written: %s", error)

    def _write(self, *, released: bool) -> None:
        self._counter += 1
        clocks = {"time": now(), "monotonic": time.monotonic(), "progress": self.progress}
        self._store.replace(
            lease_name(self._slot), encode({**self._record, **clocks, "counter": self._counter, "released": released})
        )
        self._due = time.monotonic() + HEARTBEAT_SECONDS


class Heart(AbstractContextManager["Heart"]):
    """Beats beside everything else, so that neither loading a model nor a long step looks like death."""

    def __init__(self, beat: Callable[[], None], interval: float = HEARTBEAT_SECONDS) -> None:
        self._beat, self._interval = beat, interval
        self._end = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            try:
                self._beat()
            except Exception as error:
                self._failure = error
                return

    def check(self) -> None:
        """Raises what ended the beating: Interrupted("fenced") where another worker has taken over."""
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


# -- every slot of a run: for those who change what is committed, beside whom nobody may be at work --------------------


def refuse_company(store: Store, dead_after: float) -> None:
    """Interrupted("locked") where a slot of the run has a living worker. Only reads."""
    watch = Watch(store, found := slots(store), dead_after)
    for slot in found:
        watch.vacant(slot)


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
            lease.release()


def _beat(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.beat()
