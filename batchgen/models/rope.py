"""Rotary position embedding: the tables of cosines and sines, and every kind of frequency scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from batchgen.models.config import RopeConfig


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


def yarn_mscale(factor: float, weight: float) -> float:
    """How much larger scores are to be where positions are stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    """Low frequencies are interpolated, high ones kept, with a linear ramp over the dimensions in between."""
    factor, original, dim = scaling["factor"], scaling["original_max_position_embeddings"], rope.rotary_dim
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = yarn_mscale(factor, 1.0)
        if over and under:
            attention_factor = yarn_mscale(factor, over) / yarn_mscale(factor, under)

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


def _none(rope: RopeConfig, scaling: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, float]:
    """Rotates by nothing."""
    return torch.zeros(rope.rotary_dim // 2), 1.0


RopeFunction = Callable[[RopeConfig, dict[str, Any], int], tuple[torch.Tensor, float]]
ROPE_KINDS: Mapping[str, RopeFunction] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "none": _none,
}
