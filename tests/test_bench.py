"""The engine's benchmark: what it reports of a workload."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import torch
from tiny import tiny_model

from batchgen import bench, bench_data, processes, spec


def test_the_report_of_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench_data.byte_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", vocab_size=512, dtype=torch.float32)
    monkeypatch.setattr(bench, "measure_roofline", lambda dtype, quantization: (1e9, 1e9))
    items = [{"prompt": [5 + i] * 20, "out": 10 + i // 4} for i in range(12)]
    (tmp_path / "items.json").write_bytes(orjson.dumps(items))
    before = processes.age()
    found = bench.engine(
        model=spec.ModelSpec(path=str(tmp_path / "model")),
        spec=spec.EngineSpec(max_num_seqs=4),
        workload_file=str(tmp_path / "items.json"),
        save=str(tmp_path / "saved.json"),
    )
    assert [len(row) for row in orjson.loads((tmp_path / "saved.json").read_bytes())] == [
        10 + i // 4 for i in range(12)
    ]
    assert (found["prompt_tokens"], found["output_tokens"]) == (240, 132)
    assert found["kv_blocks"] == 4  # what it can use: four at once, of at most 32 tokens in blocks of 32
    assert found["kv_used_mean"] == found["kv_used_peak"] == 1.0
    assert found["occupancy"] == 1.0 and found["mean_rows_per_step"] == 4.0  # four run until all are done
    assert found["steps"] == 10 + 11 + 12
    assert 0.0 < found["host_share"] < 1.0 and found["recomputed_tokens"] == 0
    # startup ends where the first step could run, the process's time where the workload does
    assert before + found["load_s"] <= found["startup_s"] + 0.02
    assert found["startup_s"] + found["seconds"] <= found["process_s"] + 0.02 <= processes.age() + 0.04


def test_a_process_knows_its_age() -> None:
    code = (
        "import time; from batchgen import processes; a = processes.age(); time.sleep(0.3); print(a, processes.age())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    first, second = map(float, said.split())
    assert 0.0 < first < 30 and 0.29 < second - first < 5
    assert abs(processes.age() - (time.time() - processes.started(os.getpid()))) < 2
