"""Paged attention at the shapes of a 135M Llama: decodes of many rows, prefill chunks, and both mixed."""

from __future__ import annotations

import torch
from batchgen_kernels import cpu, reference
from measure import parse, report, report_machine

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32
NUM_LAYERS = 30  # pools that a step reads one after the other: more than any cache holds


def spread(rows: int, mean: int) -> list[int]:
    """Context lengths from half to one and a half times the mean."""
    return [mean // 2 + mean * row // rows for row in range(rows)]


def bench(ops: cpu.Ops, dtype: torch.dtype, case: str, lengths: list[int], contexts: list[int]) -> None:
    blocks = [-(-n // BLOCK_SIZE) for n in contexts]
    table = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    for row, ids in zip(table, torch.randperm(sum(blocks)).int().split(blocks), strict=True):
        row[: len(ids)] = ids
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    context = torch.tensor(contexts, dtype=torch.int32)
    query = torch.randn(sum(lengths), NUM_HEADS, HEAD_DIM).to(dtype)
    num_layers = NUM_LAYERS if sum(lengths) == len(lengths) else 2
    shape = ops.pool_shape(sum(blocks), NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    pools = [cpu.zeros(shape, dtype).normal_() for _ in range(num_layers)]

    def native() -> None:
        items = ops.attention_items(starts, context, NUM_HEADS, NUM_KV_HEADS)
        for pool in pools:
            ops.paged_attention(query, pool, table, starts, context, items, block_size=BLOCK_SIZE, scale=HEAD_DIM**-0.5)

    def twin() -> None:
        items = reference.attention_items(starts, context, NUM_HEADS, NUM_KV_HEADS)
        for pool in pools:
            reference.paged_attention(
                query, pool, table, starts, context, items, block_size=BLOCK_SIZE, scale=HEAD_DIM**-0.5
            )

    pairs = sum(sum(range(c - n + 1, c + 1)) for n, c in zip(lengths, contexts, strict=True))
    num_bytes = sum(contexts) * NUM_KV_HEADS * 2 * HEAD_DIM * dtype.itemsize
    runs = {ops.isa: native, "twin": twin}
    report("attention", case, runs, num_bytes=num_bytes, flops=4 * pairs * NUM_HEADS * HEAD_DIM, calls=num_layers)


def main() -> None:
    ops, dtype = parse()
    report_machine(dtype)
    for rows, mean in [(96, 250), (96, 500), (64, 1000)]:
        bench(ops, dtype, f"decode {rows} rows at {mean}", [1] * rows, spread(rows, mean))
    for length, context in [(64, 64), (256, 256), (512, 512), (1024, 1024), (256, 1024)]:
        bench(ops, dtype, f"prefill {length} to {context}", [length], [context])
    bench(ops, dtype, "prefill 4 of 128", [128] * 4, [128] * 4)
    bench(ops, dtype, "64 decodes at 500, prefill 256", [1] * 64 + [256], [*spread(64, 500), 256])


if __name__ == "__main__":
    main()
