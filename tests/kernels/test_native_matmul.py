"""The native matmuls against their twins, at every instruction set. Of 8-bit ones only scales may round apart."""

from __future__ import annotations

import pytest
import torch
from batchgen_kernels import cpu, reference
from batchgen_kernels.reference import FloatWeight, Int8Weight, quantize


def weight(out_features: int, in_features: int) -> Int8Weight:
    return Int8Weight.pack(*quantize(torch.randn(out_features, in_features)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(1, 1, 1), (2, 4, 16), (3, 5, 17), (7, 31, 48), (9, 576, 100), (17, 130, 33), (40, 1537, 49), (0, 8, 8)],
)
def test_equals_the_twin(ops: cpu.Ops, dtype: torch.dtype, rows: int, in_features: int, out_features: int) -> None:
    torch.manual_seed(rows)
    packed, bias = weight(out_features, in_features), torch.randn(out_features)
    x = torch.randn(rows, in_features + 3).to(dtype)[:, :in_features]  # rows that do not follow each other
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for given in (None, bias):
        expected = reference.int8_linear(x, packed, given)
        torch.testing.assert_close(ops.int8_linear(x, packed, given), expected, atol=tolerance, rtol=tolerance)
    wide = ops.int8_linear(x, packed, bias, wide=True)
    assert torch.equal(wide.to(dtype), ops.int8_linear(x, packed, bias))
    torch.testing.assert_close(wide, reference.int8_linear(x, packed, bias, wide=True), atol=1e-4, rtol=1e-4)


def test_many_threads_cut_rows_too(ops: cpu.Ops) -> None:
    x, packed = torch.randn(130, 64), weight(16, 64)
    alone = ops.int8_linear(x, packed)
    torch.set_num_threads(3)
    assert torch.equal(ops.int8_linear(x, packed), alone)


def test_the_largest_sums_do_not_saturate(ops: cpu.Ops) -> None:
    """The 8-bit products of AVX2 would: 2 x 127 x 127 for two neighbours, twice that with unsigned bytes."""
    x = torch.full((2, 4096), 3.0)
    packed = Int8Weight.pack(torch.full((16, 4096), 127, dtype=torch.int8), torch.full((16,), 0.5))
    torch.testing.assert_close(ops.int8_linear(x, packed), torch.full((2, 16), 3.0 * 4096 * 127 * 0.5))
    assert torch.equal(ops.int8_linear(-x, packed), -ops.int8_linear(x, packed))


def test_a_row_of_zeros_gives_the_bias_and_a_broken_row_nan(ops: cpu.Ops) -> None:
    x = torch.randn(6, 20)
    x[1], x[3, 7], x[4, 19] = 0.0, float("nan"), float("inf")
    packed, bias = weight(18, 20), torch.randn(18)
    out = ops.int8_linear(x, packed, bias)
    assert torch.equal(out[1], bias)
    assert out[[3, 4]].isnan().all() and out[[0, 1, 2, 5]].isfinite().all()


def test_a_row_does_not_depend_on_its_neighbours(ops: cpu.Ops) -> None:
    x, packed = torch.randn(23, 70), weight(50, 70)
    together = ops.int8_linear(x, packed)
    for rows in (1, 2, 5, 13):
        assert torch.equal(ops.int8_linear(x[:rows], packed), together[:rows])


def test_one_large_input_spoils_only_its_group(ops: cpu.Ops) -> None:
    x, plain = torch.randn(4, 256), torch.randn(32, 256)
    x[:, 70] = 1000.0
    plain[:, 70] = 0.0  # so that only the rounding of the others is seen
    expected = x @ plain.T
    error = ops.int8_linear(x, Int8Weight.pack(*quantize(plain))) - expected
    assert error.std() < 0.6 * expected.std()  # 64 of 256 inputs are lost; with one scale for all, nearly all are


def test_packing_keeps_every_number() -> None:
    quantized, scales = quantize(torch.randn(37, 50))
    packed = Int8Weight.pack(quantized, scales)
    assert torch.equal(packed.unpack(), quantized)
    assert packed.panels.shape == (3, 13, 16, 4) and packed.scales[37:].eq(0).all()
    assert torch.equal(packed.sums[0, :37], quantized.sum(dim=1, dtype=torch.int32))


def test_quantised_rows_are_within_half_a_step() -> None:
    x = torch.randn(5, 300) * torch.tensor([1e-6, 1.0, 50.0, 1e4, 0.0])[:, None]
    quantized, scales = quantize(x)
    assert quantized[:4].abs().amax(dim=1).eq(127).all()
    assert ((quantized * scales[:, None] - x).abs() <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x[:, :5], w), "x: expected torch.float32 .2, 8."),
        (lambda x, w: (x.double(), w), "expected float32 or bfloat16"),
        (lambda x, w: (x, w._replace(scales=w.scales[:3])), "scales: expected"),
        (lambda x, w: (x, w._replace(panels=w.panels.short())), "panels: expected torch.int8"),
    ],
)
def test_wrong_tensors_are_refused(ops: cpu.Ops, change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        ops.int8_linear(*change(torch.randn(2, 8), weight(16, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(1, 1, 1), (2, 3, 16), (5, 33, 17), (13, 576, 100), (27, 71, 49), (40, 70, 49), (0, 4, 4)],
)
def test_dense_equals_the_twin(
    ops: cpu.Ops, dtype: torch.dtype, rows: int, in_features: int, out_features: int
) -> None:
    torch.manual_seed(rows)
    packed = FloatWeight.pack(torch.randn(out_features, in_features).to(dtype))
    bias = torch.randn(out_features).to(dtype)
    x = torch.randn(rows, in_features + 3).to(dtype)[:, :in_features]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for given in (None, bias):
        expected = reference.float_linear(x, packed, given)
        torch.testing.assert_close(ops.float_linear(x, packed, given), expected, atol=tolerance * 4, rtol=tolerance)
    wide = ops.float_linear(x, packed, bias, wide=True)
    assert torch.equal(wide.to(dtype), ops.float_linear(x, packed, bias))
    torch.testing.assert_close(wide, reference.float_linear(x, packed, bias, wide=True), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_rows_do_not_depend_on_their_neighbours_nor_on_threads(ops: cpu.Ops, dtype: torch.dtype) -> None:
    x, packed = torch.randn(530, 71).to(dtype), FloatWeight.pack(torch.randn(50, 71).to(dtype))
    together = ops.float_linear(x, packed)
    for rows in (1, 2, 5, 13, 150):
        assert torch.equal(ops.float_linear(x[:rows], packed), together[:rows])
    torch.set_num_threads(3)
    assert torch.equal(ops.float_linear(x, packed), together)


def test_dense_bfloat16_adds_up_in_float32(ops: cpu.Ops) -> None:
    """4,096 products of which none would change a sum of 256 in bfloat16."""
    x, plain = torch.ones(3, 4097).bfloat16(), torch.full((20, 4097), 0.5).bfloat16()
    x[:, 0] = 256.0
    assert torch.equal(ops.float_linear(x, FloatWeight.pack(plain)), torch.full((3, 20), 128.0 + 2048).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_a_dense_weight_keeps_every_number(dtype: torch.dtype) -> None:
    plain = torch.randn(37, 51).to(dtype)
    packed = FloatWeight.pack(plain)
    assert torch.equal(packed.unpack(), plain)
    assert packed.panels.shape == ((3, 51, 16, 1) if dtype == torch.float32 else (3, 26, 16, 2))


def test_dense_of_wrong_shape_is_refused(ops: cpu.Ops) -> None:
    packed = FloatWeight.pack(torch.randn(20, 8))
    for x, weight, message in (
        (torch.randn(2, 9), packed, "x: expected"),
        (torch.randn(2, 8).bfloat16(), packed, "panels: expected"),
        (torch.randn(2, 8), packed._replace(out_features=40), "panels: 2 of 8 lanes cannot be of 40 channels"),
        (torch.randn(2, 9), packed._replace(in_features=9), "panels: 2 of 8 lanes cannot be of 20 channels and 9"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.float_linear(x, weight)
