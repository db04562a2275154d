"""Reads a GGUF file as if it were a Hugging Face checkpoint: names, layout and configuration are translated."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import ModelError
from batchgen.weights import add_samples, regular_file
from batchgen.weights.gguf_metadata import TensorInfo, read_header

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# metadata key after the architecture's prefix -> config.json key
CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
END_TOKENS = ("eos", "eot", "eom")  # ends of text, of turn and of message: llama.cpp stops at each of them

# tensor name, without its block number -> Hugging Face's, {} standing for the block number
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
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
NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # one divisor per rotary frequency: how Llama 3's scaling is stored

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 30
STORED = {FLOAT32: "float32", FLOAT16: "float16", BFLOAT16: "bfloat16"}
CHUNK_ELEMENTS = 1 << 18  # dequantised at a time: stays in cache, and large tensors need no float32 copy of themselves


class GgufCheckpoint:
    """Tensors are read and dequantised one by one while they stream."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(regular_file(path, f"{path} does not exist; expected a .gguf file"))
        self._header_bytes = min((tensor.offset for tensor in header.tensors), default=0)
        self._sizes = _sizes(path, header.tensors)
        self._infos = {_translate(info.name): info for info in header.tensors}
        if len(self._infos) != len(header.tensors):
            raise ModelError(f"{path} names a tensor twice; is the file damaged?")
        self.config = self._read_config(header.metadata)
        self.generation_config: dict[str, Any] = {}
        self.names = tuple(name for name in self._infos if name != ROPE_FACTORS)

    def stream(
        self, names: Collection[str] | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = set(self.names if names is None else names)
        for name, info in sorted(self._infos.items(), key=lambda item: item[1].offset):
            if name in wanted:
                yield name, self._tensor(name, info, dtype)

    def by_file(self, names: Collection[str]) -> list[list[str]]:
        return [list(names)]

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            digest.update(file.read(self._header_bytes))
            add_samples(digest, file, sorted((i.offset, i.offset + self._sizes[i.name]) for i in self._infos.values()))
        return digest.hexdigest()

    def _bytes(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """A copy: the pages of a map would count as memory of this process."""
        found = np.fromfile(self.path, np.uint8, self._sizes[info.name], offset=info.offset)
        if len(found) != self._sizes[info.name]:
            raise ModelError(f"{self.path} became shorter while tensor {info.name!r} was read from it")
        return found

    def _tensor(self, name: str, info: TensorInfo, dtype: torch.dtype | None) -> torch.Tensor:
        import torch

        if info.ggml_type in STORED:
            stored: torch.dtype = getattr(torch, STORED[info.ggml_type])
            tensor = torch.from_numpy(self._bytes(info)).view(stored).view(info.shape)
            tensor = tensor.to(dtype or stored)
        else:
            tensor = torch.empty(info.shape, dtype=dtype or torch.float32)
            self._dequantise(info, tensor)
        if self._permuted and name.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")):
            heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            if type(heads) is not int or heads <= 0 or tensor.shape[0] % (2 * heads):
                raise ModelError(
                    f"{self.path}: tensor {info.name!r} has {tensor.shape[0]} rows, which are not "
                    f"pairs of {heads!r} heads"
                )
            tensor = _halves_of_pairs(tensor, heads)
        return tensor

    def _dequantise(self, info: TensorInfo, out: torch.Tensor) -> None:
        """Fill `out` row chunk by row chunk, so that float32 exists for one chunk only."""
        import torch
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(info.ggml_type)
        num_rows = out.numel() // out.shape[-1]
        flat, rows = out.view(num_rows, -1), self._bytes(info).reshape(num_rows, -1)
        step = max(1, CHUNK_ELEMENTS // out.shape[-1])
        for start in range(0, num_rows, step):
            try:
                chunk = dequantize(rows[start : start + step], kind)
            except NotImplementedError as error:
                raise ModelError(
                    f"{self.path}: tensor {info.name!r} is quantised as {kind.name}, which the gguf package cannot "
                    "dequantise; update it, or convert the model to another quantisation (Q8_0, Q4_K, ...)"
                ) from error
            flat[start : start + step].copy_(torch.from_numpy(chunk))

    def _read_config(self, metadata: dict[str, Any]) -> dict[str, Any]:
        arch = metadata.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise ModelError(
                f"{self.path}: GGUF architecture {arch!r} is not supported, expected one of "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        if int(metadata.get("split.count", 1)) > 1:
            raise ModelError(f"{self.path}: a GGUF model split over files is not supported yet; merge it into one file")
        config: dict[str, Any] = {"architectures": [ARCHITECTURES[arch]], "model_type": arch, "hidden_act": "silu"}
        for key, name in CONFIG_KEYS.items():
            value = metadata.get(f"{arch}.{key}")
            if value is not None:
                config[name] = value.tolist() if isinstance(value, np.ndarray) else value
        for key in ("hidden_size", "num_attention_heads"):
            if not isinstance(config.get(key), int):
                raise ModelError(f"{self.path}: metadata gives {key} as {config.get(key)!r}, expected one number")
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        for key in ("attention.value_length", "rope.dimension_count"):
            if metadata.get(f"{arch}.{key}", config["head_dim"]) != config["head_dim"]:
                raise ModelError(
                    f"{self.path}: {arch}.{key} is {metadata[f'{arch}.{key}']}, only the head size "
                    f"({config['head_dim']}) is supported"
                )
        self._permuted = arch == "llama"  # the converter pairs q and k rows for interleaved rotation in this one only

        embedding = self._infos.get("model.embed_tokens.weight")
        config["vocab_size"] = embedding.shape[0] if embedding else metadata.get(f"{arch}.vocab_size")
        config["tie_word_embeddings"] = "lm_head.weight" not in self._infos
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._infos
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in self._infos
        ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in END_TOKENS)
        config["eos_token_id"] = sorted({int(token) for token in ends if token is not None})
        scaling = self._rope_scaling(arch, metadata, config["head_dim"])
        if scaling:
            config["rope_scaling"] = scaling
        window = metadata.get(f"{arch}.attention.sliding_window")
        if window and arch == "llama":
            config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)
        elif window:
            raise ModelError(f"{self.path}: {arch}.attention.sliding_window ({window}) is not supported")
        sizes: Counter[str] = Counter()
        for info in self._infos.values():
            sizes[STORED.get(info.ggml_type, "bfloat16")] += self._sizes[info.name]
        config["dtype"] = sizes.most_common(1)[0][0] if sizes else "float32"
        return config

    def _rope_scaling(self, arch: str, metadata: dict[str, Any], head_dim: int) -> dict[str, Any]:
        """Hugging Face's rope_scaling; per-frequency factors become a longrope whose two factor lists are equal."""
        kind = metadata.get(f"{arch}.rope.scaling.type", "none")
        factor = metadata.get(f"{arch}.rope.scaling.factor", metadata.get(f"{arch}.rope.scale_linear", 1.0))
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        factors = self._infos.get(ROPE_FACTORS)
        if factors is not None:
            if kind != "none" or factors.ggml_type != FLOAT32 or factors.shape != (head_dim // 2,):
                raise ModelError(
                    f"{self.path}: {ROPE_FACTORS} {factors.shape} beside rope scaling {kind!r} is not supported, "
                    f"expected {head_dim // 2} float32 factors and no other scaling"
                )
            divisors = self._bytes(factors).view(np.float32).tolist()
            return {
                "rope_type": "longrope",
                "short_factor": divisors,
                "long_factor": divisors,
                "attention_factor": 1.0,
            }
        if kind == "yarn":
            if metadata.get(f"{arch}.rope.scaling.attn_factor", 1.0) != 1.0:
                raise ModelError(f"{self.path}: {arch}.rope.scaling.attn_factor is not supported with yarn")
            scaling = {"rope_type": "yarn", "factor": factor}
            return scaling if original is None else scaling | {"original_max_position_embeddings": original}
        if kind == "linear" or (kind == "none" and factor != 1.0):
            return {"rope_type": "linear", "factor": factor}
        return {} if kind == "none" else {"rope_type": kind}  # an unknown kind is refused where all kinds are known


def _translate(name: str) -> str:
    """Hugging Face's name of a tensor; one without a counterpart keeps its own, and the registry says so."""
    match = NAME.fullmatch(name)
    if match is None:
        return name
    block, stem, kind = match.groups()
    found = TOP_NAMES.get(stem) if block is None else BLOCK_NAMES.get(stem)
    return f"{found.format(block)}.{kind}" if found else name


def _halves_of_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the converter's row order: within a head, rows (0, 1), (2, 3), ... become row i beside row i + dim / 2."""
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _sizes(path: Path, tensors: tuple[TensorInfo, ...]) -> dict[str, int]:
    """Bytes of every tensor by its GGUF name, each checked to lie inside the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes, file_size = {}, path.stat().st_size
    for info in tensors:
        try:
            block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{path}: tensor {info.name!r} has the unknown type {info.ggml_type}; update the gguf package"
            ) from error
        count = int(np.prod(info.shape, dtype=object))
        if not count or not info.shape or info.shape[-1] % block_elements:
            raise ModelError(f"{path}: tensor {info.name!r} has the impossible shape {info.shape}")
        sizes[info.name] = count // block_elements * block_bytes
        if info.offset + sizes[info.name] > file_size:
            raise ModelError(
                f"{path} ends at byte {file_size}, but tensor {info.name!r} reaches to "
                f"{info.offset + sizes[info.name]}; incomplete download?"
            )
    return sizes
