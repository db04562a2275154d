"""Checks and measures everything that needs a GPU, in under six minutes: `make gpu-check`, explained in docs/gpu.md.

Each part runs in a process of its own, so that one that crashes or hangs does not take the others with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]
BUDGET = 345.0  # seconds for all parts
QWEN, LLAMA = "qwen3-0.6b", "llama-3.1-8b"
SMOKE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "float32",
}


class Part(NamedTuple):
    name: str
    limit: float  # seconds
    arguments: tuple[str, ...] = ()  # of pytest; none: the function measures


PARTS = [
    Part("device", 60),
    Part("rates", 40),
    Part("attention", 60),
    Part("kernels", 120, ("tests/triton", "-k", "not compil")),  # what is compiled for other devices is no matter here
    Part("engine", 90, ("tests/gpu/test_engine.py",)),
    Part(f"nano {QWEN}", 60),
    Part(f"nano {LLAMA}", 90),
    Part(f"transformers {QWEN}", 70),
    Part(f"transformers {LLAMA}", 90),
]
SMOKE_PARTS = [Part(name, 90) for name in ("device", "rates", "attention", "nano smoke", "transformers smoke")]


class Goal(NamedTuple):
    part: str
    key: str
    least: float | None = None
    most: float | None = None

    def reached(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value < self.most)

    def __str__(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"under {self.most:g}"


GOALS = [
    Goal("attention", "share_of_copy", least=0.80),
    Goal(f"nano {QWEN}", "output_tokens_per_s", least=28_000),
    Goal(f"nano {QWEN}", "roofline_share", least=0.70),
    Goal(f"nano {QWEN}", "host_share", most=0.03),
    Goal(f"nano {LLAMA}", "output_tokens_per_s", least=10_000),
    Goal(f"nano {LLAMA}", "roofline_share", least=0.70),
    Goal(f"nano {LLAMA}", "host_share", most=0.03),
]


# -- parts, each in its own process ------------------------------------------------------------------------------------


def torch_device(smoke: bool) -> torch.device:
    import torch

    return torch.device("cpu" if smoke else "cuda")


def device(smoke: bool) -> dict[str, Any]:
    """What this machine is."""
    import platform

    lacking = [name for name in ("pydantic", "orjson", "click", "pytest") if not importlib.util.find_spec(name)]
    if lacking:
        raise SystemExit(f"not installed: {', '.join(lacking)}; docs/gpu.md says which wheels to bring")

    import torch
    import transformers
    import triton

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }
    if smoke:
        return {"device": "cpu", **found}
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    properties = torch.cuda.get_device_properties(0)
    found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    found["multiprocessors"] = properties.multi_processor_count
    return {"device": properties.name, **found}


def rates(smoke: bool) -> dict[str, Any]:
    """What there is to be had: the bytes of a copy, the arithmetic of a large product."""
    import torch

    from batchgen import bench

    at, seconds = torch_device(smoke), 0.1 if smoke else 1.0
    size, num_bytes = (256, 1 << 24) if smoke else (8192, 4 << 30)
    return {
        "copy_gb_per_s": round(bench.measure_copy(at, seconds, num_bytes) / 1e9, 1),
        "matmul_tflop_per_s": round(bench.measure_matmul(torch.bfloat16, at, seconds, size) / 1e12, 2),
    }


def attention(smoke: bool) -> dict[str, Any]:
    """Keys and values that decoding rows read, in bytes a second; contexts are half to one and a half times the mean.

    `share_of_copy` is of the first case, the shape of nano's middle.
    """
    import torch
    from batchgen_kernels import reference

    from batchgen import bench, loader, spec

    given = spec.EngineSpec(device="cpu") if smoke else spec.EngineSpec()
    at = loader.open_device(given.device)
    cases = {  # heads, KV heads, rows, mean context
        "256 rows at 1024, 16 heads": (16, 8, 256, 1024),
        "256 rows at 1024, 32 heads": (32, 8, 256, 1024),
        "16 rows at 8192, 32 heads": (32, 8, 16, 8192),
    }
    if smoke:
        cases = {"4 rows at 64, 4 heads": (4, 2, 4, 64)}
    copied = bench.measure_copy(at.torch_device, 0.1 if smoke else 0.5, 1 << 24 if smoke else 4 << 30)
    found = {
        name: decode_rate(loader.make_backend(given, at, reference), at, *case, seconds=0.1 if smoke else 0.5)
        for name, case in cases.items()
    }
    if not smoke:
        torch.cuda.empty_cache()
    first = next(iter(found.values()))
    return {"share_of_copy": round(first / copied, 4), **{f"{k}, GB/s": round(v / 1e9, 1) for k, v in found.items()}}


def decode_rate(
    backend: Any, at: Any, num_heads: int, num_kv_heads: int, rows: int, mean: int, *, seconds: float
) -> float:
    """Bytes a second; layers are read one after the other, and are together larger than any cache."""
    import numpy as np
    import torch

    from batchgen import bench
    from batchgen.attention.base import AttentionMetadata
    from batchgen.models.config import KVSpec

    head_dim, num_layers, size = 128, 4, backend.block_size
    contexts = np.linspace(mean // 2, mean + mean // 2, rows).astype(np.int32)
    needed = -(-contexts // size)
    table = np.zeros((rows, int(needed.max())), np.int32)
    ids = np.random.default_rng(0).permutation(int(needed.sum())).astype(np.int32)
    for row, own in enumerate(np.split(ids, np.cumsum(needed)[:-1])):
        table[row, : len(own)] = own
    layers = [KVSpec(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)] * num_layers
    dtype = torch.bfloat16
    backend.allocate(layers, len(ids), dtype)
    last = contexts - 1
    slots = table[np.arange(rows), last // size].astype(np.int64) * size + last % size
    metadata = AttentionMetadata(
        np.arange(rows + 1, dtype=np.int32),
        contexts,
        np.arange(rows, dtype=np.int32),
        torch.from_numpy(table).to(at.torch_device),
        table,
        torch.from_numpy(slots).to(at.torch_device),
    )
    backend.prepare(metadata)
    query = torch.randn(rows, num_heads, head_dim, device=at.torch_device).to(dtype)

    def run() -> None:
        for layer in range(num_layers):
            backend.attend(layer, query, metadata)

    num_bytes = num_layers * int(contexts.sum()) * num_kv_heads * 2 * head_dim * dtype.itemsize
    return num_bytes / bench.best_time(run, seconds, at.torch_device)


def nano(config: str, smoke: bool) -> dict[str, Any]:
    """The workload through this engine."""
    from batchgen import bench, spec

    return bench.engine(
        model=spec.ModelSpec(path=config),
        spec=spec.EngineSpec(device="cpu") if smoke else spec.EngineSpec(),
        random_weights=shape(config),
        workload="nano",
        workload_file=smoke_workload() if smoke else None,
    )


def peer(config: str, limit: float, smoke: bool) -> dict[str, Any]:
    """The same requests through transformers' continuous batching, with its own choice of everything.

    Where it does not finish within `limit` seconds, `output_tokens_per_s` is what it would have had to exceed.
    """
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    from batchgen.bench import load_workload
    from batchgen.workloads import WORKLOADS

    began = time.perf_counter()
    items = load_workload(smoke_workload()) if smoke else WORKLOADS["nano"].items(np.random.default_rng(0))
    raw = {key: value for key, value in shape(config).items() if key not in ("architectures", "dtype", "model_type")}
    with torch_device(smoke):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(shape(config)["model_type"], **raw), dtype=getattr(torch, shape(config)["dtype"])
        ).eval()
    longest = max(item.output_tokens for item in items)
    settings = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=-1)
    hints = WorkloadHints(max(len(item.prompt) for item in items), longest, len(items))
    total, tokens, left = sum(item.output_tokens for item in items), 0, len(items)
    sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64) if smoke else None  # else all memory is taken
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=sizes, workload_hints=hints, timeout=5
    ) as manager:
        attention = model.config._attn_implementation
        start = time.perf_counter()
        for item in items:
            manager.add_request(item.prompt.tolist(), max_new_tokens=item.output_tokens)
        while left and time.perf_counter() - began < limit:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise SystemExit("transformers' generation thread ended early")
            elif result.error is not None:
                raise SystemExit(f"transformers: {result.error}")
            elif result.is_finished():
                tokens, left = tokens + len(result.generated_tokens), left - 1
        seconds = time.perf_counter() - start
    if not left and tokens != total:
        raise SystemExit(f"transformers: {tokens} tokens, expected {total}")
    return {
        "finished": not left,
        "attention": attention,
        "requests": len(items),
        "output_tokens": total,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(total / seconds, 1),
    }


def shape(config: str) -> dict[str, Any]:
    from batchgen.weights.random import find_config

    return SMOKE_CONFIG if config == "smoke" else find_config(config)


def smoke_workload() -> str:
    file = Path(tempfile.gettempdir(), f"gpu-check-{os.getpid()}.json")
    file.write_text(json.dumps([{"prompt": [5 + row] * 20, "out": 8 + row} for row in range(6)]))
    return str(file)


def measure(part: Part, smoke: bool) -> dict[str, Any]:
    kind, _, config = part.name.partition(" ")
    if kind == "nano":
        return nano(config, smoke)
    if kind == "transformers":
        return peer(config, part.limit - 10, smoke)
    return {"device": device, "rates": rates, "attention": attention}[kind](smoke)


# -- the whole ---------------------------------------------------------------------------------------------------------


def run_part(part: Part, limit: float, smoke: bool) -> dict[str, Any]:
    """Its figures and `status`: passed, failed (with the end of what it said) or too slow."""
    began = time.perf_counter()
    if part.arguments:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *part.arguments]
        if importlib.util.find_spec("xdist"):  # most of the time goes into compiling
            command += ["-n", "8"]
    else:
        command = [sys.executable, __file__, "--part", part.name, *(["--smoke"] if smoke else [])]
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if not smoke:
        environment["TRITON_INTERPRET"] = "0"
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it started too
                process.wait()
        said.seek(0)
        lines = said.read().splitlines()
    found: dict[str, Any] = {"wall_s": round(time.perf_counter() - began, 1)}
    if code != 0:
        found |= {"status": "failed" if code is not None else "too slow", "output": lines[-60:]}
    elif part.arguments:
        found |= {"status": "passed", "summary": lines[-1] if lines else ""}
    else:
        answer = next(line for line in reversed(lines) if line.startswith("{"))  # libraries may talk at their end
        found |= {"status": "passed", **json.loads(answer)}
    return found


def run_parts(parts: list[Part], smoke: bool, show: Callable[[Part, dict[str, Any]], None]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    end = time.perf_counter() + BUDGET
    for part in parts:
        left = end - time.perf_counter()
        if parts[0].name in results and results[parts[0].name]["status"] != "passed":
            results[part.name] = {"status": "not run", "output": [f"{parts[0].name} failed"]}
        elif left < 5:
            results[part.name] = {"status": "not run", "output": ["no time was left"]}
        else:
            results[part.name] = run_part(part, min(part.limit, left), smoke)
        show(part, results[part.name])
    return results


SHOWN = (
    "share_of_copy",
    "copy_gb_per_s",
    "matmul_tflop_per_s",
    "output_tokens_per_s",
    "roofline_share",
    "host_share",
    "load_s",
    "attention",
    "summary",
)


def show(part: Part, result: dict[str, Any]) -> None:
    """A line of the table; what a failure said follows it."""
    if part.name == "device":
        figures = {key: value for key, value in result.items() if key not in ("status", "wall_s", "output")}
    else:
        figures = {key: result[key] for key in SHOWN if key in result}
    figures |= {key: value for key, value in result.items() if key.endswith(", GB/s")}
    if result.get("finished") is False:
        figures["not finished, so less than"] = figures.pop("output_tokens_per_s")
    text = ", ".join(f"{key} {value}" for key, value in figures.items())
    print(f"{part.name:28} {result['status']:9} {result.get('wall_s', 0.0):6.1f} s  {text}", flush=True)
    if "output" in result:
        print("\n".join(f"    {line}" for line in result["output"][-15:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--only", help="parts whose names hold this text (and the first)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: does this program still work?")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    parts = SMOKE_PARTS if given.smoke else PARTS
    if given.part:
        (part,) = (part for part in parts if part.name == given.part)
        print(json.dumps(measure(part, given.smoke)))
        return 0
    if given.only:
        parts = parts[:1] + [part for part in parts[1:] if given.only in part.name]
    results = run_parts(parts, given.smoke, show)
    goals = []
    for goal in GOALS:
        if (value := results.get(goal.part, {}).get(goal.key)) is not None:
            reached = goal.reached(value)
            goals.append({"part": goal.part, "key": goal.key, "value": value, "goal": str(goal), "reached": reached})
            print(f"goal: {goal.part}, {goal.key} {goal}: {value}, {'reached' if reached else 'MISSED'}")
    for config in (QWEN, LLAMA):
        ours, theirs = (
            results.get(f"{who} {config}", {}).get("output_tokens_per_s") for who in ("nano", "transformers")
        )
        if ours and theirs:
            print(f"{config}: {ours / theirs:.2f} times transformers' continuous batching")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"parts": results, "goals": goals}, indent=1))
    bad = [name for name, result in results.items() if result["status"] != "passed"]
    print(f"{len(results) - len(bad)} of {len(results)} parts passed" + (f"; not: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
