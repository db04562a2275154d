"""Checks a safetensors header: what it claims of its tensors must be possible, and fill the file exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from batchgen.errors import ModelError

# bits of one element
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
METADATA = "__metadata__"


def read_entries(path: Path, header: bytes) -> dict[str, Any]:
    """The header's entries, by tensor name; ModelError where one is damaged or lies about the file."""
    try:
        entries = json.loads(header, object_pairs_hook=_once)
        if not isinstance(entries, dict):
            raise ValueError("no JSON object")
        entries.pop(METADATA, None)
        spans = sorted(_span(name, entry) for name, entry in entries.items())
        at = 0
        for start, end, name in spans:
            if start != at:
                raise ValueError(f"tensor {name!r} starts at byte {start} of the data, and {at} are before it")
            at = end
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged safetensors header ({error}); incomplete download?") from error
    size, expected = path.stat().st_size, 8 + len(header) + at
    if size != expected:
        raise ModelError(
            f"missing shard data: {path.name} in {path.parent} has {size} bytes, its header says {expected}; "
            "incomplete download? Download the model again"
        )
    return entries


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two entries of one name counts, readers would not agree upon."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _span(name: str, entry: Any) -> tuple[int, int, str]:
    """Start and end of a tensor in the data, if its shape and type say so too."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"tensor {name!r} is no JSON object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _naturals(shape) or len(shape) > 8:
        raise ValueError(f"tensor {name!r} has the impossible shape {str(shape)[:100]}")
    if not _naturals(span) or len(span) != 2:
        raise ValueError(f"tensor {name!r} has the impossible offsets {str(span)[:100]}")
    start, end = span
    if 8 * (end - start) != prod(shape) * BITS[dtype]:
        raise ValueError(f"tensor {name!r} of shape {shape} and dtype {dtype} cannot lie in bytes {start} to {end}")
    return start, end, name


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
