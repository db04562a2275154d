"""The real scheduler against a modelled device: how full it keeps a pool that is far too small, and at what price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchgen.bench_scheduler import Device, Simulation, _blocks_up_to, simulate
from batchgen.workloads import WORKLOADS


def found(workload: str, **options: Any) -> dict[str, Any]:
    return simulate(Simulation(workload, **options))


@pytest.mark.parametrize("certain", [True, False], ids=["certain", "eos"])
@pytest.mark.parametrize(("workload", "rows"), [("nano", 2000), ("mixed", 2000), ("longtail", 2000)])
def test_a_quarter_of_the_pool_is_kept_full_and_little_is_done_twice(workload: str, rows: int, certain: bool) -> None:
    what = found(workload, rows=rows, certain=certain, max_batch_tokens=3072)
    assert what["full_steps"] > 500
    assert what["occupancy"] >= 0.95
    assert what["recomputed_share"] <= 0.01
    assert 1 <= what["makespan_ratio"] < 1.6  # the tail of so few rows is a good part of it


def test_all_rows_run_and_each_token_is_computed_once() -> None:
    what = found("mixed", rows=40, blocks=10_000)
    assert what["recomputed_tokens"] == what["preemptions"] == 0 and what["occupancy"] is None
    one_by_one = found("mixed", rows=40, blocks=10_000, max_num_seqs=1)
    assert one_by_one["computed_tokens"] == what["computed_tokens"]
    assert one_by_one["mean_running"] == 1.0


def test_what_all_rows_share_is_computed_once() -> None:
    what = found("prefix", rows=200, blocks=2000, certain=True)
    assert what["cached_tokens"] >= 199 * 512
    assert what["makespan_ratio"] >= 1


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_nothing_beats_the_lower_bound(workload: str) -> None:
    for device in (Device(), Device(flops=1e12), Device(parameters=1e6)):
        assert simulate(Simulation(workload, 60, True, device=device))["makespan_ratio"] >= 1


def test_a_slower_device_takes_longer() -> None:
    what = Simulation("longtail", 200, True)
    slow = simulate(replace(what, device=Device(bandwidth=1e12, flops=1.5e14)))
    assert slow["makespan_s"] == pytest.approx(4 * simulate(what)["makespan_s"], rel=0.01)


def test_blocks_held_summed_up() -> None:
    for tokens in (0, 1, 4, 5, 37):
        counted = sum(-(-held // 4) for held in range(1, tokens + 1))
        assert _blocks_up_to(np.array([tokens]), 4).tolist() == [counted]
