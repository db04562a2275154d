"""Formats with one float8 or int8 code to a byte and scales beside them: fp8 in its dialects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from batchgen.errors import ModelError
from batchgen.weights.quantized_parts import SCALE_DTYPES, Raw, Recipe, Stored, ceil_div, choice

if TYPE_CHECKING:
    import torch

FLOAT8 = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIXES = ("_scale_inv", "_scale")  # both are factors, whatever the first one's name says
EXPONENTS = ("F8_E8M0", "U8")  # scales that are powers of two, stored as exponents

Block = tuple[int, int]  # the rows and columns that share a scale


def read_fp8(stored: Stored, raw: Raw) -> Iterator[tuple[str, Recipe]]:
    """DeepSeek's blocks of scales, or a scale for the whole tensor or each row. Scales of activations have no use:
    what is computed here is in the model's dtype."""
    choice(raw, "expert_dtype", ("fp8",), "fp8")
    block = None if raw.get("weight_block_size") is None else block_of(raw, "weight_block_size")
    for name, tensor in stored.tensors.items():
        if tensor.dtype not in FLOAT8:
            continue
        if len(tensor.shape) < 2:
            stored.fail(f"tensor {name!r} is stored as {tensor.dtype} in shape {tensor.shape}, expected a matrix")
        rows, columns = tensor.shape[-2:]
        blocks = [(rows, columns), (1, columns), (rows, 1)]
        if block is not None:
            blocks.insert(0, block)
        scale = next((name + suffix for suffix in SCALE_SUFFIXES if name + suffix in stored.tensors), None)
        scale = stored.need(scale or name + SCALE_SUFFIXES[0 if block else 1], name, SCALE_DTYPES + EXPONENTS)
        yield name, scaled(stored, name, scale, blocks)


def read_modelopt(stored: Stored, raw: Raw) -> Iterator[tuple[str, Recipe]]:
    choice(raw, "quant_algo", ("fp8", "fp8_per_channel_per_token"), kind="ModelOpt's ")
    return read_fp8(stored, {})


def block_of(raw: Raw, key: str) -> Block:
    """[rows, columns]; older files have it as "128x128"."""
    given = raw.get(key)
    found = [int(part) if part.isdecimal() else 0 for part in given.split("x")] if isinstance(given, str) else given
    if (
        not isinstance(found, list | tuple)
        or len(found) != 2
        or not all(isinstance(part, int) and not isinstance(part, bool) and part > 0 for part in found)
    ):
        raise ModelError(
            f"model config: {key} is {given!r} in quantization_config, expected two positive whole numbers"
        )
    return found[0], found[1]


def scaled(
    stored: Stored, name: str, scale: str, blocks: Sequence[Block], zeros: str | None = None, factor: float = 1.0
) -> Recipe:
    """Of matrices (..., rows, columns) with a code to a byte, whose scales must be those of one of `blocks`."""
    shape = stored.shape(name)
    *stack, rows, columns = shape
    found = stored.shape(scale)
    grids = [(*stack, ceil_div(rows, height), ceil_div(columns, width)) for height, width in blocks]
    fitting = [block for block, grid in zip(blocks, grids, strict=True) if _fits(found, grid)]
    if not fitting:
        stored.fail(
            f"tensor {scale!r} has shape {found}, expected {' or '.join(map(str, dict.fromkeys(grids)))}: it does not "
            f"fit {name!r} of shape {shape}"
        )
    parts = {"codes": name, "scales": scale} | ({} if zeros is None else {"zeros": zeros})
    return Recipe(shape, parts, partial(_fill, block=fitting[0], factor=factor))


def _fits(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """A last dimension of 1 may be left out, a single scale may have any number of them."""
    if grid[-2:] == (1, 1) and shape in ((), (1,), grid[:-2]):
        return True
    return shape == grid or (grid[-1] == 1 and shape == grid[:-1])


def _fill(parts: Mapping[str, torch.Tensor], out: torch.Tensor, block: Block, factor: float) -> None:
    import torch

    from batchgen.weights import dequantize

    rows, columns = out.shape[-2:]
    codes, numbers = parts["codes"].view(-1, rows, columns), out.view(-1, rows, columns)  # (matrices, rows, columns)
    grid = (-1, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    scales = dequantize.factors(parts["scales"]).view(grid).expand(len(codes), -1, -1) * factor
    zeros = parts["zeros"].to(torch.float32).view(grid) if "zeros" in parts else None
    table = dequantize.float8_table(codes.dtype) if codes.dtype.is_floating_point else None
    for index, matrix in enumerate(codes):

        def numbers_of(rows: slice, matrix: torch.Tensor = matrix) -> torch.Tensor:
            taken = matrix[rows]
            return taken.to(torch.float32) if table is None else dequantize.lookup(table, taken.view(torch.uint8))

        of_matrix = dequantize.Scales(scales[index], *block, None if zeros is None else zeros[index])
        dequantize.fill(numbers[index], of_matrix, numbers_of)
