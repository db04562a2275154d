"""Formats whose 4-bit codes name the numbers of a table: bitsandbytes (and its int8) and MXFP4."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from batchgen.weights.quantized_fp8 import scaled
from batchgen.weights.quantized_parts import Raw, Recipe, Stored, ceil_div
from batchgen.weights.safetensors import DTYPES

if TYPE_CHECKING:
    import torch

STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
ROW_MAJOR = b"\0"
MXFP4_BLOCK = 32


def read_bitsandbytes(stored: Stored, raw: Raw) -> Iterator[tuple[str, Recipe]]:
    """The tensors themselves say which of its formats they are in."""
    for suffix in STATES:
        for name in stored.ending(suffix):
            yield name, _four_bits(stored, name, name + suffix)
    for name, tensor in stored.tensors.items():
        if tensor.dtype == "I8" and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            layout = f"{module}.weight_format"
            if layout in stored.tensors and stored.read_bytes(layout) != ROW_MAJOR:
                stored.fail(f"tensor {name!r} is stored tiled (weight_format is not 0), expected plain rows")
            scale = stored.need(f"{module}.SCB", name, ("F32",), tensor.shape[:1])
            recipe = scaled(stored, name, scale, [(1, tensor.shape[-1])], factor=1 / 127)
            used = (layout,) if layout in stored.tensors else ()
            yield name, Recipe(recipe.shape, recipe.parts, recipe.fill, used)


def _four_bits(stored: Stored, name: str, state_name: str) -> Recipe:
    try:
        state = json.loads(stored.read_bytes(state_name))
        shape, block = tuple(map(int, state["shape"])), int(state["blocksize"])
        nested, offset = int(state.get("nested_blocksize") or 0), float(state.get("nested_offset") or 0)
        if min(shape) < 1 or block < 1 or nested < 0:
            raise ValueError(f"{state}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        stored.fail(f"tensor {state_name!r} does not say how {name!r} is quantised ({error}); is the file damaged?")
    num_codes = prod(shape)
    num_blocks = ceil_div(num_codes, block)
    tensor = stored.tensors.get(stored.need(name, state_name, ("U8", "I8", *DTYPES)))
    if tensor is not None and tensor.end - tensor.start != ceil_div(num_codes, 2):
        stored.fail(
            f"tensor {name!r} has {tensor.end - tensor.start} bytes, expected {ceil_div(num_codes, 2)} for two codes "
            f"to a byte and shape {shape}"
        )
    parts = {
        "codes": name,
        "scales": stored.need(f"{name}.absmax", name, ("U8",) if nested else ("F32",), (num_blocks,)),
        "table": stored.need(f"{name}.quant_map", name, ("F32",), (16,)),
    }
    if nested:
        shape_of_nested = (ceil_div(num_blocks, nested),)
        parts["nested scales"] = stored.need(f"{name}.nested_absmax", name, ("F32",), shape_of_nested)
        parts["nested table"] = stored.need(f"{name}.nested_quant_map", name, ("F32",), (256,))
    return Recipe(shape, parts, partial(_fill_four_bits, block=block, nested=nested, offset=offset), (state_name,))


def _fill_four_bits(
    parts: Mapping[str, torch.Tensor], out: torch.Tensor, block: int, nested: int, offset: float
) -> None:
    """Blocks run on over the ends of rows, the first code of a byte is in its high bits."""
    import torch

    from batchgen.weights import dequantize

    scales = parts["scales"]
    if nested:  # the scales are quantised in turn, in 8 bits
        codes = dequantize.lookup(parts["nested table"].view(256, 1), scales.view(1, -1))[0]
        scales = codes * parts["nested scales"].repeat_interleave(nested)[: len(codes)] + offset
    table = dequantize.pair_table(parts["table"], low_first=False)
    stored, flat = parts["codes"].reshape(-1).view(torch.uint8), out.view(-1)
    for part in dequantize.chunks(len(flat), 1, multiple=2 * block):
        count = part.stop - part.start
        numbers = dequantize.lookup(table, stored[part.start // 2 : ceil_div(part.stop, 2)].view(1, -1))[0, :count]
        of_blocks = scales[part.start // block : ceil_div(part.stop, block)]
        flat[part] = numbers.mul_(of_blocks.repeat_interleave(block)[:count])


def read_mxfp4(stored: Stored, raw: Raw) -> Iterator[tuple[str, Recipe]]:
    """Experts in blocks of 32 columns with a power of two each; the tensor they stand for is stored transposed."""
    for name in stored.ending("_blocks"):
        blocks = stored.check(f"{name}_blocks", ("U8",))
        shape = stored.shape(blocks)  # (experts, rows, columns / 32, 16)
        if len(shape) != 4 or shape[3] != MXFP4_BLOCK // 2:
            stored.fail(f"tensor {blocks!r} has shape {shape}, expected (experts, rows, blocks, {MXFP4_BLOCK // 2})")
        scales = stored.need(f"{name}_scales", blocks, ("U8", "F8_E8M0"), shape[:3])
        experts, rows, num_blocks, _ = shape
        yield (
            name,
            Recipe((experts, num_blocks * MXFP4_BLOCK, rows), {"codes": blocks, "scales": scales}, _fill_mxfp4),
        )


def _fill_mxfp4(parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    from batchgen.weights import dequantize

    table = dequantize.pair_table(dequantize.FP4_VALUES, low_first=True)
    scales = dequantize.factors(parts["scales"])  # (experts, rows, blocks)
    for expert, codes in enumerate(parts["codes"].flatten(2)):  # (rows, columns / 2)

        def numbers_of(rows: slice, codes: torch.Tensor = codes) -> torch.Tensor:
            return dequantize.lookup(table, codes[rows])

        of_expert = dequantize.Scales(scales[expert], 1, MXFP4_BLOCK)
        dequantize.fill(out[expert].t(), of_expert, numbers_of)
