"""Ends a process in which nothing moves any more: all stacks to stderr, children killed, exit 75.

A main thread that hangs in native code cannot be raised into, so the last step is `os._exit`. Before it a loop that
still turns gets its chance to save and to raise by itself (`check`). The watchdog's thread must never wait for what the
main thread may hold or hang on: it does not log, and writes to the standard streams from threads that it can leave.
(A native call that hangs without giving up Python's lock stops the watchdog too. Its heartbeat stops with it, so that
another worker can take the run over.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO, TextIO

import psutil

from batchgen.errors import ExitCode, Interrupted

GRACE_SECONDS = 5.0  # for a loop that still turns to see that it stalls
SAVING_SECONDS = 60.0  # for one that has seen it, to save and leave; a drain takes 20 s on a slow store
LAST_WORDS_SECONDS = 2.0  # for writing to a pipe that nobody may read


class Watchdog(AbstractContextManager["Watchdog"]):
    """Wants a `touch` at least every `timeout` seconds while its block runs; None watches nothing.

    Time in which the whole process or machine stood still does not count: after it the count starts anew.
    `on_stall` takes the place of `leave`.
    """

    def __init__(
        self,
        timeout: float | None,
        *,
        on_stall: Callable[[], None] | None = None,
        dump: TextIO | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        assert timeout is None or timeout > 0, timeout
        self._timeout, self._grace = timeout, grace
        self._on_stall, self._dump = on_stall or leave, dump
        self._touches = self._seen = 0
        self._stalled_at = -1  # touches
        self._saving = False
        self._end = threading.Event()
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def touch(self) -> None:
        """Something got done. Called by one thread only."""
        self._touches += 1

    @property
    def stalled(self) -> bool:
        """Nothing got done for too long; the process leaves in a few seconds, unless something gets done."""
        return self._stalled_at == self._touches

    def check(self) -> None:
        """Interrupted("stalled") where nothing got done for too long; the caller then has a minute to save and leave
        the block."""
        if self.stalled:
            self._saving = True
            raise Interrupted(
                f"{self._what()}: all stacks are above; run the same command again, and report this if it repeats",
                reason="stalled",
            )

    def __enter__(self) -> Watchdog:
        if self._timeout is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._leaving:  # who has begun to leave does so
            self._end.set()
        if self._timeout is not None:
            self._thread.join()

    def _what(self) -> str:
        return f"no progress for {self._timeout:g} s"

    def _run(self) -> None:
        assert self._timeout is not None
        while not self._end.is_set():
            if not self._quiet_for(self._timeout):
                continue
            self._stalled_at = self._seen
            _dump_stacks(f"batchgen: {self._what()}; what all threads are at:", self._dump)
            if not self._quiet_for(self._grace) and not self._saving:
                continue  # it moves again
            while self._saving and not self._quiet_for(SAVING_SECONDS):
                if self._end.is_set():
                    return
            with self._leaving:
                if not self._end.is_set():
                    self._on_stall()
            return

    def _quiet_for(self, seconds: float) -> bool:
        """Whether nothing was touched for `seconds`. False as soon as something is, and when the block is left."""
        tick = min(1.0, seconds / 20)
        quiet, before = 0.0, time.monotonic()
        while quiet < seconds:
            if self._end.wait(tick):
                return False
            if self._touches != self._seen:
                self._seen = self._touches
                return False
            now = time.monotonic()
            passed, before = now - before, now
            # a thread that was not run either: the process was stopped, or the machine
            quiet = 0.0 if passed > tick + seconds / 4 else quiet + passed
        return True


def leave() -> None:
    """Kill the children, tell programs why, and end the process whatever its other threads are at."""
    with contextlib.suppress(Exception):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=LAST_WORDS_SECONDS)
    with contextlib.suppress(Exception):
        _write(_descriptor(sys.stdout, 1), b'{"status":"interrupted","reason":"stalled"}\n')
    os._exit(ExitCode.INTERRUPTED)


def _dump_stacks(title: str, dump: TextIO | None) -> None:
    """faulthandler holds Python's lock while it writes: never into a pipe, which may be what the process hangs on."""
    with contextlib.suppress(Exception):
        with _scratch() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        _write(_descriptor(dump or sys.stderr, 2), b"%s\n%s\n" % (title.encode(), stacks))


def _scratch() -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # a full disk does not matter
        return os.fdopen(os.memfd_create("batchgen-stacks"), "w+b")
    return tempfile.TemporaryFile()


def _descriptor(stream: TextIO, otherwise: int) -> int:
    """Where a stream writes to; around it, because a thread that hangs may hold the stream's own lock."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):  # none, closed, or not a file
        return otherwise


def _write(descriptor: int, data: bytes) -> None:
    def write() -> None:
        rest = data
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(descriptor, rest) :]

    writer = threading.Thread(target=write, name="last-words", daemon=True)
    writer.start()
    writer.join(LAST_WORDS_SECONDS)


__all__ = ["Watchdog", "leave"]
