"""Paged attention in Triton at the shapes of a 0.6B and an 8B model: decodes of many rows, also behind shared prefixes,
prefill chunks, and both mixed. Needs a GPU."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from batchgen_kernels import attention, work
from measure import parse_gpu, report, report_machine

BLOCK_SIZE, MAX_PARTS = 32, 4096


class Shape(NamedTuple):
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int  # pools that a step reads one after the other


SHAPES = [Shape("0.6B", 16, 8, 128, 28), Shape("8B", 32, 8, 128, 32)]


def spread(rows: int, mean: int) -> list[int]:
    """Context lengths from half to one and a half times the mean."""
    return [mean // 2 + mean * row // rows for row in range(rows)]


def bench(
    shape: Shape,
    case: str,
    lengths: list[int],
    contexts: list[int],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    shared: int = 0,
) -> None:
    """With `shared` tokens, that many are the same for all sequences: read once for all, and for each."""
    rng, common = np.random.default_rng(0), shared // BLOCK_SIZE
    own = [-(-n // BLOCK_SIZE) - common for n in contexts]
    num_blocks = common + sum(own)
    ids = rng.permutation(num_blocks).astype(np.int32)
    table = np.zeros((len(contexts), common + max(own)), np.int32)
    for row, number, end in zip(table, own, np.cumsum(own), strict=True):
        row[:common], row[common : common + number] = ids[:common], ids[common + end - number : common + end]
    starts, context = np.cumsum([0, *lengths], dtype=np.int32), np.array(contexts, np.int32)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim)
    decode = max(lengths) == 1
    num_layers = shape.num_layers if decode else 2
    pool_shape = attention.pool_shape(num_blocks, *heads[1:], BLOCK_SIZE)
    pools = [torch.randn(pool_shape, dtype=dtype).to(kv_dtype) for _ in range(num_layers)]
    query = torch.randn(sum(lengths), shape.num_heads, shape.head_dim, dtype=dtype)
    device_table = torch.from_numpy(table).cuda()
    parts = torch.empty(MAX_PARTS * shape.num_heads * shape.head_dim)
    part_lses = torch.empty(MAX_PARTS * shape.num_heads)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    config = attention.launch_config(*heads, kv_dtype, decode=decode)

    def prepared(share: bool) -> work.Work:
        plan = work.plan(
            starts,
            context,
            np.arange(len(contexts), dtype=np.int32),
            table,
            sum(lengths),
            group=shape.num_heads // shape.num_kv_heads,
            window=None,
            small=config.blocks["small"],
            large=config.blocks["large"],
            block_size=BLOCK_SIZE,
            target_items=4 * multiprocessors // shape.num_kv_heads + 1,
            max_parts=MAX_PARTS,
            share=share,
        )
        (sections,) = work.unpack(torch.from_numpy(work.pack([plan], [plan.room])).cuda(), [plan.room])
        merges = 8 * multiprocessors if len(plan.merged) else 0
        return work.Work(*sections, parts, part_lses, plan.with_large, merges)

    def run(made: work.Work) -> None:
        for pool in pools:
            attention.paged_attention(
                *(query, pool, device_table, made),
                config=config,
                block_size=BLOCK_SIZE,
                value_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
            )

    pairs = sum(sum(range(c - n + 1, c + 1)) for n, c in zip(lengths, contexts, strict=True))
    num_bytes = sum(contexts) * shape.num_kv_heads * 2 * shape.head_dim * kv_dtype.itemsize
    runs = {"triton": partial(run, prepared(True))}
    if shared:
        runs = {"triton, shared": runs["triton"], "triton, each alone": partial(run, prepared(False))}
    flops = 4 * pairs * shape.num_heads * shape.head_dim
    report("attention", f"{shape.name}: {case}", runs, num_bytes=num_bytes, flops=flops, calls=num_layers)


def main() -> None:
    dtype = parse_gpu()
    report_machine(dtype)
    for shape in SHAPES:
        same = partial(bench, shape, dtype=dtype, kv_dtype=dtype)
        for rows, mean in [(1, 8000), (16, 2000), (96, 500), (256, 500), (256, 2000), (512, 1000)]:
            same(f"decode {rows} rows at {mean}", [1] * rows, spread(rows, mean))
        if torch.cuda.get_device_capability() >= (8, 9):
            fp8 = torch.float8_e4m3fn
            bench(shape, "decode 256 at 2000, KV in fp8", [1] * 256, spread(256, 2000), dtype=dtype, kv_dtype=fp8)
        for rows, shared in [(256, 512), (256, 2048), (8, 2048)]:
            same(f"decode {rows} rows behind {shared}, 88 own", [1] * rows, [shared + 88] * rows, shared=shared)
        for length, context in [(512, 512), (2048, 2048), (8192, 8192), (2048, 16384)]:
            same(f"prefill {length} to {context}", [length], [context])
        same("prefill 16 of 512", [512] * 16, [512] * 16)
        same("256 decodes at 1000, prefill 2048", [1] * 256 + [2048], [*spread(256, 1000), 2048])


if __name__ == "__main__":
    main()
