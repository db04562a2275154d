"""One thread that builds and writes parts beside the engine's steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Writer(AbstractContextManager["Writer[_T]"], Generic[_T]):
    """Runs tasks in order in a thread that never keeps the process alive.

    Results, and what a task raised, come out of `done`, in the caller's thread.
    """

    def __init__(self, room: int = 2) -> None:
        self._room = room
        self._open = 0
        self._tasks: queue.SimpleQueue[Callable[[], _T] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    @property
    def busy(self) -> bool:
        """Results of tasks are still to be taken."""
        return self._open > 0

    @property
    def full(self) -> bool:
        """Another task would only wait, and hold memory."""
        return self._open >= self._room

    def add(self, task: Callable[[], _T]) -> None:
        self._open += 1
        self._tasks.put(task)

    def done(self, timeout: float = 0.0) -> Iterator[_T]:
        """What is finished by now; waits for the first at most `timeout` seconds. Raises what a task raised."""
        while self._open:
            try:
                result, error = self._done.get(timeout > 0, timeout)
            except queue.Empty:
                return
            self._open -= 1
            timeout = 0.0
            if error is not None:
                raise error
            yield result  # type: ignore[misc]

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._done.put((task(), None))
            except BaseException as error:
                self._done.put((None, error))

    def __enter__(self) -> Writer[_T]:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Give up what has not begun, and what has within two seconds: a slow store must not hold up a drain."""
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        self._tasks.put(None)
        self._thread.join(2.0)
