"""The decoder's building blocks: linear layers (dense, prepacked or in 8 bits), norms, activations, and where a
checkpoint's tensors go in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from batchgen_kernels import pages
from batchgen_kernels.reference import FloatWeight, Int8Weight, SortedTokens, quantize

from batchgen.models.config import ModelConfig

QUANTIZE_ROWS = 4096  # of a weight at once: what that takes beside it is bounded


class Ops(Protocol):
    """The fused operations and matmuls: the native ones or their plain-torch twin, chosen once by the caller."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalise the last dimension of x (num_tokens, size) or (num_tokens, num_heads, size); the weight is float32.

        With `residual`, x is added to it in place and the sum is normalised.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of each row: (num_tokens, 2 * size) -> (num_tokens, size)."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The same with gelu in its tanh form."""
        ...

    def clamped_swiglu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """GPT-OSS's: both halves cut off, the gate times its steeper sigmoid times (second half + 1)."""
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

    def grouped_linear_pays(self) -> bool:
        """Whether `grouped_linear` is better than a product of each expert's own."""
        ...

    def tile_rows(self, num_assignments: int, num_experts: int) -> int:
        """The tile to sort that many assignments in."""
        ...

    def sort_tokens(self, expert_ids: torch.Tensor, num_experts: int, tile: int) -> SortedTokens:
        """Of expert_ids (num_tokens, top_k), without the host's knowing what they are."""
        ...

    def grouped_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        tokens: SortedTokens,
        bias: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (num_tokens or num_tokens * top_k, in_features) by each assignment's matrix of weight (num_experts,
        out_features, in_features) -> (num_tokens * top_k, out_features); with `weights` (num_tokens, top_k) summed to
        (num_tokens, out_features)."""
        ...


Activation = Callable[[Ops, torch.Tensor], torch.Tensor]


def _gelu_tanh(ops: Ops, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


# hidden_act of a configuration -> (num_tokens, 2 * size) to (num_tokens, size), the gate first
GATED_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": lambda ops, gate_up: ops.silu_mul(gate_up),
    "gelu_pytorch_tanh": lambda ops, gate_up: ops.gelu_tanh_mul(gate_up),
    "clamped_swiglu": lambda ops, gate_up: ops.clamped_swiglu_mul(gate_up),
}
# the same without a gate: (num_tokens, size) to (num_tokens, size)
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": lambda ops, x: F.gelu(x),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": lambda ops, x: F.relu(x),
    "silu": lambda ops, x: F.silu(x),
}


def activation_of(config: ModelConfig) -> Activation:
    return (GATED_ACTIVATIONS if config.gated else ACTIVATIONS)[config.activation]


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


class Place(NamedTuple):
    """Where a tensor of the checkpoint goes: the shape it must have and what takes it, in float32 if `wide`."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], object]
    wide: bool = False


Places = Iterator[tuple[str, Place]]  # by the tensor's name


@dataclass(frozen=True, slots=True)
class Layout:
    """How checkpoints of one kind store the decoder's parts: their names, in which {} stands for the layer's number.

    A single name "qkv" or "gate_up" stands for what is elsewhere "q", "k" and "v", "gate" and "up". `grouped`: rows of
    "qkv" are the queries of a key's group, then that key and its value, and so on. `transposed`: matrices are stored as
    (in_features, out_features).
    """

    names: Mapping[str, str]
    grouped: bool = False
    transposed: bool = False

    def of_layer(self, index: int) -> Layout:
        return replace(self, names={part: name.replace("{}", str(index)) for part, name in self.names.items()})


# A tensor that is stored as one -> the parts of a linear layer, (rows, in_features) or (rows,) each
Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def linear_places(target: Linear, *names: str, split: Split | None = None, transposed: bool = False) -> Places:
    """The parts of one linear layer, in the order in which it stacks them; or all of them under a single name, cut up
    by `split` (None: as they are stacked). `transposed` weights are stored as (in_features, rows)."""
    everything = range(len(target.parts))
    if split is None and len(names) == len(everything):
        for part, name in zip(everything, names, strict=True):
            yield from _stored_linear(target, name, (part,), lambda tensor: (tensor,), transposed)
    else:
        (name,) = names
        yield from _stored_linear(target, name, everything, split or (lambda t: t.split(target.parts)), transposed)


def _stored_linear(target: Linear, name: str, parts: Sequence[int], split: Split, transposed: bool) -> Places:
    def load(take: Callable[[int, torch.Tensor], None], tensor: torch.Tensor) -> None:
        for part, piece in zip(parts, split(tensor.t() if transposed else tensor), strict=True):
            take(part, piece)

    rows = sum(target.parts[part] for part in parts)
    shape = (target.in_features, rows) if transposed else (rows, target.in_features)
    yield f"{name}.weight", Place(shape, partial(load, target.load_weight))
    if target.bias is not None:
        yield f"{name}.bias", Place((rows,), partial(load, target.load_bias))


class Norm:
    """RMS or layer normalisation over the last dimension (or over all heads at once)."""

    def __init__(
        self, config: ModelConfig, shape: tuple[int, ...], empty: Callable[..., torch.Tensor], *, bias: bool = False
    ) -> None:
        self.weight = empty(shape, dtype=torch.float32)
        self.bias = empty(shape, dtype=torch.float32) if bias else None
        self._rms, self._eps, self._offset = config.norm == "rms", config.norm_eps, config.norm_offset

    def __call__(self, ops: Ops, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """(num_tokens, size) or (num_tokens, num_heads, size) -> the same. With `residual`, x is added to it in place
        and the sum is normalised."""
        if self._rms:
            return ops.rms_norm(x, self.weight, self._eps, residual)
        if residual is not None:
            x = residual.add_(x)
        normalised = F.layer_norm(x.float(), x.shape[-1:], eps=self._eps) * self.weight
        return (normalised if self.bias is None else normalised + self.bias).to(x.dtype)

    def places(self, name: str) -> Places:
        def load(tensor: torch.Tensor) -> None:
            self.weight.copy_(tensor + self._offset)

        yield f"{name}.weight", Place(tuple(self.weight.shape), load, wide=True)
        if self.bias is not None:
            yield f"{name}.bias", Place(tuple(self.bias.shape), self.bias.copy_, wide=True)
