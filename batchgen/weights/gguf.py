"""Reads a GGUF file as if it were a Hugging Face checkpoint: names, layout and configuration are translated."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import ModelError
from batchgen.weights import add_samples, regular_file
from batchgen.weights.gguf_architectures import ARCHITECTURES, CONFIG_KEYS, Change, GgufArchitecture, choose
from batchgen.weights.gguf_metadata import GGUFHeader, TensorInfo, read_header

if TYPE_CHECKING:
    import torch

END_TOKENS = ("eos", "eot", "eom")  # ends of text, of turn and of message: llama.cpp stops at each of them

NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # one divisor per rotary frequency: how Llama 3's scaling is stored
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # and Phi-3's
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 30
STORED = {FLOAT32: "float32", FLOAT16: "float16", BFLOAT16: "bfloat16"}
CHUNK_ELEMENTS = 1 << 18  # dequantised at a time: stays in cache, and large tensors need no float32 copy of themselves


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor by Hugging Face's name: what is read from which file, and what is then done to it."""

    path: Path
    info: TensorInfo
    change: Change | None = None
    offset: float = 0.0  # taken off its elements


class GgufCheckpoint:
    """Tensors are read and dequantised one by one while they stream."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(regular_file(path, f"{path} does not exist; expected a .gguf file"))
        headers = {path: header, **self._other_parts(header.metadata)}
        self._headers = {file: found.tensors for file, found in headers.items()}
        self._infos = {info.name: (file, info) for file, found in headers.items() for info in found.tensors}
        for file, found in headers.items():
            _check_sizes(file, found.tensors)
        if len(self._infos) != sum(len(found.tensors) for found in headers.values()):
            raise ModelError(f"{path} names a tensor twice; is the file damaged?")
        self._arch = self._architecture(header.metadata)
        self.config = self._read_config(header.metadata)
        self.generation_config: dict[str, Any] = {}
        self._stored = dict(self._places())
        self.names = tuple(self._stored)

    def stream(
        self, names: Collection[str] | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = self.names if names is None else [name for name in set(names) if name in self._stored]
        for name in sorted(wanted, key=lambda name: (self._stored[name].path, self._stored[name].info.offset)):
            yield name, self._tensor(self._stored[name], dtype)

    def by_file(self, names: Collection[str]) -> list[list[str]]:
        return [found for path in self._headers if (found := [n for n in names if self._stored[n].path == path])]

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path, tensors in self._headers.items():
            with open(path, "rb") as file:
                digest.update(file.read(min((info.offset for info in tensors), default=0)))
                add_samples(digest, file, sorted((info.offset, info.offset + _num_bytes(info)) for info in tensors))
        return digest.hexdigest()

    def _other_parts(self, metadata: dict[str, Any]) -> dict[Path, GGUFHeader]:
        """Of a model split over files, of which the first is named."""
        count = metadata.get("split.count", 1)
        if count in (0, 1):
            return {}
        match = SPLIT_NAME.fullmatch(self.path.name)
        if match is None or (int(match[2]), int(match[3])) != (1, count):
            raise ModelError(
                f"{self.path} is a part of a GGUF model split over {count!r:.40} files; name the first part, with its "
                "name as llama.cpp gives it (...-00001-of-0000N.gguf)"
            )
        paths = [self.path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
        return {
            path: read_header(
                regular_file(path, f"{path} does not exist; {self.path.name} is split over {count} files")
            )
            for path in paths
        }

    def _places(self) -> Iterator[tuple[str, _Stored]]:
        """Every tensor; one without a counterpart keeps its own name, and the registry says so."""
        for name, (path, info) in self._infos.items():
            match = NAME.fullmatch(name)
            block, stem, kind = match.groups() if match else (None, name, "")
            template = self._arch.names.get(stem)
            if name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS):
                continue
            if template is None or ("{}" in template) != (block is not None):
                yield name, _Stored(path, info)
                continue
            offset = self._arch.norm_offset if stem.endswith("norm") else 0.0
            change = self._arch.changes.get(stem)
            if template.count("{}") < 2:
                yield f"{template.format(block)}.{kind}", _Stored(path, info, change, offset)
                continue
            for expert, one in enumerate(_slices(info)):
                yield f"{template.format(block, expert)}.{kind}", _Stored(path, one, change, offset)

    def _tensor(self, stored: _Stored, dtype: torch.dtype | None) -> torch.Tensor:
        import torch

        info = stored.info
        kind = torch.float32 if stored.offset else dtype  # the offset is taken off exactly
        if info.ggml_type in STORED:
            found: torch.dtype = getattr(torch, STORED[info.ggml_type])
            tensor = torch.from_numpy(_bytes(stored.path, info)).view(found).view(info.shape)
            tensor = tensor.to(kind or found)
        else:
            tensor = torch.empty(info.shape, dtype=kind or torch.float32)
            self._dequantise(stored, tensor)
        if stored.offset:
            tensor = (tensor - stored.offset).to(dtype or torch.float32)
        if stored.change is None:
            return tensor
        try:
            return stored.change(tensor, self.config)
        except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
            raise ModelError(
                f"{stored.path}: tensor {info.name!r} of shape {info.shape} does not fit the metadata's number of "
                f"heads ({error})"
            ) from error

    def _dequantise(self, stored: _Stored, out: torch.Tensor) -> None:
        """Fill `out` row chunk by row chunk, so that float32 exists for one chunk only."""
        import torch
        from gguf import GGMLQuantizationType, dequantize

        info = stored.info
        kind = GGMLQuantizationType(info.ggml_type)
        num_rows = out.numel() // out.shape[-1]
        flat, rows = out.view(num_rows, -1), _bytes(stored.path, info).reshape(num_rows, -1)
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

    def _architecture(self, metadata: dict[str, Any]) -> GgufArchitecture:
        name = metadata.get("general.architecture")
        found = choose(str(name), metadata, self._infos)
        if found is None:
            raise ModelError(
                f"{self.path}: GGUF architecture {name!r} is not supported, expected one of "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        return found

    def _read_config(self, metadata: dict[str, Any]) -> dict[str, Any]:
        prefix, arch = metadata["general.architecture"], self._arch
        config: dict[str, Any] = {
            "architectures": [arch.architecture],
            "model_type": arch.model_type,
            "hidden_act": "silu",
            **arch.fixed,
        }
        for key, name in {**CONFIG_KEYS, **arch.keys}.items():
            value = metadata.get(f"{prefix}.{key}")
            if value is not None:
                config[name] = value.tolist() if isinstance(value, np.ndarray) else value
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
            if not isinstance(config.get(key), int):
                raise ModelError(f"{self.path}: metadata gives {key} as {config.get(key)!r}, expected one number")
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        rotated = metadata.get(f"{prefix}.rope.dimension_count", config["head_dim"])
        if arch.rotates_part and 0 < rotated <= config["head_dim"]:
            config["partial_rotary_factor"] = rotated / config["head_dim"]
            rotated = config["head_dim"]
        sizes = {
            "rope.dimension_count": rotated,
            "attention.value_length": metadata.get(f"{prefix}.attention.value_length", config["head_dim"]),
        }
        for key, size in sizes.items():
            if size != config["head_dim"]:
                raise ModelError(
                    f"{self.path}: {prefix}.{key} is {size}, only the head size ({config['head_dim']}) is supported"
                )
        embedding = self._infos.get("token_embd.weight")
        config["vocab_size"] = embedding[1].shape[0] if embedding else metadata.get(f"{prefix}.vocab_size")
        config["tie_word_embeddings"] = "output.weight" not in self._infos
        config["attention_bias"] = not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(self._infos)
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in self._infos
        ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in END_TOKENS)
        config["eos_token_id"] = sorted({int(token) for token in ends if token is not None})
        scaling = self._rope_scaling(prefix, metadata, config)
        if scaling:
            config["rope_scaling"] = scaling
        window = metadata.get(f"{prefix}.attention.sliding_window")
        if window and "attention.sliding_window" not in arch.keys:
            raise ModelError(f"{self.path}: {prefix}.attention.sliding_window ({window}) is not supported")
        if "sliding_window" in arch.keys.values():
            config["sliding_window"] = window or None  # 0 is none
        config.update(arch.more(config, self._infos))
        stored: Counter[str] = Counter()
        for _, info in self._infos.values():
            stored[STORED.get(info.ggml_type, "bfloat16")] += _num_bytes(info)
        config["dtype"] = stored.most_common(1)[0][0] if stored else "float32"
        return config

    def _rope_scaling(self, arch: str, metadata: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """Hugging Face's rope_scaling; per-frequency factors become a longrope whose two factor lists are equal."""
        kind = metadata.get(f"{arch}.rope.scaling.type", "none")
        factor = metadata.get(f"{arch}.rope.scaling.factor", metadata.get(f"{arch}.rope.scale_linear", 1.0))
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        if ROPE_FACTORS in self._infos:
            if kind != "none":
                raise ModelError(f"{self.path}: {ROPE_FACTORS} beside rope scaling {kind!r} is not supported")
            divisors = self._factors(ROPE_FACTORS, config)
            return {
                "rope_type": "longrope",
                "short_factor": divisors,
                "long_factor": divisors,
                "attention_factor": 1.0,
            }
        if LONG_FACTORS in self._infos and SHORT_FACTORS in self._infos:
            scaling = {
                "rope_type": "longrope",
                "short_factor": self._factors(SHORT_FACTORS, config),
                "long_factor": self._factors(LONG_FACTORS, config),
                "original_max_position_embeddings": original,
                "attention_factor": metadata.get(f"{arch}.rope.scaling.attn_factor"),
            }
            return {key: value for key, value in scaling.items() if value is not None}
        if kind == "yarn":
            if metadata.get(f"{arch}.rope.scaling.attn_factor", 1.0) != 1.0:
                raise ModelError(f"{self.path}: {arch}.rope.scaling.attn_factor is not supported with yarn")
            scaling = {"rope_type": "yarn", "factor": factor}
            return scaling if original is None else scaling | {"original_max_position_embeddings": original}
        if kind == "linear" or (kind == "none" and factor != 1.0):
            return {"rope_type": "linear", "factor": factor}
        return {} if kind == "none" else {"rope_type": kind}  # an unknown kind is refused where all kinds are known

    def _factors(self, name: str, config: dict[str, Any]) -> list[float]:
        path, info = self._infos[name]
        count = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)) // 2
        if info.ggml_type != FLOAT32 or info.shape != (count,):
            raise ModelError(f"{self.path}: {name} {info.shape} is not supported, expected {count} float32 factors")
        return list(_bytes(path, info).view(np.float32).tolist())


def _bytes(path: Path, info: TensorInfo) -> npt.NDArray[np.uint8]:
    """A copy: the pages of a map would count as memory of this process."""
    size = _num_bytes(info)
    found = np.fromfile(path, np.uint8, size, offset=info.offset)
    if len(found) != size:
        raise ModelError(f"{path} became shorter while tensor {info.name!r} was read from it")
    return found


def _slices(info: TensorInfo) -> list[TensorInfo]:
    """The matrices that lie one behind the other in a tensor of three dimensions; vectors likewise."""
    size = _num_bytes(info) // info.shape[0]
    return [replace(info, shape=info.shape[1:], offset=info.offset + number * size) for number in range(info.shape[0])]


def _num_bytes(info: TensorInfo) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
    return int(np.prod(info.shape, dtype=object)) // block_elements * block_bytes


def _check_sizes(path: Path, tensors: tuple[TensorInfo, ...]) -> None:
    """Every tensor's type is known, its shape possible, and it lies inside the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    file_size = path.stat().st_size
    for info in tensors:
        try:
            block_elements, _ = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{path}: tensor {info.name!r} has the unknown type {info.ggml_type}; update the gguf package"
            ) from error
        if not np.prod(info.shape, dtype=object) or not info.shape or info.shape[-1] % block_elements:
            raise ModelError(f"{path}: tensor {info.name!r} has the impossible shape {info.shape}")
        if info.offset + _num_bytes(info) > file_size:
            raise ModelError(
                f"{path} ends at byte {file_size}, but tensor {info.name!r} reaches to "
                f"{info.offset + _num_bytes(info)}; incomplete download?"
            )
