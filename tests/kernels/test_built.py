"""That the native ops are built where they can be, and not used where they do not fit the Python side."""

from __future__ import annotations

import shutil
from types import ModuleType

import pytest
from batchgen_kernels import cpu, reference
from batchgen_kernels.cpu import items


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler here")
def test_the_native_ops_are_built_where_a_compiler_is() -> None:
    assert cpu.load() is not None


@pytest.mark.skipif(cpu.load() is None, reason="the native ops were not built")
@pytest.mark.parametrize(
    ("place", "name"),
    [
        *((cpu, name) for name in ("_INTERFACE", "MAX_HEAD_DIM", "_LINEAR_ROWS", "_state_floats")),
        *((items, name) for name in ("KEY_TILE", "QUERY_ROWS", "REGISTER_ROWS", "ITEM_WORDS")),
        *((reference, name) for name in ("GROUP", "PANEL")),
    ],
)
def test_a_library_of_other_sizes_is_not_used(
    place: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would write past the room that it is given."""
    now = getattr(place, name)
    monkeypatch.setattr(place, name, (lambda head_dim: now(head_dim) + 16) if callable(now) else 2 * now)
    assert cpu.load() is None
    assert "of another version: reinstall" in caplog.text
