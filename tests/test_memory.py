"""What memory is left, and what of it the KV pool takes."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tiny import tiny_model

from batchgen import bench_data, loader, memory, spec
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import EngineSettings, StepResult
from batchgen.errors import ConfigError
from batchgen.types import Demand, Request, RowKey, SamplingParams
from batchgen.workloads import WORKLOADS

GIB = 1 << 30
FREE = 4 * GIB
CONTEXT = 256  # of the tiny model
BLOCK = 32


# -- what is left ------------------------------------------------------------------------------------------------------


def group(folder: Path, *, version: int = 2, cache: int = 0, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")
    # version 1 says first what is the group's own, then what is its and its children's
    stat = ["anon 1", *(f"{key} {3 * cache}" for key in ("inactive_file", "active_file") if version == 1)]
    total = "" if version == 2 else "total_"
    stat += [f"{total}inactive_file {cache - cache // 3}", f"{total}active_file {cache // 3}"]
    (folder / "memory.stat").write_text("\n".join(stat) + "\n")


def proc(folder: Path, cgroup: str, mountinfo: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


def mount(place: Path, root: str = "/", kind: str = "cgroup2", options: str = "rw") -> str:
    return f"31 23 0:28 {root} {place} rw,relatime shared:9 - {kind} {kind} {options}\n"


def test_the_narrowest_of_all_groups_around_the_process_counts(tmp_path: Path) -> None:
    """Version 2: a limit on any level, hard or soft, and files in the cache give way."""
    top = tmp_path / "fs"
    group(top)  # the root group has no files of its own
    group(top / "slice", memory_max=1000, memory_high="max", memory_current=800, cache=50)
    group(top / "slice/job", memory_max="max", memory_high=700, memory_current=300, cache=0)
    group(top / "slice/job/step", memory_max=900, memory_high="max", memory_current=200, cache=10)
    group(top / "slice/other", memory_max=1, memory_current=1)
    here = proc(tmp_path / "proc", "0::/slice/job/step\n", mount(tmp_path / "tmp", kind="tmpfs") + mount(top))
    assert list(memory.group_room(here)) == [710, 400, 250]


def test_groups_of_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    files = {"memory_limit_in_bytes": 2**63 - 4096, "memory_usage_in_bytes": 5000}
    group(top, version=1, **files)
    group(top / "a", version=1, cache=7, memory_limit_in_bytes=1000, memory_usage_in_bytes=900)
    mounts = (
        mount(tmp_path / "cpu", kind="cgroup", options="rw,cpu")
        + mount(top, kind="cgroup", options="rw,memory")
        + mount(tmp_path / "unified")
    )
    here = proc(tmp_path / "proc", "4:memory:/a\n1:cpu:/a\n0::/\n", mounts)
    assert list(memory.group_room(here)) == [107, 2**63 - 4096 - 5000]


@pytest.mark.parametrize("path", ["/docker/123", "/docker/123/inner", "/elsewhere", "/../sibling"])
def test_a_container_sees_its_part_of_the_tree(tmp_path: Path, path: str) -> None:
    """Its own group is where the mount begins; a path outside of it cannot be seen, but its top can."""
    top = tmp_path / "fs"
    group(top, memory_max=1000, memory_current=100)
    group(top / "inner", memory_max=500, memory_current=50)
    here = proc(tmp_path / "proc", f"0::{path}\n", mount(top, root="/docker/123"))
    assert list(memory.group_room(here)) == ([450, 900] if path.endswith("inner") else [900])


def test_limits_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(memory.limit_room()) == []
    taken = psutil.Process().memory_info().vms
    limits = {resource.RLIMIT_AS: taken + (1 << 30), resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    (room,) = memory.limit_room()
    assert room == pytest.approx((1 << 30) - memory.THREADS_BYTES, abs=64 << 20)
    assert memory.available() <= room + (64 << 20)


def test_no_groups(tmp_path: Path) -> None:
    assert list(memory.group_room(tmp_path / "missing")) == []
    assert 0 < memory.available() < 1 << 60


def test_libraries_need_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"limit": resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits["limit"], resource.RLIM_INFINITY))
    assert memory.room_to_begin()
    used = psutil.Process().memory_info().vms
    limits["limit"] = used + 2 * memory.LIBRARIES_BYTES
    assert memory.room_to_begin()
    limits["limit"] = used + memory.LIBRARIES_BYTES // 2
    assert not memory.room_to_begin()


# -- what the pool takes -----------------------------------------------------------------------------------------------


def demand(lengths: list[int], max_tokens: int, *, complete: bool = True, shared: int = 0) -> Demand:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 300, shared).astype(np.int32)
    prompts = [np.concatenate([prefix, rng.integers(0, 300, length).astype(np.int32)]) for length in lengths]
    return Demand(prompts, [max_tokens] * len(prompts), complete)


def blocks(wanted: Demand | None, **changes: Any) -> int:
    given = {"max_num_seqs": 4, "max_model_len": 8192, "block_size": BLOCK, "prefix_cache": True, **changes}
    return loader.useful_blocks(wanted, **given)


def test_a_job_that_is_known_whole_gets_what_it_can_use() -> None:
    assert blocks(demand([10, 40, 70], 20)) == 1 + 2 + 3
    assert blocks(demand([10] * 3 + [40] * 5, 20)) == 4 * 2  # four run at once, the longest of all
    assert blocks(demand([10], 8000)) == -(-8010 // BLOCK)  # one sample always fits whole
    assert blocks(demand([10] * 4, 4000)) == 4 * -(-(10 + loader.TYPICAL_OUTPUT) // BLOCK)
    assert blocks(demand([8000], 4000)) == 8192 // BLOCK  # not more than the context
    assert blocks(demand([], 1)) == 2


def test_samples_that_end_sooner_make_room_for_the_others_to_grow() -> None:
    prompts = demand([BLOCK] * 4, 1).prompts
    staggered = Demand(prompts, [BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK], complete=True)
    # two are left at most of it: 5 and 5 blocks, and some more for their starts; not the 2 + 3 + 5 + 9 of all ends
    assert blocks(staggered) == 12
    assert blocks(staggered, max_num_seqs=3) == 3 + 5 + 9  # the fourth takes the place of the first that ends


def known(prompt: int, outputs: list[int]) -> Demand:
    return Demand(demand([prompt] * len(outputs), 1).prompts, outputs, complete=True)


def drawn(workload: str, *, longest_first: bool) -> Demand:
    items = WORKLOADS[workload].items(np.random.default_rng(0))
    if longest_first:
        items.sort(key=lambda item: -item.output_tokens)
    return Demand([item.prompt for item in items], [item.output_tokens for item in items], complete=True)


@pytest.mark.parametrize("certain", [True, False], ids=["certain", "open"])
@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(demand([10, 40, 70], 20), id="three"),
        pytest.param(known(32, [520] * 64), id="long answers"),
        pytest.param(known(100, [24] * 200), id="short answers in two waves"),
        pytest.param(known(30, [900] * 50 + [30] * 50), id="half short"),
        pytest.param(known(32, [300] * 50 + [600] * 50), id="shorter first"),
        pytest.param(known(64, list(range(10, 1010, 10))), id="shortest first"),
        pytest.param(known(64, list(range(1000, 0, -10))), id="longest first"),
        pytest.param(drawn("mixed", longest_first=False), id="mixed"),
        pytest.param(drawn("mixed", longest_first=True), id="mixed, longest first"),
        pytest.param(drawn("prefix", longest_first=False), id="prefix"),
    ],
)
def test_no_row_of_a_known_job_waits_for_blocks(wanted: Demand, certain: bool) -> None:
    """And none is preempted, though all come to their limits."""
    pool = blocks(wanted, max_num_seqs=100)
    sizes = EngineSettings(100, 1024, pool, BLOCK, max_model_len=8192)
    scheduler = Scheduler(sizes, eos_token_ids=frozenset({0}), stream_factory=lambda: pytest.fail("no stop strings"))
    for row, (prompt, most) in enumerate(zip(wanted.prompts, wanted.max_tokens, strict=True)):
        sampling = SamplingParams(max_tokens=most, ignore_eos=certain)
        scheduler.add(Request(RowKey(0, row), prompt, sampling, noise_key=row))
    while (plan := scheduler.plan()) is not None:
        assert not scheduler.num_waiting or plan.num_tokens == 1024 or scheduler.num_running == 100
        count = int(plan.samples.sum())
        scheduler.update(StepResult(plan.step, np.ones(count, np.int32), np.ones(count, np.bool_)))
    assert scheduler.stats().output_tokens == sum(wanted.max_tokens) and scheduler.stats().preemptions == 0


def test_while_rows_are_to_come_room_is_made_for_samples_like_the_first_ones_and_at_least_for_usual_ones() -> None:
    assert blocks(demand([10] * 50, 20, complete=False)) == 8192 // BLOCK  # any row may come
    usual = 1000 * loader.TYPICAL_CONTEXT // BLOCK
    assert blocks(demand([10] * 50, 20, complete=False), max_num_seqs=1000) == usual
    assert blocks(demand([10] * 98 + [4000] * 2, 20, complete=False), max_num_seqs=1000) == usual
    assert blocks(demand([10] * 50 + [3000] * 50, 20, complete=False), max_num_seqs=1000) == 95_000
    for unknown in (None, demand([], 1, complete=False)):
        assert blocks(unknown, max_num_seqs=100) == 100 * loader.TYPICAL_CONTEXT // BLOCK


def test_a_prefix_that_samples_share_is_counted_once() -> None:
    for complete in (True, False):
        few = demand([8] * 100, 8, shared=20 * BLOCK, complete=complete)
        expected = 20 + 50 if complete else 50 * loader.TYPICAL_CONTEXT // BLOCK
        assert blocks(few, max_num_seqs=50) == expected
        assert blocks(few, max_num_seqs=50, prefix_cache=False) == 21 * 50
    same = demand([BLOCK], 8).prompts * 2  # of whole blocks: the last token is computed, so its block is nobody else's
    assert blocks(Demand(same, [8, 8], True)) == 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    bench_data.byte_tokenizer(made)
    tiny_model(made, vocab_size=512, dtype=torch.float32)
    return made


def settings(folder: Path, wanted: Demand | None = None, **engine: Any) -> Any:
    model = loader.Model(spec.ModelSpec(path=str(folder)), spec.EngineSpec(**engine))
    return model.engine(lambda: wanted).settings


def per_block(settings: Any) -> int:
    return 2 * 2 * 2 * 32 * 4 * settings.block_size  # K and V of two layers with two heads of 32 float32 numbers


def test_the_pool_is_a_share_of_what_is_free_beside_steps_and_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = loader.ROWS_BYTES + (8 << 20)
    monkeypatch.setattr(memory, "available", lambda: small)
    pool = settings(folder)
    taken = pool.num_blocks * per_block(pool)
    config = loader.Model(spec.ModelSpec(path=str(folder)), spec.EngineSpec()).config
    max_num_seqs, max_batch_tokens = loader.CPU_STEP
    steps = loader.step_bytes(config, torch.float32, max_batch_tokens, max_num_seqs)
    assert 0 < taken <= loader.KV_SHARE * (small - loader.ROWS_BYTES - steps) < taken + per_block(pool)
    half = settings(folder, kv_memory=0.5)
    assert half.num_blocks == pytest.approx(pool.num_blocks * 0.5 / loader.KV_SHARE, abs=2)


def test_what_the_job_can_use_bounds_the_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: FREE)
    assert settings(folder).num_blocks == 128 * CONTEXT // BLOCK
    assert settings(folder, demand([10, 40, 70], 20)).num_blocks == 6
    given = settings(folder, demand([10, 40, 70], 20), kv_memory=32 << 20)
    assert given.num_blocks * per_block(given) == 32 << 20


def test_a_pool_that_does_not_fit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: FREE)
    with pytest.raises(ConfigError, match=r"engine.kv_memory: 3.90 GiB, but 3.5\d GiB .* 4.00 GiB, less .* lower it"):
        settings(folder, kv_memory=int(3.9 * GIB))
    monkeypatch.setattr(memory, "available", lambda: loader.ROWS_BYTES)
    with pytest.raises(ConfigError, match=r"engine.max_num_seqs: 128, engine.max_batch_tokens: 512: .*; lower engine"):
        settings(folder)
    monkeypatch.setattr(memory, "available", lambda: FREE)
    with pytest.raises(ConfigError, match=r"^engine.max_num_seqs: 1000000, .* leave no room for keys and values: 0.00"):
        settings(folder, max_num_seqs=10**6)
    with pytest.raises(ConfigError, match=r"^engine.kv_memory: 3 bytes hold 0 blocks"):
        settings(folder, kv_memory=1e-9)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000)
    monkeypatch.setattr(loader.registry, "build", lambda *given, **named: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"model.path: the weights of .* in float32, .* model.dtype: bfloat16 halves"):
        settings(folder)
