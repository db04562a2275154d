"""Memory in huge pages, where the system gives them: reading it costs far fewer look-ups of addresses."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

HUGE = 2 << 20  # bytes
CHUNK = 32 << 20  # bytes that tensors share
LINE = 64  # bytes of a cache line
HAS_HUGE = hasattr(mmap, "MADV_HUGEPAGE")


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are there already, so that missing memory is missed now, not in mid-run."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE or not HAS_HUGE:
        return torch.zeros(shape, dtype=dtype)
    region = _region(size)
    region[:: mmap.PAGESIZE].zero_()  # the system gives zeros: to write them all again took up to ten times as long
    return region.view(dtype).view(shape)


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
