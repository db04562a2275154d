"""Tiny random models in Hugging Face's and GGUF's formats, and their reference implementation to compare with."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

# Odd on purpose: three query heads to a KV head, head size unlike hidden size / heads, an odd vocabulary.
SHAPE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


WITHOUT_HEAD_DIM = (
    "gpt_neox",
    "gpt2",
    "cohere",
    "falcon",
    "deepseek_v2",
    "deepseek_v3",
)  # it follows from other keys, whatever is given


def tiny_model(
    folder: Path, family: str = "llama", *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> PreTrainedModel:
    """Save a random model of `family` (a transformers model_type) to `folder` and return it, in float32.

    All weights are random, biases and norms too, and large enough for logits that differ. Overrides are keys of
    config.json; `dtype` is what it is stored in.
    """
    dtype = overrides.pop("dtype", torch.float32)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim" or family not in WITHOUT_HEAD_DIM}
    config = AutoConfig.for_model(family, **{**shape, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.3 if name.endswith("bias") else parameter.shape[-1] ** -0.5))
            parameter.copy_(parameter.to(dtype).float())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=config.eos_token_id)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model.float()


@dataclass(frozen=True)
class GgufForm:
    """What llama.cpp's converter does with one transformers model_type.

    `settings` are metadata keys and where in the configuration their values are; `changes` by the last part of a
    module's name in transformers.
    """

    arch: str
    settings: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = field(default_factory=dict)
    norm_offset: float = 0.0


def _pairs(heads_key: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    def change(array: torch.Tensor, config: Any) -> torch.Tensor:
        heads = getattr(config, heads_key)
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return halves.transpose(1, 2).reshape(array.shape)

    return change


def _ungrouped(array: torch.Tensor, config: Any) -> torch.Tensor:
    """For each key head its queries, its key and its value -> all queries, all keys, all values."""
    heads, groups = config.num_attention_heads, _kv_heads(config)
    each = heads // groups
    split = array.reshape(groups, each + 2, -1, *array.shape[1:])
    parts = split[:, :each], split[:, each], split[:, each + 1]
    return torch.cat([part.reshape(-1, *array.shape[1:]) for part in parts])


def _turned(array: torch.Tensor, config: Any) -> torch.Tensor:
    return array.T if array.dim() == 2 else array


PAIRED = {"q_proj": _pairs("num_attention_heads"), "k_proj": _pairs("num_key_value_heads")}
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
SLIDING = {"attention.sliding_window": "sliding_window"}
MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
GGUF_FORMS = {
    "llama": GgufForm("llama", changes=PAIRED),
    "mistral": GgufForm("llama", SLIDING, PAIRED),
    "mixtral": GgufForm(
        "llama", {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}, PAIRED
    ),
    "qwen2": GgufForm("qwen2"),
    "qwen3": GgufForm("qwen3"),
    "qwen2_moe": GgufForm(
        "qwen2moe",
        {**MOE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"shared_expert_gate": lambda array, config: array.reshape(-1)},
    ),
    "qwen3_moe": GgufForm("qwen3moe", MOE),
    "olmoe": GgufForm("olmoe", {name: MOE[name] for name in ("expert_count", "expert_used_count")}),
    "gemma": GgufForm("gemma", norm_offset=1.0),
    "gemma2": GgufForm("gemma2", {**SLIDING, **CAPS}, norm_offset=1.0),
    "gemma3_text": GgufForm("gemma3", SLIDING, norm_offset=1.0),
    "phi3": GgufForm("phi3", {**SLIDING, "rope.scaling.original_context_length": "original_max_position_embeddings"}),
    "smollm3": GgufForm("smollm3", changes=PAIRED),
    "granite": GgufForm(
        "granite",
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        PAIRED,
    ),
    "olmo2": GgufForm("olmo2"),
    "olmo3": GgufForm("olmo2", SLIDING),
    "starcoder2": GgufForm("starcoder2", SLIDING),
    "cohere": GgufForm("command-r", {"logit_scale": "logit_scale"}),
    "gpt_neox": GgufForm(
        "gptneox", {"use_parallel_residual": "use_parallel_residual"}, {"query_key_value": _ungrouped}
    ),
    "gpt2": GgufForm("gpt2", changes=dict.fromkeys(("c_attn", "c_proj", "c_fc"), _turned)),
    "falcon": GgufForm("falcon", changes={"query_key_value": _ungrouped}),
}


def _kv_heads(config: Any) -> int:
    if config.model_type in ("gpt_neox", "gpt2"):
        return config.num_attention_heads
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else config.num_attention_heads
    for key in ("num_kv_heads", "num_key_value_heads"):
        if getattr(config, key, None):
            return getattr(config, key)
    return config.num_attention_heads


def _gguf_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(config: Any) -> dict[str, Any]:
    """Of the layers that attend to everything; the others' is not in such files."""
    found = getattr(config, "rope_parameters", None) or {}
    return found.get("full_attention", found)


def _gguf_settings(config: Any, form: GgufForm) -> dict[str, Any]:
    head_dim, rope = _gguf_head_dim(config), _rope(config)
    width = next(
        (getattr(config, key) for key in ("ffn_hidden_size", "n_inner", "intermediate_size") if hasattr(config, key)), 0
    )
    epsilon = next(
        (name, float(getattr(config, key)))
        for key, name in (
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("norm_epsilon", "attention.layer_norm_epsilon"),
            ("layer_norm_eps", "attention.layer_norm_epsilon"),
            ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
        )
        if hasattr(config, key)
    )
    settings = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _kv_heads(config),
        epsilon[0]: epsilon[1],
        "vocab_size": config.vocab_size,
    }
    if config.model_type not in WITHOUT_HEAD_DIM:
        settings |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope:
        settings["rope.freq_base"] = float(rope["rope_theta"])
        settings["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        settings |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        settings["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.model_type == "olmo3":
        settings["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    settings |= {key: getattr(config, name) for key, name in form.settings.items()}
    return {key: value for key, value in settings.items() if value is not None}


def tiny_gguf(
    path: Path,
    model: PreTrainedModel,
    quantization: str = "Q8_0",
    metadata: dict[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> None:
    """Write `model` (of a family in GGUF_FORMS) as llama.cpp's converter would: its names, its order of rows.

    Matrices become `quantization`, vectors float32. `metadata` is added under the architecture's prefix.
    """
    import gguf  # not on every machine where the other models are made

    config = model.config
    form = GGUF_FORMS[config.model_type]
    writer = gguf.GGUFWriter(path, form.arch, split_max_tensors=split_max_tensors)
    for key, value in (_gguf_settings(config, form) | (metadata or {})).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)]
        add(f"{form.arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    kind = gguf.GGMLQuantizationType[quantization]
    arch = next(known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == form.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    experts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in _stored_parameters(model).items():
        array = parameter.detach().float()
        change = form.changes.get(name.split(".")[-2])
        if change is not None:
            array = change(array, config)
        if form.norm_offset and name.endswith("norm.weight"):
            array = array + form.norm_offset
        if (expert := EXPERT.fullmatch(name)) is not None:  # of all experts one tensor, in their order
            experts.setdefault(f"{expert[1]}.{expert[3]}", []).append(array)
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        _add_tensor(writer, target, array, kind)
    for name, arrays in experts.items():
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        _add_tensor(writer, target, torch.stack(arrays), kind)
    for length in ("short", "long"):
        factors = _rope(config).get(f"{length}_factor")
        if factors:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def _stored_parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By the names under which they are saved: some models hold all experts' matrices as one parameter."""
    if not any(".experts." in name for name, _ in model.named_parameters()):
        return dict(model.named_parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def _add_tensor(writer: Any, name: str, array: torch.Tensor, kind: Any) -> None:
    import gguf

    if array.dim() == 1:
        writer.add_tensor(name, array.contiguous().numpy())
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array.numpy()), kind), raw_dtype=kind)
