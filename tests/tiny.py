"""Tiny random models in Hugging Face's and GGUF's formats, and their reference implementation to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
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


def tiny_gguf(
    path: Path, model: PreTrainedModel, quantization: str = "Q8_0", metadata: dict[str, Any] | None = None
) -> None:
    """Write `model` (llama, qwen2 or qwen3) as llama.cpp's converter would: its names, its order of q and k rows.

    Matrices become `quantization`, vectors float32. `metadata` is added under the architecture's prefix.
    """
    import gguf  # not on every machine where the other models are made

    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{arch}.{key}", value)
    kind = gguf.GGMLQuantizationType[quantization]
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[arch],
        config.num_hidden_layers,
    )
    for name, parameter in model.named_parameters():
        array = parameter.detach().float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.transpose(1, 2).reshape(array.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if array.dim() == 1:
            writer.add_tensor(target, array.numpy())
        else:
            writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(array.numpy()), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
