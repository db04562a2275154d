"""The engine's benchmark: what it reports of a workload."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import torch
from tiny import SHAPE, tiny_model

from batchgen import bench, bench_data, processes, spec
from batchgen.errors import ConfigError
from batchgen.models import registry
from batchgen.weights.random import RandomCheckpoint, find_config


def test_the_report_of_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench_data.byte_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", vocab_size=512, dtype=torch.float32)
    monkeypatch.setattr(bench, "measure_roofline", lambda dtype, quantization, device: (1e9, 1e9))
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


def test_random_weights_need_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_roofline", lambda dtype, quantization, device: (1e9, 1e9))
    shape = {"architectures": ["Qwen2ForCausalLM"], "dtype": "float32", "max_position_embeddings": 64, **SHAPE}
    (tmp_path / "items.json").write_bytes(orjson.dumps([{"prompt": [5, 6, 7 + i], "out": 9} for i in range(3)]))
    found = bench.engine(
        model=spec.ModelSpec(path="tiny"),
        spec=spec.EngineSpec(max_num_seqs=4),
        random_weights=shape,
        workload_file=str(tmp_path / "items.json"),
        save=str(tmp_path / "saved.json"),
    )
    assert (found["model"], found["random_weights"], found["output_tokens"]) == ("tiny", True, 27)
    assert len({tuple(row) for row in orjson.loads((tmp_path / "saved.json").read_bytes())}) == 3
    with pytest.raises(ConfigError, match=r"token id 3\d+, but the model has only 331"):
        bench.engine(model=spec.ModelSpec(path="tiny"), spec=spec.EngineSpec(), random_weights=shape)


@pytest.mark.parametrize(
    ("name", "numbers"), [("smollm2-135m", 134.5e6), ("qwen3-0.6b", 596e6), ("llama-3.1-8b", 8.03e9)]
)
def test_the_shapes_to_measure_with(name: str, numbers: float) -> None:
    shapes = registry.tensor_shapes(registry.read_config(find_config(name)))
    assert sum(map(math.prod, shapes.values())) == pytest.approx(numbers, rel=1e-3)


def test_random_weights_are_of_one_size_and_no_two_rows_are_alike() -> None:
    checkpoint = RandomCheckpoint("x", {}, {"a.weight": (3000, 1024), "a_norm.weight": (7,), "a.bias": (5,)})
    tensors = dict(checkpoint.stream(dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(tensors["a.weight"].unique(dim=0)) == 3000
    assert tensors["a.weight"].float().std().item() == pytest.approx(1024**-0.5, rel=0.01)
    assert tensors["a_norm.weight"].tolist() == [1.0] * 7 and tensors["a.bias"].tolist() == [0.0] * 5


def test_a_process_knows_its_age() -> None:
    code = (
        "import time; from batchgen import processes; a = processes.age(); time.sleep(0.3); print(a, processes.age())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    first, second = map(float, said.split())
    assert 0.0 < first < 30 and 0.29 < second - first < 5
    assert abs(processes.age() - (time.time() - processes.started(os.getpid()))) < 2
