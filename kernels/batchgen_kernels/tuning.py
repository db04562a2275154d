"""Block sizes, warps and stages of the Triton kernels: a table by kernel, device architecture and Triton version."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import triton

INTERPRETER = "interpreter"  # Triton's own, on a CPU
# What is sold for graphics has the matrix instructions and the shared memory of an older generation.
LIKE = {"sm_120": "sm_89", "sm_121": "sm_89"}


class Config(NamedTuple):
    """How a kernel is launched. `blocks` are its constexpr block sizes by name."""

    blocks: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2


# kernel -> (architecture, first Triton version it holds for) -> configuration. An architecture that is not listed takes
# the newest listed one of its maker below it, the interpreter and unknown makers take ("", ...). Values of one
# architecture that depend on a size (of a head, of a row) are their own entries: "paged_attention/128".
TABLE: dict[str, dict[tuple[str, tuple[int, int]], Config]] = {
    # attention.py: steps with chunks of prompts, and decodes alone, by the larger of a key's and a value's size
    "paged_attention/64": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 128, "keys": 64}, num_warps=8, num_stages=3),
        ("sm_90", (3, 0)): Config({"small": 16, "large": 128, "keys": 128}, num_warps=8, num_stages=2),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=1),
    },
    "paged_attention/128": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 128, "keys": 32}, num_warps=8, num_stages=5),
        ("sm_90", (3, 0)): Config({"small": 16, "large": 128, "keys": 64}, num_warps=8, num_stages=3),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=1),
    },
    "paged_attention/256": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=8, num_stages=2),
        ("sm_90", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=8, num_stages=3),
        ("sm_100", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=8, num_stages=2),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=4, num_stages=1),
    },
    # In float32 no matrix instruction helps, and larger tiles do not stay in registers.
    "paged_attention/float32": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 16, "keys": 32}, num_warps=4, num_stages=1),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 16, "keys": 32}, num_warps=4, num_stages=1),
    },
    "paged_decode/float32": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 16, "keys": 32}, num_warps=4, num_stages=1),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 16, "keys": 32}, num_warps=4, num_stages=1),
    },
    "paged_decode/64": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=5),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=1),
    },
    "paged_decode/128": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=4, num_stages=5),
        ("sm_90", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=5),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=1),
    },
    "paged_decode/256": {
        ("", (3, 0)): Config({"small": 16, "large": 64, "keys": 64}, num_warps=4, num_stages=2),
        ("sm_80", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=8, num_stages=2),
        ("sm_90", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=8, num_stages=3),
        ("gfx942", (3, 0)): Config({"small": 16, "large": 64, "keys": 32}, num_warps=4, num_stages=1),
    },
    # cache.py
    "rope_and_write": {
        ("", (3, 0)): Config({"tokens": 32, "heads": 8}),
        ("sm_80", (3, 0)): Config({"tokens": 1, "heads": 8}, num_warps=2),
        ("gfx942", (3, 0)): Config({"tokens": 1, "heads": 8}, num_warps=1),
    },
    # Rows of up to so many elements. A program takes several short ones: about 32 elements a thread are on their way.
    "rms_norm/256": {
        ("", (3, 6)): Config({"ROWS": 4}),
        ("sm_80", (3, 6)): Config({"ROWS": 16}),
        ("gfx942", (3, 6)): Config({"ROWS": 16}),
    },
    "rms_norm/1024": {
        ("", (3, 6)): Config({"ROWS": 2}),
    },
    "rms_norm/4096": {
        ("", (3, 6)): Config({"ROWS": 1}),
        ("sm_80", (3, 6)): Config({"ROWS": 1}, num_warps=8),
        ("gfx942", (3, 6)): Config({"ROWS": 1}, num_warps=8),
    },
    "rms_norm/16384": {
        ("", (3, 6)): Config({"ROWS": 1}),
        ("sm_80", (3, 6)): Config({"ROWS": 1}, num_warps=16),
        ("gfx942", (3, 6)): Config({"ROWS": 1}, num_warps=16),
    },
    "gate": {
        ("", (3, 6)): Config({"COLUMNS": 1024}),
    },
    "keyed_gumbel": {
        ("", (3, 6)): Config({"BLOCK": 8192}),
        ("sm_80", (3, 6)): Config({"BLOCK": 1024}),
        ("gfx942", (3, 6)): Config({"BLOCK": 1024}),
    },
    # SPLIT tokens of a row are a program's, BLOCK of them at a time; a search keeps KEPT tokens at hand.
    "sample/scan": {
        ("", (3, 6)): Config({"SPLIT": 32768, "BLOCK": 8192}),
        ("sm_80", (3, 6)): Config({"SPLIT": 8192, "BLOCK": 2048}),
        ("gfx942", (3, 6)): Config({"SPLIT": 8192, "BLOCK": 2048}),
    },
    "sample/limit": {
        ("", (3, 6)): Config({"BLOCK": 8192, "KEPT": 1024}),
        ("sm_80", (3, 6)): Config({"BLOCK": 4096, "KEPT": 2048}, num_warps=16),
        ("gfx942", (3, 6)): Config({"BLOCK": 4096, "KEPT": 2048}, num_warps=16),
    },
    "sample/draw": {
        ("", (3, 6)): Config({"SPLIT": 32768, "BLOCK": 8192}),
        ("sm_80", (3, 6)): Config({"SPLIT": 8192, "BLOCK": 1024}),
        ("gfx942", (3, 6)): Config({"SPLIT": 8192, "BLOCK": 1024}),
    },
    "sample/likeliest": {
        ("", (3, 6)): Config({"PART": 8192}),
        ("sm_80", (3, 6)): Config({"PART": 4096}, num_warps=8),
        ("gfx942", (3, 6)): Config({"PART": 4096}, num_warps=8),
    },
    "sample/penalise": {
        ("", (3, 6)): Config({"BLOCK": 64}),
        ("sm_80", (3, 6)): Config({"BLOCK": 512}),
        ("gfx942", (3, 6)): Config({"BLOCK": 512}),
    },
    "sample/bias": {
        ("", (3, 6)): Config({"BLOCK": 64}),
        ("sm_80", (3, 6)): Config({"BLOCK": 512}),
        ("gfx942", (3, 6)): Config({"BLOCK": 512}),
    },
    # Experts.
    "sort_tokens": {
        ("", (3, 0)): Config({"ASSIGNMENTS": 64}, num_warps=4, num_stages=1),
    },
    "grouped_linear/16": {
        ("", (3, 0)): Config({"COLUMNS": 128, "INNER": 64, "BAND": 8}, num_warps=4, num_stages=4),
        ("gfx942", (3, 0)): Config({"COLUMNS": 128, "INNER": 64, "BAND": 8}, num_warps=4, num_stages=2),
    },
    "grouped_linear/64": {
        ("", (3, 0)): Config({"COLUMNS": 128, "INNER": 64, "BAND": 8}, num_warps=4, num_stages=4),
        ("gfx942", (3, 0)): Config({"COLUMNS": 128, "INNER": 64, "BAND": 8}, num_warps=4, num_stages=2),
    },
    "grouped_linear/128": {
        ("", (3, 0)): Config({"COLUMNS": 128, "INNER": 64, "BAND": 8}, num_warps=8, num_stages=3),
        ("sm_90", (3, 0)): Config({"COLUMNS": 256, "INNER": 64, "BAND": 8}, num_warps=8, num_stages=4),
        ("gfx942", (3, 0)): Config({"COLUMNS": 128, "INNER": 64, "BAND": 8}, num_warps=8, num_stages=2),
    },
    "grouped_linear/float32": {
        ("", (3, 0)): Config({"COLUMNS": 32, "INNER": 16, "BAND": 8}, num_warps=4, num_stages=2),
    },
}


@cache
def architecture() -> str:
    """The current device's: "sm_90", "gfx942", or INTERPRETER."""
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":", maxsplit=1)[0]


def choose(kernel: str) -> Config:
    """The entry of TABLE for this device and this Triton. KeyError where the kernel has none that fits."""
    arch = architecture()
    return _choose(kernel, LIKE.get(arch, arch), _version())


@cache
def _choose(kernel: str, arch: str, version: tuple[int, int]) -> Config:
    def rank(key: tuple[str, tuple[int, int]]) -> tuple[int, tuple[int, int]] | None:
        listed, first = key
        if first > version:
            return None
        if not listed:
            return -1, first
        if listed == arch:
            return 1 << 30, first
        if listed.startswith("sm_") and arch.startswith("sm_") and int(listed[3:]) <= int(arch[3:]):
            return int(listed[3:]), first
        return None

    ranked = [(place, config) for key, config in TABLE[kernel].items() if (place := rank(key)) is not None]
    if not ranked:
        raise KeyError(f"kernel {kernel} has no configuration for {arch} with Triton {version}")
    return max(ranked, key=lambda entry: entry[0])[1]


def _version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
