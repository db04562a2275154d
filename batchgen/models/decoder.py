"""The one decoder: every supported family is this forward pass with other flags in its ModelConfig. Inference only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from batchgen.attention.base import AttentionBackend, AttentionMetadata
from batchgen.models.config import KVSpec, ModelConfig
from batchgen.models.experts import Experts, experts_kind
from batchgen.models.latent import LatentProjection
from batchgen.models.layers import Layout, Linear, Norm, Ops, Place, Places, linear_kind, linear_places
from batchgen.models.mlp import Mlp
from batchgen.models.rope import RopeTable

Empty = Callable[..., torch.Tensor]  # of a shape, in the model's dtype, on its device


class Projection:
    """Queries, keys and values of one layer, out of one matrix."""

    def __init__(self, config: ModelConfig, spec: KVSpec, linear: Callable[..., Linear], empty: Empty) -> None:
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = linear(config.hidden_size, (q_size, kv_size, kv_size), bias=config.qkv_bias)
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm != "none":
            self.q_norm = Norm(config, _qk_norm_shape(config.qk_norm, spec.num_heads, spec.head_dim), empty)
            self.k_norm = Norm(config, _qk_norm_shape(config.qk_norm, spec.num_kv_heads, spec.head_dim), empty)
        self._spec, self._all_heads, self._clip = spec, config.qk_norm == "all", config.qkv_clip

    def __call__(self, ops: Ops, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(num_tokens, hidden_size) -> query, key and value, each (num_tokens, heads, head_dim), views of one tensor
        where q and k are not normalised."""
        spec = self._spec
        projected = self.qkv(normed)
        heads = projected.unflatten(-1, (-1, spec.head_dim))  # (num_tokens, all heads, head_dim)
        query, key, value = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self._normalise(ops, self.q_norm, query), self._normalise(ops, self.k_norm, key)
        if self._clip is not None:
            for states in (query, key, value):
                states.clamp_(-self._clip, self._clip)
        return query, key, value

    def _normalise(self, ops: Ops, norm: Norm, heads: torch.Tensor) -> torch.Tensor:
        if self._all_heads:
            return norm(ops, heads.flatten(-2)).view(heads.shape)
        return norm(ops, heads)

    def places(self, layout: Layout) -> Places:
        names = layout.names
        stored = (names["qkv"],) if "qkv" in names else (names["q"], names["k"], names["v"])
        split = self._split_groups if layout.grouped else None
        yield from linear_places(self.qkv, *stored, split=split, transposed=layout.transposed)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.places(names["q_norm"])
            yield from self.k_norm.places(names["k_norm"])

    def _split_groups(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        spec = self._spec
        group = spec.num_heads // spec.num_kv_heads
        groups = tensor.view(spec.num_kv_heads, group + 2, spec.head_dim, *tensor.shape[1:])
        return [part.flatten(0, 2) for part in groups.split((group, 1, 1), dim=1)]


def _qk_norm_shape(kind: str, num_heads: int, head_dim: int) -> tuple[int, ...]:
    return {"head": (head_dim,), "heads": (num_heads, head_dim), "all": (num_heads * head_dim,)}[kind]


class DecoderLayer:
    """The weights of one layer. Norms that the family does not have are None."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        linear: Callable[..., Linear],
        experts: Callable[..., Experts],
        empty: Empty,
    ) -> None:
        def norm(place: str) -> Norm | None:
            return Norm(config, (config.hidden_size,), empty, bias=config.norm_bias) if place in config.norms else None

        self.attn_in, self.attn_out = norm("attn_in"), norm("attn_out")
        self.mlp_in, self.mlp_out = norm("mlp_in"), norm("mlp_out")
        spec = config.layers[index]
        self.projection = (Projection if config.latent is None else LatentProjection)(config, spec, linear, empty)
        self.out = linear(spec.num_heads * spec.value_size, (config.hidden_size,), bias=config.out_bias)
        self.sinks = empty(spec.num_heads, dtype=torch.float32) if spec.sinks else None
        sparse = bool(config.expert_layers) and config.expert_layers[index]
        self.mlp: Mlp | Experts = experts(config) if sparse else Mlp(config, linear)

    def places(self, layout: Layout) -> Places:
        for place in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            norm: Norm | None = getattr(self, place)
            if norm is not None:
                yield from norm.places(layout.names[place])
        yield from self.projection.places(layout)
        if self.sinks is not None:
            yield layout.names["sinks"], Place(tuple(self.sinks.shape), self.sinks.copy_, wide=True)
        yield from linear_places(self.out, layout.names["out"], transposed=layout.transposed)
        yield from self.mlp.places(layout)


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
        experts = experts_kind(linear, empty, ops)
        self.config = config
        self.dtype = dtype
        self.backend = backend
        self.ops = ops
        self.embedding = empty(config.vocab_size, config.hidden_size)
        self.positions = empty(config.max_position_embeddings, config.hidden_size) if config.learned_positions else None
        self.layers = [DecoderLayer(config, index, linear, experts, empty) for index in range(config.num_layers)]
        self.norm = Norm(config, (config.hidden_size,), empty, bias=config.norm_bias)
        self.head = linear(config.hidden_size, (config.vocab_size,), bias=False)
        self.ropes = [RopeTable(rope, max_model_len, device) for rope in config.ropes]
        # as the reference does: in the model's dtype
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype, device="cpu"))

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
        rotations = [rope(positions) for rope in self.ropes]
        residual = F.embedding(input_ids, self.embedding)  # (num_tokens, hidden_size)
        if config.embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        if self.positions is not None:
            residual = residual + F.embedding(positions, self.positions)
        update: torch.Tensor | None = None  # what the layer before adds to the residual stream
        for index, layer in enumerate(self.layers):
            normed = _add_and_normalise(ops, layer.attn_in, residual, update)
            query, key, value = layer.projection(ops, normed)
            cos, sin = rotations[config.rope_of_layer[index]]
            interleaved = config.ropes[config.rope_of_layer[index]].interleaved
            self.backend.rope_and_write(index, query, key, value, cos, sin, interleaved, metadata)
            attended = metadata
            if sample_rows is not None and index == len(self.layers) - 1:
                assert sample_metadata is not None
                if not len(sample_rows):
                    return residual[:0]
                query, residual = query.index_select(0, sample_rows), residual.index_select(0, sample_rows)
                normed = normed.index_select(0, sample_rows) if config.parallel else normed
                attended = sample_metadata
            context = self.backend.attend(index, query, attended, layer.sinks)  # (num_tokens, num_heads, value_size)
            update = self._finished(layer.attn_out, layer.out(context.reshape(len(query), -1)))
            if config.parallel:
                normed = normed if layer.mlp_in is None else layer.mlp_in(ops, residual)
                update = update.add_(self._finished(layer.mlp_out, layer.mlp(ops, normed)))
            else:
                normed = _add_and_normalise(ops, layer.mlp_in, residual, update)
                update = self._finished(layer.mlp_out, layer.mlp(ops, normed))
        return _add_and_normalise(ops, self.norm, residual, update)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(num_samples, hidden_size) -> (num_samples, vocab_size) float32"""
        logits, config = self.head(hidden, wide=True), self.config
        if config.logit_scale != 1.0:
            logits = logits.mul_(config.logit_scale)
        if config.logit_soft_cap is not None:
            logits = logits.div_(config.logit_soft_cap).tanh_().mul_(config.logit_soft_cap)
        return logits

    def _finished(self, norm: Norm | None, update: torch.Tensor) -> torch.Tensor:
        """What half a layer has computed (num_tokens, hidden_size), as it is added to the residual stream."""
        if norm is not None:
            update = norm(self.ops, update)
        scale = self.config.residual_scale
        return update if scale == 1.0 else update.mul_(scale)

    def places(self, layout: Layout) -> Places:
        """Where the tensors of a checkpoint go."""
        names = layout.names
        yield f"{names['embedding']}.weight", Place(tuple(self.embedding.shape), self.embedding.copy_)
        if self.positions is not None:
            yield f"{names['positions']}.weight", Place(tuple(self.positions.shape), self.positions.copy_)
        yield from self.norm.places(names["norm"])
        if not self.config.tied_head:
            yield from linear_places(self.head, names["head"])
        for index, layer in enumerate(self.layers):
            yield from layer.places(layout.of_layer(index))


def _add_and_normalise(
    ops: Ops, norm: Norm | None, residual: torch.Tensor, update: torch.Tensor | None
) -> torch.Tensor:
    """Add to the residual stream in place and normalise it, all (num_tokens, hidden_size)."""
    if update is None:
        return residual if norm is None else norm(ops, residual)
    return residual.add_(update) if norm is None else norm(ops, update, residual)
