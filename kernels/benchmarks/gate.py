"""Gated activations at the shapes of a 135M Llama."""

from __future__ import annotations

from functools import partial

import torch
from batchgen_kernels import reference
from measure import parse, report


def main() -> None:
    ops, dtype = parse()
    for op in ("silu_mul", "gelu_tanh_mul"):
        for tokens in (96, 512):
            gate_up = torch.randn(tokens, 2 * 1536).to(dtype)
            runs = {name: partial(getattr(by, op), gate_up) for name, by in ((ops.isa, ops), ("twin", reference))}
            report(op, f"{tokens} x 1536", runs, num_bytes=1.5 * gate_up.nbytes)


if __name__ == "__main__":
    main()
