"""Which launch configuration a device gets."""

from __future__ import annotations

import pytest
from batchgen_kernels import tuning
from batchgen_kernels.tuning import Config, choose

PLAIN, AMPERE, HOPPER, LATER, AMD = (Config({"BLOCK": size}) for size in (16, 32, 64, 128, 256))
ENTRIES = {
    ("", (3, 0)): PLAIN,
    ("sm_80", (3, 0)): AMPERE,
    ("sm_90", (3, 0)): HOPPER,
    ("sm_90", (3, 7)): LATER,
    ("gfx942", (3, 0)): AMD,
}


@pytest.mark.parametrize(
    ("architecture", "version", "expected"),
    [
        ("sm_80", (3, 6), AMPERE),
        ("sm_86", (3, 6), AMPERE),
        ("sm_90", (3, 6), HOPPER),
        ("sm_90", (3, 7), LATER),
        ("sm_90", (4, 0), LATER),
        ("sm_100", (3, 6), HOPPER),  # by number: 100 is after 90
        ("sm_75", (3, 6), PLAIN),
        ("gfx942", (3, 6), AMD),
        ("gfx90a", (3, 6), PLAIN),
        (tuning.INTERPRETER, (3, 6), PLAIN),
    ],
)
def test_the_newest_entry_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, architecture: str, version: tuple[int, int], expected: Config
) -> None:
    monkeypatch.setitem(tuning.TABLE, "some", ENTRIES)
    monkeypatch.setattr(tuning, "architecture", lambda: architecture)
    monkeypatch.setattr(tuning, "_version", lambda: version)
    tuning._choose.cache_clear()
    assert choose("some") is expected
    tuning._choose.cache_clear()


def test_a_kernel_without_a_fitting_entry_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tuning.TABLE, "some", {("sm_90", (3, 0)): HOPPER})
    with pytest.raises(KeyError, match="kernel some has no configuration for interpreter"):
        choose("some")


def test_tests_run_in_the_interpreter() -> None:
    assert tuning.architecture() == tuning.INTERPRETER


@pytest.mark.parametrize("kernel", tuning.TABLE)
def test_every_kernel_runs_everywhere(kernel: str) -> None:
    for architecture in (tuning.INTERPRETER, "sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"):
        config = tuning._choose(kernel, architecture, (3, 6))
        assert all(size & (size - 1) == 0 for size in config.blocks.values()), "Triton's blocks are powers of 2"
        assert config.num_warps in (1, 2, 4, 8, 16)
