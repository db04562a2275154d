"""Kernels that compile_kernels must refuse: prints what it says of each. Run as a program of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from compile_kernels import Case, compile_case, empty


@triton.jit
def _matmul_kernel(x, y, out, SIZE: tl.constexpr, INNER: tl.constexpr, steps):
    rows, inner = tl.arange(0, SIZE), tl.arange(0, INNER)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(steps):
        a = tl.load(x + rows[:, None] * INNER * steps + step * INNER + inner[None, :])
        b = tl.load(y + rows[None, :] * INNER * steps + step * INNER + inner[:, None])
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out + rows[:, None] * SIZE + rows[None, :], total)


def _matmul(size: int, dtype: torch.dtype = torch.bfloat16, **options: int) -> None:
    x, out = empty(size, 4096, dtype=dtype), empty(size, size, dtype=torch.float32)
    _matmul_kernel[(1,)](x, x, out, SIZE=size, INNER=64, steps=64, **options)


def main() -> None:
    kernel = "_matmul_kernel"
    for case in (
        Case("fine", lambda: _matmul(64), {kernel: (64,)}),
        Case("short", lambda: _matmul(32), {kernel: (32,)}),
        Case("spills", lambda: _matmul(64, maxnreg=40), {kernel: (64,)}, ("sm_80", "sm_100")),
        Case("spills", lambda: _matmul(128, num_warps=1), {kernel: (128,)}, ("gfx942",)),
        Case("large", lambda: _matmul(128, num_warps=8, num_stages=9), {kernel: (128,)}),
        Case("plain", lambda: _matmul(16, torch.float32), {kernel: (64,)}),
        Case("broken", lambda: _matmul(48), targets=("sm_90",)),
        Case("absent", lambda: _matmul(64), {"_other_kernel": (64,)}, ("sm_90",)),
    ):
        for target in case.targets:
            for row in compile_case(case, target):
                problem = row.problem.strip().splitlines()[-1] if row.problem else "good"
                print(case.name, target, row.kernel, problem, sep=": ")


if __name__ == "__main__":
    main()
