"""Compiles every Triton kernel as it would be launched on GPUs that are not there, and judges what came out.

The launchers run on tensors without storage while Triton believes in a device of the wanted architecture: so block
sizes, warps, stages, dtypes and divisibility are those of a real launch, which stops after compiling. Kernels must not
spill registers, must fit the shared memory, and must use the architecture's matrix instructions.

    python compile_kernels.py [--only WORD] [--target sm_90] [--processes 2]    (without TRITON_INTERPRET)
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import batchgen_kernels
import torch
import triton
from batchgen_kernels import moe, tuning
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

KIB = 1024


class Target(NamedTuple):
    gpu: GPUTarget
    shared: int  # bytes a program may have
    tall: str  # the matrix instruction for tiles of 64 rows and more
    short: str


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * KIB, "mma.sync", "mma.sync"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * KIB, "wgmma.mma_async", "mma.sync"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * KIB, "tcgen05.mma", "mma.sync"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * KIB, "v_mfma", "v_mfma"),
}
MATRIX = tuple(dict.fromkeys(name for target in TARGETS.values() for name in (target.tall, target.short)))


class Case(NamedTuple):
    """One call of launchers. `rows` are those of the tiles of the kernels that multiply matrices."""

    name: str
    launch: Callable[[], object]
    rows: Mapping[str, int] = {}
    targets: tuple[str, ...] = tuple(TARGETS)


class Compiled(NamedTuple):
    case: str
    kernel: str
    target: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    matrix: str  # the matrix instructions in it
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
        spilled = 4 * sum(int(count) for count in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text))
    found = [name for name in MATRIX if name in text]
    shared = compiled.metadata.shared
    problems = []
    if spilled:
        problems.append(f"spills {spilled} bytes")
    if shared > target.shared:
        problems.append(f"shared memory {shared} of {target.shared}")
    if rows := case.rows.get(kernel, 0):
        expected = target.tall if rows >= 64 else target.short
        if expected not in found:
            problems.append(f"no {expected}")
    return Compiled(case.name, kernel, name, registers, spilled, shared, " ".join(found), ", ".join(problems))


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
    with compiling(TARGETS[target].gpu) as compiled:
        try:
            case.launch()
        except Exception:
            problem = traceback.format_exc()
            compiled_to = compiled[-1][0] if compiled else "nothing"
            return [Compiled(case.name, f"after {compiled_to}", target, 0, 0, 0, "", problem)]
    missing = set(case.rows) - {kernel for kernel, _ in compiled}
    rows = [judge(case, kernel, target, result) for kernel, result in dict(compiled).items()]
    return rows + [Compiled(case.name, kernel, target, 0, 0, 0, "", "not launched") for kernel in missing]


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


def _experts(num_tokens: int, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> Callable[[], object]:
    """Both matmuls of 128 experts, 8 for each token: Qwen3-30B-A3B's."""
    num_experts, top_k, hidden, inner = 128, 8, 2048, 768

    def launch() -> object:
        tile = moe.tile_rows(num_tokens * top_k, num_experts)
        tokens = moe.sort_tokens(empty(num_tokens, top_k, dtype=torch.int64), num_experts, tile)
        first = empty(num_experts, 2 * inner, hidden, dtype=dtype)
        gate_up = moe.grouped_linear(
            empty(num_tokens, hidden, dtype=dtype),
            first,
            tokens,
            empty(num_experts, 2 * inner, dtype=dtype) if bias else None,
        )
        second = empty(num_experts, hidden, inner, dtype=dtype)
        weights = empty(num_tokens, top_k, dtype=torch.float32)
        return moe.grouped_linear(gate_up[:, :inner], second, tokens, weights=weights)

    return launch


MATMUL = "_grouped_linear_kernel"
CASES = [
    Case("experts, 128 tokens", _experts(128), {MATMUL: 16}),
    Case("experts, 1024 tokens", _experts(1024), {MATMUL: 64}),
    Case("experts, 8192 tokens", _experts(8192, bias=True), {MATMUL: 128}),
    Case("experts, 8192 tokens float16", _experts(8192, dtype=torch.float16), {MATMUL: 128}, ("sm_90",)),
    Case("experts, 8192 tokens float32", _experts(8192, dtype=torch.float32)),
]


def _compile_case(index: int, target: str) -> list[Compiled]:
    """In a process of the pool, to which no closure can be sent."""
    return compile_case(CASES[index], target)


def table(rows: Iterable[Compiled]) -> str:
    return "\n".join(
        f"{row.case:34} {row.kernel:32} {row.target:7} registers {row.registers:3} spilled {row.spilled:4} "
        f"shared {row.shared:6} {row.matrix:26} {row.problem}".rstrip()
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--target", choices=tuple(TARGETS))
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    tasks = [
        (index, target)
        for index, case in enumerate(CASES)
        for target in case.targets
        if given.only in case.name and given.target in (None, target)
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            rows = [row for rows in pool.starmap(_compile_case, tasks, chunksize=1) for row in rows]
    print(f"Triton {triton.__version__}: {len(rows)} kernels")
    print(table(rows))
    uncovered = every_kernel() - {row.kernel for row in rows} if not given.only else set()
    for kernel in sorted(uncovered):
        print(f"no case launches {kernel}")
    return 1 if uncovered or any(row.problem for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
