"""GPTQ and AWQ: codes of a few bits in int32 words, the matrix stored transposed as (columns, rows)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from batchgen.errors import ModelError
from batchgen.weights.quantized_parts import SCALE_DTYPES, Raw, Recipe, Stored, ceil_div, choice, size

if TYPE_CHECKING:
    import torch

AWQ_BITS = 4
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # where in a word the codes of 8 consecutive rows are


def read_gptq(stored: Stored, raw: Raw) -> Iterator[tuple[str, Recipe]]:
    key = "checkpoint_format" if raw.get("checkpoint_format") else "format"  # a newer name for the same
    choice(raw, "is_marlin_format", (False,), False)
    choice(raw, "pack_dtype", ("int32",), "int32")
    zero_offset = 0 if choice(raw, key, ("gptq", "gptq_v2"), "gptq", kind="GPTQ's ") == "gptq_v2" else 1
    for module in stored.ending(".qweight"):
        given = {**raw, **_override(raw, module)}
        bits = choice(given, "bits", (2, 3, 4, 8), kind="GPTQ's ")
        name = stored.check(f"{module}.qweight", ("I32",))
        if len(stored.shape(name)) != 2:
            stored.fail(f"tensor {name!r} has shape {stored.shape(name)}, expected a matrix")
        words, rows = stored.shape(name)
        columns, cut = divmod(words * 32, bits)
        if cut:
            stored.fail(f"tensor {name!r} has shape {stored.shape(name)}, expected a multiple of {bits} rows of words")
        group_size = size(given, "group_size", whole=columns)
        grid = (ceil_div(columns, group_size), rows)
        parts = {
            "codes": name,
            "scales": stored.need(f"{module}.scales", name, SCALE_DTYPES, grid),
            "zeros": stored.need(f"{module}.qzeros", name, ("I32",), (grid[0], ceil_div(rows * bits, 32))),
        }
        if choice(given, "desc_act", (True, False), False) or f"{module}.g_idx" in stored.tensors:
            parts["groups"] = stored.need(f"{module}.g_idx", name, ("I32", "I64"), (columns,))
        fill = partial(
            _fill_gptq,
            bits=bits,
            group_size=group_size,
            zero_offset=zero_offset,
            where=f"{stored.path}: tensor '{module}.g_idx'",
        )
        yield f"{module}.weight", Recipe((rows, columns), parts, fill)


def _override(raw: Raw, module: str) -> Raw:
    """What GPTQModel's `dynamic` says of a layer by the first pattern that fits; "-:" marks layers left out."""
    for pattern, values in (raw.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), module):
            if not pattern.startswith("-:"):
                return dict(values)
            raise ModelError(f"model config: quantization_config leaves {module!r} out, but it is stored quantised")
    return {}


def _fill_gptq(
    parts: Mapping[str, torch.Tensor], out: torch.Tensor, bits: int, group_size: int, zero_offset: int, where: str
) -> None:
    import torch

    from batchgen.weights import dequantize

    (rows, columns), codes = out.shape, parts["codes"]  # codes: (words, rows)
    # version 1 stores one less than the zero point, and wraps round at 0
    zeros = (dequantize.unpack(parts["zeros"], bits, rows) + zero_offset) % (1 << bits)  # (groups, rows)
    scales = parts["scales"].to(torch.float32)  # (groups, rows)
    groups = None
    if "groups" in parts:
        groups = dequantize.group_index(parts["groups"], len(scales), group_size, where)
    of_matrix = dequantize.Scales(scales.t().contiguous(), 1, group_size, zeros.t().contiguous(), groups)
    dequantize.fill(out, of_matrix, lambda rows: dequantize.unpack(codes[:, rows].t(), bits, columns))


def read_awq(stored: Stored, raw: Raw) -> Iterator[tuple[str, Recipe]]:
    key = "version" if raw.get("version") else "format"
    choice(raw, key, ("gemm",), "gemm", kind="AWQ's ")
    choice(raw, "bits", (AWQ_BITS,), raw.get("w_bit", AWQ_BITS), kind="AWQ's ")
    choice(raw, "zero_point", (True,), True, kind="AWQ's ")
    for module in stored.ending(".qweight"):
        name = stored.check(f"{module}.qweight", ("I32",))
        if len(stored.shape(name)) != 2:
            stored.fail(f"tensor {name!r} has shape {stored.shape(name)}, expected a matrix")
        columns, words = stored.shape(name)
        rows = words * 32 // AWQ_BITS
        group_size = size(raw, "group_size", whole=columns, default=raw.get("q_group_size", 128))
        groups = ceil_div(columns, group_size)
        parts = {
            "codes": name,
            "scales": stored.need(f"{module}.scales", name, SCALE_DTYPES, (groups, rows)),
            "zeros": stored.need(f"{module}.qzeros", name, ("I32",), (groups, words)),
        }
        yield f"{module}.weight", Recipe((rows, columns), parts, partial(_fill_awq, group_size=group_size))


def _fill_awq(parts: Mapping[str, torch.Tensor], out: torch.Tensor, group_size: int) -> None:
    import torch

    from batchgen.weights import dequantize

    scales = parts["scales"].to(torch.float32).t().contiguous()  # (rows, groups)
    of_matrix = dequantize.Scales(scales, 1, group_size, _awq_rows(parts["zeros"]))
    per_word = 32 // AWQ_BITS

    def codes(rows: slice) -> torch.Tensor:
        return _awq_rows(parts["codes"][:, rows.start // per_word : rows.stop // per_word])

    dequantize.fill(out, of_matrix, codes, multiple=per_word)


def _awq_rows(words: torch.Tensor) -> torch.Tensor:
    """(n, rows / 8) -> (rows, n), float32."""
    import torch

    shifts = torch.tensor(AWQ_SHIFTS, dtype=torch.int32).view(1, -1, 1)
    codes = (words.t().contiguous().unsqueeze(1) >> shifts) & 15  # (rows / 8, 8, n)
    return codes.to(torch.float32).flatten(0, 1)
