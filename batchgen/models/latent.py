"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values out of vectors of low rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from batchgen.models.config import KVSpec, ModelConfig
from batchgen.models.layers import Layout, Linear, Norm, Ops, Places, linear_places

NORM_EPS = 1e-6  # of the norms in between, whatever the configuration says of the others


class LatentProjection:
    """Queries, keys and values of one layer, written out for all heads before they are kept: that takes the memory of
    as many KV heads, and attention is then that of any other model.

    The rotated part of a key is one for all heads. It comes first here, in queries and keys alike, as the backends
    rotate the first dimensions; checkpoints have it last, and the rows of the weights are put in this order.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: KVSpec,
        linear: Callable[..., Linear],
        empty: Callable[..., torch.Tensor],
    ) -> None:
        latent = config.latent
        assert latent is not None
        between = replace(config, norm_eps=NORM_EPS)
        self._spec, self._latent = spec, latent
        self._plain = spec.head_dim - latent.rope_dim  # dimensions of a key that are not rotated
        # what is computed from the hidden states, in one matrix: the queries' vector and the keys' and values'
        self._down_parts = (*([latent.query_rank] if latent.query_rank else []), latent.kv_rank + latent.rope_dim)
        self.down = linear(config.hidden_size, self._down_parts, bias=latent.bias)
        query_size = spec.num_heads * spec.head_dim
        self.query_norm = Norm(between, (latent.query_rank,), empty) if latent.query_rank else None
        self.query = linear(latent.query_rank or config.hidden_size, (query_size,), bias=False)
        self.kv_norm = Norm(between, (latent.kv_rank,), empty)
        self.kv = linear(latent.kv_rank, (spec.num_heads * (self._plain + spec.value_size),), bias=False)

    def __call__(self, ops: Ops, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(num_tokens, hidden_size) -> query and key (num_tokens, num_heads, head_dim), not rotated yet, and value
        (num_tokens, num_heads, value_size), a strided view."""
        spec, rope_dim = self._spec, self._latent.rope_dim
        *query_down, kv_down = self.down(normed).split(self._down_parts, dim=-1)
        compressed, rotated = kv_down.split((self._latent.kv_rank, rope_dim), dim=-1)
        low_rank = normed if self.query_norm is None else self.query_norm(ops, query_down[0])
        query = self.query(low_rank).unflatten(-1, (spec.num_heads, spec.head_dim))
        kv = self.kv(self.kv_norm(ops, compressed)).unflatten(-1, (spec.num_heads, -1))
        plain, value = kv.split((self._plain, spec.value_size), dim=-1)
        key = torch.cat((rotated[:, None].expand(-1, spec.num_heads, -1), plain), dim=-1)
        return query, key, value

    def places(self, layout: Layout) -> Places:
        names = layout.names
        if self.query_norm is None:
            yield from linear_places(self.down, names["kv_down"])
            yield from linear_places(self.query, names["q"], split=self._rotated_first)
        else:
            yield from linear_places(self.down, names["query_down"], names["kv_down"])
            yield from self.query_norm.places(names["query_down_norm"])
            yield from linear_places(self.query, names["query_up"], split=self._rotated_first)
        yield from self.kv_norm.places(names["kv_down_norm"])
        yield from linear_places(self.kv, names["kv_up"])

    def _rotated_first(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The queries' weight (num_heads * head_dim, in_features)."""
        heads = tensor.unflatten(0, (self._spec.num_heads, self._spec.head_dim))
        plain, rotated = heads.split((self._plain, self._latent.rope_dim), dim=1)
        return (torch.cat((rotated, plain), dim=1).flatten(0, 1),)
