"""What all tests of the native ops share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from batchgen_kernels import cpu

OPS = cpu.load()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other would take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=cpu.ISAS[: cpu.ISAS.index(OPS.isa) + 1] if OPS else ("portable",))
def ops(request: pytest.FixtureRequest) -> cpu.Ops:
    """The ops at every instruction set of this machine."""
    if OPS is None:
        pytest.skip("the native ops were not built")
    return OPS.with_isa(request.param)
