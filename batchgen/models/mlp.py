"""The feed-forward half of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from batchgen.models.config import ModelConfig
from batchgen.models.layers import Layout, Linear, Ops, Places, activation_of, linear_places


class Mlp:
    """A gate and the up-projection are one matrix."""

    def __init__(self, config: ModelConfig, linear: Callable[..., Linear], size: int | None = None) -> None:
        """`size` None is the configuration's intermediate size."""
        hidden, inter = config.hidden_size, size or config.intermediate_size
        self.up = linear(hidden, (inter, inter) if config.gated else (inter,), bias=config.mlp_bias)
        self.down = linear(inter, (hidden,), bias=config.mlp_bias)
        self._activation, self._gated = activation_of(config), config.gated

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> the same"""
        return self.down(self._activation(ops, self.up(x)))

    def places(self, layout: Layout) -> Places:
        stored = ("up",) if not self._gated else ("gate_up",) if "gate_up" in layout.names else ("gate", "up")
        names = [layout.names[part] for part in stored]
        yield from linear_places(self.up, *names, transposed=layout.transposed)
        yield from linear_places(self.down, layout.names["down"], transposed=layout.transposed)
