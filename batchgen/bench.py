"""The engine measured: timing, and this machine's roofline; prints one JSON line."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from batchgen_kernels import cpu as native
from batchgen_kernels import reference as reference_ops

from batchgen import processes
from batchgen.engine.engine import Engine
from batchgen.engine.step import StepPlan, StepResult
from batchgen.errors import BatchgenError, ConfigError, NoInputError
from batchgen.loader import DTYPES, Model, layer_weights
from batchgen.models.config import ModelConfig
from batchgen.models.layers import linear_kind
from batchgen.planner import Planner
from batchgen.spec import EngineSpec, ModelSpec
from batchgen.types import Completion, Demand, Request, RowKey, SamplingParams
from batchgen.workloads import WORKLOADS, Item


def load_workload(path: str) -> list[Item]:
    """A JSON list of {"prompt": [token ids], "out": number of tokens}."""
    try:
        rows = orjson.loads(Path(path).read_bytes())
        return [Item(np.asarray(row["prompt"], np.int32), int(row["out"])) for row in rows]
    except FileNotFoundError:
        raise NoInputError(f"{path}: no such workload file") from None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f'{path}: expected a JSON list of {{"prompt": [token ids], "out": number}}, found {error!r}'
        ) from None


class TimedRunner:
    """Passes an engine's steps on to its runner and counts the time they take: the host's share is what is left.

    On a GPU that is the time in which it has no step to work on.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._runner = engine.runner
        self._device = device
        self._marks: list[Any] = []  # on a GPU: the beginning of a step, its end, the next one's beginning, ...
        self._stats, self._block_size = engine.stats, engine.settings.block_size
        self._seconds = 0.0
        self.steps = 0
        self.rows = 0  # decoding or prefilling samples, summed over steps
        self.tokens = 0  # computed, summed over steps
        self.context = 0  # tokens whose keys and values had to be read, summed over steps; shared ones count once
        self.blocks = 0  # of the KV pool that samples hold, summed over steps
        self.most_blocks = 0

    def submit(self, plan: StepPlan) -> Any:
        blocks = self._stats().kv_blocks_used
        self.blocks += blocks
        self.most_blocks = max(self.most_blocks, blocks)
        self.steps += 1
        self.rows += len(plan.slots)
        self.tokens += plan.num_tokens
        self.context += min(int((plan.starts + plan.lengths).sum()), blocks * self._block_size)
        self._mark()
        return self._timed(lambda: self._runner.submit(plan))

    def sample(self, handle: Any) -> None:
        self._timed(lambda: self._runner.sample(handle))
        self._mark()

    def collect(self, handle: Any) -> StepResult:
        result: StepResult = self._timed(lambda: self._runner.collect(handle))
        return result

    def _timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self._seconds += time.perf_counter() - began

    def _mark(self) -> None:
        """A point of the GPU's stream, which it passes when all before it is done."""
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    @property
    def seconds(self) -> float:
        """That the device was at work."""
        if self._device.type != "cuda":
            return self._seconds
        torch.cuda.synchronize()
        steps = zip(self._marks[::2], self._marks[1::2], strict=False)  # one that failed has no end
        return sum(began.elapsed_time(ended) for began, ended in steps) / 1e3


def measure_roofline(
    dtype: torch.dtype, quantization: str | None, device: torch.device, seconds: float = 0.5
) -> tuple[float, float]:
    """The rates of this machine: a linear layer of the model's kind at 512 rows, FLOP/s; reading memory, bytes/s.

    On a GPU a large product, and a copy, which counts the bytes read and those written.
    """
    if device.type != "cpu":
        return measure_matmul(dtype, device, seconds), measure_copy(device, seconds)
    ops = native.load() or reference_ops
    linear = linear_kind(dtype, quantization, ops)(2048, (2048,), bias=False)
    linear.load_weight(0, torch.randn(2048, 2048).to(dtype))
    x = torch.randn(512, 2048).to(dtype)
    matmul = 2 * 512 * 2048 * 2048 / best_time(lambda: linear(x), seconds)
    big = torch.ones(64 << 20, dtype=torch.float32)  # 256 MiB: more than any cache
    return matmul, big.nbytes / best_time(big.sum, seconds)


def measure_matmul(dtype: torch.dtype, device: torch.device, seconds: float, size: int = 8192) -> float:
    """FLOP/s of a product of random square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / best_time(lambda: torch.matmul(a, b, out=out), seconds, device)


def measure_copy(device: torch.device, seconds: float, num_bytes: int = 4 << 30) -> float:
    """Bytes read and written a second."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / best_time(lambda: target.copy_(source), seconds, device)


def best_time(call: Callable[[], Any], seconds: float, device: torch.device | None = None) -> float:
    """The shortest of the runs that fit into `seconds`, of at least one after one to warm up; on a GPU until the device
    is done."""

    def run() -> float:
        began = time.perf_counter()
        call()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    run()
    best, end = run(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, run())
    return best


def floor_seconds(
    config: ModelConfig,
    work: TimedRunner,
    sampled: int,
    *,
    weight_size: int,
    kv_size: int,
    matmul_rate: float,
    memory_rate: float,
) -> float:
    """The least time for this work on this machine: its matmuls at the measured rate, plus its KV at memory speed.

    Every computed token passes all layers, every sampled one the head; attention's own arithmetic, like norms and
    sampling, is taken as free, and so are the weights where a step's matmuls last longer than reading them. Sizes are
    the bytes of one number.
    """
    body = layer_weights(config)
    cached = sum(layer.num_kv_heads * (layer.head_dim + layer.value_size) for layer in config.layers) * kv_size
    head = config.hidden_size * config.vocab_size
    arithmetic = 2 * (body * work.tokens + head * sampled) / matmul_rate
    weights = (body + head) * weight_size * work.steps / memory_rate
    return max(arithmetic, weights) + cached * work.context / memory_rate


def engine(
    *,
    model: ModelSpec,
    spec: EngineSpec,
    random_weights: dict[str, Any] | None = None,
    workload: str = "mixed",
    workload_file: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Run a workload through planner and engine, everything submitted at once, and say where the time went.

    Equal prompts are computed as often as they occur. `random_weights` is a config.json: a model of that shape without
    files, of which `model.path` is but the name.
    `load_s` is the model and the KV pool, `startup_s` from the start of the process to where the first step could run,
    `process_s` to the workload's end. `occupancy` is of the rows that may run at once, `kv_used_*` of the KV pool;
    `roofline_share` is the least time for this work on this machine against what it took, `host_share` the time
    outside the model's steps. `save` names a file for the generated token ids (a JSON list of lists, in the workload's
    order).
    """
    if workload_file is None and workload not in WORKLOADS:
        raise ConfigError(f"workload {workload!r}: expected one of {', '.join(WORKLOADS)}")
    items = load_workload(workload_file) if workload_file else WORKLOADS[workload].items(np.random.default_rng(0))
    demand = Demand([item.prompt for item in items], [item.output_tokens for item in items], complete=True)
    began = time.perf_counter()
    loaded = Model(model, spec, random_weights=random_weights)
    if (largest := max(int(item.prompt.max(initial=0)) for item in items)) >= loaded.config.vocab_size:
        raise ConfigError(f"workload: token id {largest}, but the model has only {loaded.config.vocab_size}")
    on_gpu = loaded.device != "cpu"
    what, rates, measuring = (DTYPES[loaded.dtype], model.quantization, torch.device(loaded.device)), None, 0.0
    if on_gpu:  # before the KV pool takes the memory that this needs
        measured = time.perf_counter()
        rates = measure_roofline(*what)
        torch.cuda.empty_cache()
        measuring = time.perf_counter() - measured
    engine = loaded.engine(lambda: demand)
    load_seconds, startup_seconds = time.perf_counter() - began - measuring, processes.age() - measuring
    # On a GPU every number of rows is met before time counts: kernels are compiled and graphs captured there
    rows = min(len(items), engine.settings.max_num_seqs) if on_gpu else 2
    warm = [Item(np.full(48, 100 + i % 64, np.int32), 4 + i // 8) for i in range(rows)]
    for _ in engine.generate(_requests(warm)):
        pass
    before = engine.stats()
    timed = engine.runner = TimedRunner(engine, torch.device(loaded.device))
    began = time.perf_counter()
    planner = Planner(engine, dedupe=False)
    for request in _requests(items):
        planner.add(request)
    completions: dict[int, Completion] = {}
    while planner.has_work:
        completions.update((done.key.row, done) for done in planner.step(more=False))
    seconds, process_seconds = time.perf_counter() - began, processes.age()
    stats = engine.stats()
    for row, item in enumerate(items):
        done = completions[row]
        if len(done.token_ids) != item.output_tokens:
            why = done.error.message if done.error else f"the context of {loaded.max_model_len} tokens is too short"
            raise BatchgenError(f"workload row {row}: {len(done.token_ids)} of {item.output_tokens} tokens: {why}")
    if save:
        Path(save).write_bytes(orjson.dumps([completions[row].token_ids.tolist() for row in range(len(items))]))
    prompt_tokens = sum(len(item.prompt) for item in items)
    output_tokens = sum(item.output_tokens for item in items)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    kv_dtype = loaded.dtype if spec.kv_dtype == "auto" else spec.kv_dtype
    matmul_rate, memory_rate = rates or measure_roofline(*what)
    floor = floor_seconds(
        loaded.config,
        timed,
        output_tokens,
        weight_size=1 if model.quantization else DTYPES[loaded.dtype].itemsize,
        kv_size=DTYPES[kv_dtype].itemsize,
        matmul_rate=matmul_rate,
        memory_rate=memory_rate,
    )
    return {
        "bench": "engine",
        "workload": Path(workload_file).name if workload_file else workload,
        "model": model.path,
        "random_weights": random_weights is not None,
        "device": loaded.device,
        "dtype": loaded.dtype,
        "quantization": model.quantization,
        "kv_dtype": kv_dtype,
        "requests": len(items),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": round(seconds, 3),
        "prompt_tokens_per_s": round(prompt_tokens / seconds, 1),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / seconds, 1),
        "load_s": round(load_seconds, 2),
        "startup_s": round(startup_seconds, 2),
        "process_s": round(process_seconds, 2),
        "roofline_share": round(floor / seconds, 3),
        "matmul_gflop_per_s": round(matmul_rate / 1e9, 1),
        "memory_gb_per_s": round(memory_rate / 1e9, 1),
        "steps": timed.steps,
        "mean_rows_per_step": round(timed.rows / timed.steps, 1),
        "occupancy": round(timed.rows / timed.steps / engine.settings.max_num_seqs, 3),
        "kv_blocks": stats.kv_blocks_total,
        "kv_used_mean": round(timed.blocks / timed.steps / stats.kv_blocks_total, 3),
        "kv_used_peak": round(timed.most_blocks / stats.kv_blocks_total, 3),
        "cached_tokens": stats.cached_tokens - before.cached_tokens,
        "recomputed_tokens": stats.recomputed_tokens - before.recomputed_tokens,
        "host_share": round(1 - timed.seconds / seconds, 4),
        "peak_rss_mib": peak_mib,
    }


def _requests(items: Sequence[Item]) -> list[Request]:
    return [
        Request(RowKey(0, row), item.prompt, SamplingParams(max_tokens=item.output_tokens, ignore_eos=True), row)
        for row, item in enumerate(items)
    ]
