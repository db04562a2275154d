"""Which machine this is, and whether a process of it still runs."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path


def machine() -> str:
    """Names what process numbers and the monotonic clock belong to: one boot of one kernel, one container in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))])
    except OSError:  # not Linux
        import psutil

        return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def started(pid: int) -> float:
    """When a running process was started, in seconds of the time of day."""
    import psutil

    return float(psutil.Process(pid).create_time())


def age() -> float:
    """Seconds since this process was started."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # from boot to its start
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.time() - started(os.getpid())


def process_runs(pid: int, started_at: float) -> bool:
    """Whether the process of this machine that had this number and was started then still runs."""
    import psutil

    try:
        process = psutil.Process(pid)
        # the start time is derived from the time of day and moves with it a little
        return abs(process.create_time() - started_at) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
