"""Rotary embedding fused with the KV write, in Triton, at the shapes of a 0.6B and an 8B model. Needs a GPU."""

from __future__ import annotations

from functools import partial

import torch
from batchgen_kernels import attention, cache, reference
from measure import parse_gpu, report, report_machine

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 8, 128, 32, 8192


def main() -> None:
    dtype = parse_gpu()
    report_machine(dtype)
    shape = attention.pool_shape(NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, BLOCK_SIZE)
    pool = torch.zeros(shape, dtype=dtype)
    for num_heads in (16, 32):
        for tokens, apart in [(256, True), (2048, False), (8192, False)]:
            sizes = (num_heads, NUM_KV_HEADS, NUM_KV_HEADS)
            fused = torch.randn(tokens, sum(sizes), HEAD_DIM, dtype=dtype)
            angles = torch.rand(tokens, HEAD_DIM // 2)
            slots = torch.randperm(NUM_BLOCKS)[:tokens] * BLOCK_SIZE + 7 if apart else torch.arange(tokens)
            given = (*fused.split(sizes, dim=1), angles.cos(), angles.sin(), slots.cuda(), pool)
            runs = {
                name: partial(by.rope_and_write, *given, block_size=BLOCK_SIZE)
                for name, by in (("triton", cache), ("twin", reference))
            }
            # query and key are read and written, the value read, key and value written to the pool
            heads = 2 * num_heads + 5 * NUM_KV_HEADS
            num_bytes = tokens * (heads * HEAD_DIM * dtype.itemsize + 4 * HEAD_DIM)
            report("rope_and_write", f"{tokens} tokens of {num_heads} heads", runs, num_bytes=num_bytes)


if __name__ == "__main__":
    main()
