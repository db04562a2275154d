"""Where the tests of Triton kernels run: on CPU tensors in its interpreter, or on the GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """All tensors that a test makes are there, those from numpy too."""
    if os.environ["TRITON_INTERPRET"] == "1":
        yield torch.device("cpu")
        return
    device, from_numpy = torch.device("cuda"), torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: from_numpy(array).to(device))
    monkeypatch.setattr(torch, "Generator", partial(torch.Generator, device))
    with device:
        yield device
