"""Quantised safetensors checkpoints, read as if they were plain ones: tensors are dequantised while they stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchgen.errors import ModelError
from batchgen.weights import (
    Checkpoint,
    quantized_blocks,
    quantized_compressed,
    quantized_fp8,
    quantized_packed,
    read_json,
)
from batchgen.weights.quantized_parts import Raw, Recipe, Stored
from batchgen.weights.safetensors import DTYPES, SafetensorsCheckpoint, Tensor

if TYPE_CHECKING:
    import torch

MODELOPT = "hf_quant_config.json"

# quant_method -> what finds its tensors. It refuses what it cannot read from the configuration and the headers alone.
METHODS: Mapping[str, Callable[[Stored, Raw], Iterator[tuple[str, Recipe]]]] = {
    "awq": quantized_packed.read_awq,
    "bitsandbytes": quantized_blocks.read_bitsandbytes,
    "compressed-tensors": quantized_compressed.read_compressed,
    "fbgemm_fp8": quantized_fp8.read_fp8,
    "fp8": quantized_fp8.read_fp8,
    "gptq": quantized_packed.read_gptq,
    "modelopt": quantized_fp8.read_modelopt,
    "mxfp4": quantized_blocks.read_mxfp4,
}
UNUSED = re.compile(r"(.*\.)?(\w+_proj_)?(input|activation|output|prob|[qkv])_(scale|zero_point|global_scale|scale_ub)")
"""Scales of activations and of a quantised KV cache: neither is computed with here."""

CODES = ("weight", "qweight", "qzeros", "g_idx", "weight_packed", "SCB", "absmax")  # last words of quantised names


def dequantised(stored: SafetensorsCheckpoint) -> Checkpoint:
    """`stored` itself if it is a plain checkpoint; else one with the tensors of a plain one.

    Everything that the configuration and the headers can say against it is said here, before a weight is read. Lists of
    layers that were left out are needed for nothing: such a layer is stored as in a plain checkpoint.
    """
    raw = _take_quantization_config(stored)
    recipes: dict[str, Recipe] = {}
    if raw:
        method = _method(stored, raw)
        with stored.byte_reader() as read_bytes:
            try:
                recipes.update(METHODS[method](Stored(stored.path, stored.tensors, read_bytes), raw))
            except (ValueError, TypeError, AttributeError, re.error) as error:  # something else where a mapping goes
                raise ModelError(f"{stored.path}: quantization_config is malformed ({error})") from error
    for name, recipe in recipes.items():
        if 0 in recipe.shape:
            raise ModelError(f"{stored.path}: tensor {name!r} is quantised in the impossible shape {recipe.shape}")
    used = {name for recipe in recipes.values() for name in (*recipe.parts.values(), *recipe.used)}
    _check_rest(stored, set(stored.tensors) - used, raw)
    return QuantizedCheckpoint(stored, recipes, used) if recipes else stored


def _take_quantization_config(stored: SafetensorsCheckpoint) -> Raw:
    """What says how tensors are quantised, taken out of the configuration: the model does not depend on it."""
    found: list[Any] = []
    for place in (stored.config, stored.config.get("text_config")):
        if isinstance(place, dict):
            found += [place.pop(key, None) for key in ("quantization_config", "compression_config")]
    raw: Any = next((given for given in found if given), {})
    if not isinstance(raw, dict):
        raise ModelError(f"{stored.path}: quantization_config is {raw!r}, expected a JSON object")
    if not raw and (stored.path / MODELOPT).exists():
        raw = {"quant_method": "modelopt", **read_json(stored.path / MODELOPT, "")}
    more = raw.get("quantization")
    return {**raw, **more} if isinstance(more, dict) and raw.get("quant_method") == "modelopt" else raw


def _method(stored: SafetensorsCheckpoint, raw: Raw) -> str:
    method = raw.get("quant_method")
    if method is None and (raw.get("load_in_4bit") or raw.get("load_in_8bit")):
        method = "bitsandbytes"  # early files
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"{stored.path}: quantised checkpoints with quant_method {method!r} are not supported, expected one of "
            f"{', '.join(METHODS)}"
        )
    return method


def _check_rest(stored: SafetensorsCheckpoint, names: Collection[str], raw: Raw) -> None:
    """Codes that belong to nothing would be taken for numbers."""
    for name in sorted(names):
        dtype = stored.tensors[name].dtype
        is_code = dtype.startswith(("F8", "F4", "F6")) or (
            bool(raw) and dtype not in DTYPES and name.rpartition(".")[2] in CODES
        )
        if is_code:
            said = f"{raw.get('quant_method')!r} has no use for it there" if raw else "there is no quantization_config"
            raise ModelError(
                f"{stored.path / stored.tensors[name].shard}: tensor {name!r} is stored as {dtype}, but by config.json "
                f"{said}, so its scales cannot be found"
            )


class QuantizedCheckpoint:
    """Shows the tensors that `recipes` make instead of the stored ones that are `used` for it."""

    def __init__(self, stored: SafetensorsCheckpoint, recipes: Mapping[str, Recipe], used: Collection[str]) -> None:
        self._stored = stored
        self._recipes = recipes
        self.path = stored.path
        self.generation_config = stored.generation_config
        # The stored numbers do not decide: scales and norms are often float16 in models that were trained in bfloat16,
        # whose activations can leave float16's range, and bfloat16 rounds far more finely than the codes do.
        self.config = {**stored.config, "dtype": "bfloat16"}
        plain = [name for name in stored.names if name not in used and not UNUSED.fullmatch(name)]
        self.names = (*plain, *(name for name in recipes if name not in plain))

    def stream(
        self, names: Collection[str] | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = set(self.names if names is None else names)
        self._stored.check_plain(wanted - set(self._recipes))
        for inside in self.by_file(wanted):
            with self._stored.reader() as read:
                for name in sorted(inside, key=lambda name: self._main_part(name).start):
                    yield name, self._tensor(name, read, dtype)  # no variable: it would live on beside the next one

    def by_file(self, names: Collection[str]) -> list[list[str]]:
        files: dict[str, list[str]] = {}
        for name in names:
            files.setdefault(self._main_part(name).shard, []).append(name)
        return [files[shard] for shard in sorted(files)]

    def fingerprint(self) -> str:
        return self._stored.fingerprint()

    def _tensor(
        self, name: str, read: Callable[[str, torch.dtype | None], torch.Tensor], dtype: torch.dtype | None
    ) -> torch.Tensor:
        import torch

        recipe = self._recipes.get(name)
        if recipe is None:
            return read(name, dtype)
        tensor = torch.empty(recipe.shape, dtype=dtype or torch.float32)
        recipe.fill({role: read(part, None) for role, part in recipe.parts.items()}, tensor)
        return tensor

    def _main_part(self, name: str) -> Tensor:
        recipe = self._recipes.get(name)
        return self._stored.tensors[name if recipe is None else next(iter(recipe.parts.values()))]
