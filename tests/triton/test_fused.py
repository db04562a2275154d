"""Triton's norm and gated activations, in its interpreter, against their twins."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels import fused, reference

DTYPES = [torch.float32, torch.float16]  # the interpreter does not round to bfloat16 as devices do


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to a rounding: one unit in the last place of float16, a few of float32."""
    rtol = {torch.float16: 2**-10, torch.float32: 2e-6}[wanted.dtype]
    assert got.dtype == wanted.dtype and got.is_contiguous()
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=2e-5)  # 1 + tanh cancels in the twin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (9, 64), (2, 1003), (3, 5120), (2, 8192), (1, 20000)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 5).to(dtype), torch.randn(shape[1])
    check(fused.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = torch.randn(shape).to(dtype)
    twin = residual.clone()
    check(fused.rms_norm(x, weight, 1e-5, residual), reference.rms_norm(x, weight, 1e-5, twin))
    assert torch.equal(residual, twin)


def test_rms_norm_takes_views() -> None:
    torch.manual_seed(1)
    projected = torch.randn(9, 5 * 32)
    heads, weight = projected.view(9, 5, 32)[:, 1:4], torch.randn(32)
    check(fused.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    rows, residual = projected[:, 32:128], torch.randn(9, 200)[:, 3:99]
    twin = residual.clone()
    check(fused.rms_norm(rows, torch.ones(96), 1e-6, residual), reference.rms_norm(rows, torch.ones(96), 1e-6, twin))
    assert torch.equal(residual, twin)


def test_rows_do_not_know_their_neighbours() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(11, 48), torch.randn(48)
    alone = torch.cat([fused.rms_norm(row[None], weight, 1e-5) for row in x])
    assert torch.equal(fused.rms_norm(x, weight, 1e-5), alone)
    x[4, 3] = float("nan")
    poisoned = fused.rms_norm(x, weight, 1e-5)
    assert poisoned[4].isnan().all() and torch.equal(poisoned[5:], alone[5:])


def test_no_rows() -> None:
    assert fused.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert fused.silu_mul(torch.empty(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul", "clamped_swiglu_mul"])
def test_gated_activations(dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(3)
    for rows, dim in [(1, 1), (3, 19), (5, 1536)]:
        gate_up = (torch.randn(rows, 2 * dim + 4) * 4).to(dtype)[:, : 2 * dim]  # rows with a stride
        check(getattr(fused, name)(gate_up), getattr(reference, name)(gate_up))
    extremes = torch.tensor([[0.0, -0.0, 1e-30, -90.0, 90.0, -3e38, 3e38, float("nan")] + [1.0] * 8]).to(dtype)
    got, wanted = getattr(fused, name)(extremes), getattr(reference, name)(extremes)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-30, equal_nan=True)


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous last dimension"):
        fused.rms_norm(torch.ones(4, 8).T, torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        fused.rms_norm(torch.ones(4, 8), torch.ones(8), 1e-5, torch.ones(4, 9))
    with pytest.raises(ValueError, match="even"):
        fused.silu_mul(torch.ones(4, 7))
