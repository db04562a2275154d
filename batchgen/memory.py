"""How much memory this process may still take: what the machine has left, and every limit that it stands under."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

THREADS_BYTES = 256 << 20  # addresses that threads and libraries still take when everything is loaded
LIBRARIES_BYTES = 1100 << 20  # addresses that torch and the others take before a model is loaded

# file names in a group's folder: limits, what is used, and what the entries of memory.stat begin with that count files
# in the page cache: they give way, whether they were used once (inactive) or again (active)
VERSION_2 = (("memory.max", "memory.high"), "memory.current", "")
VERSION_1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def available() -> int:
    """Bytes that can be taken without swapping, and without being killed or slowed down for it."""
    return max(0, min([psutil.virtual_memory().available, *group_room(), *limit_room()]))


def limit_room() -> Iterator[int]:
    """What is left of this process's own limits (ulimit -v, ulimit -d), which count addresses, used or not."""
    for name, used in (("RLIMIT_AS", "vms"), ("RLIMIT_DATA", "data")):
        most = resource.getrlimit(getattr(resource, name))[0]
        taken = getattr(psutil.Process().memory_info(), used, None)  # not every system tells
        if most != resource.RLIM_INFINITY and taken is not None:
            yield most - taken - THREADS_BYTES


def room_to_begin() -> bool:
    """Whether this process has addresses for its libraries (ulimit -v): some of them abort it when they get none."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return most == resource.RLIM_INFINITY or most - psutil.Process().memory_info().vms > LIBRARIES_BYTES


def group_room(proc: Path = Path("/proc/self")) -> Iterator[int]:
    """What each memory control group around this process has left, from its own one up to the root; swap is not used.

    A group may be limited anywhere on that way, by itself or by what its neighbours take.
    """
    for folder, top, (limits, used, all_of) in _groups(proc):
        for place in [folder, *folder.parents][: len(folder.parts) - len(top.parts) + 1]:
            for limit in limits:
                try:
                    counts = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                    most, now = (int((place / name).read_text()) for name in (limit, used))
                    cache = sum(int(counts.get(f"{all_of}{kind}_file", 0)) for kind in ("inactive", "active"))
                    yield most - now + cache
                except (OSError, ValueError):  # no such group, a root without these files, or "max"
                    continue


def _groups(proc: Path) -> Iterator[tuple[Path, Path, tuple[tuple[str, ...], str, str]]]:
    """This process's own memory groups: the folder, where their tree is mounted, and how its files are called."""
    try:
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in own:
        if controllers and "memory" not in controllers.split(","):
            continue
        kind, files = ("cgroup", VERSION_1) if controllers else ("cgroup2", VERSION_2)
        for place, what in mounts:
            root, mounted = place.split(" ")[3:5]
            type_, _, options = what.split(" ", 2)
            if type_ == kind and (not controllers or "memory" in options.split(",")):
                top = Path(mounted)
                group = PurePosixPath(path)
                # inside a container the mount shows the part of the tree below `root`; what is outside of it, cannot be
                # seen from here
                below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
                yield (top if ".." in below.parts else top / below), top, files
                break


def give_back() -> None:
    """Return what was freed to the system, where the C library can be told to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
