"""Who works on a slot: epochs, which fence an older worker, and the heartbeat, which keeps a second one out."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Any

from batchgen.errors import Interrupted, PermissionDenied, StorageError
from batchgen.io.stores import Store
from batchgen.processes import machine, process_runs, started
from batchgen.runfolder import encode, epoch_folder, epoch_name, lease_name, put_new, read_record

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 30.0


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
    """Whether the worker that wrote `record` lives; None where that cannot be told from this machine."""
    if record.get("released"):
        return False
    if record.get("machine") != machine():
        return None
    if not process_runs(int(record["pid"]), float(record["process_started"])):
        return False
    return time.monotonic() - float(record["monotonic"]) < timeout


def seems_alive(record: dict[str, Any]) -> bool:
    """`alive`, with the time of day deciding for a worker on another machine: good enough to report."""
    here = alive(record)
    if here is not None:
        return here
    age = datetime.now(timezone.utc) - datetime.fromisoformat(str(record["time"]))
    return age.total_seconds() < DEAD_AFTER_SECONDS


def latest_epoch(store: Store, slot: int) -> int:
    """The highest epoch of the slot, 0 where it was never started."""
    names = [name.rsplit("/", 1)[-1] for name in store.list(epoch_folder(slot))]
    return max((int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()), default=0)


def holder(store: Store, slot: int, epoch: int) -> dict[str, Any]:
    """The last sign of the worker of `epoch`: its lease, or the epoch's own record where there is no lease of it."""
    lease = read_record(store, lease_name(slot))
    if lease is not None and lease.get("epoch") == epoch:
        return lease
    return read_record(store, epoch_name(slot, epoch)) or {}


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
    def acquire(cls, store: Store, slot: int, info: dict[str, Any], *, dead_after: float) -> Lease:
        """Start the slot's next epoch, unless a living worker has the slot: Interrupted("locked") names it.

        A worker on another machine is watched for `dead_after` seconds before it is taken for dead.
        """
        while True:
            epoch = latest_epoch(store, slot)
            if epoch and _still_held(store, slot, epoch, dead_after):
                raise Interrupted(
                    f"another worker has this run: {who(holder(store, slot, epoch))}. One run folder takes one worker "
                    "at a time: wait for it, or end it and run again",
                    reason="locked",
                )
            record = {**info, **worker(), "slot": slot, "epoch": epoch + 1, "attempt": uuid.uuid4().hex}
            record |= {"time": now(), "monotonic": time.monotonic()}
            if put_new(store, epoch_name(slot, epoch + 1), encode(record)):
                lease = cls(store, slot, epoch + 1, record)
                lease._write(released=False)
                return lease
            logger.info("another worker started on this run at the same moment; looking again")

    def check(self) -> None:
        """Interrupted("fenced") where a newer worker has taken the slot over, or the run was deleted under us."""
        latest = latest_epoch(self._store, self._slot)
        own = read_record(self._store, epoch_name(self._slot, self.epoch))
        if latest == self.epoch and own is not None and own.get("attempt") == self._record["attempt"]:
            return
        other = read_record(self._store, epoch_name(self._slot, latest)) if latest else None
        by = f"taken over by {who(other)}" if other else "deleted"
        raise Interrupted(
            f"this run was {by} while this process stood still for longer than {DEAD_AFTER_SECONDS:.0f} s; "
            "what it had committed before is kept, it ends here",
            reason="fenced",
        )

    def beat(self) -> None:
        """Show that this worker lives, at most every 5 s. Safe to call from another thread."""
        if time.monotonic() < self._due:
            return
        with self._lock:
            try:
                self.check()
                self._write(released=False)
            except (StorageError, PermissionDenied) as error:
                # a heartbeat saves money and guards no data: commits will tell if the store is gone
                self._due = time.monotonic() + HEARTBEAT_SECONDS
                logger.warning("the heartbeat could not be written: %s", error)

    def release(self) -> None:
        """Let the next start have the slot at once."""
        with self._lock:
            self.check()
            self._write(released=True)

    def _write(self, *, released: bool) -> None:
        self._counter += 1
        clocks = {"time": now(), "monotonic": time.monotonic(), "progress": self.progress}
        self._store.replace(
            lease_name(self._slot), encode({**self._record, **clocks, "counter": self._counter, "released": released})
        )
        self._due = time.monotonic() + HEARTBEAT_SECONDS


def _still_held(store: Store, slot: int, epoch: int, timeout: float) -> bool:
    first = holder(store, slot, epoch)
    known = alive(first, timeout) if first else False
    if known is not None:
        return known
    logger.warning("%s may still be at work on this run; watching it for up to %.0f s", who(first), timeout)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        time.sleep(min(1.0, max(deadline - time.monotonic(), 0)))
        seen = holder(store, slot, epoch)
        if seen.get("released") or latest_epoch(store, slot) != epoch:
            return False  # free, or another start has been quicker: the next look decides
        if seen.get("counter", 0) > first.get("counter", 0):  # a lease lost meanwhile is no sign of life
            return True
    return False


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
