"""A model without files: random weights in the shape of a well-known model, to measure speed with."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.errors import ModelError
from batchgen.weights import read_json

if TYPE_CHECKING:
    import torch

BLOCK = (1 << 20) + 7  # numbers that are drawn; prime to every row length in use, so that no two rows are alike

FILES = 8

CONFIGS: Mapping[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}


def find_config(name: str) -> dict[str, Any]:
    """config.json's keys, by a name of CONFIGS or from a file.json."""
    if name in CONFIGS:
        return CONFIGS[name]
    if not name.endswith(".json"):
        raise ModelError(f"config {name!r} is not known, expected one of {', '.join(CONFIGS)}, or a file.json")
    return read_json(Path(name), f"config {name!r}: no such file")


class RandomCheckpoint:
    """Stands for a checkpoint with tensors of these `shapes`. Matrices are scaled so that no layer makes its input
    larger, norms are 1 and biases 0: logits stay finite, whatever the depth."""

    def __init__(self, name: str, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path = Path(name)
        self.config = config
        self.generation_config: dict[str, Any] = {}
        self.names = tuple(shapes)
        self._shapes = shapes

    def stream(
        self, names: Collection[str] | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """One block of numbers, over and over: drawing them all would take minutes for billions."""
        import torch

        block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
        for name in self.names if names is None else names:
            shape = self._shapes[name]
            if len(shape) == 1 or name.endswith("bias"):
                yield name, torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype)
                continue
            size = math.prod(shape)  # of a matrix (out, in), or of all experts' (num_experts, in, out)
            scaled = (block * shape[1] ** -0.5).to(dtype or torch.float32)
            yield name, scaled.repeat(-(-size // BLOCK))[:size].view(shape)

    def by_file(self, names: Collection[str]) -> list[list[str]]:
        """As if there were several: filling tensors is work for more than one thread."""
        ordered = list(names)
        return [ordered[first::FILES] for first in range(FILES)]

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()
