"""Builds the decoder from a checkpoint: its configuration read by its family's entry, its tensors put in place."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from batchgen_kernels import reference

from batchgen.attention.base import AttentionBackend
from batchgen.attention.reference import ReferenceBackend
from batchgen.errors import ModelError
from batchgen.models.config import KVSpec, ModelConfig
from batchgen.models.decoder import Decoder
from batchgen.models.families import FAMILIES, Family
from batchgen.models.fields import Raw, integer, number, one_of, token_ids
from batchgen.models.layers import ACTIVATIONS, GATED_ACTIVATIONS, Layout, Ops, Place
from batchgen.weights import Checkpoint

# recomputed from the configuration, or masks that older checkpoints hold
IGNORABLE = (r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", r"(.*\.)?(attn|attention)\.(masked_)?bias")
COMMON_DEFAULTS = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "dtype": None,
}
MAX_LAYERS = 10_000
DTYPES = ("float32", "bfloat16", "float16")


def read_config(raw: Raw) -> ModelConfig:
    """config.json's keys -> ModelConfig. ModelError names the key that is missing, wrong or not supported."""
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = _common_form(raw, family)
    num_layers = integer(raw, "num_hidden_layers")
    if num_layers > MAX_LAYERS:  # lists are made of that length
        raise ModelError(f"model config: num_hidden_layers is {num_layers}, expected at most {MAX_LAYERS}")
    hidden_size = integer(raw, "hidden_size")
    num_heads = integer(raw, "num_attention_heads")
    num_kv_heads = num_heads if raw.get("num_key_value_heads", 0) is None else integer(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError(
            f"model config: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if raw["head_dim"] is None and hidden_size % num_heads:
        raise ModelError(
            f"model config: no head_dim, and hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
            f"({num_heads})"
        )
    head_dim = hidden_size // num_heads if raw["head_dim"] is None else integer(raw, "head_dim")
    windows = family.windows(raw, num_layers)
    for window in set(windows) - {None}:
        integer({"sliding_window": window}, "sliding_window")
    ropes, rope_of_layer = family.ropes(raw, head_dim, num_layers)
    base = KVSpec(num_heads, num_kv_heads, head_dim, **{"scale": head_dim**-0.5, **family.attention(raw)})
    fields = {
        **family.fields,
        **{field: bool(raw[key]) for field, key in family.flags.items()},
        **family.more(raw),
    }
    activations = GATED_ACTIVATIONS if fields.get("gated", True) else ACTIVATIONS
    dtype = str(raw["dtype"] or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"model config: stored dtype {dtype} is not supported, expected one of {', '.join(DTYPES)}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=num_layers,
        layers=tuple(replace(base, window=window) for window in windows),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        max_position_embeddings=integer(raw, "max_position_embeddings"),
        norm_eps=number(raw, "rms_norm_eps"),
        activation=one_of(raw, "hidden_act", activations),
        tied_head=bool(raw["tie_word_embeddings"]),
        dtype=dtype,
        eos_token_ids=token_ids(raw["eos_token_id"]),
        **fields,
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


def _common_form(raw: Raw, family: Family) -> Raw:
    """With the keys that Llama has, and what the reference implementation assumes for those that are left out."""
    if family.text_config:
        inner = raw.get("text_config")
        if not isinstance(inner, Mapping):
            raise ModelError(f"model config: text_config is {inner!r}, expected the language model's configuration")
        raw = {**raw, **inner, "dtype": raw.get("dtype")}
    renamed = {key: raw[own] for key, own in family.keys.items() if raw.get(own) is not None}
    return family.adapt({**COMMON_DEFAULTS, **family.defaults, **raw, **renamed})


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
    more_ends = token_ids(checkpoint.generation_config.get("eos_token_id"))
    config = replace(config, eos_token_ids=tuple(sorted({*config.eos_token_ids, *more_ends})))
    family = FAMILIES[config.architecture]
    own = [pattern.replace("{num_layers}", str(config.num_layers)) for pattern in family.ignorable]
    ignorable = [re.compile(pattern) for pattern in (*IGNORABLE, *own)]
    stored = {name for name in checkpoint.names if not any(pattern.fullmatch(name) for pattern in ignorable)}
    layout = _stored_layout(family, config, stored)
    head_name = f"{layout.names['head']}.weight"
    decoder = Decoder(
        config,
        dtype=dtype,
        quantization=quantization,
        backend=backend,
        max_model_len=max_model_len,
        ops=ops,
        device=device,
    )
    places = dict(decoder.places(layout))
    _check_names(checkpoint, config, stored - ({head_name} if config.tied_head else set()), set(places))
    _load(checkpoint, places, dtype, device, readers)
    if config.tied_head:
        decoder.head.use(decoder.embedding)
        if head_name in stored:
            _compare_tied(checkpoint, head_name, layout.names["embedding"], decoder.embedding)
    return decoder


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint with this configuration has; nothing is allocated."""
    bare = replace(config, ropes=())  # their tables would be computed, for which torch imports for seconds
    with torch.device("meta"):
        decoder = Decoder(bare, dtype=torch.float32, backend=ReferenceBackend(), max_model_len=1, ops=reference)
    layout = _stored_layout(FAMILIES[config.architecture], config, ())
    return {name: place.shape for name, place in decoder.places(layout)}


def _stored_layout(family: Family, config: ModelConfig, stored: Collection[str]) -> Layout:
    """The family's, with the prefix under which the checkpoint has its embedding; else with the usual one."""
    layout = family.layout(config)

    def under(base: str, head: str) -> Layout:
        names = {part: (head if part == "head" else base) + name for part, name in layout.names.items()}
        return replace(layout, names=names)

    candidates = [under(*prefix) for prefix in family.prefixes]
    present = (found for found in candidates if f"{found.names['embedding']}.weight" in stored)
    return next(present, candidates[0])


def _load(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    dtype: torch.dtype,
    device: torch.device | None,
    readers: int,
) -> None:
    lock = threading.Lock()  # parts of one layer may lie in two files

    def load(names: Collection[str]) -> None:
        for wide in (True, False):
            wanted = [name for name in names if places[name].wide == wide]
            for name, tensor in checkpoint.stream(wanted, dtype=torch.float32 if wide else dtype):
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
        if tensor.shape != embedding.shape or not torch.equal(tensor.to(embedding.device), embedding):
            logging.getLogger(__name__).warning(
                "%s: config.json ties the head to the embedding, but the file holds a different %s; it is not used, "
                "the head is %s.weight",
                checkpoint.path,
                head_name,
                embedding_name,
            )
