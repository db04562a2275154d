"""The table of model families: how a checkpoint's configuration is read, where its tensors go, and the loading."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from batchgen_kernels import reference

from batchgen.attention.base import AttentionBackend
from batchgen.attention.reference import ReferenceBackend
from batchgen.errors import ModelError
from batchgen.models.config import KVSpec, ModelConfig, RopeConfig
from batchgen.models.decoder import Decoder
from batchgen.models.layers import ACTIVATIONS, ROPE_KINDS, Linear, Ops
from batchgen.weights import Checkpoint

Raw = Mapping[str, Any]

# The decoder's parts -> their names in the checkpoint, {} standing for the layer's number
WEIGHT_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "input_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "out": "model.layers.{}.self_attn.o_proj",
    "post_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}
IGNORABLE = (re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"),)  # recomputed from the configuration


def _no_windows(raw: Raw, num_layers: int) -> list[int | None]:
    return [None] * num_layers


def _one_window(raw: Raw, num_layers: int) -> list[int | None]:
    return [raw["sliding_window"]] * num_layers


def _windows_by_layer(raw: Raw, num_layers: int) -> list[int | None]:
    """`layer_types` names each layer; without it all from `max_window_layers` on slide. Off unless asked for."""
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    if window is None:
        return [None] * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw["max_window_layers"]
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ModelError(
            f"model config: layer_types is {kinds!r}, expected {num_layers} times sliding_attention or full_attention"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one architecture apart. A flag is fixed, or the name of the configuration key that holds it.

    `defaults` are what the reference implementation assumes for keys that the configuration leaves out.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Callable[[Raw, int], list[int | None]] = _no_windows
    names: Mapping[str, str] = field(default_factory=lambda: WEIGHT_NAMES)
    defaults: Raw = field(default_factory=dict)


QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": False, "mlp_bias": False, "num_key_value_heads": None},
    ),
    "MistralForCausalLM": Family(windows=_one_window, defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=_windows_by_layer, defaults=QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        windows=_windows_by_layer,
        defaults={"attention_bias": False, "head_dim": 128, **QWEN_WINDOWS},
    ),
}
COMMON_DEFAULTS = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "dtype": None,
}
DTYPES = ("float32", "bfloat16", "float16")

# rope kind -> the keys its dictionary must hold as numbers; "factors" are lists of one number for each frequency
ROPE_NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
ROPE_LISTS = {"longrope": ("short_factor", "long_factor")}


def read_config(raw: Raw) -> ModelConfig:
    """config.json's keys -> ModelConfig. ModelError names the key that is missing, wrong or not supported."""
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = {**COMMON_DEFAULTS, **family.defaults, **raw}
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method")
        raise ModelError(f"model config: quantised checkpoints (quant_method {method!r}) are not supported yet")
    num_layers = _integer(raw, "num_hidden_layers")
    hidden_size = _integer(raw, "hidden_size")
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = num_heads if raw.get("num_key_value_heads", 0) is None else _integer(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError(
            f"model config: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if raw["head_dim"] is None and hidden_size % num_heads:
        raise ModelError(
            f"model config: no head_dim, and hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
            f"({num_heads})"
        )
    head_dim = hidden_size // num_heads if raw["head_dim"] is None else _integer(raw, "head_dim")
    if raw["hidden_act"] not in ACTIVATIONS:
        raise ModelError(
            f"model config: hidden_act {raw['hidden_act']!r} is not supported, expected one of {', '.join(ACTIVATIONS)}"
        )
    windows = family.windows(raw, num_layers)
    for window in set(windows) - {None}:
        _integer({"sliding_window": window}, "sliding_window")
    dtype = str(raw["dtype"] or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"model config: stored dtype {dtype} is not supported, expected one of {', '.join(DTYPES)}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=num_layers,
        layers=tuple(
            KVSpec(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window) for window in windows
        ),
        ropes=(_read_rope(raw, head_dim),),
        rope_of_layer=(0,) * num_layers,
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        norm_eps=_number(raw, "rms_norm_eps"),
        activation=raw["hidden_act"],
        qkv_bias=_flag(raw, family.qkv_bias),
        out_bias=_flag(raw, family.out_bias),
        mlp_bias=_flag(raw, family.mlp_bias),
        qk_norm="head" if family.qk_norm else "none",
        tied_head=bool(raw["tie_word_embeddings"]),
        dtype=dtype,
        eos_token_ids=_token_ids(raw["eos_token_id"]),
    )


def _architecture(raw: Raw) -> str:
    declared = raw.get("architectures") or []
    for name in declared:
        if name in FAMILIES:
            return str(name)
    raise ModelError(
        f"model architecture {', '.join(map(str, declared)) or 'not declared'} (model_type "
        f"{raw.get('model_type')!r}) is not supported, expected one of {', '.join(FAMILIES)}"
    )


def _read_rope(raw: Raw, head_dim: int) -> RopeConfig:
    """`rope_parameters`, or the older `rope_scaling` beside `rope_theta`, with what they leave to others filled in."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(f"model config: rope parameters {given!r} are not supported, expected one flat dictionary")
    found = {"rope_theta": raw["rope_theta"], "partial_rotary_factor": raw.get("partial_rotary_factor"), **given}
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    if kind not in ROPE_KINDS:
        raise ModelError(f"model config: rope type {kind!r} is not supported, expected one of {', '.join(ROPE_KINDS)}")
    theta, share = _number(found, "rope_theta"), found.pop("partial_rotary_factor")
    rotary_dim = int(head_dim * (1.0 if share is None else share))
    del found["rope_theta"]
    if rotary_dim % 2:
        raise ModelError(f"model config: rotary dimension {rotary_dim} is odd, expected an even number")
    limit = _integer(raw, "max_position_embeddings")
    if kind == "dynamic":
        found["original_max_position_embeddings"] = limit  # the reference stretches from there, whatever is given
    elif kind in ROPE_NUMBERS:
        found.setdefault("original_max_position_embeddings", limit)
        found["original_max_position_embeddings"] = raw.get(
            "original_max_position_embeddings", found["original_max_position_embeddings"]
        )
    if kind in ("yarn", "longrope") and found.get("factor") is None:
        found["factor"] = limit / _number(found, "original_max_position_embeddings")
    for key in ROPE_NUMBERS.get(kind, ()):
        if _number(found, key) <= 0:
            raise ModelError(f"model config: rope parameter {key} is {found[key]}, expected a positive number")
    for key in ROPE_LISTS.get(kind, ()):
        values = found.get(key)
        if not isinstance(values, list | tuple) or len(values) != rotary_dim // 2:
            raise ModelError(f"model config: rope parameter {key} is {values!r}, expected {rotary_dim // 2} numbers")
        found[key] = tuple(values)
    scaling = () if kind == "default" else (("rope_type", kind), *sorted(found.items()))
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def _integer(raw: Raw, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"model config: {key} is {value!r}, expected one positive whole number")
    return value


def _number(raw: Raw, key: str) -> float:
    value = raw.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"model config: {key} is {value!r}, expected a number")
    return value


def _flag(raw: Raw, flag: bool | str) -> bool:
    return bool(raw[flag]) if isinstance(flag, str) else flag


def _token_ids(given: Any) -> tuple[int, ...]:
    """An EOS entry: absent, one id or a list of ids."""
    ids = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return tuple(sorted({int(token) for token in ids}))


class Place(NamedTuple):
    """Where a tensor of the checkpoint goes: the shape it must have and what takes it."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], object]


def build(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
    backend: AttentionBackend,
    max_model_len: int,
    ops: Ops,
    device: torch.device | None = None,
    readers: int = 1,
) -> Decoder:
    """Make the decoder and stream the checkpoint's tensors into place; every one is used or known to be needless.

    With `quantization` linear layers, the head among them, are quantised as they are loaded. `max_model_len` bounds the
    positions. `readers` files are read at once, each with one tensor in memory. EOS ids of generation_config.json join
    those of config.json.
    """
    config = read_config(checkpoint.config)
    more_ends = _token_ids(checkpoint.generation_config.get("eos_token_id"))
    config = replace(config, eos_token_ids=tuple(sorted({*config.eos_token_ids, *more_ends})))
    names = FAMILIES[config.architecture].names
    head_name = f"{names['head']}.weight"
    stored = {name for name in checkpoint.names if not any(pattern.fullmatch(name) for pattern in IGNORABLE)}
    decoder = Decoder(
        config,
        dtype=dtype,
        quantization=quantization,
        backend=backend,
        max_model_len=max_model_len,
        ops=ops,
        device=device,
    )
    places = dict(_places(decoder, names))
    _check_names(checkpoint, config, stored - ({head_name} if config.tied_head else set()), set(places))
    _load(checkpoint, places, dtype, device, readers)
    if config.tied_head:
        decoder.head.use(decoder.embedding)
        if head_name in stored:
            _compare_tied(checkpoint, head_name, names["embedding"], decoder.embedding)
    return decoder


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint with this configuration has; nothing is allocated."""
    bare = replace(config, ropes=())  # their tables would be computed, for which torch imports for seconds
    with torch.device("meta"):
        decoder = Decoder(bare, dtype=torch.float32, backend=ReferenceBackend(), max_model_len=1, ops=reference)
    return {name: place.shape for name, place in _places(decoder, FAMILIES[config.architecture].names)}


def _load(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    dtype: torch.dtype,
    device: torch.device | None,
    readers: int,
) -> None:
    lock = threading.Lock()  # parts of one layer may lie in two files

    def load(names: Collection[str]) -> None:
        for name, tensor in checkpoint.stream(names, dtype=dtype):
            _check_shape(checkpoint, name, tensor, places[name].shape)
            # read here, where others read too, and from there in one go
            staged = tensor.pin_memory() if device is not None and device.type == "cuda" else tensor
            with lock:
                places[name].load(staged)

    if readers == 1:
        load(places)
        return
    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(load, checkpoint.by_file(places)):  # raises what a reader raised
            pass


def _check_names(checkpoint: Checkpoint, config: ModelConfig, stored: set[str], expected: set[str]) -> None:
    """Before anything is read: what is missing would be random, what is left over would change the model."""
    missing, unknown = sorted(expected - stored), sorted(stored - expected)
    if missing:
        raise ModelError(
            f"{checkpoint.path} lacks {len(missing)} of the {len(expected)} tensors that {config.architecture} with "
            f"this configuration needs: {_few(missing)}; incomplete download, or a config.json of another model?"
        )
    if unknown:
        raise ModelError(
            f"{checkpoint.path} holds {len(unknown)} tensors that have no place in {config.architecture} with this "
            f"configuration: {_few(unknown)}; the model would not be the one that was trained. Does config.json belong "
            "to it (biases, tied embeddings, adapters)?"
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_shape(checkpoint: Checkpoint, name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ModelError(
            f"{checkpoint.path}: tensor {name} has shape {tuple(tensor.shape)}, but the configuration makes it "
            f"{expected}; does config.json belong to these weights?"
        )


def _compare_tied(checkpoint: Checkpoint, head_name: str, embedding_name: str, embedding: torch.Tensor) -> None:
    for _, tensor in checkpoint.stream([head_name], dtype=embedding.dtype):
        if tensor.shape != embedding.shape or not torch.equal(tensor, embedding):
            logging.getLogger(__name__).warning(
                "%s: config.json ties the head to the embedding, but the file holds a different %s; it is not used, "
                "the head is %s.weight",
                checkpoint.path,
                head_name,
                embedding_name,
            )


def _places(decoder: Decoder, names: Mapping[str, str]) -> Iterator[tuple[str, Place]]:
    yield _vector(names["embedding"], decoder.embedding)
    yield _vector(names["norm"], decoder.norm)
    if not decoder.config.tied_head:
        yield from _linear(decoder.head, names["head"])
    for index, layer in enumerate(decoder.layers):
        local = {part: name.format(index) for part, name in names.items()}
        yield _vector(local["input_norm"], layer.input_norm)
        yield _vector(local["post_norm"], layer.post_norm)
        if layer.q_norm is not None and layer.k_norm is not None:
            yield _vector(local["q_norm"], layer.q_norm)
            yield _vector(local["k_norm"], layer.k_norm)
        yield from _linear(layer.qkv, local["q"], local["k"], local["v"])
        yield from _linear(layer.out, local["out"])
        yield from _linear(layer.gate_up, local["gate"], local["up"])
        yield from _linear(layer.down, local["down"])


def _vector(name: str, target: torch.Tensor) -> tuple[str, Place]:
    """A tensor that is kept as it is: a norm's weight, or the embedding."""
    return f"{name}.weight", Place(tuple(target.shape), target.copy_)


def _linear(target: Linear, *names: str) -> Iterator[tuple[str, Place]]:
    """The parts of one linear layer, in the order in which it stacks them."""
    for part, (name, rows) in enumerate(zip(names, target.parts, strict=True)):
        yield f"{name}.weight", Place((rows, target.in_features), partial(target.load_weight, part))
        if target.bias is not None:
            yield f"{name}.bias", Place((rows,), partial(target.load_bias, part))
