"""Checked access to config.json's keys: every message names the key, what it holds and what was expected."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from batchgen.errors import ModelError
from batchgen.models.config import RopeConfig
from batchgen.models.rope import ROPE_KINDS

Raw = Mapping[str, Any]

# rope kind -> the keys its dictionary must hold as numbers; "factors" are lists of one number for each frequency
ROPE_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
ROPE_LISTS = {"longrope": ("short_factor", "long_factor")}
LAYER_TYPES = ("full_attention", "sliding_attention")


def integer(raw: Raw, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"model config: {key} is {value!r}, expected one positive whole number")
    return value


def number(raw: Raw, key: str) -> float:
    value = raw.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"model config: {key} is {value!r}, expected a number")
    return value


def optional_number(raw: Raw, key: str) -> float | None:
    return None if raw.get(key) is None else number(raw, key)


def one_of(raw: Raw, key: str, allowed: Collection[str]) -> str:
    if raw.get(key) not in allowed:
        raise ModelError(f"model config: {key} {raw.get(key)!r} is not supported, expected one of {', '.join(allowed)}")
    return str(raw[key])


def token_ids(given: Any) -> tuple[int, ...]:
    """An EOS entry: absent, one id or a list of ids."""
    ids = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return tuple(sorted({int(token) for token in ids}))


def layer_types(raw: Raw, num_layers: int, default: list[str]) -> list[str]:
    """`layer_types`, or the family's pattern where the configuration has none."""
    kinds = raw.get("layer_types") or default
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers or not set(kinds) <= set(LAYER_TYPES):
        raise ModelError(
            f"model config: layer_types is {kinds!r}, expected {num_layers} times sliding_attention or full_attention"
        )
    return list(kinds)


def rope_dictionary(raw: Raw) -> dict[str, Any]:
    """`rope_parameters`, or the older `rope_scaling` beside `rope_theta`."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"model config: rope parameters {given!r} are not supported, expected a dictionary")
    return dict(given)


def read_rope(raw: Raw, given: Raw, head_dim: int, *, interleaved: bool = False) -> RopeConfig:
    """One flat dictionary of rope parameters, with what it leaves to other keys of the configuration filled in."""
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(
            f"model config: rope parameters {dict(given)!r} are not supported, expected one flat dictionary"
        )
    found = {"rope_theta": raw["rope_theta"], "partial_rotary_factor": raw.get("partial_rotary_factor"), **given}
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    kinds = [known for known in ROPE_KINDS if known != "none"]
    if kind not in kinds:
        raise ModelError(f"model config: rope type {kind!r} is not supported, expected one of {', '.join(kinds)}")
    theta, share = number(found, "rope_theta"), found.pop("partial_rotary_factor")
    rotary_dim = int(head_dim * (1.0 if share is None else share))
    del found["rope_theta"]
    if rotary_dim % 2:
        raise ModelError(f"model config: rotary dimension {rotary_dim} is odd, expected an even number")
    limit = integer(raw, "max_position_embeddings")
    if kind == "dynamic":
        found["original_max_position_embeddings"] = limit  # the reference stretches from there, whatever is given
    elif kind in ROPE_NUMBERS:
        found.setdefault("original_max_position_embeddings", limit)
        found["original_max_position_embeddings"] = raw.get(
            "original_max_position_embeddings", found["original_max_position_embeddings"]
        )
    if kind in ("yarn", "longrope") and found.get("factor") is None:
        found["factor"] = limit / number(found, "original_max_position_embeddings")
    for key in ROPE_NUMBERS.get(kind, ()):
        if number(found, key) <= 0:
            raise ModelError(f"model config: rope parameter {key} is {found[key]}, expected a positive number")
    for key in ROPE_LISTS.get(kind, ()):
        values = found.get(key)
        if not isinstance(values, list | tuple) or len(values) != rotary_dim // 2:
            raise ModelError(f"model config: rope parameter {key} is {values!r}, expected {rotary_dim // 2} numbers")
        found[key] = tuple(values)
    scaling = () if kind == "default" else (("rope_type", kind), *sorted(found.items()))
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling, interleaved=interleaved)
