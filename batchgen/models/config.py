"""A model's shape as frozen data: everything in which families differ is a field here, not a copy of the decoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps in the KV cache and how it attends.

    `window` counts the keys a query sees, itself included. `value_dim` None is `head_dim`. With `sinks` every head has
    a logit that takes its share of the softmax and gives nothing; `attend` is given them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    sinks: bool = False

    @property
    def value_size(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer. `scaling` is the checkpoint's own dictionary, its kind under
    "rope_type"; `rotary_dim` <= head_dim; `interleaved` rotates pairs (0, 1) instead of (0, dim / 2). The kind "none"
    rotates by nothing: for layers without positions."""

    theta: float
    rotary_dim: int
    scaling: tuple[tuple[str, object], ...] = ()
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's MLP.

    The router's logits become scores by `scoring`; `top_k` experts are chosen, of the `top_groups` best of `num_groups`
    groups where there are several; their scores, made to sum to 1 if `normalize`, times `scale`, weigh what they give.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: str = "softmax"  # softmax | sigmoid
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # of a group's scores: max | top2 (the sum of the two best)
    router_bias: bool = False  # a part of the logits
    choice_bias: bool = False  # added to the scores for choosing only
    bias: bool = False  # of the experts' matrices, not of the one that every token takes
    shared_size: int = 0  # the intermediate size of an expert that every token takes; 0: none
    shared_gate: bool = False  # what it gives is weighed by a sigmoid


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries and keys come from vectors of low rank, and
    a part of each key, which alone is rotated, is shared by all heads."""

    query_rank: int | None  # None: queries come from the hidden states
    kv_rank: int
    rope_dim: int
    bias: bool = False


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
    gated: bool = True  # whether the MLP has a gate beside its up-projection
    norm: str = "rms"  # rms | layer (with the mean taken off)
    norm_bias: bool = False
    norm_offset: float = 0.0  # stored weights lack it
    norms: tuple[str, ...] = ("attn_in", "mlp_in")  # what is normalised: also attn_out, mlp_out
    parallel: bool = False  # attention and MLP both see the layer's input; without "mlp_in" normalised once
    qkv_bias: bool = False
    qkv_clip: float | None = None
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"  # none | head (a weight for all heads) | heads (one for each) | all (all heads at once)
    learned_positions: bool = False
    tied_head: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each half of a layer adds
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    expert_layers: tuple[bool, ...] = ()  # which layers have them; empty: none
    latent: LatentConfig | None = None
    dtype: str = "float32"  # the stored dtype; bfloat16 for quantised files
    eos_token_ids: tuple[int, ...] = ()
