"""Every family against transformers: a tiny random model of each, ragged chunked prefill, then greedy decoding."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Harness, reference_logits, sequences
from safetensors.torch import load_file, save_file
from tiny import SHAPE, tiny_model

from batchgen.errors import ModelError
from batchgen.models import registry
from batchgen.models.families import FAMILIES

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}, "full_attention": YARN}
LINEAR_BY_TYPE = {**BY_TYPE, "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0}}


@dataclass(frozen=True)
class Row:
    """A model of transformers' `model_type`, whose configuration differs from tiny.SHAPE by `changes`."""

    architecture: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)


LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GEMMA, GEMMA2, GEMMA3 = "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"
PHI3, GRANITE, STARCODER2, COHERE = (
    "Phi3ForCausalLM",
    "GraniteForCausalLM",
    "Starcoder2ForCausalLM",
    "CohereForCausalLM",
)
SMOLLM3, OLMO2, OLMO3 = "SmolLM3ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"
MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE = (
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3}
SMALL_EXPERTS = {**EXPERTS, "moe_intermediate_size": 48}
NEOX, GPT2, FALCON = "GPTNeoXForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM"
DEEPSEEK2, DEEPSEEK3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
WINDOW = {"sliding_window": 9}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 18,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "rms_norm_eps": 0.05,  # not that of the norms between the low-rank vectors and what comes of them
}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 8, "beta_slow": 1}

ROWS = {
    "llama": Row(LLAMA, "llama"),
    "llama-tied": Row(LLAMA, "llama", {"tie_word_embeddings": True}),
    "llama-biases": Row(LLAMA, "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-null": Row(LLAMA, "llama", {"head_dim": None}),
    "llama-gelu": Row(LLAMA, "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": Row(MISTRAL, "mistral", {"sliding_window": None}),
    "mistral-window": Row(MISTRAL, "mistral", WINDOW),
    "qwen2": Row(QWEN2, "qwen2", {"head_dim": 16}),
    "qwen2-window": Row(QWEN2, "qwen2", {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen3": Row(QWEN3, "qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": Row(QWEN3, "qwen3", {"attention_bias": True}),
    "gemma": Row(GEMMA, "gemma", {"hidden_act": "gelu"}),
    "gemma2": Row(
        GEMMA2,
        "gemma2",
        {**WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Row(GEMMA3, "gemma3_text", {**WINDOW, "num_hidden_layers": 7, "rope_parameters": LINEAR_BY_TYPE}),
    "phi3": Row(PHI3, "phi3", {**WINDOW, "pad_token_id": 0, "head_dim": 16}),
    "phi3-partial-longrope": Row(
        PHI3,
        "phi3",
        {
            "pad_token_id": 0,
            "head_dim": 16,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                # the reference chooses by each row's length, batchgen once for the job
                "short_factor": [2.0 + 0.5 * n for n in range(6)],
                "long_factor": [2.0 + 0.5 * n for n in range(6)],
            },
        },
    ),
    "smollm3": Row(SMOLLM3, "smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "smollm3-window": Row(
        SMOLLM3, "smollm3", {"num_hidden_layers": 4, "pad_token_id": 0, "use_sliding_window": True, **WINDOW}
    ),
    "olmo2": Row(OLMO2, "olmo2", {"head_dim": 16}),
    "olmo3": Row(OLMO3, "olmo3", {**WINDOW, "head_dim": 16, "num_hidden_layers": 4, "rope_parameters": BY_TYPE}),
    "granite": Row(
        GRANITE,
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.7,
        },
    ),
    "starcoder2": Row(STARCODER2, "starcoder2", {**WINDOW, "head_dim": 16}),
    "starcoder2-no-bias": Row(STARCODER2, "starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "deepseek-v2": Row(
        DEEPSEEK2,
        "deepseek_v2",
        {
            **LATENT,
            "rope_parameters": DEEPSEEK_YARN,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v2-lite": Row(DEEPSEEK2, "deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": Row(DEEPSEEK3, "deepseek_v3", {**LATENT, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v3-biases-in-halves": Row(
        DEEPSEEK3, "deepseek_v3", {**LATENT, "attention_bias": True, "rope_interleave": False, "v_head_dim": 36}
    ),
    "deepseek-v3-no-query-rank": Row(DEEPSEEK3, "deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    "mixtral": Row(MIXTRAL, "mixtral", {"num_local_experts": 5, **WINDOW}),
    "olmoe": Row(OLMOE, "olmoe", {**EXPERTS, "head_dim": 16, "clip_qkv": 0.8}),
    "olmoe-normalised": Row(OLMOE, "olmoe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen2-moe": Row(
        QWEN2_MOE,
        "qwen2_moe",
        {**SMALL_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 80, "num_hidden_layers": 3}
        | {"decoder_sparse_step": 2},
    ),
    "qwen2-moe-window": Row(
        QWEN2_MOE,
        "qwen2_moe",
        {**SMALL_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 80, "num_hidden_layers": 3}
        | {"qkv_bias": False, "norm_topk_prob": True, "use_sliding_window": True, **WINDOW},
    ),
    "qwen3-moe": Row(
        QWEN3_MOE,
        "qwen3_moe",
        {**SMALL_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe-window": Row(QWEN3_MOE, "qwen3_moe", {**SMALL_EXPERTS, "use_sliding_window": True, **WINDOW}),
    "gpt-neox": Row(NEOX, "gpt_neox"),
    "gpt-neox-sequential": Row(NEOX, "gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    "gpt-oss": Row(
        "GptOssForCausalLM",
        "gpt_oss",
        {**WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "gpt2": Row(GPT2, "gpt2", {"n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 64, "n_inner": 160}),
    "cohere": Row(COHERE, "cohere", {"pad_token_id": 0, "logit_scale": 0.4}),
    "cohere-qk-norm": Row(
        COHERE, "cohere", {"pad_token_id": 0, "logit_scale": 0.4, "use_qk_norm": True, "attention_bias": True}
    ),
    "falcon-7b": Row(FALCON, "falcon", {"ffn_hidden_size": 160}),
    "falcon-rw": Row(FALCON, "falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-40b": Row(FALCON, "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-2-11b": Row(
        FALCON,
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
}


def test_every_family_has_a_row() -> None:
    assert {row.architecture for row in ROWS.values()} >= set(FAMILIES) - {"Gemma3ForConditionalGeneration"}


@pytest.mark.parametrize("name", ROWS)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    model = tiny_model(tmp_path, row.model_type, **row.changes)
    assert model.config.architectures == [row.architecture]
    run = Harness(tmp_path, max_model_len=64)
    texts = sequences(model.config.vocab_size, 37, 5, 22)
    seen: dict[int, list[torch.Tensor]] = {number: [] for number in texts}
    # uneven chunks, sequences that join late, then decodes beside a prefill
    for chunks in ({0: 7, 1: 3}, {0: 11, 2: 9}, {0: 16, 2: 1, 1: 1}, {2: 12, 0: 1}, {1: 1, 0: 1}, {0: 1}):
        feed = {}
        for number, length in chunks.items():
            done = run.context.get(number, 0)
            feed[number] = texts[number][done : done + length]
        for number, logits in run.step(feed, padding=3).items():
            seen[number].append(logits)
    for number, tokens in texts.items():
        expected = reference_logits(model, tokens)
        assert expected.std() > 0.1, "logits that hardly differ show nothing"
        torch.testing.assert_close(torch.cat(seen[number]), expected, atol=1e-4, rtol=0)
    # greedy from there, the last layer computing sampled rows only
    newest = {number: int(logits[-1][-1].argmax()) for number, logits in seen.items()}
    for _ in range(6):
        for number, token in newest.items():
            texts[number] = [*texts[number], token]
        stepped = run.step({number: [token] for number, token in newest.items()}, sample=True, padding=1)
        newest = {number: int(logits[-1].argmax()) for number, logits in stepped.items()}
    for number, tokens in texts.items():
        assert int(reference_logits(model, tokens)[-1].argmax()) == newest[number]
        greedy = reference_logits(model, tokens).argmax(-1).tolist()
        assert tokens[-6:] == greedy[-7:-1]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_gemma3_with_images(tmp_path: Path, prefix: str) -> None:
    """As new and as older versions of transformers store it."""
    model = tiny_model(tmp_path, "gemma3_text", **WINDOW, sliding_window_pattern=2)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.embeddings.weight"] = torch.ones(2, 2)
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tokens = sequences(model.config.vocab_size, 30)[0]
    logits = Harness(tmp_path, max_model_len=64).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)


def test_older_spellings_of_gemma3s_configuration(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "gemma3_text", **WINDOW, num_hidden_layers=7, rope_parameters=LINEAR_BY_TYPE)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"], raw["layer_types"], raw["_sliding_window_pattern"]
    raw.update(rope_theta=50000.0, rope_local_base_freq=1000.0, sliding_window_pattern=6)
    raw["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokens = sequences(model.config.vocab_size, 30)[0]
    logits = Harness(tmp_path, max_model_len=64).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)


def test_gpt2_without_its_prefix_and_with_masks(tmp_path: Path) -> None:
    """As the published checkpoints are."""
    model = tiny_model(tmp_path, "gpt2", **ROWS["gpt2"].changes)
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors")
    tokens = sequences(model.config.vocab_size, 30)[0]
    logits = Harness(tmp_path, max_model_len=64).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)


def test_deepseek_v3_as_published(tmp_path: Path) -> None:
    """With the older spelling of its rope, and a further layer that guesses a token ahead."""
    model = tiny_model(tmp_path, "deepseek_v3", **ROWS["deepseek-v3"].changes)
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw.pop("head_dim", None)
    raw["rope_theta"], raw["rope_scaling"] = rope.pop("rope_theta"), {"type": rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    ahead = {name.replace(".1.", ".2."): tensor.clone() for name, tensor in tensors.items() if "layers.1." in name}
    save_file(
        {**tensors, **ahead, "model.layers.2.eh_proj.weight": torch.ones(96, 192)}, tmp_path / "model.safetensors"
    )
    tokens = sequences(model.config.vocab_size, 30)[0]
    logits = Harness(tmp_path, max_model_len=64).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"have no place.*model\.layers\.2\."):
        Harness(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("GptOssForCausalLM", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 are not supported"),
        ("FalconForCausalLM", {"alibi": True}, "alibi is not supported"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers is .1., expected 2 times"),
        ("Gemma2ForCausalLM", {"layer_types": ["chunked_attention"] * 2}, "layer_types is .*sliding_attention"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None, expected a number"),
        ("Gemma3ForConditionalGeneration", {}, "text_config is None"),
        ("GraniteForCausalLM", {"logits_scaling": "8"}, "logits_scaling is '8', expected a number"),
        (
            "DeepseekV2ForCausalLM",
            {**LATENT, "rope_scaling": {**DEEPSEEK_YARN, "mscale_all_dim": "1"}},
            "mscale_all_dim is '1', expected a number",
        ),
        ("DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": 0}, "q_lora_rank is 0, expected one positive"),
        ("DeepseekV2ForCausalLM", {**LATENT, "qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, expected an even"),
        ("Starcoder2ForCausalLM", {"hidden_act": "swish"}, "hidden_act 'swish' is not supported.*gelu_pytorch_tanh"),
    ],
)
def test_configurations_that_are_refused(architecture: str, change: dict[str, Any], message: str) -> None:
    raw = {**SHAPE, "architectures": [architecture], **change}
    with pytest.raises(ModelError, match=message):
        registry.read_config(raw)
