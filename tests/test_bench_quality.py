"""What `bench quality` says of a job whose model is quantised while it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batchgen_kernels.pages import Arena
from fakes import byte_tokenizer
from tiny import tiny_model

from batchgen import bench_quality, spec
from batchgen.errors import ConfigError, DataError
from batchgen.models.layers import Linear, Ops
from batchgen.spec import JobSpec


def job(folder: Path, prompts: list[str], **model: object) -> JobSpec:
    byte_tokenizer(folder / "model")
    tiny_model(folder / "model", vocab_size=512, eos_token_id=511)
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    sections = {
        "model": {"path": str(folder / "model"), **model},
        "input": {"path": str(folder / "in.jsonl")},
        "sampling": {"max_tokens": 6, "temperature": 1.0},
        "output": {"path": str(folder / "out")},
        "engine": {"max_num_seqs": 4, "kv_memory": "8MiB"},
    }
    return spec.parse(sections, where="test")


def test_the_plain_model_is_compared_with_the_quantised_one(tmp_path: Path) -> None:
    found = bench_quality.measure(job(tmp_path, ["one two", "", "three", "a fourth"], quantization="int8"), rows=3)
    assert found["rows"] == 2  # of three: an empty prompt fails in the job too
    assert found["quantization"] == "int8" and found["positions"] <= 12
    assert found["perplexity"] > 1.0 and abs(found["perplexity_quantized"] / found["perplexity"] - 1) < 0.3
    assert all(0.0 <= found[share] <= 1.0 for share in ("rows_equal", "tokens_before_difference", "top1_agreement"))
    assert not (tmp_path / "out").exists()


def test_a_model_compared_with_itself_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unchanged(*args: Any, ops: Ops, arena: Arena, **rest: Any) -> Linear:
        return Linear(*args, **rest)

    monkeypatch.setattr("batchgen.models.layers.QUANTIZED", {"int8": unchanged})
    found = bench_quality.measure(job(tmp_path, ["one two", "three"], quantization="int8"), rows=2)
    assert found["perplexity"] == found["perplexity_quantized"]
    assert found["top1_agreement"] == found["rows_equal"] == found["tokens_before_difference"] == 1.0


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization"):
        bench_quality.measure(job(tmp_path, ["x"]), rows=1)
    with pytest.raises(DataError, match="none of the first 2 rows"):
        bench_quality.measure(job(tmp_path, ["", ""], quantization="int8"), rows=2)


def test_rows_that_outgrow_the_pool_are_left_out_and_nothing_is_read_beyond_it(tmp_path: Path) -> None:
    spec = job(tmp_path, ["x" * 200, "short"], quantization="int8")
    engine = spec.engine.model_copy(
        update={"kv_memory": 2 * 2 * 2 * 32 * 32 * 4 * 3}
    )  # layers, K and V, heads, block, dim
    found = bench_quality.measure(spec.model_copy(update={"engine": engine}), rows=2)
    assert found["rows"] == 1


def test_a_row_is_answered_to_its_own_length(tmp_path: Path) -> None:
    spec = job(tmp_path, ["one", "two"], quantization="int8")
    rows = [{"prompt": "one", "own": {"max_tokens": 2}}, {"prompt": "two", "own": {"max_tokens": 3}}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = spec.sampling.model_copy(update={"column": "own"})
    assert bench_quality.measure(spec.model_copy(update={"sampling": sampling}), rows=2)["positions"] <= 5
