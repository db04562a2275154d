"""The engine against the reference implementation on the device that it chooses by itself, with tiny models: of every
family where that is a GPU; elsewhere of one, so that this file is known to work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model
from transformers import PreTrainedModel

from batchgen import spec
from batchgen.engine.engine import Engine
from batchgen.loader import Model
from batchgen.tokenizer import Tokenizer
from batchgen.types import Request, RowKey, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OUTPUT = 24
HARD = {  # windows, biases and scaled rotations
    "llama": {"attention_bias": True, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    "mistral": {"sliding_window": 19},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}
FAMILIES = [*HARD] if DEVICE.type == "cuda" else ["qwen3"]


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Of 1 to 90 tokens; every third begins with the same 40."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 331, 40)
    own = [rng.integers(3, 331, length) for length in rng.integers(1, 90, 21)]
    mixed = [np.concatenate((shared, p[:20])) if number % 3 == 0 else p for number, p in enumerate(own)]
    return [prompt.astype(np.int32) for prompt in mixed]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, PreTrainedModel]]:
    """Makes a tiny model -> an engine with it, and the reference."""
    monkeypatch.setattr(Tokenizer, "load", lambda path, chat_template: Tokenizer.of_numbers(331))

    def open_one(family: str, dtype: torch.dtype, **engine: Any) -> tuple[Engine, PreTrainedModel]:
        reference = tiny_model(tmp_path / family, family, dtype=dtype, **HARD[family])
        settings = {"max_num_seqs": 8, "max_batch_tokens": 64, "kv_memory": 1 << 24, **engine}
        return Model(spec.ModelSpec(path=str(tmp_path / family)), spec.EngineSpec(**settings)).engine(), reference.to(
            DEVICE
        )

    return open_one


def outputs(engine: Engine, prompts: list[np.ndarray], **sampling: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **sampling)
    rows = [Request(RowKey(0, row), prompt, params, row + 1) for row, prompt in enumerate(prompts)]
    done = {completion.key.row: completion.token_ids.tolist() for completion in engine.generate(rows)}
    return [done[row] for row in range(len(prompts))]


def logits(reference: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """(num_tokens, vocab_size) float32"""
    with torch.inference_mode():
        return reference(torch.from_numpy(ids.astype(np.int64))[None].to(DEVICE)).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
def test_greedy_tokens_are_the_references(
    family: str, dtype: torch.dtype, slack: float, opened: Callable[..., Any], prompts: list[np.ndarray]
) -> None:
    """No other token is better by more than rounding: the reference computes in float32."""
    engine, reference = opened(family, dtype)
    for prompt, output in zip(prompts, outputs(engine, prompts), strict=True):
        found = logits(reference, np.concatenate((prompt, output)))[len(prompt) - 1 : -1]  # (OUTPUT, vocab_size)
        chosen = found.gather(1, torch.tensor(output, device=DEVICE)[:, None])[:, 0]
        assert (found.max(dim=1).values - chosen).max().item() < slack


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}])
def test_graphs_change_nothing(
    sampling: dict[str, Any], opened: Callable[..., Any], prompts: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = outputs(opened("llama", torch.float32)[0], prompts, **sampling)
    monkeypatch.setattr("batchgen.device.Cuda.captures", False)
    assert outputs(opened("llama", torch.float32)[0], prompts, **sampling) == captured


def test_answers_do_not_depend_on_what_else_runs(opened: Callable[..., Any], prompts: list[np.ndarray]) -> None:
    few = outputs(opened("qwen3", torch.float32, max_num_seqs=2)[0], prompts)
    assert few == outputs(opened("qwen3", torch.float32, max_num_seqs=21, max_batch_tokens=512)[0], prompts)
