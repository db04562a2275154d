"""Tensors in huge pages hold what ordinary ones would."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels import pages


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 20,), (3, 700, 1031)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_zeros_are_zero_and_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = pages.zeros(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and not zeros.any()
    zeros.fill_(1)
    assert zeros.eq(1).all()


def test_kept_tensors_do_not_overlap() -> None:
    given = [torch.randn(size).bfloat16() for size in (1, 33, 40_000, 9_000_001, 20_000_000, 7)]
    kept = [pages.keep(tensor) for tensor in given]
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    kept[1].zero_()
    assert all(torch.equal(given[i], kept[i]) for i in (0, 2, 3, 4, 5))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)


def test_a_kept_tensor_may_come_in_any_order_and_outlives_its_neighbours() -> None:
    plain = torch.randn(300, 500)
    first, second = pages.keep(plain.T), pages.keep(plain)
    assert first.is_contiguous() and torch.equal(first, plain.T)
    del first
    assert torch.equal(second, plain)
