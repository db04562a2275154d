"""The one decoder: every supported family is this forward pass with other flags in its ModelConfig. Inference only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from batchgen.attention.base import AttentionBackend, AttentionMetadata
from batchgen.models.config import KVSpec, ModelConfig
from batchgen.models.layers import ACTIVATIONS, Linear, Ops, RopeTable, linear_kind


class DecoderLayer:
    """The weights of one layer; q, k and v are one matrix, gate and up are one matrix."""

    def __init__(
        self,
        config: ModelConfig,
        spec: KVSpec,
        linear: Callable[..., Linear],
        empty: Callable[..., torch.Tensor],
    ) -> None:
        hidden, inter = config.hidden_size, config.intermediate_size
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.spec = spec
        self.input_norm = empty(hidden)
        self.qkv = linear(hidden, (q_size, kv_size, kv_size), bias=config.qkv_bias)
        self.q_norm = empty(spec.head_dim) if config.qk_norm == "head" else None
        self.k_norm = empty(spec.head_dim) if config.qk_norm == "head" else None
        self.out = linear(q_size, (hidden,), bias=config.out_bias)
        self.post_norm = empty(hidden)
        self.gate_up = linear(hidden, (inter, inter), bias=config.mlp_bias)
        self.down = linear(inter, (hidden,), bias=config.mlp_bias)


class Decoder:
    """Token ids of one flat ragged batch in, hidden states and float32 logits out. `registry.build` makes it and loads
    its weights.

    K and V of every token go through `backend`, which owns them and has prepared the step. Callers are in inference
    mode.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        quantization: str | None = None,
        backend: AttentionBackend,
        max_model_len: int,
        ops: Ops,
        device: torch.device | None = None,
    ) -> None:
        linear = linear_kind(dtype, quantization, ops, device)
        empty = partial(torch.empty, dtype=dtype, device=device)
        self.config = config
        self.dtype = dtype
        self.backend = backend
        self.ops = ops
        self.embedding = empty(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, spec, linear, empty) for spec in config.layers]
        self.norm = empty(config.hidden_size)
        self.head = linear(config.hidden_size, (config.vocab_size,), bias=False)
        self.ropes = [RopeTable(rope, max_model_len, device) for rope in config.ropes]

    def forward(
        self,
        input_ids: torch.Tensor,  # (num_tokens,) int64
        positions: torch.Tensor,  # (num_tokens,) int64
        metadata: AttentionMetadata,
        sample_rows: torch.Tensor | None = None,  # (num_samples,) int64, indices of tokens
        sample_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """The last layer's output, normalised, (num_samples, hidden_size), for the tokens `sample_rows`; for all
        tokens where it is None. `logits` goes on from there.

        `sample_metadata` sees each sampled token as a sequence of one query whose context ends with it: the last
        layer writes K and V of all tokens, but needs the rest only where a token is sampled.
        """
        config, ops = self.config, self.ops
        activation = ACTIVATIONS[config.activation]
        rotations = [rope(positions) for rope in self.ropes]
        residual = F.embedding(input_ids, self.embedding)  # (num_tokens, hidden_size)
        if config.embedding_scale != 1.0:
            residual = residual * config.embedding_scale
        update: torch.Tensor | None = None  # what the layer before adds to the residual stream
        for index, layer in enumerate(self.layers):
            if update is None:
                normed = ops.rms_norm(residual, layer.input_norm, config.norm_eps)
            else:
                normed = ops.rms_norm(update, layer.input_norm, config.norm_eps, residual)
            query, key, value = self._project(layer, normed)
            cos, sin = rotations[config.rope_of_layer[index]]
            interleaved = config.ropes[config.rope_of_layer[index]].interleaved
            self.backend.rope_and_write(index, query, key, value, cos, sin, interleaved, metadata)
            attended = metadata
            if sample_rows is not None and index == len(self.layers) - 1:
                assert sample_metadata is not None
                if not len(sample_rows):
                    return residual[:0]
                query, residual = query.index_select(0, sample_rows), residual.index_select(0, sample_rows)
                attended = sample_metadata
            context = self.backend.attend(index, query, attended)  # (num_tokens, num_heads, head_dim)
            update = layer.out(context.reshape(len(query), -1))
            normed = ops.rms_norm(update, layer.post_norm, config.norm_eps, residual)
            update = layer.down(activation(ops, layer.gate_up(normed)))
        assert update is not None
        return ops.rms_norm(update, self.norm, config.norm_eps, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_samples, hidden_size) -> (num_samples, vocab_size) float32"""
        return self.head(hidden, wide=True)

    def _project(self, layer: DecoderLayer, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(num_tokens, hidden_size) -> query, key and value, each (num_tokens, heads, head_dim), views of one tensor
        where q and k are not normalised."""
        spec, eps = layer.spec, self.config.norm_eps
        heads = layer.qkv(normed).unflatten(-1, (-1, spec.head_dim))  # (num_tokens, all heads, head_dim)
        query, key, value = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = self.ops.rms_norm(query, layer.q_norm, eps)
            key = self.ops.rms_norm(key, layer.k_norm, eps)
        return query, key, value
