"""What the readers of quantised formats share: the stored tensors as headers show them, and recipes made of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from batchgen.errors import ModelError
from batchgen.weights.safetensors import Tensor

if TYPE_CHECKING:
    import torch

Raw = Mapping[str, Any]
SCALE_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one tensor of the model comes out of stored ones."""

    shape: tuple[int, ...]
    parts: Mapping[str, str]  # what `fill` calls them -> stored tensors, that with the codes first
    fill: Callable[[Mapping[str, torch.Tensor], torch.Tensor], None]  # of the parts, into a tensor of `shape`
    used: tuple[str, ...] = ()  # further stored tensors that belong to it and need not be read again


@dataclass(frozen=True, slots=True)
class Stored:
    """The checkpoint's stored tensors. Checks raise a ModelError that names the file's tensor and what it should be."""

    path: Path
    tensors: Mapping[str, Tensor]
    read_bytes: Callable[[str], bytes]  # for small ones only

    def ending(self, suffix: str) -> Iterator[str]:
        """Names without the `suffix` that they have."""
        return (name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def need(self, name: str, owner: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None) -> str:
        """`name`, which `owner` cannot be dequantised without, after checking that it is there as expected."""
        if name not in self.tensors:
            stem = owner.rpartition(".")[0]
            beside = sorted(other for other in self.tensors if other.startswith(f"{stem}.") and other != owner)
            self.fail(
                f"tensor {owner!r} is quantised, but {name!r}, without which it means nothing, is not there "
                f"(there are {', '.join(beside[:6]) or 'no other tensors of this layer'}); incomplete download?"
            )
        return self.check(name, dtypes, shape)

    def check(self, name: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None) -> str:
        tensor = self.tensors[name]
        if tensor.dtype not in dtypes:
            self.fail(f"tensor {name!r} is stored as {tensor.dtype}, expected {' or '.join(dtypes)}")
        if shape is not None and tensor.shape != shape:
            self.fail(
                f"tensor {name!r} has shape {tensor.shape}, expected {shape}: it does not fit its quantised layer"
            )
        return name

    def fail(self, message: str) -> NoReturn:
        raise ModelError(f"{self.path}: {message}")


def choice(raw: Raw, key: str, known: Collection[Any], default: Any = None, kind: str = "") -> Any:
    """A key of quantization_config whose value must be one of `known`."""
    value = raw.get(key, default)
    value = value.lower() if isinstance(value, str) else value
    if type(value) is not type(next(iter(known))) or value not in known:  # True is no 1
        raise ModelError(
            f"model config: {kind}{key} is {raw.get(key)!r} in quantization_config, which is not supported; expected "
            f"{' or '.join(map(str, known))}"
        )
    return value


def size(raw: Raw, key: str, whole: int | None = None, default: Any = None) -> int:
    """A key of quantization_config that is a positive number of rows or columns; -1 stands for `whole`."""
    value = raw.get(key, default)
    if value == -1 and whole is not None:
        return whole
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"model config: {key} is {value!r} in quantization_config, expected a positive whole number")
    return value


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
