"""Which layers have a window and which rotary positions, as families' configurations say it."""

from __future__ import annotations

from batchgen.errors import ModelError
from batchgen.models.config import RopeConfig
from batchgen.models.fields import Raw, integer, layer_types, read_rope, rope_dictionary

Windows = list[int | None]  # of each layer
Ropes = tuple[tuple[RopeConfig, ...], tuple[int, ...]]  # and which of them each layer has


def no_windows(raw: Raw, num_layers: int) -> Windows:
    return [None] * num_layers


def one_window(raw: Raw, num_layers: int) -> Windows:
    return [raw["sliding_window"]] * num_layers


def last_layers_slide(raw: Raw, num_layers: int) -> Windows:
    """Qwen's: all layers from `max_window_layers` on. Off unless asked for."""
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    if window is None:
        return [None] * num_layers
    first = raw["max_window_layers"]
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in layer_types(raw, num_layers, default)]


def every_other_slides(raw: Raw, num_layers: int) -> Windows:
    """Qwen2-MoE's: of the first `max_window_layers`, the first, third and so on. Off unless asked for."""
    if not raw["use_sliding_window"]:
        return [None] * num_layers
    slides = [layer % 2 == 0 and layer < raw["max_window_layers"] for layer in range(num_layers)]
    default = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return [
        integer(raw, "sliding_window") if kind == "sliding_attention" else None
        for kind in layer_types(raw, num_layers, default)
    ]


def one_window_if_asked(raw: Raw, num_layers: int) -> Windows:
    return [raw["sliding_window"] if raw["use_sliding_window"] else None] * num_layers


def _every(raw: Raw, num_layers: int, period: int) -> list[str]:
    """The types of layers where the last one of each period attends to everything."""
    default = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(num_layers)]
    return layer_types(raw, num_layers, default)


def _period(raw: Raw) -> int:
    return integer(raw, "sliding_window_pattern")


def periodic_windows(raw: Raw, num_layers: int) -> Windows:
    kinds = _every(raw, num_layers, _period(raw))
    return [integer(raw, "sliding_window") if kind == "sliding_attention" else None for kind in kinds]


def one_rope(raw: Raw, head_dim: int, num_layers: int, interleaved: bool = False) -> Ropes:
    return (read_rope(raw, rope_dictionary(raw), head_dim, interleaved=interleaved),), (0,) * num_layers


def interleaved_rope(raw: Raw, head_dim: int, num_layers: int) -> Ropes:
    return one_rope(raw, head_dim, num_layers, interleaved=True)


def no_rope(raw: Raw, head_dim: int, num_layers: int) -> Ropes:
    return (NO_ROPE,), (0,) * num_layers


NO_ROPE = RopeConfig(theta=1.0, rotary_dim=2, scaling=(("rope_type", "none"),))


def ropes_by_type(raw: Raw, head_dim: int, num_layers: int) -> Ropes:
    """One for layers that attend to everything, one for those with a window, which scaling leaves alone: both in
    `rope_parameters`, or in the older keys."""
    given = rope_dictionary(raw)
    if not any(kind in given for kind in ("full_attention", "sliding_attention")):
        local = raw.get("rope_local_base_freq", raw["rope_theta"])
        given = {"full_attention": given, "sliding_attention": {"rope_theta": local}}
    kinds = _every(raw, num_layers, _period(raw))
    order = sorted(set(kinds))
    return (
        tuple(read_rope(raw, given.get(kind) or {}, head_dim) for kind in order),
        tuple(order.index(kind) for kind in kinds),
    )


def some_without_rope(raw: Raw, head_dim: int, num_layers: int) -> Ropes:
    """SmolLM3's: `no_rope_layers` holds a 1 for each layer that has positions."""
    interval = integer(raw, "no_rope_layer_interval")
    flags = raw.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(flags, list | tuple) or len(flags) != num_layers:
        raise ModelError(f"model config: no_rope_layers is {flags!r}, expected {num_layers} times 0 or 1")
    (rope,), _ = one_rope(raw, head_dim, num_layers)
    return (rope, NO_ROPE), tuple(0 if flag else 1 for flag in flags)


def windows_without_rope(raw: Raw, num_layers: int) -> Windows:
    """SmolLM3's: where windows are asked for, layers without positions have them."""
    if not raw["use_sliding_window"] or raw["sliding_window"] is None:
        return [None] * num_layers
    _, ropes = some_without_rope(raw, 2, num_layers)
    default = ["sliding_attention" if rope else "full_attention" for rope in ropes]
    return [
        integer(raw, "sliding_window") if kind == "sliding_attention" else None
        for kind in layer_types(raw, num_layers, default)
    ]
