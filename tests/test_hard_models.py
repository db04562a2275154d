"""Model folders that are hard on a loader, and models that are hard on an engine, through a whole job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes import byte_tokenizer
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from batchgen import job, spec
from batchgen.errors import BatchgenError, ConfigError, ModelError
from batchgen.loader import resolve_dtype
from batchgen.models.decoder import Decoder

INDEX = "model.safetensors.index.json"
PADDING = 64  # ids of the model that the tokenizer has not
MODEL = {"vocab_size": 259 + PADDING, "hidden_size": 64, "num_attention_heads": 4, "eos_token_id": 256}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = byte_tokenizer(tmp_path_factory.mktemp("model") / "tiny")
    tiny_model(path, max_shard_size="100KB", attention_bias=True, mlp_bias=True, **MODEL)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def a_job(folder: Path, tmp_path: Path, rows: int = 2, **changes: dict[str, Any]) -> spec.JobSpec:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(rows)))
    return spec.parse(
        {
            "model": {"path": str(folder), **changes.get("model", {})},
            "input": {"path": str(data)},
            "prompt": {"column": "text", "chat": False},
            "sampling": {"max_tokens": 8, **changes.get("sampling", {})},
            "output": {"path": str(tmp_path / "out"), "format": "jsonl", "token_ids": True},
            "engine": {"kv_memory": "8MiB", "max_num_seqs": 16, **changes.get("engine", {})},
            "errors": {"max_failed": 0.5},
        }
    )


def run(folder: Path, tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    job.run(a_job(folder, tmp_path, **changes))
    return [json.loads(line) for part in sorted((tmp_path / "out").glob("part-*.jsonl")) for line in part.open()]


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def place(folder: Path, shard: str) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": shard}))


def configure(folder: Path, **keys: Any) -> None:
    edit_json(folder / "config.json", lambda config: config.update(keys))


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    place(folder, "pipe.safetensors")


def float8_without_scale(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, shard)


def last(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[-1]


def stale(folder: Path) -> None:
    """As of an upload whose files were made anew: twice as many are named as are there."""
    total = len(list(folder.glob("model-*.safetensors")))

    def change(index: dict[str, Any]) -> None:
        for name, shard in index["weight_map"].items():
            index["weight_map"][name] = shard.replace(f"-of-{total:05}", f"-of-{2 * total:05}")

    edit_json(folder / INDEX, change)


SCALING = {"rope_type": "su", "factor": 2.0, "rope_theta": 1e4}
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "D3 a shard is absent": (lambda folder: last(folder).unlink(), "missing shard model-.*incomplete download"),
    "D3 a shard lacks a byte": (lambda f: os.truncate(last(f), last(f).stat().st_size - 1), "incomplete download"),
    "D4 an old index": (stale, "missing shard model-.*model.ignore_index: true"),
    "D7 unknown scaling": (lambda folder: configure(folder, rope_parameters=SCALING), "rope type 'su'"),
    "D7 older unknown scaling": (lambda folder: configure(folder, rope_scaling={"type": "mrope"}), "rope type 'mrope'"),
    "D8 a head size for each layer": (lambda folder: configure(folder, head_dim=[16, 32]), r"head_dim is \[16, 32\]"),
    "D8 another head size": (
        lambda folder: configure(folder, head_dim=None),
        r"k_proj.bias has shape \(64,\), .* makes it \(32,\)",
    ),
    "D10 biases without a place": (lambda folder: configure(folder, attention_bias=False), "no place .*proj.bias"),
    "D10 biases that are not there": (
        lambda folder: configure(folder, architectures=["Qwen3ForCausalLM"]),
        "lacks .*norm",
    ),
    "D12 float8 without a scale": (float8_without_scale, "F8_E4M3, but .*its scales cannot be found"),
    "D15 a file above": (lambda folder: place(folder, "../secret.safetensors"), "expected a plain file name"),
    "D15 a file elsewhere": (lambda folder: place(folder, "/etc/passwd"), "expected a plain file name"),
    "D15 a pipe": (a_pipe, "pipe.safetensors is not a regular file"),
}


@pytest.mark.parametrize("label", BROKEN)
@pytest.mark.timeout(60)
def test_a_model_that_cannot_be_right_ends_the_job_with_69(folder: Path, tmp_path: Path, label: str) -> None:
    """Almost always before anything is allocated; a shape that does not fit the configuration, when it is read."""
    damage, message = BROKEN[label]
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    damage(folder)
    with pytest.raises(BatchgenError, match=message) as caught:
        run(folder, tmp_path)
    assert caught.value.exit_code == 69 and not list((tmp_path / "out").glob("part-*"))


def test_a_missing_shard_is_found_before_anything_is_allocated(folder: Path, tmp_path: Path) -> None:
    """D3"""
    last(folder).unlink()
    with (
        patch.object(Decoder, "__init__", side_effect=AssertionError("made a decoder")),
        pytest.raises(ModelError, match="missing shard"),
    ):
        run(folder, tmp_path)


def test_an_index_may_be_ignored_where_every_tensor_is_there(folder: Path, whole: Path, tmp_path: Path) -> None:
    """D4"""
    (tmp_path / "first").mkdir()
    expected = run(whole, tmp_path / "first")
    stale(folder)
    assert run(folder, tmp_path, model={"ignore_index": True}) == expected
    last(folder).unlink()
    (tmp_path / "third").mkdir()
    with pytest.raises(ModelError, match=r"missing shard model-.*incomplete download"):
        run(folder, tmp_path / "third", model={"ignore_index": True})
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    with pytest.raises(ConfigError, match=r"model\.ignore_index: true, but .*x\.gguf is a GGUF file"):
        run(gguf, tmp_path / "third", model={"ignore_index": True})


def test_code_beside_a_model_is_never_run_in_a_job(folder: Path, whole: Path, tmp_path: Path) -> None:
    """Model and tokenizer are read without it."""
    (tmp_path / "first").mkdir()
    expected = run(whole, tmp_path / "first")
    code = f"open({str(tmp_path / 'was-here')!r}, 'w'); raise SystemExit('run')"
    for name in ("modeling_tiny", "tokenization_tiny"):
        (folder / f"{name}.py").write_text(code)
    configure(folder, auto_map={"AutoConfig": "modeling_tiny.C", "AutoModelForCausalLM": "modeling_tiny.M"})
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_tiny.T", None]}, "tokenizer_class": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert run(folder, tmp_path) == expected
    assert not (tmp_path / "was-here").exists() and not {"modeling_tiny", "tokenization_tiny"} & set(sys.modules)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_that_pad_the_vocabulary_are_never_drawn(whole: Path, tmp_path: Path, temperature: float) -> None:
    """B12: however likely the model finds them."""
    logits = Decoder.logits

    def forced(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden)  # (num_rows, vocab_size)
        found[:, 259 + 7 :] = 1e4
        return found

    with patch.object(Decoder, "logits", forced):
        padded = run(whole, tmp_path, sampling={"temperature": temperature})
    (tmp_path / "plain").mkdir()
    plain = run(whole, tmp_path / "plain", sampling={"temperature": temperature})
    assert padded == plain and all(row["output_tokens"] == 8 for row in plain)
    assert all(token < 259 for row in padded for token in row["token_ids"])


def test_logits_that_are_no_numbers(folder: Path, tmp_path: Path) -> None:
    """D14: the rows that show it are errors; where it is all of the first ones, the model cannot be right."""
    head = next(path for path in folder.glob("model-*.safetensors") if "lm_head.weight" in load_file(path))
    tensors = load_file(head)
    tensors["lm_head.weight"] *= 1e38
    save_file(tensors, head, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN or infinity for the first 12 rows.*model\.dtype") as caught:
        run(folder, tmp_path, rows=12)
    assert caught.value.exit_code == 69


def test_activations_beyond_float16(folder: Path, tmp_path: Path) -> None:
    """D14: a model made for bfloat16 that is run in float16. No CPU job may; a GPU's loader would do as here."""
    name = "model.layers.0.mlp.down_proj.weight"
    shard = next(path for path in folder.glob("model-*.safetensors") if name in load_file(path))
    tensors = load_file(shard)
    tensors[name] *= 1e5
    save_file(tensors, shard, metadata={"format": "pt"})
    (tmp_path / "wide").mkdir()
    assert all(row["error"] is None for row in run(folder, tmp_path / "wide", rows=5))
    with pytest.raises(ConfigError, match=r"model\.dtype: float16 does not run on a CPU"):
        run(folder, tmp_path, model={"dtype": "float16"})
    as_float16 = patch("batchgen.loader.resolve_dtype", return_value="float16")
    without_kernels = patch("batchgen_kernels.cpu.load", return_value=None)  # they have no float16
    with (
        as_float16,
        without_kernels,
        pytest.raises(ModelError, match=r"NaN or infinity.*try float32 or bfloat16") as caught,
    ):
        run(folder, tmp_path, rows=5, engine={"attention": "reference"})
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("on_gpu", [True, False])
def test_bfloat16_never_becomes_float16_by_itself(on_gpu: bool) -> None:
    """D14: its range is that of float32, which float16's is not."""
    assert resolve_dtype("auto", "bfloat16", on_gpu=on_gpu) in ("bfloat16", "float32")
    assert resolve_dtype("auto", "float32", on_gpu=on_gpu) == "float32"
