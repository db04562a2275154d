"""Sorting by expert and both matmuls of a mixture of experts on a GPU, at the shapes of a model with 128 experts.

What moves is the weights of all experts in use, and what goes in and out.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

import torch
import triton.testing
from batchgen_kernels import gpu, moe

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    dtype = getattr(torch, parser.parse_args().dtype)
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    make = {"dtype": dtype, "device": "cuda"}
    first = torch.randn(EXPERTS, 2 * INNER, HIDDEN, **make) * 0.02
    second = torch.randn(EXPERTS, HIDDEN, INNER, **make) * 0.02
    for num_tokens in (1, 32, 256, 1024, 8192):
        x, acted = torch.randn(num_tokens, HIDDEN, **make), torch.randn(num_tokens * TOP_K, INNER, **make)
        weights, expert_ids = torch.rand(num_tokens, EXPERTS, device="cuda").topk(TOP_K, dim=1)
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
            taken = triton.testing.do_bench(run) / 1e3
            line = {"op": op, "case": f"{num_tokens} tokens", "by": torch.cuda.get_device_name()}
            line |= {"ms": round(taken * 1e3, 4), "GB/s": round(num_bytes / taken / 1e9, 1)}
            print(json.dumps(line | {"TFLOP/s": round(flops / taken / 1e12, 1)}), flush=True)


if __name__ == "__main__":
    main()
