"""Native norm, gated activations and keyed noise against their twins, and the noise against published vectors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from batchgen_kernels import cpu, reference

OPS = cpu.load()
needs_ops = pytest.mark.skipif(OPS is None, reason="the native ops were not built")
DTYPES = [torch.float32, torch.bfloat16]


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to a rounding: one unit in the last place of bfloat16, a few of float32."""
    rtol, atol = (2**-7, 1e-5) if wanted.dtype == torch.bfloat16 else (2e-5, 1e-5)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576), (40, 1003), (300, 64)])
def test_rms_norm(ops: cpu.Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 5).to(dtype), torch.randn(shape[1])
    check(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = torch.randn(shape).to(dtype)
    twin = residual.clone()
    check(ops.rms_norm(x, weight, 1e-5, residual), reference.rms_norm(x, weight, 1e-5, twin))
    assert torch.equal(residual, twin)


@pytest.mark.parametrize("by", [OPS, reference])
def test_rms_norm_of_a_weight_that_bfloat16_holds_is_the_product_in_bfloat16(by: cpu.Ops | ModuleType | None) -> None:
    """As of models whose norms are stored in it."""
    if by is None:
        pytest.skip("the native ops were not built")
    torch.manual_seed(0)
    x, weight = (torch.randn(33, 576) * 5).bfloat16(), torch.randn(576).bfloat16()
    wanted = weight * by.rms_norm(x, torch.ones(576), 1e-5)
    assert torch.equal(by.rms_norm(x, weight.float(), 1e-5), wanted)


def test_rms_norm_takes_strided_heads(ops: cpu.Ops) -> None:
    fused = torch.randn(9, 5 * 32)
    heads, weight = fused.view(9, 5, 32)[:, 1:4], torch.randn(32)
    check(ops.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    rows = fused[:, 32:128]
    check(ops.rms_norm(rows, torch.ones(96), 1e-6), reference.rms_norm(rows, torch.ones(96), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(ops: cpu.Ops, dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(1)
    for rows, dim in [(1, 1), (3, 19), (130, 1536)]:
        gate_up = (torch.randn(rows, 2 * dim + 4) * 4).to(dtype)[:, : 2 * dim]  # rows with a stride
        check(getattr(ops, name)(gate_up), getattr(reference, name)(gate_up))
    extremes = torch.tensor([[0.0, -0.0, 1e-30, -90.0, 90.0, -3e38, 3e38, float("nan")] + [1.0] * 8]).to(dtype)
    got, wanted = getattr(ops, name)(extremes), getattr(reference, name)(extremes)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_words(counter: str, key: str, words: str) -> None:
    def read(text: str) -> torch.Tensor:
        return torch.tensor([int(word, 16) for word in text.split()])

    assert torch.equal(reference.philox4x32(read(counter), read(key)), read(words))


def test_keyed_gumbel(ops: cpu.Ops) -> None:
    keys = torch.tensor([0, -1, 2**62 + 12345, -(2**63), 7], dtype=torch.int64)
    positions = torch.tensor([0, 1, 2**31 - 1, -1, 5], dtype=torch.int32)
    samples = torch.tensor([0, 3, 1, -7, 2**31 - 1], dtype=torch.int32)
    for vocab in (1, 5, 64, 1000, 49157):
        got = ops.keyed_gumbel(keys, positions, samples, vocab)
        wanted = reference.keyed_gumbel(keys, positions, samples, vocab)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    # 6627e8d5 is the published first word for zeros, whatever else is in the batch.
    first = -torch.log(-torch.log(torch.tensor(((0x6627E8D5 >> 9) + 0.5) * 2.0**-23)))
    torch.testing.assert_close(got[0, 0], first, rtol=1e-5, atol=0)


def test_gumbel_noise_has_the_right_mean_and_spread() -> None:
    noise = reference.keyed_gumbel(torch.tensor([3]), torch.ones(1).int(), torch.zeros(1).int(), 200_000)
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - 1.6449) < 0.03


@needs_ops
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ops: ops.rms_norm(torch.ones(2, 4), torch.ones(5), 1e-5), r"weight: expected torch.float32 \(4,\)"),
        (lambda ops: ops.rms_norm(torch.ones(2, 4), torch.ones(4).bfloat16(), 1e-5), "weight: .* got torch.bfloat16"),
        (lambda ops: ops.silu_mul(torch.ones(2, 5)), r"gate_up: expected torch.float32 \(2, 4\)"),
        (lambda ops: ops.silu_mul(torch.ones(2, 4).double()), "gate_up: expected float32 or bfloat16"),
        (
            lambda ops: ops.keyed_gumbel(torch.zeros(2).long(), torch.zeros(2).int(), torch.zeros(3).int(), 8),
            r"samples: expected torch.int32 \(2,\)",
        ),
    ],
)
def test_wrong_tensors_are_named(call: Callable[[cpu.Ops | None], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(OPS)


@needs_ops
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_torch_and_the_library_share_one_openmp_runtime() -> None:
    code = """
from batchgen_kernels import cpu
assert cpu.load() is not None
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(sum(path.rsplit("/", 1)[1].startswith(("libgomp", "libomp", "libiomp")) for path in paths))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
