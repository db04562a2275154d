"""Every Triton kernel compiles for the GPUs we serve: no register spills, it fits, it uses matrix instructions.

Without a GPU, and without the interpreter that this process uses: in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Its output; compiled kernels are kept in `folder`, and none is taken from elsewhere."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.timeout(1200)  # many minutes where other work keeps the cores busy
def test_every_kernel_compiles_as_it_would_be_launched(tmp_path: Path) -> None:
    run = _run("compile_kernels.py", tmp_path)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


def test_bad_kernels_are_found(tmp_path: Path) -> None:
    run = _run("failing_kernels.py", tmp_path)
    assert run.returncode == 0, run.stderr
    said: dict[tuple[str, str], str] = {}
    for line in run.stdout.splitlines():
        if (parts := line.split(": ", 3))[0] in {"fine", "short", "spills", "large", "plain", "broken", "absent"}:
            name, target, kernel, problem = parts
            said[name, target] = f"{kernel}: {problem}"
    kernel = "_matmul_kernel: "
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert said["fine", target] == said["short", target] == kernel + "good"
        assert re.fullmatch(kernel + r"shared memory \d+ of \d+", said["large", target])
    for target in ("sm_80", "sm_100", "gfx942"):
        assert re.fullmatch(kernel + r"spills \d+ bytes", said["spills", target])
    assert said["plain", "sm_80"] == kernel + "no mma.sync"
    assert said["plain", "sm_90"] == kernel + "no wgmma.mma_async"
    assert said["plain", "sm_100"] == kernel + "no tcgen05.mma"
    assert "power of 2" in said["broken", "sm_90"]
    assert said["absent", "sm_90"] == "_other_kernel: not launched"
