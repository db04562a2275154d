"""The table of model families: what sets each architecture's configuration and weights apart from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchgen.errors import ModelError
from batchgen.models import layouts, mixtures, positions
from batchgen.models.config import LatentConfig, ModelConfig
from batchgen.models.fields import (
    Raw,
    integer,
    number,
    optional_number,
    rope_dictionary,
)
from batchgen.models.layers import Layout
from batchgen.models.rope import yarn_mscale


def _nothing(raw: Raw) -> dict[str, Any]:
    return {}


def _as_it_is(raw: dict[str, Any]) -> dict[str, Any]:
    return raw


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart.

    `known_for` names models for people. `keys` are common keys of config.json and this family's names for them,
    `defaults` what the reference implementation assumes for keys that are left out; `adapt` brings what is left of a
    family's own ways into the common form. From that, `fields` of ModelConfig are fixed, `flags` are taken from the
    keys they name, `more` follow from several; `attention` gives fields of every layer's KVSpec. `prefixes` are what
    tensor names may begin with, and the head's.
    """

    known_for: str
    layout: Callable[[ModelConfig], Layout] = lambda config: layouts.LLAMA
    prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)
    ignorable: tuple[str, ...] = ()  # patterns of tensor names, in which {num_layers} stands for that number
    text_config: bool = False  # the language model's configuration is a part of its own
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Raw = field(default_factory=dict)
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is
    fields: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Raw], dict[str, Any]] = _nothing
    windows: Callable[[Raw, int], positions.Windows] = positions.no_windows
    ropes: Callable[[Raw, int, int], positions.Ropes] = positions.one_rope
    attention: Callable[[Raw], dict[str, Any]] = _nothing


def _gelu_means_tanh(raw: dict[str, Any]) -> dict[str, Any]:
    """The first Gemmas were published with "gelu", and trained with its tanh form."""
    return {**raw, "hidden_act": "gelu_pytorch_tanh"} if raw["hidden_act"] in ("gelu", None) else raw


def _gemma_scale(raw: Raw) -> dict[str, Any]:
    return {
        "scale": number(raw, "query_pre_attn_scalar") ** -0.5,
        "soft_cap": optional_number(raw, "attn_logit_softcapping"),
    }


def _gemma_fields(raw: Raw) -> dict[str, Any]:
    return {
        "embedding_scale": integer(raw, "hidden_size") ** 0.5,
        "logit_soft_cap": optional_number(raw, "final_logit_softcapping"),
    }


def _longrope_by_other_names(raw: dict[str, Any]) -> dict[str, Any]:
    """The first Phi-3 called it "su", or "yarn"."""
    given = rope_dictionary(raw)
    kind = given.get("rope_type") or given.get("type")
    return {**raw, "rope_scaling": {**given, "rope_type": "longrope"}} if kind in ("su", "yarn") else raw


def _granite_fields(raw: Raw) -> dict[str, Any]:
    return {
        "embedding_scale": number(raw, "embedding_multiplier"),
        "residual_scale": number(raw, "residual_multiplier"),
        "logit_scale": 1.0 / number(raw, "logits_scaling"),
    }


def _cohere_fields(raw: Raw) -> dict[str, Any]:
    return {"logit_scale": number(raw, "logit_scale"), "qk_norm": "heads" if raw["use_qk_norm"] else "none"}


def _four_times_as_wide(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("intermediate_size") is None:
        raw = {**raw, "intermediate_size": 4 * integer(raw, "hidden_size")}
    return raw


def _gpt2(raw: dict[str, Any]) -> dict[str, Any]:
    if not raw["scale_attn_weights"] or raw["scale_attn_by_inverse_layer_idx"]:
        raise ModelError(
            "model config: scale_attn_weights false and scale_attn_by_inverse_layer_idx true are not supported"
        )
    return _one_key_a_head(_four_times_as_wide(raw))


def _one_key_a_head(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "num_key_value_heads": None}


def _falcon(raw: dict[str, Any]) -> dict[str, Any]:
    if raw["alibi"]:
        raise ModelError("model config: alibi is not supported; expected a Falcon with rotary positions")
    if not raw["new_decoder_architecture"]:
        raw = {**raw, "num_key_value_heads": 1 if raw["multi_query"] else None}
    return _four_times_as_wide(raw)


def _falcon_norms(raw: Raw) -> dict[str, Any]:
    new = bool(raw["new_decoder_architecture"])
    parallel = new or bool(raw["parallel_attn"])
    two = not parallel or (new and raw["num_ln_in_parallel_attn"] in (None, 2))
    return {"parallel": parallel, "norms": ("attn_in", "mlp_in") if two else ("attn_in",)}


def _falcon_layout(config: ModelConfig) -> Layout:
    return layouts.FALCON_TWO_NORMS if config.parallel and "mlp_in" in config.norms else layouts.FALCON


def _deepseek(raw: dict[str, Any]) -> dict[str, Any]:
    """`head_dim` is no key of theirs: what transformers writes there is the rotated part of it."""
    if integer(raw, "qk_rope_head_dim") % 2:
        raise ModelError(f"model config: qk_rope_head_dim is {raw['qk_rope_head_dim']}, expected an even number")
    head_dim = integer(raw, "qk_nope_head_dim") + integer(raw, "qk_rope_head_dim")
    return _one_key_a_head({**raw, "head_dim": head_dim})


def _deepseek_rope(raw: Raw, head_dim: int, num_layers: int) -> positions.Ropes:
    return positions.one_rope(
        raw, integer(raw, "qk_rope_head_dim"), num_layers, interleaved=bool(raw["rope_interleave"])
    )


def _deepseek_attention(raw: Raw) -> dict[str, Any]:
    (rope,), _ = _deepseek_rope(raw, 0, 1)
    scaling: dict[str, Any] = dict(rope.scaling)
    weight = optional_number(scaling, "mscale_all_dim")
    stretched = yarn_mscale(scaling["factor"], weight) if weight else 1.0
    return {"scale": integer(raw, "head_dim") ** -0.5 * stretched**2, "value_dim": integer(raw, "v_head_dim")}


def _deepseek_fields(raw: Raw) -> dict[str, Any]:
    return {
        "latent": LatentConfig(
            query_rank=None if raw["q_lora_rank"] is None else integer(raw, "q_lora_rank"),
            kv_rank=integer(raw, "kv_lora_rank"),
            rope_dim=integer(raw, "qk_rope_head_dim"),
            bias=bool(raw["attention_bias"]),
        )
    }


def _gpt_oss(raw: dict[str, Any]) -> dict[str, Any]:
    if (raw["swiglu_alpha"], raw["swiglu_limit"]) != (1.702, 7.0):
        raise ModelError(
            f"model config: swiglu_alpha {raw['swiglu_alpha']!r} and swiglu_limit {raw['swiglu_limit']!r} are not "
            "supported, expected 1.702 and 7.0"
        )
    if not rope_dictionary(raw):
        yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        raw = {**raw, "rope_scaling": yarn}
    return {**raw, "hidden_act": "clamped_swiglu"}


ATTENTION_BIAS = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
NO_BIAS: Raw = {"attention_bias": False, "mlp_bias": False}
QWEN: Raw = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
COUNT_OF_EXPERTS = {"num_local_experts": "num_experts"}
QWEN_EXPERTS: Raw = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
LAYER_NORM = {"norm": "layer", "norm_bias": True}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
GEMMA = {"norm_offset": 1.0}
FOUR_NORMS = ("attn_in", "attn_out", "mlp_in", "mlp_out")
GEMMA2: Raw = {
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window_pattern": 2,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
}
GEMMA3: Raw = {
    **GEMMA2,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 131072,
}
DEEPSEEK_DEFAULTS: Raw = {
    **NO_BIAS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
GEMMA3_TEXT = Family(
    known_for="Gemma 3",
    layout=lambda config: layouts.SANDWICH,
    keys={"hidden_act": "hidden_activation"},
    defaults=GEMMA3,
    fields={**GEMMA, "norms": FOUR_NORMS, "qk_norm": "head"},
    flags=ATTENTION_BIAS,
    more=_gemma_fields,
    windows=positions.periodic_windows,
    ropes=positions.ropes_by_type,
    attention=_gemma_scale,
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        known_for="Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2 and the many models of their shape",
        flags={**ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
        defaults={**NO_BIAS, "num_key_value_heads": None},
    ),
    "MistralForCausalLM": Family(
        known_for="Mistral 7B, Nemo, Small", windows=positions.one_window, defaults={"sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(
        known_for="Qwen2, Qwen2.5", fields={"qkv_bias": True}, windows=positions.last_layers_slide, defaults=QWEN
    ),
    "Qwen3ForCausalLM": Family(
        known_for="Qwen3",
        fields={"qk_norm": "head"},
        flags=ATTENTION_BIAS,
        windows=positions.last_layers_slide,
        defaults={**NO_BIAS, **QWEN, "head_dim": 128},
    ),
    "GemmaForCausalLM": Family(
        known_for="Gemma",
        fields=GEMMA,
        flags=ATTENTION_BIAS,
        adapt=_gelu_means_tanh,
        more=lambda raw: {"embedding_scale": integer(raw, "hidden_size") ** 0.5},
        keys={"hidden_act": "hidden_activation"},
        defaults={**NO_BIAS, "tie_word_embeddings": True, "head_dim": 256, "hidden_act": None},
    ),
    "Gemma2ForCausalLM": Family(
        known_for="Gemma 2",
        layout=lambda config: layouts.SANDWICH,
        keys={"hidden_act": "hidden_activation"},
        defaults=GEMMA2,
        fields={**GEMMA, "norms": FOUR_NORMS},
        flags=ATTENTION_BIAS,
        more=_gemma_fields,
        windows=positions.periodic_windows,
        attention=_gemma_scale,
    ),
    "Gemma3ForCausalLM": GEMMA3_TEXT,
    "Gemma3ForConditionalGeneration": replace(
        GEMMA3_TEXT,
        known_for="Gemma 3 from 4B on; text only",
        text_config=True,
        prefixes=(("model.language_model.", ""), ("language_model.model.", "language_model.")),
        ignorable=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    ),
    "Phi3ForCausalLM": Family(
        known_for="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        layout=lambda config: layouts.PHI3,
        adapt=_longrope_by_other_names,
        windows=positions.one_window,
        defaults={"num_key_value_heads": None, "sliding_window": None, "rms_norm_eps": 1e-5},
    ),
    "SmolLM3ForCausalLM": Family(
        known_for="SmolLM3",
        flags={**ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
        windows=positions.windows_without_rope,
        ropes=positions.some_without_rope,
        defaults={
            **NO_BIAS,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
        },
    ),
    "Olmo2ForCausalLM": Family(
        known_for="OLMo 2",
        layout=lambda config: layouts.SANDWICH,
        fields={"norms": ("attn_out", "mlp_out"), "qk_norm": "all"},
        flags=ATTENTION_BIAS,
        defaults={**NO_BIAS, "num_key_value_heads": None, "rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Family(
        known_for="OLMo 3",
        layout=lambda config: layouts.SANDWICH,
        fields={"norms": ("attn_out", "mlp_out"), "qk_norm": "all"},
        flags=ATTENTION_BIAS,
        windows=positions.periodic_windows,
        ropes=positions.ropes_by_type,
        defaults={
            **NO_BIAS,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500_000.0,
        },
    ),
    "GraniteForCausalLM": Family(
        known_for="Granite 3",
        flags={**ATTENTION_BIAS, "mlp_bias": "mlp_bias"},
        more=_granite_fields,
        attention=lambda raw: {"scale": number(raw, "attention_multiplier")},
        defaults={
            **NO_BIAS,
            "num_key_value_heads": None,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        known_for="StarCoder2",
        layout=lambda config: layouts.STARCODER2,
        keys={"rms_norm_eps": "norm_epsilon"},
        fields={**LAYER_NORM, "gated": False},
        flags={"qkv_bias": "use_bias", "out_bias": "use_bias", "mlp_bias": "use_bias"},
        windows=positions.one_window,
        defaults={
            "use_bias": True,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
        },
    ),
    "GPTNeoXForCausalLM": Family(
        known_for="GPT-NeoX 20B, Pythia",
        layout=lambda config: layouts.GPT_NEOX,
        prefixes=(("gpt_neox.", ""),),
        keys={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        fields={**LAYER_NORM, **BIASES, "gated": False},
        flags={**ATTENTION_BIAS, "parallel": "use_parallel_residual"},
        adapt=_one_key_a_head,
        defaults={
            "attention_bias": True,
            "use_parallel_residual": True,
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.25,
        },
    ),
    "GPT2LMHeadModel": Family(
        known_for="GPT-2",
        layout=lambda config: layouts.GPT2,
        prefixes=(("transformer.", ""), ("", "")),
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        adapt=_gpt2,
        fields={**LAYER_NORM, **BIASES, "gated": False, "learned_positions": True},
        ropes=positions.no_rope,
        defaults={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "MixtralForCausalLM": Family(
        known_for="Mixtral 8x7B, 8x22B",
        layout=lambda config: layouts.MIXTRAL,
        more=mixtures.mixtral,
        windows=positions.one_window,
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        known_for="Qwen1.5-MoE, Qwen2-57B-A14B",
        keys=COUNT_OF_EXPERTS,
        layout=lambda config: layouts.QWEN_MOE,
        flags={"qkv_bias": "qkv_bias"},
        more=mixtures.qwen2_moe,
        windows=positions.every_other_slides,
        defaults={**QWEN, **QWEN_EXPERTS, "qkv_bias": True, "num_local_experts": 60, "num_experts_per_tok": 4},
    ),
    "GptOssForCausalLM": Family(
        known_for="gpt-oss-20b, gpt-oss-120b",
        layout=lambda config: layouts.GPT_OSS,
        adapt=_gpt_oss,
        flags=ATTENTION_BIAS,
        more=mixtures.gpt_oss,
        windows=positions.periodic_windows,
        attention=lambda raw: {"sinks": True},
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        known_for="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        keys=COUNT_OF_EXPERTS,
        layout=lambda config: layouts.QWEN_MOE,
        fields={"qk_norm": "head"},
        flags=ATTENTION_BIAS,
        more=mixtures.qwen3_moe,
        windows=positions.one_window_if_asked,
        defaults={**NO_BIAS, **QWEN, **QWEN_EXPERTS, "num_local_experts": 128, "num_experts_per_tok": 8},
    ),
    "OlmoeForCausalLM": Family(
        known_for="OLMoE",
        keys=COUNT_OF_EXPERTS,
        layout=lambda config: layouts.QWEN_MOE,
        fields={"qk_norm": "all"},
        flags=ATTENTION_BIAS,
        more=mixtures.olmoe,
        defaults={
            **NO_BIAS,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "clip_qkv": None,
            "norm_topk_prob": False,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "CohereForCausalLM": Family(
        known_for="Command R, Command R+",
        keys={"rms_norm_eps": "layer_norm_eps"},
        fields={"norm": "layer", "norms": ("attn_in",), "parallel": True},
        flags=ATTENTION_BIAS,
        more=_cohere_fields,
        ropes=positions.interleaved_rope,
        defaults={
            **NO_BIAS,
            "use_qk_norm": False,
            "logit_scale": 0.0625,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "num_key_value_heads": None,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        known_for="DeepSeek-V2, V2-Lite, V2.5",
        layout=lambda config: layouts.DEEPSEEK,
        keys={"num_local_experts": "n_routed_experts"},
        adapt=_deepseek,
        flags={"out_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        more=lambda raw: {**_deepseek_fields(raw), **mixtures.deepseek_v2(raw)},
        ropes=_deepseek_rope,
        attention=_deepseek_attention,
        defaults={
            **DEEPSEEK_DEFAULTS,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 2,
            "num_local_experts": 64,
            "moe_intermediate_size": 1407,
            "norm_topk_prob": False,
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        known_for="DeepSeek-V3, V3.1, R1; Kimi K2",
        layout=lambda config: layouts.DEEPSEEK,
        keys={"num_local_experts": "n_routed_experts"},
        ignorable=(r"model\.layers\.{num_layers}\..*",),  # what guesses a token further ahead
        adapt=_deepseek,
        flags={"out_bias": "attention_bias"},
        more=lambda raw: {**_deepseek_fields(raw), **mixtures.deepseek_v3(raw)},
        ropes=_deepseek_rope,
        attention=_deepseek_attention,
        defaults={
            **DEEPSEEK_DEFAULTS,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
        },
    ),
    "FalconForCausalLM": Family(
        known_for="Falcon 7B, 40B, 180B, Falcon 2; not those with ALiBi",
        layout=_falcon_layout,
        prefixes=(("transformer.", ""),),
        keys={
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        adapt=_falcon,
        fields={**LAYER_NORM, "gated": False},
        flags={"qkv_bias": "bias", "out_bias": "bias", "mlp_bias": "bias"},
        more=_falcon_norms,
        defaults={
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "num_ln_in_parallel_attn": None,
            "bias": False,
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "num_key_value_heads": None,
        },
    ),
}
