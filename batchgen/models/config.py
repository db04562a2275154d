"""A model's shape as frozen data: everything in which families differ is a field here, not a copy of the decoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps in the KV cache and how it attends.

    `window` counts the keys a query sees, itself included.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer. `scaling` is the checkpoint's own dictionary, its kind under
    "rope_type"; `rotary_dim` <= head_dim; `interleaved` rotates pairs (0, 1) instead of (0, dim / 2)."""

    theta: float
    rotary_dim: int
    scaling: tuple[tuple[str, object], ...] = ()
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. `layers[i]` and `ropes[rope_of_layer[i]]` belong to layer i."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    layers: tuple[KVSpec, ...]
    ropes: tuple[RopeConfig, ...]
    rope_of_layer: tuple[int, ...]
    max_position_embeddings: int
    norm_eps: float
    activation: str  # a key of layers.ACTIVATIONS
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    embedding_scale: float = 1.0
    dtype: str = "float32"  # the stored dtype; bfloat16 for quantised files
    eos_token_ids: tuple[int, ...] = ()
