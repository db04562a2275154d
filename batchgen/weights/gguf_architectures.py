"""The table of GGUF architectures: what each calls its tensors and settings, and how its tensors differ from Hugging
Face's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]
Change = Callable[["torch.Tensor", Config], "torch.Tensor"]

# metadata key after the architecture's prefix -> config.json key, in its common form (Llama's)
CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}


# --- how stored tensors become Hugging Face's ---


def halves_of_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the converter's row order: within a head, rows (0, 1), (2, 3), ... become row i beside row i + dim / 2."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _query_halves(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return halves_of_pairs(tensor, int(config["num_attention_heads"]))


def _key_halves(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return halves_of_pairs(tensor, int(config["num_key_value_heads"]))


def _grouped(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """All queries, all keys, all values -> for each key head its queries, its key and its value."""
    import torch

    heads, groups = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    head_dim = tensor.shape[0] // (heads + 2 * groups)
    parts = tensor.split([heads * head_dim, groups * head_dim, groups * head_dim])
    return torch.cat([part.reshape(groups, -1, *tensor.shape[1:]) for part in parts], dim=1).reshape(tensor.shape)


def _transposed(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _one_row(tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return tensor.reshape(1, -1)


PAIRED = {"attn_q": _query_halves, "attn_k": _key_halves}


# --- tensor names without ".weight" and block number -> Hugging Face's; {} is the block, a second {} the expert ---

LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}
SANDWICH = {
    **LLAMA,
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
PHI3 = {**LLAMA, "attn_qkv": "model.layers.{}.self_attn.qkv_proj", "ffn_up": "model.layers.{}.mlp.gate_up_proj"}
STARCODER2 = {**LLAMA, "ffn_up": "model.layers.{}.mlp.c_fc", "ffn_down": "model.layers.{}.mlp.c_proj"}
MIXTRAL = {
    **LLAMA,
    "ffn_gate_inp": "model.layers.{}.block_sparse_moe.gate",
    "ffn_gate_exps": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "model.layers.{}.block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "model.layers.{}.block_sparse_moe.experts.{}.w3",
}
QWEN_MOE = {
    **LLAMA,
    "ffn_gate_inp": "model.layers.{}.mlp.gate",
    "ffn_gate_exps": "model.layers.{}.mlp.experts.{}.gate_proj",
    "ffn_up_exps": "model.layers.{}.mlp.experts.{}.up_proj",
    "ffn_down_exps": "model.layers.{}.mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    "ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
    "ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
}
GPT_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attn_norm": "gpt_neox.layers.{}.input_layernorm",
    "attn_qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "attn_output": "gpt_neox.layers.{}.attention.dense",
    "ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "ffn_up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "ffn_down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}
GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.ln_1",
    "attn_qkv": "transformer.h.{}.attn.c_attn",
    "attn_output": "transformer.h.{}.attn.c_proj",
    "ffn_norm": "transformer.h.{}.ln_2",
    "ffn_up": "transformer.h.{}.mlp.c_fc",
    "ffn_down": "transformer.h.{}.mlp.c_proj",
}
FALCON = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.input_layernorm",
    "attn_qkv": "transformer.h.{}.self_attention.query_key_value",
    "attn_output": "transformer.h.{}.self_attention.dense",
    "ffn_up": "transformer.h.{}.mlp.dense_h_to_4h",
    "ffn_down": "transformer.h.{}.mlp.dense_4h_to_h",
}
FALCON_TWO_NORMS = {**FALCON, "attn_norm": "transformer.h.{}.ln_mlp", "attn_norm_2": "transformer.h.{}.ln_attn"}

# --- settings ---

WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def _nothing(config: Config, names: Collection[str]) -> Config:
    return {}


def _gemma_scale(largest: int) -> Callable[[Config, Collection[str]], Config]:
    """Not in the file. The largest model of a generation, told by its number of layers, scales by another size."""

    def more(config: Config, names: Collection[str]) -> Config:
        by_width = config["num_hidden_layers"] == largest
        size = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
        return {"query_pre_attn_scalar": size}

    return more


def _olmo3_layers(config: Config, names: Collection[str]) -> Config:
    """Its windows: a flag for each layer, or the number of layers after which they repeat."""
    given = config.pop("windowed", 4)
    if not isinstance(given, list):
        return {"sliding_window_pattern": given}
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in given]}


def _falcon(config: Config, names: Collection[str]) -> Config:
    two_norms = "blk.0.attn_norm_2.weight" in names
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "new_decoder_architecture": two_norms or groups not in (1, heads),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "multi_query": groups == 1,
        "bias": "blk.0.attn_qkv.bias" in names,
    }


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture of GGUF files, and the architecture of Hugging Face's that it is.

    `names` and `changes` go by a tensor's name in the file. To norm weights the converter has added `norm_offset`.
    `keys` of the metadata are read beside CONFIG_KEYS, `fixed` settings are not in the file, `more` follow from the
    others and from which tensors there are. With `rotates_part` not all of a head need be rotated.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    changes: Mapping[str, Change] = field(default_factory=dict)
    norm_offset: float = 0.0
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Config, Collection[str]], Config] = _nothing
    rotates_part: bool = False


GELU = {"hidden_act": "gelu_pytorch_tanh"}
QWEN2_MOE = GgufArchitecture(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    names=QWEN_MOE,
    changes={"ffn_gate_inp_shexp": _one_row},
    keys={**EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    fixed={"norm_topk_prob": False, "decoder_sparse_step": 1},
    more=lambda config, names: {"qkv_bias": "blk.0.attn_q.bias" in names},
)
GEMMA2 = GgufArchitecture(
    "Gemma2ForCausalLM",
    "gemma2",
    names=SANDWICH,
    norm_offset=1.0,
    keys={
        **WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    fixed=GELU,
    more=_gemma_scale(largest=46),
)

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", changes=PAIRED),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": GgufArchitecture("GemmaForCausalLM", "gemma", norm_offset=1.0, fixed=GELU),
    "gemma2": GEMMA2,
    "gemma3": replace(
        GEMMA2,
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        keys={**GEMMA2.keys, "rope.freq_base_swa": "rope_local_base_freq"},
        fixed={**GELU, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
        more=_gemma_scale(largest=62),
    ),
    "phi3": GgufArchitecture("Phi3ForCausalLM", "phi3", names=PHI3, keys=WINDOW, rotates_part=True),
    "smollm3": GgufArchitecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        changes=PAIRED,
        fixed={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "granite": GgufArchitecture(
        "GraniteForCausalLM",
        "granite",
        changes=PAIRED,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", names=SANDWICH),
    "qwen2moe": QWEN2_MOE,
    "qwen3moe": replace(
        QWEN2_MOE,
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "olmoe": GgufArchitecture(
        "OlmoeForCausalLM", "olmoe", names=QWEN_MOE, keys=EXPERTS, fixed={"norm_topk_prob": False}
    ),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        names=STARCODER2,
        keys=WINDOW,
        fixed=GELU,
        more=lambda config, names: {"use_bias": "blk.0.attn_q.bias" in names},
    ),
    "command-r": GgufArchitecture(
        "CohereForCausalLM",
        "cohere",
        keys={"logit_scale": "logit_scale"},
        more=lambda config, names: {"use_qk_norm": "blk.0.attn_q_norm.weight" in names},
    ),
    "gptneox": GgufArchitecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        names=GPT_NEOX,
        changes={"attn_qkv": _grouped},
        keys={"use_parallel_residual": "use_parallel_residual"},
        fixed={"hidden_act": "gelu"},
        rotates_part=True,
    ),
    "gpt2": GgufArchitecture(
        "GPT2LMHeadModel",
        "gpt2",
        names=GPT2,
        changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), _transposed),
        fixed={"hidden_act": "gelu_new"},
    ),
    "falcon": GgufArchitecture(
        "FalconForCausalLM",
        "falcon",
        names=FALCON,
        changes={"attn_qkv": _grouped},
        fixed={"hidden_act": "gelu", "parallel_attn": True, "alibi": False},
        more=_falcon,
    ),
}
MISTRAL = replace(ARCHITECTURES["llama"], architecture="MistralForCausalLM", model_type="mistral", keys=WINDOW)
MIXTRAL_OF_LLAMA = replace(
    MISTRAL,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    names=MIXTRAL,
    keys={**WINDOW, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
)
OLMO3 = replace(
    ARCHITECTURES["olmo2"],
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    keys={**WINDOW, "attention.sliding_window_pattern": "windowed"},
    more=_olmo3_layers,
)


def choose(name: str, metadata: Mapping[str, Any], names: Collection[str]) -> GgufArchitecture | None:
    """The architecture of a file; some names stand for several. None: not known."""
    window = metadata.get(f"{name}.attention.sliding_window")
    if name == "llama" and metadata.get(f"{name}.expert_count"):
        return MIXTRAL_OF_LLAMA
    if name == "llama" and window:
        return MISTRAL
    if name == "olmo2" and window:
        return OLMO3
    if name == "falcon" and "blk.0.attn_norm_2.weight" in names:
        return replace(ARCHITECTURES[name], names=FALCON_TWO_NORMS)
    return ARCHITECTURES.get(name)
