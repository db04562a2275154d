"""Timing for the benchmarks: the best of several runs, native beside twin, one JSON line each."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from batchgen_kernels import cpu, reference


def parse() -> tuple[Any, torch.dtype]:
    """The command line that every benchmark has: which instruction set and which numbers.

    On a GPU the ops are the Triton ones, and new tensors are made there.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--isa", choices=cpu.ISAS, help="default: the machine's best")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    if given.device == "cuda":
        from batchgen_kernels import gpu

        torch.set_default_device("cuda")
        return gpu, getattr(torch, given.dtype)
    ops = cpu.load()
    if ops is None:
        parser.error("the native ops were not built: pip install -e . or python setup.py build_ext --inplace")
    return (ops.with_isa(given.isa) if given.isa else ops), getattr(torch, given.dtype)


def parse_gpu(description: str | None = None) -> torch.dtype:
    """The command line of benchmarks that need a GPU, where new tensors are made from here on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    torch.set_default_device("cuda")
    return getattr(torch, given.dtype)


def by_name(ops: Any) -> dict[str, Any]:
    """The ops and their twin, by what they run on."""
    name = ops.isa if isinstance(ops, cpu.Ops) else torch.cuda.get_device_name()
    return {name: ops, "twin": reference}


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def seconds(run: Callable[[], object], budget: float = 0.5, most: int = 200) -> float:
    """The shortest of as many runs as fit the budget, at least 3, after one to warm up."""
    once = _on_gpu if on_gpu() else _on_cpu
    once(run)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget and len(times) < most):
        times.append(once(run))
    return min(times)


def _on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _on_gpu(run: Callable[[], object]) -> float:
    """Between two points of the stream: what the host does before the first launch counts as well."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def report(
    op: str, case: str, runs: Mapping[str, Callable[[], object]], *, num_bytes: float, flops: float = 0, calls: int = 1
) -> None:
    """Print a line per implementation; a run is `calls` calls, which move `num_bytes` and compute `flops` each."""
    for name, run in runs.items():
        taken = seconds(run) / calls
        line: dict[str, object] = {"op": op, "case": case, "by": name}
        if on_gpu():
            line["device"] = torch.cuda.get_device_name()
        else:
            line["threads"] = torch.get_num_threads()
        line["ms"] = round(taken * 1e3, 4)
        line["GB/s"] = round(num_bytes / taken / 1e9, 1)
        if flops:
            line["GFLOP/s"] = round(flops / taken / 1e9, 1)
        print(json.dumps(line), flush=True)


def report_machine(dtype: torch.dtype) -> None:
    """What there is to be had: the rate of a large matmul, and of reading memory."""
    size = 8192 if on_gpu() else 2048
    a, b = torch.randn(2, size, size).to(dtype)
    report("machine", f"matmul {size}", {"torch": lambda: a @ b}, num_bytes=3 * a.nbytes, flops=2 * size**3)
    large = torch.ones(1 << 28)
    report("machine", "read 1 GiB", {"torch": large.sum}, num_bytes=large.nbytes)
