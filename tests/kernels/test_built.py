"""Tests of the native ops are skipped where these were not built: this one is not."""

from __future__ import annotations

import shutil

import pytest
from batchgen_kernels import cpu


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler here")
def test_the_native_ops_are_built_where_a_compiler_is() -> None:
    assert cpu.load() is not None
