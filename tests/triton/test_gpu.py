"""The GPU's ops are called like their twins."""

from __future__ import annotations

import inspect

import pytest
from batchgen_kernels import gpu, reference


@pytest.mark.parametrize("name", gpu.__all__)
def test_an_op_takes_what_its_twin_takes(name: str) -> None:
    ours, twin = (inspect.signature(getattr(module, name)).parameters for module in (gpu, reference))
    # Of the twin: the CPU's sampling is the twin's, with noise of its own.
    own = {"gumbel"} if name == "sample" else set()
    expected = {key: (value.kind, value.default) for key, value in twin.items() if key not in own}
    assert {key: (value.kind, value.default) for key, value in ours.items()} == expected
