"""Paged attention at the shapes of a 135M Llama: decodes of many rows, also behind shared prefixes, prefill chunks, and
both mixed."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch
from batchgen_kernels import cpu, pages, reference
from measure import parse, report, report_machine

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32
NUM_LAYERS = 30  # pools that a step reads one after the other: more than any cache holds


def spread(rows: int, mean: int) -> list[int]:
    """Context lengths from half to one and a half times the mean."""
    return [mean // 2 + mean * row // rows for row in range(rows)]


def bench(
    ops: cpu.Ops,
    dtype: torch.dtype,
    case: str,
    lengths: list[int],
    contexts: list[int],
    *,
    kv_dtype: torch.dtype,
    shared: int = 0,
    families: int = 1,
) -> None:
    """With `shared` tokens, that many are the same for all sequences of a family: read once for all, and for each."""
    blocks, common = [-(-n // BLOCK_SIZE) for n in contexts], shared // BLOCK_SIZE
    num_blocks = families * common + sum(n - common for n in blocks)
    ids = torch.randperm(num_blocks).int().split([common] * families + [n - common for n in blocks])
    table = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    for number, (row, own) in enumerate(zip(table, ids[families:], strict=True)):
        row[:common], row[common : common + len(own)] = ids[number % families], own
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    context = torch.tensor(contexts, dtype=torch.int32)
    query = torch.randn(sum(lengths), NUM_HEADS, HEAD_DIM).to(dtype)
    num_layers = NUM_LAYERS if sum(lengths) == len(lengths) else 2
    shape = ops.pool_shape(num_blocks, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    pools = [pages.zeros(shape, kv_dtype).normal_() for _ in range(num_layers)]

    def run(by: cpu.Ops | ModuleType, share: bool) -> None:
        items = by.attention_items(
            starts, context, table if share else None, NUM_HEADS, NUM_KV_HEADS, block_size=BLOCK_SIZE
        )
        for pool in pools:
            by.paged_attention(query, pool, table, items, block_size=BLOCK_SIZE, scale=HEAD_DIM**-0.5)

    pairs = sum(sum(range(c - n + 1, c + 1)) for n, c in zip(lengths, contexts, strict=True))
    num_bytes = sum(contexts) * NUM_KV_HEADS * 2 * HEAD_DIM * kv_dtype.itemsize
    runs = {ops.isa: partial(run, ops, True), "twin": partial(run, reference, True)}
    if shared:
        runs = {f"{ops.isa}, shared": runs[ops.isa], f"{ops.isa}, each alone": partial(run, ops, False)}
    report("attention", case, runs, num_bytes=num_bytes, flops=4 * pairs * NUM_HEADS * HEAD_DIM, calls=num_layers)


def main() -> None:
    ops, dtype = parse()
    report_machine(dtype)
    for rows, mean in [(96, 250), (96, 340), (96, 500), (64, 1000)]:
        bench(ops, dtype, f"decode {rows} rows at {mean}", [1] * rows, spread(rows, mean), kv_dtype=dtype)
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    bench(ops, dtype, f"decode 96 rows at 340, KV in {other}", [1] * 96, spread(96, 340), kv_dtype=other)
    for rows, shared, families in [(96, 512, 1), (96, 128, 1), (8, 2048, 1), (2, 256, 1), (2, 2048, 1), (96, 1024, 24)]:
        case = f"decode {rows} rows behind {families} x {shared}, 88 own"
        given = {"kv_dtype": dtype, "shared": shared, "families": families}
        bench(ops, dtype, case, [1] * rows, [shared + 88] * rows, **given)
    bench(ops, dtype, "32 chunks of 8 behind 512", [8] * 32, [520] * 32, kv_dtype=dtype, shared=512)
    for length, context in [(64, 64), (256, 256), (512, 512), (1024, 1024), (256, 1024)]:
        bench(ops, dtype, f"prefill {length} to {context}", [length], [context], kv_dtype=dtype)
    bench(ops, dtype, "prefill 4 of 128", [128] * 4, [128] * 4, kv_dtype=dtype)
    mixed = [*spread(64, 500), 256]
    bench(ops, dtype, "64 decodes at 500, prefill 256", [1] * 64 + [256], mixed, kv_dtype=dtype)


if __name__ == "__main__":
    main()
