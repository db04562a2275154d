"""A child process that ends with its parent, however that ends; called in the child, before anything slow."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Linux kills this process as soon as the parent, or the thread of it that started this process, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)


def die_with_input() -> None:
    """Everywhere: the parent holds the other end of standard input, which is closed when it is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
