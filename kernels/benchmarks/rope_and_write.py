"""Rotary embedding fused with the KV write, at the shapes of a 135M Llama."""

from __future__ import annotations

from functools import partial

import torch
from batchgen_kernels import reference
from measure import parse, report

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32


def main() -> None:
    ops, dtype = parse()
    pool = torch.zeros(ops.pool_shape(2048, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE), dtype=dtype)
    for tokens, apart in [(96, True), (256, False), (1024, False)]:
        fused = torch.randn(tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
        query, key, value = fused.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
        angles = torch.rand(tokens, HEAD_DIM // 2)
        cos, sin = angles.cos(), angles.sin()
        slots = torch.randperm(2048)[:tokens] * BLOCK_SIZE + 7 if apart else torch.arange(tokens)
        given = (query, key, value, cos, sin, slots, pool)
        runs = {
            name: partial(by.rope_and_write, *given, block_size=BLOCK_SIZE)
            for name, by in ((ops.isa, ops), ("twin", reference))
        }
        num_bytes = 2 * fused.nbytes + cos.nbytes + sin.nbytes
        report(
            "rope_and_write",
            f"{tokens} tokens, {'each its own' if apart else 'full'} blocks",
            runs,
            num_bytes=num_bytes,
        )


if __name__ == "__main__":
    main()
