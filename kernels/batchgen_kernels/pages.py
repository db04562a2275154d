"""Memory in huge pages, where the system gives them: reading it costs far fewer look-ups of addresses."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

HUGE = 2 << 20  # bytes
CHUNK = 32 << 20  # bytes that tensors share
LINE = 64  # bytes of a cache line


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are there already, so that missing memory is missed now, not in mid-run."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE:
        return torch.zeros(shape, dtype=dtype)
    return _region(size).view(dtype).view(shape).zero_()


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor that lives long. Small ones share pages, which go when the last of them does."""
    size = tensor.numel() * tensor.dtype.itemsize
    return _chunks.take(size)[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class _Chunks:
    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)  # of the newest chunk

    def take(self, size: int) -> torch.Tensor:
        """(`size` or a little more,) uint8, from where a cache line begins."""
        room = -(-size // LINE) * LINE
        if room > CHUNK:
            return _region(room)
        if room > len(self._left):
            self._left = _region(CHUNK)
        taken, self._left = self._left[:room], self._left[room:]
        return taken


_chunks = _Chunks()


def _region(size: int) -> torch.Tensor:
    """(size,) uint8, zero, of pages that are not there before they are touched."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    region = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        region.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(region, dtype=torch.uint8)  # keeps the region alive
    start = -raw.data_ptr() % HUGE
    return raw[start : start + size]
