"""A mixture of experts in place of a layer's MLP: a router chooses some of them for each token, which is given the
weighted sum of what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from batchgen.models.config import ExpertsConfig, ModelConfig
from batchgen.models.layers import (
    Activation,
    Layout,
    Linear,
    Ops,
    Place,
    Places,
    activation_of,
    linear_places,
)
from batchgen.models.mlp import Mlp

Empty = Callable[..., torch.Tensor]  # of a shape, in the model's dtype, on its device
TINY = 1e-20  # the reference's, against a sum of scores that are all 0


class Router:
    """Chooses each token's experts. All of it is in float32: close scores would trade places in less."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, device: torch.device) -> None:
        self.linear = Linear(
            hidden_size, (config.num_experts,), bias=config.router_bias, dtype=torch.float32, device=device
        )
        self.choice_bias = (
            torch.empty(config.num_experts, dtype=torch.float32, device=device) if config.choice_bias else None
        )
        self._config = config

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(num_tokens, hidden_size) -> the weights of each token's experts, float32, and their ids, int64, both
        (num_tokens, top_k), the best first."""
        config = self._config
        logits = self.linear(x.float())
        scores = logits.softmax(dim=-1) if config.scoring == "softmax" else logits.sigmoid()
        ranked = scores if self.choice_bias is None else scores + self.choice_bias
        if config.num_groups > 1:
            ranked = self._without_worse_groups(ranked)
        expert_ids = _best(ranked, config.top_k)
        weights = scores.gather(1, expert_ids)
        if config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        return weights if config.scale == 1.0 else weights * config.scale, expert_ids

    def _without_worse_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """(num_tokens, num_experts) -> the same, -inf in all but the best groups."""
        config = self._config
        groups = ranked.unflatten(1, (config.num_groups, -1))
        score = groups.amax(dim=-1) if config.group_score == "max" else groups.topk(2, dim=-1).values.sum(dim=-1)
        worse = torch.ones_like(score, dtype=torch.bool).scatter_(1, _best(score, config.top_groups), False)
        return groups.masked_fill(worse[:, :, None], float("-inf")).flatten(1)

    def places(self, layout: Layout) -> Places:
        for name, place in linear_places(self.linear, layout.names["router"]):
            yield name, place._replace(wide=True)
        if self.choice_bias is not None:
            yield (
                layout.names["choice_bias"],
                Place(tuple(self.choice_bias.shape), self.choice_bias.copy_, wide=True),
            )


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """(num_tokens, size) -> the indices of the highest, (num_tokens, count), of equal ones the lowest first, which
    topk does not promise."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class Mixture(Protocol):
    """The experts' matrices. `ups` and `downs` load them: one for each expert."""

    @property
    def ups(self) -> Sequence[Linear]: ...

    @property
    def downs(self) -> Sequence[Linear]: ...

    def __call__(self, ops: Ops, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (num_tokens, hidden_size), the others (num_tokens, top_k) -> (num_tokens, hidden_size)"""
        ...


class SeparateExperts:
    """A linear layer for each matrix of each expert, and a product for each expert that a token has: for devices where
    the host knows what it computes. What a token gets does not depend on the others of its step."""

    def __init__(
        self, config: ExpertsConfig, hidden_size: int, activation: Activation, linear: Callable[..., Linear]
    ) -> None:
        inter = config.intermediate_size
        self.ups: Sequence[Linear] = [
            linear(hidden_size, (inter, inter), bias=config.bias) for _ in range(config.num_experts)
        ]
        self.downs: Sequence[Linear] = [
            linear(inter, (hidden_size,), bias=config.bias) for _ in range(config.num_experts)
        ]
        self._activation = activation

    def __call__(self, ops: Ops, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_tokens, top_k = expert_ids.shape
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)  # (num_tokens * top_k,) assignments by expert
        counts = flat.bincount(minlength=len(self.ups)).tolist()
        gate_up = _products(self.ups, x[order // top_k], counts)
        down = _products(self.downs, self._activation(ops, gate_up), counts)
        given = torch.empty(len(order), down.shape[1], dtype=torch.float32)
        given[order] = down.float()
        # by rank, whatever else is computed
        return (given.unflatten(0, (num_tokens, top_k)) * weights[:, :, None]).sum(dim=1).to(x.dtype)


def _products(linears: Sequence[Linear], x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """x (num_assignments, in_features), the first counts[0] rows by the first layer, and so on."""
    active = [(linear, count) for linear, count in zip(linears, counts, strict=True) if count]
    rows = x.split([count for _, count in active])
    return torch.cat([linear(part) for (linear, _), part in zip(active, rows, strict=True)])


class StackedExperts:
    """Matrices of one kind as one tensor, and one product with all of them: for devices that are told what to do
    before it is known which expert a token takes."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, activation: Activation, empty: Empty) -> None:
        count, inter = config.num_experts, config.intermediate_size
        self.up = empty((count, 2 * inter, hidden_size))
        self.down = empty((count, hidden_size, inter))
        self.up_bias = empty((count, 2 * inter)) if config.bias else None
        self.down_bias = empty((count, hidden_size)) if config.bias else None
        self.ups: Sequence[Linear] = [_Slice(self.up, self.up_bias, expert, (inter, inter)) for expert in range(count)]
        self.downs: Sequence[Linear] = [
            _Slice(self.down, self.down_bias, expert, (hidden_size,)) for expert in range(count)
        ]
        self._activation, self._count = activation, count

    def __call__(self, ops: Ops, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = ops.sort_tokens(expert_ids, self._count, ops.tile_rows(expert_ids.numel(), self._count))
        gate_up = ops.grouped_linear(x, self.up, tokens, self.up_bias)  # (num_tokens * top_k, 2 * intermediate_size)
        return ops.grouped_linear(self._activation(ops, gate_up), self.down, tokens, self.down_bias, weights)


class _Slice(Linear):
    """One expert's matrix in a stack of them, to be loaded as those of other linear layers are."""

    def __init__(self, stack: torch.Tensor, bias: torch.Tensor | None, expert: int, parts: Sequence[int]) -> None:
        super().__init__(stack.shape[2], parts, bias=False, dtype=stack.dtype, device=stack.device)
        self.weight, self.bias = stack[expert], None if bias is None else bias[expert]

    def use(self, weight: torch.Tensor) -> None:
        """It stays where it is."""


class Experts:
    """Router, experts, and an MLP that every token takes beside them where the configuration has one."""

    def __init__(
        self, config: ModelConfig, linear: Callable[..., Linear], mixture: Callable[..., Mixture], empty: Empty
    ) -> None:
        own, hidden = config.experts, config.hidden_size
        assert own is not None
        like = empty(0)
        self.router = Router(own, hidden, like.device)
        self.mixture = mixture(own, hidden, activation_of(config))
        self.shared = Mlp(config, linear, own.shared_size) if own.shared_size else None
        self.shared_gate = (  # not worth quantising
            Linear(hidden, (1,), bias=False, dtype=like.dtype, device=like.device) if own.shared_gate else None
        )

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> the same"""
        weights, expert_ids = self.router(x)
        out = self.mixture(ops, x, expert_ids, weights)
        if self.shared is None:
            return out
        shared = self.shared(ops, x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return out.add_(shared)

    def places(self, layout: Layout) -> Places:
        names = layout.names
        yield from self.router.places(layout)
        if "experts_gate_up" in names:
            yield from self._stacked_places(layout)
        else:
            for expert, (up, down) in enumerate(zip(self.mixture.ups, self.mixture.downs, strict=True)):
                gate_name, up_name, down_name = (
                    names[part].replace("{expert}", str(expert)) for part in ("expert_gate", "expert_up", "expert_down")
                )
                yield from linear_places(up, gate_name, up_name)
                yield from linear_places(down, down_name)
        if self.shared is not None:
            own = {part: names[f"shared_{part}"] for part in ("gate", "up", "down")}
            yield from self.shared.places(replace(layout, names=own))
        if self.shared_gate is not None:
            yield from linear_places(self.shared_gate, names["shared_weight"])

    def _stacked_places(self, layout: Layout) -> Places:
        """GPT-OSS's: a tensor for all experts, transposed, the rows of gate and up taking turns."""
        for linears, part_name, parts in (
            (self.mixture.ups, "experts_gate_up", 2),
            (self.mixture.downs, "experts_down", 1),
        ):
            name, rows = layout.names[part_name], sum(linears[0].parts)
            yield name, Place((len(linears), linears[0].in_features, rows), partial(_load_weights, linears, parts))
            if linears[0].bias is not None:
                yield f"{name}_bias", Place((len(linears), rows), partial(_load_biases, linears, parts))


def _load_weights(linears: Sequence[Linear], parts: int, tensor: torch.Tensor) -> None:
    """(num_experts, in_features, rows)"""
    for linear, stored in zip(linears, tensor, strict=True):
        for part, rows in _taking_turns(stored.t(), parts):
            linear.load_weight(part, rows)


def _load_biases(linears: Sequence[Linear], parts: int, tensor: torch.Tensor) -> None:
    """(num_experts, rows)"""
    for linear, stored in zip(linears, tensor, strict=True):
        for part, rows in _taking_turns(stored, parts):
            linear.load_bias(part, rows)


def _taking_turns(stored: torch.Tensor, parts: int) -> Iterator[tuple[int, torch.Tensor]]:
    for part in range(parts):
        yield part, stored[part::parts]


def experts_kind(linear: Callable[..., Linear], empty: Empty, ops: Ops) -> Callable[[ModelConfig], Experts]:
    """What makes a layer's experts."""
    mixture: Callable[..., Mixture]
    if ops.grouped_linear_pays():
        mixture = partial(StackedExperts, empty=empty)
    else:
        mixture = partial(SeparateExperts, linear=linear)
    return partial(Experts, linear=linear, mixture=mixture, empty=empty)
