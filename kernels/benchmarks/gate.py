"""Gated activations at the shapes of a 135M Llama, and on a GPU at those of an 8B one."""

from __future__ import annotations

from functools import partial

import torch
from measure import by_name, parse, report


def main() -> None:
    ops, dtype = parse()
    for op in ("silu_mul", "gelu_tanh_mul"):
        for tokens, dim in (
            [(256, 14336), (8192, 14336)] if torch.get_default_device().type == "cuda" else [(96, 1536), (512, 1536)]
        ):
            gate_up = torch.randn(tokens, 2 * dim).to(dtype)
            runs = {name: partial(getattr(by, op), gate_up) for name, by in by_name(ops).items()}
            report(op, f"{tokens} x {dim}", runs, num_bytes=1.5 * gate_up.nbytes)


if __name__ == "__main__":
    main()
