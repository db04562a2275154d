"""compressed-tensors: layers are quantised as the first group of the configuration says whose targets name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from batchgen.errors import ModelError
from batchgen.weights.quantized_fp8 import FLOAT8, Block, block_of, scaled
from batchgen.weights.quantized_parts import SCALE_DTYPES, Raw, Recipe, Stored, ceil_div, choice, size
from batchgen.weights.safetensors import DTYPES

if TYPE_CHECKING:
    import torch

PACKED = "pack-quantized"
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", PACKED)
STRATEGIES = ("tensor", "channel", "group", "block")
CLASSES = ("Linear", "Embedding")  # targets that name a class; a checkpoint shows only which layers are quantised


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the layers of one group are stored."""

    targets: tuple[str, ...]
    format: str
    kind: str  # "int" or "float"
    bits: int
    strategy: str
    block: Block  # -1 for all rows or columns
    symmetric: bool
    needs_index: bool  # groups are of columns that do not follow each other


def read_compressed(stored: Stored, raw: Raw) -> Iterator[tuple[str, Recipe]]:
    if (raw.get("sparsity_config") or {}).get("format", "dense") != "dense":
        stored.fail("quantization_config has a sparsity_config; sparse checkpoints are not supported")
    if (raw.get("transform_config") or {}).get("config_groups"):
        stored.fail("quantization_config has a transform_config; rotated weights are not supported")
    schemes = [
        _scheme(group, str(raw.get("format")))
        for group in (raw.get("config_groups") or {}).values()
        if not isinstance(group, Mapping) or group.get("weights") is not None
    ]
    for name, tensor in stored.tensors.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight_packed" and (kind != "weight" or tensor.dtype in DTYPES):
            continue
        if any(_names(target, module) for target in raw.get("ignore") or ()):
            stored.fail(f"tensor {name!r} is stored as {tensor.dtype}, but quantization_config ignores {module!r}")
        scheme = _of_module(schemes, module)
        if scheme is None:
            stored.fail(f"tensor {name!r} is stored as {tensor.dtype}, but no group of quantization_config targets it")
        if (kind == "weight_packed") != (scheme.format == PACKED):
            stored.fail(f"there is {name!r}, but by quantization_config {module!r} is {scheme.format}")
        yield f"{module}.weight", (_packed if scheme.format == PACKED else _plain)(stored, module, scheme)


def _scheme(group: object, common_format: str) -> Scheme:
    if not isinstance(group, Mapping):
        raise ModelError(f"model config: group {group!r} in quantization_config is not supported, expected a mapping")
    weights = group["weights"]
    form = str(group.get("format") or common_format)
    choice({"format": form}, "format", FORMATS, kind="compressed-tensors' ")
    packed = form == PACKED
    kind = choice(weights, "type", ("int",) if packed or form == "int-quantized" else ("float", "int"), "int")
    bits = choice(weights, "num_bits", (2, 4, 8) if packed else range(1, 9) if kind == "int" else (8,), 8)
    group_size = weights.get("group_size")
    inferred = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = choice({"strategy": weights.get("strategy") or inferred}, "strategy", STRATEGIES)
    block = {"tensor": (-1, -1), "channel": (1, -1)}.get(strategy)
    if strategy == "group":
        block = (1, size(weights, "group_size"))
    elif block is None:
        block = block_of(weights, "block_structure")
    actorder = str(weights.get("actorder")).lower()
    return Scheme(
        targets=tuple(map(str, group.get("targets") or ())),
        format=form,
        kind=kind,
        bits=bits,
        strategy=strategy,
        block=block,
        symmetric=choice(weights, "symmetric", (True, False), True),
        needs_index=actorder in ("group", "dynamic", "true"),
    )


def _names(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _of_module(schemes: list[Scheme], module: str) -> Scheme | None:
    """Of several schemes that of a target with the layer's name, then of a pattern, then of a class: its own order."""
    by_target = {target: scheme for scheme in schemes for target in scheme.targets}
    for target in sorted(by_target, key=lambda target: ("re:" in target, target)):
        if _names(target, module):
            return by_target[target]
    is_embedding = "embed" in module.rpartition(".")[2]
    return by_target.get("Embedding" if is_embedding else "Linear")


def _block(scheme: Scheme, shape: tuple[int, ...]) -> Block:
    height, width = scheme.block
    return (shape[-2] if height < 0 else height, shape[-1] if width < 0 else width)


def _plain(stored: Stored, module: str, scheme: Scheme) -> Recipe:
    """A code to a byte."""
    name, zeros = f"{module}.weight", f"{module}.weight_zero_point"
    stored.check(name, FLOAT8 if scheme.kind == "float" else ("I8",))
    scale = stored.need(f"{module}.weight_scale", name, SCALE_DTYPES)
    recipe = scaled(stored, name, scale, [_block(scheme, stored.shape(name))])
    if scheme.symmetric:  # zero points, where they are stored all the same, are 0
        return replace(recipe, used=(zeros,) if zeros in stored.tensors else ())
    stored.need(zeros, name, ("I8",), stored.shape(scale))
    return replace(recipe, parts={**recipe.parts, "zeros": zeros})


def _packed(stored: Stored, module: str, scheme: Scheme) -> Recipe:
    """Codes of `bits` bits in int32 words along the columns, offset so that they are not negative."""
    packed, shape_name = f"{module}.weight_packed", f"{module}.weight_shape"
    stored.need(packed, packed, ("I32",))
    stored.need(shape_name, packed, ("I64", "I32"), (2,))
    width = 8 if stored.tensors[shape_name].dtype == "I64" else 4
    content = stored.read_bytes(shape_name)
    rows, columns = (int.from_bytes(content[at : at + width], "little", signed=True) for at in (0, width))
    stored.check(packed, ("I32",), (rows, ceil_div(columns * scheme.bits, 32)))
    height, width = _block(scheme, (rows, columns))
    grid = (ceil_div(rows, height), ceil_div(columns, width))
    scale = stored.need(f"{module}.weight_scale", packed, SCALE_DTYPES, (1,) if scheme.strategy == "tensor" else grid)
    parts = {"codes": packed, "scales": scale}
    zeros, index = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
    if not scheme.symmetric:
        stored.need(zeros, packed, ("I32", "I8"))
        as_bytes = stored.tensors[zeros].dtype == "I8"  # older files
        stored.check(
            zeros, ("I32", "I8"), stored.shape(scale) if as_bytes else (ceil_div(grid[0] * scheme.bits, 32), grid[1])
        )
        parts["zeros"] = zeros
    if scheme.needs_index or index in stored.tensors:
        parts["groups"] = stored.need(index, packed, ("I32", "I64"), (columns,))
    used = tuple(name for name in (shape_name, zeros) if name in stored.tensors and name not in parts.values())
    fill = partial(_fill, bits=scheme.bits, block=(height, width), where=f"{stored.path}: tensor {index!r}")
    return Recipe((rows, columns), parts, fill, used)


def _fill(parts: Mapping[str, torch.Tensor], out: torch.Tensor, bits: int, block: Block, where: str) -> None:
    import torch

    from batchgen.weights import dequantize

    columns, offset = out.shape[1], 1 << bits - 1
    grid = (ceil_div(out.shape[0], block[0]), ceil_div(columns, block[1]))
    scales = parts["scales"].to(torch.float32).view(grid)
    zeros = torch.full_like(scales, offset)
    if "zeros" in parts:
        stored = parts["zeros"]
        if stored.dtype == torch.int8:
            zeros += stored
        else:  # packed along the rows
            zeros = dequantize.unpack(stored.t(), bits, grid[0]).t().contiguous()
    groups = None
    if "groups" in parts and int(parts["groups"].min()) >= 0:  # -1 stands for groups that follow each other
        groups = dequantize.group_index(parts["groups"], grid[1], block[1], where)
    of_matrix = dequantize.Scales(scales, *block, zeros, groups)
    dequantize.fill(out, of_matrix, lambda rows: dequantize.unpack(parts["codes"][rows], bits, columns))
