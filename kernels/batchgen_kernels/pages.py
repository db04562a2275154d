"""Memory in huge pages, where the system gives them: reading it costs far fewer look-ups of addresses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Sequence

import torch

HUGE = 2 << 20  # bytes
CHUNK = 32 << 20  # bytes that tensors share
LINE = 64  # bytes of a cache line
HAS_HUGE = hasattr(mmap, "MADV_HUGEPAGE")
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: bring pages in as a write would, and change nothing in them


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system gives when they are first written to, or when `Filling` asks for them."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE or not HAS_HUGE:
        return torch.zeros(shape, dtype=dtype)
    return _region(size).view(dtype).view(shape)


class Filling:
    """Brings in the pages of large tensors that `zeros` made, so that missing memory is missed soon, not in mid-run.

    Where pages can be asked for without changing them that happens beside other work, the first parts of all tensors
    first; what is written to before has its pages from then on. Elsewhere they are all touched at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if HAS_HUGE and tensor.nbytes >= HUGE]
        self._thread: threading.Thread | None = None
        self._error = 0  # errno
        if not self._tensors:
            return
        self._error = _populate(self._tensors[0].data_ptr(), HUGE)
        if self._error in (errno.EINVAL, errno.ENOSYS):  # an older kernel
            self._error = 0
            for tensor in self._tensors:
                # the system gives zeros: to write them all again took up to ten times as long
                tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()
            self._tensors = []
        elif not self._error:
            self._thread = threading.Thread(target=self._fill, name="pages", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises MemoryError when the system had no page left to give."""
        if self._error:
            raise MemoryError(os.strerror(self._error))

    def wait(self) -> None:
        """Until all pages are there."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _fill(self) -> None:
        for start in range(0, max(tensor.nbytes for tensor in self._tensors), HUGE):  # faults elsewhere wait for a call
            for tensor in self._tensors:
                if start < tensor.nbytes and not self._error:
                    self._error = _populate(tensor.data_ptr() + start, min(HUGE, tensor.nbytes - start))
        self._tensors = []


def _populate(address: int, size: int) -> int:
    """Have the system bring in pages; 0, or the number of the error. Python's own madvise would hold its lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), POPULATE_WRITE):
        error = ctypes.get_errno()
        if error not in (errno.EINTR, errno.EAGAIN):
            return error
    return 0


class Arena:
    """Places tensors that live long, such as weights, one behind the other; a chunk goes when the last of them does."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # of the newest chunk

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> torch.Tensor:
        """As torch.empty, from where a cache line begins."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // LINE) * LINE
        if room > CHUNK:
            place = _region(room)
        else:
            if room > len(self._left):
                self._left = _region(CHUNK)
            place, self._left = self._left[:room], self._left[room:]
        return place[:size].view(dtype).view(*shape)


def _region(size: int) -> torch.Tensor:
    """(size,) uint8; in huge pages they are zero, and not there before they are touched."""
    if not HAS_HUGE:
        return torch.empty(size, dtype=torch.uint8)
    region = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        region.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(region, dtype=torch.uint8)  # keeps the region alive
    start = -raw.data_ptr() % HUGE
    return raw[start : start + size]
