"""Storage that fails, dies, hangs or loses what was not fsynced, at any operation that a test chooses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from batchgen.errors import StorageError
from batchgen.io.stores import Store

WRITES = frozenset({"create", "replace", "replace_if", "replace_from", "delete"})
OPERATIONS = WRITES | {"version", "read", "open", "exists", "size", "list"}


class Died(BaseException):
    """Stands for the process's death in a test that stays in one process: no handler catches it."""


class Call(NamedTuple):
    """One storage operation."""

    operation: str
    name: str
    data: bytes | None = None

    def __repr__(self) -> str:
        return f"{self.operation} {self.name}"

    @property
    def point(self) -> str:
        """The operation and the kind of object: "create part", "replace lease", "list epoch" ..."""
        return f"{self.operation} {kind_of(self.name)}"


def kind_of(name: str) -> str:
    if name.startswith("part-"):
        return "part"
    state, _, rest = name.partition("/")
    if state != "_batchgen":
        return name or "folder"
    return {"pieces": "piece", "proofs": "proof", "job.json": "job"}.get(kind := rest.partition("/")[0], kind)


Do = Callable[[], Any]
Meet = Callable[[Call, Do], Any]


class MeddledStore(Store):
    """A Store that hands each of its operations to `meet`, which does it or has something else happen."""

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, *, retries: int = 0, meet: Meet
    ) -> None:
        super().__init__(url, storage_options, retries=retries, pause=0.01)
        self._meet, self._inside = meet, threading.local()

    def _through(self, call: Call, do: Do) -> Any:
        if getattr(self._inside, "busy", False):  # one operation of the store that is made of others
            return do()

        def done() -> Any:
            self._inside.busy = True
            try:
                return do()
            finally:
                self._inside.busy = False

        return self._meet(call, done)


def _meddled(operation: str) -> Callable[..., Any]:
    real = getattr(Store, operation)

    def method(self: MeddledStore, name: str = "", *rest: Any, **named: Any) -> Any:
        data = rest[0] if rest and isinstance(rest[0], bytes) else named.get("data")
        return self._through(Call(operation, name, data), lambda: real(self, name, *rest, **named))

    return method


for _operation in OPERATIONS:
    if hasattr(Store, _operation):
        setattr(MeddledStore, _operation, _meddled(_operation))


class Fault:
    """Meets the `at`-th operation among those that `where` picks, and happens there in the way that `how` says.

    After a death no operation of this process is done any more, whatever its handlers try.
    """

    HOWS = ("fails before", "is done but not acknowledged", "dies before", "dies after")
    KILLS = ("killed before", "killed after")

    def __init__(self, how: str, at: int, where: Callable[[Call], bool] = lambda call: True) -> None:
        assert how in self.HOWS + self.KILLS
        self.how, self.at, self.where = how, at, where
        self.count = 0
        self.dead = False
        self.call: Call | None = None  # that was met
        self._lock = threading.Lock()

    @property
    def met(self) -> bool:
        return self.count >= self.at

    def __call__(self, call: Call, do: Do) -> Any:
        with self._lock:
            self._live()
            self.count += self.where(call)
            if not (self.where(call) and self.count == self.at):
                done = do()
                self._live()
                return done
            self.call = call
            return self._happen(call, do)

    def _live(self) -> None:
        if self.dead:
            raise Died

    def _happen(self, call: Call, do: Do) -> Any:
        if self.how in ("is done but not acknowledged", "dies after", "killed after"):
            do()
        if self.how in self.KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how.startswith("dies"):
            self.dead = True
            raise Died(f"{self.how} {call.point}")
        raise StorageError(f"{call.name}: timeout: the request {self.how}")


def throttled(bytes_per_second: float) -> Meet:
    """A store that takes that much: an operation holds up those that come at the same time."""
    lock = threading.Lock()

    def meet(call: Call, do: Do) -> Any:
        with lock:
            time.sleep(len(call.data or b"") / bytes_per_second)
            return do()

    return meet
