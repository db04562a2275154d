"""Compiles every Triton kernel as it would be launched on GPUs that are not there, and judges what came out.

The launchers run on tensors without storage while Triton believes in a device of the wanted architecture: so block
sizes, warps, stages, dtypes and divisibility are those of a real launch, which stops after compiling. Kernels must not
spill registers, must fit the shared memory, and must use the architecture's matrix instructions.

    python compile_kernels.py [--all] [--only WORD] [--target sm_90]    (without TRITON_INTERPRET)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import batchgen_kernels
import torch
import triton
from batchgen_kernels import attention, cache, fused, moe, sampling, tuning, work
from batchgen_kernels.draws import NUM_FIELDS, Bias, Penalties, SamplingRows
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

KIB = 1024


class Target(NamedTuple):
    gpu: GPUTarget
    shared: int  # bytes a program may have
    tall: str  # the matrix instruction for tiles of 64 rows and more
    short: str


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 99 * KIB, "mma.sync", "mma.sync"),  # as little as its successors 86, 89
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * KIB, "wgmma.mma_async", "mma.sync"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * KIB, "tcgen05.mma", "mma.sync"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * KIB, "v_mfma", "v_mfma"),
}
MATRIX = tuple(dict.fromkeys(name for target in TARGETS.values() for name in (target.tall, target.short)))


class Case(NamedTuple):
    """A call of launchers. `rows` are those of each tile that a kernel multiplies; none where it need not be told."""

    name: str
    launch: Callable[[], object]
    rows: Mapping[str, tuple[int, ...]] = {}
    targets: tuple[str, ...] = tuple(TARGETS)
    quick: tuple[str, ...] = tuple(TARGETS)  # those of the targets where it tells more than other cases do


class Compiled(NamedTuple):
    case: str
    kernel: str
    target: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    matrix: str  # the matrix instructions in it
    seconds: float = 0.0  # that the whole case took
    problem: str = ""


class Device:
    """What Triton asks of a driver before a launch."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        """Compiled kernels are kept by this."""
        return f"{self._target.backend} {self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def compiling(target: GPUTarget) -> Iterator[list[tuple[str, Any]]]:
    """Launches become compilations, whose (kernel name, result) the list collects."""
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        compiled.append((self.fn.__name__, kernel))
        return kernel

    triton.runtime.driver.set_active(Device(target))
    tuning.architecture.cache_clear()
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def judge(case: Case, kernel: str, name: str, compiled: Any) -> Compiled:
    target = TARGETS[name]
    if target.gpu.backend == "cuda":
        text = compiled.asm["ptx"]
        registers, spilled = _resources(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[-1])
        # Of the memory: scalar registers that spill go to lanes of vector registers
        spilled = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text)[-1])
    found = [name for name in MATRIX if name in text]
    shared = compiled.metadata.shared
    problems = []
    if spilled:
        problems.append(f"spills {spilled} bytes")
    if shared > target.shared:
        problems.append(f"shared memory {shared} of {target.shared}")
    expected = dict.fromkeys(target.tall if rows >= 64 else target.short for rows in case.rows.get(kernel, ()))
    problems += [f"no {instruction}" for instruction in expected if instruction not in found]
    return Compiled(case.name, kernel, name, registers, spilled, shared, " ".join(found), problem=", ".join(problems))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and the bytes of stack: registers that spill lie there, LOCAL stays 0."""
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(dump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[-1]
    return int(registers), int(stack)


def compile_case(case: Case, target: str) -> list[Compiled]:
    """One case for one architecture."""
    started = time.monotonic()
    with compiling(TARGETS[target].gpu) as compiled:
        try:
            case.launch()
        except Exception:
            problem = traceback.format_exc()
            compiled_to = compiled[-1][0] if compiled else "nothing"
            return [Compiled(case.name, f"after {compiled_to}", target, 0, 0, 0, "", problem=problem)]
    missing = set(case.rows) - {kernel for kernel, _ in compiled}
    distinct = {(kernel, result.hash): result for kernel, result in compiled}
    rows = [judge(case, kernel, target, result) for (kernel, _), result in distinct.items()]
    rows += [Compiled(case.name, kernel, target, 0, 0, 0, "", problem="not launched") for kernel in missing]
    return [row._replace(seconds=time.monotonic() - started) for row in rows]


def every_kernel() -> set[str]:
    """The names of the package's kernels: helpers that kernels call do not end in _kernel."""
    names = set()
    for module in pkgutil.iter_modules(batchgen_kernels.__path__, "batchgen_kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                names.add(name)
    return names


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def _floats(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


class Heads(NamedTuple):
    """Of a model's attention."""

    query: int
    kv: int
    key_dim: int
    value_dim: int


SMALL, MIDDLE, WIDE, LATENT = (
    Heads(14, 2, 64, 64),
    Heads(32, 8, 128, 128),
    Heads(16, 8, 256, 256),
    Heads(16, 16, 192, 128),
)
BFLOAT16, FLOAT16, FLOAT32, FLOAT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BLOCK_SIZE, NUM_TOKENS = 16, 256


def _pool(heads: Heads, dtype: torch.dtype) -> torch.Tensor:
    shape = attention.pool_shape(1 << 14, heads.kv, heads.key_dim, heads.value_dim, BLOCK_SIZE)
    return empty(*shape, dtype=dtype)


def _states(heads: Heads, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query and key, views of one matmul's output, and value."""
    fused_states = empty(NUM_TOKENS, heads.query + heads.kv, heads.key_dim, dtype=dtype)
    value = empty(NUM_TOKENS, heads.kv, heads.value_dim, dtype=dtype)
    return fused_states[:, : heads.query], fused_states[:, heads.query :], value


def _attention(
    name: str,
    heads: Heads,
    kv_dtype: torch.dtype = BFLOAT16,
    dtype: torch.dtype = BFLOAT16,
    *,
    targets: tuple[str, ...] = tuple(TARGETS),
    quick: tuple[str, ...] | None = None,
    **options: Any,
) -> list[Case]:
    """A step with chunks of prompts, and one of decodes as it is captured in a graph."""
    cases = []
    for decode in (False, True):

        def launch(decode: bool = decode) -> object:
            config = attention.launch_config(*heads, kv_dtype, decode=decode)
            items, entries, merged = _ints(300, work.ITEM_WORDS), _ints(NUM_TOKENS, work.ENTRY_WORDS), _ints(257)
            parts, lses = _floats(1024 * heads.query * heads.value_dim), _floats(1024 * heads.query)
            return attention.paged_attention(
                _states(heads, dtype)[0],
                _pool(heads, kv_dtype),
                _ints(512, 1024),
                work.Work(items, entries, merged, parts, lses, with_large=True, merge_programs=132),
                config=config,
                block_size=BLOCK_SIZE,
                value_dim=heads.value_dim,
                scale=0.1,
                **options,
            )

        tiles = (16, 64) if dtype != FLOAT32 else ()
        title = f"{'decodes' if decode else 'chunks'} {name}"
        cases.append(
            Case(title, launch, {"_paged_attention_kernel": tiles}, targets, targets if quick is None else quick)
        )
    return cases


def _rope(heads: Heads, kv_dtype: torch.dtype = BFLOAT16, *, rotary_dim: int, interleaved: bool = False) -> object:
    query, key, value = _states(heads, BFLOAT16)
    cos, sin = _floats(NUM_TOKENS, rotary_dim // 2), _floats(NUM_TOKENS, rotary_dim // 2)
    slots, pool = empty(NUM_TOKENS, dtype=torch.int64), _pool(heads, kv_dtype)
    return cache.rope_and_write(
        query, key, value, cos, sin, slots, pool, block_size=BLOCK_SIZE, interleaved=interleaved
    )


def _norms(dtype: torch.dtype) -> None:
    for dim in (576, 1024, 4096, 8192):
        fused.rms_norm(empty(NUM_TOKENS, dim, dtype=dtype), _floats(dim), 1e-6)
        x, residual = empty(NUM_TOKENS, dim, dtype=dtype), empty(NUM_TOKENS, dim, dtype=dtype)
        fused.rms_norm(x, _floats(dim), 1e-6, residual)
    for dim in (64, 128, 256):
        fused.rms_norm(empty(NUM_TOKENS, 48, dim, dtype=dtype)[:, :32], _floats(dim), 1e-6)


def _gates(dtype: torch.dtype) -> None:
    fused.silu_mul(empty(NUM_TOKENS, 2 * 14336, dtype=dtype))
    fused.gelu_tanh_mul(empty(NUM_TOKENS, 2 * 1536, dtype=dtype))
    fused.clamped_swiglu_mul(empty(NUM_TOKENS, 2 * 2880, dtype=dtype))


def _sample(vocab: int, *, everything: bool = False) -> object:
    """Plainly, or with all that a row may ask for."""
    packed = _ints(NUM_FIELDS, NUM_TOKENS)
    rows = SamplingRows.unpack(packed)
    if not everything:
        return sampling.sample(_floats(NUM_TOKENS, vocab), rows, vocab)
    costs = _floats(3, NUM_TOKENS).unbind()
    penalties = Penalties(*costs, _ints(512, 8192), _ints(NUM_TOKENS), _ints(NUM_TOKENS), _ints(NUM_TOKENS))
    return sampling.sample(
        _floats(NUM_TOKENS, vocab),
        rows,
        vocab,
        penalties=penalties,
        bias=Bias(_ints(NUM_TOKENS, 300), _floats(NUM_TOKENS, 300)),
        allowed=_ints(NUM_TOKENS, (vocab + 31) // 32),
        num_logprobs=20,
    )


def _noise() -> object:
    ints = _ints(NUM_TOKENS)
    return sampling.keyed_gumbel(empty(NUM_TOKENS, dtype=torch.int64), ints, ints, 151936)


def _experts(num_tokens: int, *, dtype: torch.dtype = BFLOAT16, bias: bool = False) -> object:
    """Both matmuls of 128 experts, 8 for each token: Qwen3-30B-A3B's."""
    num_experts, top_k, hidden, inner = 128, 8, 2048, 768
    tile = moe.tile_rows(num_tokens * top_k, num_experts)
    tokens = moe.sort_tokens(empty(num_tokens, top_k, dtype=torch.int64), num_experts, tile)
    biases = empty(num_experts, 2 * inner, dtype=dtype) if bias else None
    first, second = empty(num_experts, 2 * inner, hidden, dtype=dtype), empty(num_experts, hidden, inner, dtype=dtype)
    gate_up = moe.grouped_linear(empty(num_tokens, hidden, dtype=dtype), first, tokens, biases)
    return moe.grouped_linear(gate_up[:, :inner], second, tokens, weights=_floats(num_tokens, top_k))


HOPPER, WITH_FLOAT8 = ("sm_90",), ("sm_90", "sm_100", "gfx942")
MATMUL = "_grouped_linear_kernel"
CASES = [
    *_attention("64", SMALL),
    *_attention("64, sinks and window", Heads(64, 8, 64, 64), window=128, sinks=_floats(64), quick=HOPPER),
    *_attention("128", MIDDLE),
    *_attention("256, soft cap and window", WIDE, window=1024, soft_cap=50.0),
    *_attention("192/128", LATENT, quick=HOPPER),
    *_attention("64 float8", SMALL, FLOAT8, targets=WITH_FLOAT8, quick=()),
    *_attention("128 float8", MIDDLE, FLOAT8, targets=WITH_FLOAT8, quick=HOPPER),
    *_attention("256 float8", WIDE, FLOAT8, targets=WITH_FLOAT8, quick=()),
    *_attention("192/128 float8", LATENT, FLOAT8, targets=WITH_FLOAT8, quick=()),
    *_attention("128 float16", MIDDLE, FLOAT16, FLOAT16, quick=()),
    *_attention("64 float32", SMALL, FLOAT32, FLOAT32, quick=()),
    Case("rope 128", lambda: _rope(MIDDLE, rotary_dim=128)),
    Case("rope 128 float8", lambda: _rope(MIDDLE, FLOAT8, rotary_dim=128), targets=WITH_FLOAT8, quick=WITH_FLOAT8),
    Case("rope 64 of 192/128", lambda: _rope(LATENT, rotary_dim=64, interleaved=True)),
    Case("norms", lambda: _norms(BFLOAT16)),
    Case("norms float16", lambda: _norms(FLOAT16), quick=()),
    Case("gates", lambda: _gates(BFLOAT16)),
    Case("gates float16", lambda: _gates(FLOAT16), quick=()),
    Case("noise", _noise),
    Case("sampling", lambda: _sample(151936), quick=HOPPER),
    Case("sampling 49152", lambda: _sample(49152), quick=()),
    Case("sampling with everything", lambda: _sample(151936, everything=True)),
    Case("experts, 128 tokens", lambda: _experts(128), {MATMUL: (16,)}),
    Case("experts, 1024 tokens", lambda: _experts(1024), {MATMUL: (64,)}),
    Case("experts, 8192 tokens", lambda: _experts(8192, bias=True), {MATMUL: (128,)}),
    Case("experts, 8192 tokens float16", lambda: _experts(8192, dtype=FLOAT16), {MATMUL: (128,)}, quick=()),
    Case("experts, 8192 tokens float32", lambda: _experts(8192, dtype=FLOAT32), quick=HOPPER),
]


def _compile_case(task: tuple[int, str]) -> list[Compiled]:
    """In a process of the pool, to which no closure can be sent."""
    index, target = task
    return compile_case(CASES[index], target)


def line(row: Compiled) -> str:
    return (
        f"{row.case:34} {row.kernel:28} {row.target:7} registers {row.registers:3} spilled {row.spilled:4} "
        f"shared {row.shared:6} {row.seconds:5.1f} s {row.matrix:26} {row.problem}"
    ).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="cases too that differ little from others")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--target", choices=tuple(TARGETS), action="append", help="default: each")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    tasks = [
        (index, target)
        for index, case in enumerate(CASES)
        for target in (case.targets if given.all else case.quick)
        if given.only in case.name and target in (given.target or TARGETS)
    ]
    print(f"Triton {triton.__version__}: {len(tasks)} cases")
    launched, bad = set(), 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            for row in itertools.chain.from_iterable(pool.imap(_compile_case, tasks)):
                print(line(row), flush=True)
                launched.add(row.kernel)
                bad += bool(row.problem)
    if not given.only:
        for kernel in sorted(every_kernel() - launched):
            print(f"{kernel}: no case launches it")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
