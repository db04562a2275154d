"""Sorting by expert and both matmuls of a mixture of experts on a GPU, at the shapes of a model with 128 experts.

What moves is the weights of all experts in use, and what goes in and out.
"""

from __future__ import annotations

from functools import partial

import torch
from batchgen_kernels import gpu, moe
from measure import parse_gpu, report

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768


def main() -> None:
    dtype = parse_gpu()
    first = torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype) * 0.02
    second = torch.randn(EXPERTS, HIDDEN, INNER, dtype=dtype) * 0.02
    for num_tokens in (1, 32, 256, 1024, 8192):
        x, acted = torch.randn(num_tokens, HIDDEN, dtype=dtype), torch.randn(num_tokens * TOP_K, INNER, dtype=dtype)
        weights, expert_ids = torch.rand(num_tokens, EXPERTS).topk(TOP_K, dim=1)
        tile = moe.tile_rows(num_tokens * TOP_K, EXPERTS)
        tokens = gpu.sort_tokens(expert_ids, EXPERTS, tile)
        used = expert_ids.unique().numel() / EXPERTS
        runs = {
            "sort_tokens": (partial(gpu.sort_tokens, expert_ids, EXPERTS, tile), 2 * expert_ids.nbytes, 0),
            "grouped_linear up": (
                partial(gpu.grouped_linear, x, first, tokens),
                used * first.nbytes + (num_tokens * HIDDEN + num_tokens * TOP_K * 2 * INNER) * dtype.itemsize,
                2 * num_tokens * TOP_K * HIDDEN * 2 * INNER,
            ),
            "grouped_linear down": (
                partial(gpu.grouped_linear, acted, second, tokens, weights=weights),
                used * second.nbytes + acted.nbytes + (2 * TOP_K + 1) * num_tokens * HIDDEN * dtype.itemsize,
                2 * num_tokens * TOP_K * HIDDEN * INNER,
            ),
        }
        for op, (run, num_bytes, flops) in runs.items():
            report(op, f"{num_tokens} tokens", {"triton": run}, num_bytes=num_bytes, flops=flops)


if __name__ == "__main__":
    main()
