"""How families with mixtures of experts say in config.json what these are, and which layers have them."""

from __future__ import annotations

from typing import Any

from batchgen.errors import ModelError
from batchgen.models.config import ExpertsConfig
from batchgen.models.fields import Raw, integer, number, optional_number


def _base(raw: Raw, size: str, **more: Any) -> ExpertsConfig:
    num_experts = integer(raw, "num_local_experts")
    top_k = integer(raw, "num_experts_per_tok")
    groups, top_groups = more.get("num_groups", 1), more.get("top_groups", 1)
    if num_experts % groups or top_groups > groups:
        raise ModelError(
            f"model config: n_group ({groups}) and topk_group ({top_groups}) do not go with {num_experts} experts; "
            "expected a divisor of their number, and no more than that"
        )
    if top_k > num_experts // groups * top_groups:
        raise ModelError(
            f"model config: num_experts_per_tok is {top_k}, but a token chooses among "
            f"{num_experts // groups * top_groups} experts"
        )
    return ExpertsConfig(num_experts, top_k, integer(raw, size), **more)


def _fields(raw: Raw, experts: ExpertsConfig, sparse: tuple[bool, ...] | None = None) -> dict[str, Any]:
    """Of ModelConfig; `sparse` None: all layers have them."""
    return {"experts": experts, "expert_layers": sparse or (True,) * integer(raw, "num_hidden_layers")}


def mixtral(raw: Raw) -> dict[str, Any]:
    return _fields(raw, _base(raw, "intermediate_size", normalize=True))


def olmoe(raw: Raw) -> dict[str, Any]:
    experts = _base(raw, "intermediate_size", normalize=bool(raw["norm_topk_prob"]))
    return {**_fields(raw, experts), "qkv_clip": optional_number(raw, "clip_qkv")}


def qwen3_moe(raw: Raw) -> dict[str, Any]:
    experts = _base(raw, "moe_intermediate_size", normalize=bool(raw["norm_topk_prob"]))
    return _fields(raw, experts, _every_few_layers(raw))


def qwen2_moe(raw: Raw) -> dict[str, Any]:
    size = integer(raw, "shared_expert_intermediate_size")
    normalize = bool(raw["norm_topk_prob"])
    experts = _base(raw, "moe_intermediate_size", normalize=normalize, shared_size=size, shared_gate=True)
    return _fields(raw, experts, _every_few_layers(raw))


def _every_few_layers(raw: Raw) -> tuple[bool, ...]:
    """The last one of each `decoder_sparse_step` layers, but for those of `mlp_only_layers`."""
    step, dense = integer(raw, "decoder_sparse_step"), raw["mlp_only_layers"] or []
    if not isinstance(dense, list | tuple) or not all(isinstance(layer, int) for layer in dense):
        raise ModelError(f"model config: mlp_only_layers is {dense!r}, expected a list of layers' numbers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(integer(raw, "num_hidden_layers")))


def gpt_oss(raw: Raw) -> dict[str, Any]:
    """Softmax over the chosen logits is that over all, made to sum to 1."""
    return _fields(raw, _base(raw, "intermediate_size", normalize=True, router_bias=True, bias=True))


def deepseek_v2(raw: Raw) -> dict[str, Any]:
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"model config: topk_method {method!r} is not supported, expected greedy or group_limited_greedy"
        )
    if raw.get("scoring_func", "softmax") != "softmax" or raw.get("norm_topk_prob"):
        raise ModelError(
            "model config: scoring_func other than softmax and norm_topk_prob true are not supported for DeepSeek-V2"
        )
    grouped = method != "greedy"
    experts = _base(
        raw,
        "moe_intermediate_size",
        scale=number(raw, "routed_scaling_factor"),
        num_groups=integer(raw, "n_group") if grouped else 1,
        top_groups=integer(raw, "topk_group") if grouped else 1,
        shared_size=_shared_size(raw),
    )
    return _fields(raw, experts, _after_the_first(raw))


def deepseek_v3(raw: Raw) -> dict[str, Any]:
    if raw.get("scoring_func", "sigmoid") != "sigmoid" or raw.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ModelError(
            "model config: scoring_func other than sigmoid and topk_method other than noaux_tc are not supported for "
            "DeepSeek-V3"
        )
    experts = _base(
        raw,
        "moe_intermediate_size",
        scoring="sigmoid",
        normalize=bool(raw["norm_topk_prob"]),
        scale=number(raw, "routed_scaling_factor"),
        num_groups=integer(raw, "n_group"),
        top_groups=integer(raw, "topk_group"),
        group_score="top2",
        choice_bias=True,
        shared_size=_shared_size(raw),
    )
    if experts.num_groups > 1 and experts.num_experts // experts.num_groups < 2:
        raise ModelError(f"model config: n_group is {experts.num_groups}, expected groups of two experts or more")
    return _fields(raw, experts, _after_the_first(raw))


def _shared_size(raw: Raw) -> int:
    return integer(raw, "moe_intermediate_size") * integer(raw, "n_shared_experts")


def _after_the_first(raw: Raw) -> tuple[bool, ...]:
    first = raw["first_k_dense_replace"]
    if not isinstance(first, int) or first < 0:
        raise ModelError(f"model config: first_k_dense_replace is {first!r}, expected a number of layers")
    return tuple(layer >= first for layer in range(integer(raw, "num_hidden_layers")))
