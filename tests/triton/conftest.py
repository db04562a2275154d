"""Where the tests of Triton kernels run: on CPU tensors in its interpreter, or on the GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Tensors are made there unless a test says otherwise."""
    device = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
    with device:
        yield device
