"""The decoder's building blocks: linear layers (dense, prepacked or in 8 bits), activations, rotary tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from batchgen_kernels import pages
from batchgen_kernels.reference import FloatWeight, Int8Weight, quantize

from batchgen.models.config import RopeConfig

QUANTIZE_ROWS = 4096  # of a weight at once: what that takes beside it is bounded


class Ops(Protocol):
    """The fused operations and matmuls: the native ones or their plain-torch twin, chosen once by the caller."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalise the last dimension of x (num_tokens, size) or (num_tokens, num_heads, size).

        With `residual`, x is added to it in place and the sum is normalised.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of each row: (num_tokens, 2 * size) -> (num_tokens, size)."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The same with gelu in its tanh form."""
        ...

    def float_linear_pays(self, dtype: torch.dtype) -> bool:
        """Whether `float_linear` is at least as fast as torch's own."""
        ...

    def float_linear(
        self, x: torch.Tensor, weight: FloatWeight, bias: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), all in float32 or all in bfloat16, but the result in
        float32 if `wide`."""
        ...

    def int8_linear(
        self, x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features); x is quantised, the bias float32, and the result too
        if `wide`."""
        ...


# hidden_act of a configuration -> (num_tokens, 2 * size) to (num_tokens, size)
ACTIVATIONS: Mapping[str, Callable[[Ops, torch.Tensor], torch.Tensor]] = {
    "silu": lambda ops, gate_up: ops.silu_mul(gate_up),
    "gelu_pytorch_tanh": lambda ops, gate_up: ops.gelu_tanh_mul(gate_up),
}


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes weights of this dtype, reordered once, on this CPU: for machines where no product of ours
    pays.

    Measured on two AVX-512-BF16 cores against F.linear (GFLOP/s at 8 / 64 / 512 rows, 576 -> 3072): bf16 547 / 980 /
    1048 against 350 / 848 / 991, fp32 344 / 500 / 513 against 105 / 201 / 217. It never lost by more than noise.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """y = x W^T + b by torch, where W may be several matrices of the checkpoint stacked along the outputs.

    Parts are loaded in any order. Where the CPU supports it, the last one triggers the reordering and the plain copy
    is freed, so that memory holds one copy.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.in_features = in_features
        self.parts = tuple(parts)
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.weight: torch.Tensor | None = None  # (sum(parts), in_features), absent before loading and once packed
        self.bias = torch.empty(sum(parts), dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None
        self._missing = set(range(len(self.parts)))

    def load_weight(self, part: int, tensor: torch.Tensor) -> None:
        if self.weight is None:
            self.weight = torch.empty(sum(self.parts), self.in_features, dtype=self.dtype, device=self.device)
        self._rows(self.weight, part).copy_(tensor)
        self._missing.discard(part)
        if not self._missing:
            self.use(self.weight)

    def load_bias(self, part: int, tensor: torch.Tensor) -> None:
        assert self.bias is not None
        self._rows(self.bias, part).copy_(tensor)

    def use(self, weight: torch.Tensor) -> None:
        """Take a finished weight (sum(parts), in_features), which a tied embedding may go on using too."""
        if self.device.type == "cpu" and can_prepack(self.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            self.weight = None
        else:
            self.weight = weight

    def _rows(self, whole: torch.Tensor, part: int) -> torch.Tensor:
        start = sum(self.parts[:part])
        return whole[start : start + self.parts[part]]

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, sum(parts)), in float32 if `wide`"""
        if self.device.type != "cpu":
            assert self.weight is not None
            if wide and self.bias is None and x.dtype != torch.float32:
                return torch.mm(x, self.weight.T, out_dtype=torch.float32)
            product = F.linear(x, self.weight, self.bias)
            return product.float() if wide else product
        num_rows = len(x)
        if padding := _bucket(num_rows) - num_rows:
            x = F.pad(x, (0, 0, 0, padding))
        if self._packed is not None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        else:
            assert self.weight is not None
            out = F.linear(x, self.weight, self.bias)
        return out[:num_rows].float() if wide else out[:num_rows]


def _bucket(num_rows: int) -> int:
    """The row count that num_rows is padded to: oneDNN prepares a primitive for every new one, and computes a single
    row in another way than several."""
    if num_rows <= 4:
        return 0 if num_rows == 0 else 2 if num_rows <= 2 else 4
    return -(-num_rows // 8) * 8


class FloatLinear(Linear):
    """The same by the ops' own product."""

    def __init__(
        self, in_features: int, parts: Sequence[int], *, bias: bool, dtype: torch.dtype, ops: Ops, arena: pages.Arena
    ) -> None:
        super().__init__(in_features, parts, bias=bias, dtype=dtype)
        self._ops, self._arena = ops, arena
        self._panels: FloatWeight | None = None

    def use(self, weight: torch.Tensor) -> None:
        self._panels = FloatWeight.pack(weight, self._arena.empty)
        self.weight = None

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        assert self._panels is not None
        return self._ops.float_linear(x, self._panels, self.bias, wide=wide)


class Int8Linear(Linear):
    """The same in 8 bits: weights with a scale for each output channel, activations quantised as they come.

    These have a scale for each token and 64 inputs. Weights are quantised while they are loaded, from what `dtype`
    holds of them.
    """

    def __init__(
        self, in_features: int, parts: Sequence[int], *, bias: bool, dtype: torch.dtype, ops: Ops, arena: pages.Arena
    ) -> None:
        super().__init__(in_features, parts, bias=False, dtype=dtype)
        self.bias = torch.empty(sum(parts)) if bias else None
        self._ops, self._arena = ops, arena
        self._int8: Int8Weight | None = None

    def use(self, weight: torch.Tensor) -> None:
        parts = [Int8Weight.pack(*quantize(rows)) for rows in weight.split(QUANTIZE_ROWS)]
        self._int8 = Int8Weight.stack(parts, self._arena.empty)
        self.weight = None

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        assert self._int8 is not None
        return self._ops.int8_linear(x, self._int8, self.bias, wide=wide)


QUANTIZED = {"int8": Int8Linear}  # model.quantization -> what linear layers are


def linear_kind(
    dtype: torch.dtype, quantization: str | None, ops: Ops, device: torch.device | None = None
) -> Callable[..., Linear]:
    """What makes a model's linear layers, from (in_features, parts, bias=); None is the CPU."""
    if quantization:
        return partial(QUANTIZED[quantization], dtype=dtype, ops=ops, arena=pages.Arena())
    if dtype in (torch.float32, torch.bfloat16) and ops.float_linear_pays(dtype):
        return partial(FloatLinear, dtype=dtype, ops=ops, arena=pages.Arena())
    return partial(Linear, dtype=dtype, device=device)


class RopeTable:
    """Cosines and sines of every position, with the reference's float32 arithmetic so that both agree to the bit."""

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device | None = None) -> None:
        inverse, attention_factor = inverse_frequencies(rope, max_model_len)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inverse[None, :]
        self.cos = (angles.cos() * attention_factor).to(device)  # (max_model_len, rotary_dim / 2)
        self.sin = (angles.sin() * attention_factor).to(device)  # (max_model_len, rotary_dim / 2)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(num_tokens,) -> cos and sin, each (num_tokens, rotary_dim / 2) float32"""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies (rotary_dim / 2,) and the factor on cosine and sine.

    The kinds whose frequencies depend on the length (dynamic, longrope) take the job's longest possible sequence: one
    set for all rows, so that a row's text depends neither on its neighbours nor on how it was chunked or cached.
    """
    scaling = dict(rope.scaling)
    return ROPE_KINDS[str(scaling.get("rope_type", "default"))](rope, scaling, max_model_len)


def _wavelengths(rope: RopeConfig, base: float | None = None) -> torch.Tensor:
    """Unscaled wavelengths over 2 pi (rotary_dim / 2,), growing geometrically: 1 / frequency."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    powers: torch.Tensor = (rope.theta if base is None else base) ** exponents
    return powers


def _default(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _wavelengths(rope), 1.0


def _linear(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _wavelengths(rope) / scaling["factor"], 1.0


def _dynamic(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    original, factor, dim = scaling["original_max_position_embeddings"], scaling["factor"], rope.rotary_dim
    stretch = factor * max(max_model_len, original) / original - (factor - 1)
    return 1.0 / _wavelengths(rope, rope.theta * stretch ** (dim / (dim - 2))), 1.0


def _yarn(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    """Low frequencies are interpolated, high ones kept, with a linear ramp over the dimensions in between."""
    factor, original, dim = scaling["factor"], scaling["original_max_position_embeddings"], rope.rotary_dim

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = mscale(over) / mscale(under) if over and under else mscale(1.0)

    def dimension_of(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(rope)
    kept = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept, float(attention_factor)


def _longrope(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    factors = scaling["long_factor" if max_model_len > original else "short_factor"]
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(rope)), float(attention_factor)


def _llama3(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    """Long wavelengths are divided by the factor, short ones kept, with a smooth blend in between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    inverse = 1.0 / _wavelengths(rope)
    wavelengths = 2 * math.pi / inverse
    divided = torch.where(wavelengths > original / low, inverse / factor, inverse)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * divided / factor + blend * divided
    medium = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(medium, blended, divided), 1.0


RopeFunction = Callable[[RopeConfig, dict[str, Any], int], tuple[torch.Tensor, float]]
ROPE_KINDS: Mapping[str, RopeFunction] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
