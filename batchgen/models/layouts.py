"""Where the tensors of each family's checkpoints are: names without the prefix that all of them share."""

from __future__ import annotations

from dataclasses import replace

from batchgen.models.layers import Layout

LLAMA = Layout(
    {
        "embedding": "embed_tokens",
        "norm": "norm",
        "head": "lm_head",
        "attn_in": "layers.{}.input_layernorm",
        "q": "layers.{}.self_attn.q_proj",
        "k": "layers.{}.self_attn.k_proj",
        "v": "layers.{}.self_attn.v_proj",
        "q_norm": "layers.{}.self_attn.q_norm",
        "k_norm": "layers.{}.self_attn.k_norm",
        "out": "layers.{}.self_attn.o_proj",
        "mlp_in": "layers.{}.post_attention_layernorm",
        "gate": "layers.{}.mlp.gate_proj",
        "up": "layers.{}.mlp.up_proj",
        "down": "layers.{}.mlp.down_proj",
    }
)


def _changed(layout: Layout, **names: str) -> Layout:
    return replace(layout, names={**layout.names, **names})


SANDWICH = _changed(
    LLAMA,
    attn_out="layers.{}.post_attention_layernorm",
    mlp_in="layers.{}.pre_feedforward_layernorm",
    mlp_out="layers.{}.post_feedforward_layernorm",
)
PHI3 = _changed(LLAMA, qkv="layers.{}.self_attn.qkv_proj", gate_up="layers.{}.mlp.gate_up_proj")
STARCODER2 = _changed(LLAMA, up="layers.{}.mlp.c_fc", down="layers.{}.mlp.c_proj")
GPT_NEOX = Layout(
    {
        "embedding": "embed_in",
        "norm": "final_layer_norm",
        "head": "embed_out",
        "attn_in": "layers.{}.input_layernorm",
        "qkv": "layers.{}.attention.query_key_value",
        "out": "layers.{}.attention.dense",
        "mlp_in": "layers.{}.post_attention_layernorm",
        "up": "layers.{}.mlp.dense_h_to_4h",
        "down": "layers.{}.mlp.dense_4h_to_h",
    },
    grouped=True,
)
GPT2 = Layout(
    {
        "embedding": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "head": "lm_head",
        "attn_in": "h.{}.ln_1",
        "qkv": "h.{}.attn.c_attn",
        "out": "h.{}.attn.c_proj",
        "mlp_in": "h.{}.ln_2",
        "up": "h.{}.mlp.c_fc",
        "down": "h.{}.mlp.c_proj",
    },
    transposed=True,
)
FALCON = Layout(
    {
        "embedding": "word_embeddings",
        "norm": "ln_f",
        "head": "lm_head",
        "attn_in": "h.{}.input_layernorm",
        "qkv": "h.{}.self_attention.query_key_value",
        "out": "h.{}.self_attention.dense",
        "mlp_in": "h.{}.post_attention_layernorm",
        "up": "h.{}.mlp.dense_h_to_4h",
        "down": "h.{}.mlp.dense_4h_to_h",
    },
    grouped=True,
)
FALCON_TWO_NORMS = _changed(FALCON, attn_in="h.{}.ln_attn", mlp_in="h.{}.ln_mlp")

QWEN_MOE = _changed(
    LLAMA,
    router="layers.{}.mlp.gate",
    expert_gate="layers.{}.mlp.experts.{expert}.gate_proj",
    expert_up="layers.{}.mlp.experts.{expert}.up_proj",
    expert_down="layers.{}.mlp.experts.{expert}.down_proj",
    shared_gate="layers.{}.mlp.shared_expert.gate_proj",
    shared_up="layers.{}.mlp.shared_expert.up_proj",
    shared_down="layers.{}.mlp.shared_expert.down_proj",
    shared_weight="layers.{}.mlp.shared_expert_gate",
)
MIXTRAL = _changed(
    LLAMA,
    router="layers.{}.block_sparse_moe.gate",
    expert_gate="layers.{}.block_sparse_moe.experts.{expert}.w1",
    expert_up="layers.{}.block_sparse_moe.experts.{expert}.w3",
    expert_down="layers.{}.block_sparse_moe.experts.{expert}.w2",
)
GPT_OSS = _changed(
    LLAMA,
    sinks="layers.{}.self_attn.sinks",
    router="layers.{}.mlp.router",
    experts_gate_up="layers.{}.mlp.experts.gate_up_proj",
    experts_down="layers.{}.mlp.experts.down_proj",
)
DEEPSEEK_MOE = _changed(
    QWEN_MOE,
    choice_bias="layers.{}.mlp.gate.e_score_correction_bias",
    shared_gate="layers.{}.mlp.shared_experts.gate_proj",
    shared_up="layers.{}.mlp.shared_experts.up_proj",
    shared_down="layers.{}.mlp.shared_experts.down_proj",
)
DEEPSEEK = _changed(
    DEEPSEEK_MOE,
    query_down="layers.{}.self_attn.q_a_proj",
    query_down_norm="layers.{}.self_attn.q_a_layernorm",
    query_up="layers.{}.self_attn.q_b_proj",
    kv_down="layers.{}.self_attn.kv_a_proj_with_mqa",
    kv_down_norm="layers.{}.self_attn.kv_a_layernorm",
    kv_up="layers.{}.self_attn.kv_b_proj",
)
