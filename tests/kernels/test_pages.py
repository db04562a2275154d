"""Tensors in huge pages hold what ordinary ones would."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from batchgen_kernels import pages


@pytest.mark.parametrize("has_huge", [pages.HAS_HUGE, False])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 20,), (3, 700, 1031)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_zeros_are_zero_and_can_be_written(
    shape: tuple[int, ...], dtype: torch.dtype, has_huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "HAS_HUGE", has_huge)
    zeros = pages.zeros(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and not zeros.any()
    zeros.fill_(1)
    assert zeros.eq(1).all()


def test_tensors_of_an_arena_do_not_overlap() -> None:
    arena = pages.Arena()
    given = [torch.randn(size).bfloat16() for size in (1, 33, 0, 40_000, 9_000_001, 20_000_000, 7)]
    kept = [arena.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in given]
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    kept[1].zero_()
    assert all(torch.equal(given[i], kept[i]) for i in (0, 2, 3, 4, 5, 6))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)


def test_a_tensor_outlives_its_arena_and_its_neighbours() -> None:
    arena, plain = pages.Arena(), torch.randn(300, 500)
    first, second = arena.empty((500, 300), dtype=plain.dtype), arena.empty(plain.shape, dtype=plain.dtype)
    second.copy_(plain)
    del first, arena
    assert second.is_contiguous() and torch.equal(second, plain)


@pytest.fixture
def resident() -> Callable[[], int]:
    """Bytes of this process that are in memory."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("asks Linux how much of the process is in memory")
    return lambda: int(statm.read_text().split()[1]) * mmap.PAGESIZE


def test_pages_come_beside_other_work_and_leave_what_was_written(resident: Callable[[], int]) -> None:
    before = resident()
    tensors = [pages.zeros((32 << 20,), torch.uint8), pages.zeros((3, 11 << 20), torch.float32)]
    assert resident() - before < 8 << 20
    filling = pages.Filling([*tensors, torch.zeros(5)])
    for tensor in tensors:
        tensor[-1:].fill_(7)
    filling.wait()
    assert resident() - before > 0.95 * sum(tensor.nbytes for tensor in tensors)
    assert all(tensor[-1:].eq(7).all() and not tensor[:-1].any() for tensor in tensors)


def test_an_older_kernel_has_all_pages_touched_at_once(
    resident: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "POPULATE_WRITE", 999)
    before, zeros = resident(), pages.zeros((3, 11 << 20), torch.float32)
    filling = pages.Filling([zeros])
    assert resident() - before > 0.95 * zeros.nbytes
    filling.wait()
    assert not zeros.any()


def test_missing_pages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, answers = pages.zeros((8 << 20,), torch.uint8), iter([0, 0, errno.ENOMEM])
    monkeypatch.setattr(pages, "_populate", lambda address, size: next(answers))
    filling = pages.Filling([zeros])
    with pytest.raises(MemoryError, match="memory"):
        filling.wait()
