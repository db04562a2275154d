"""Every family's GGUF form: the tensors of the same model saved by transformers, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Harness, reference_logits, sequences
from test_families import BY_TYPE, LINEAR_BY_TYPE, ROWS, Row
from tiny import GGUF_FORMS, tiny_gguf, tiny_model

from batchgen.models.families import FAMILIES
from batchgen.weights import open_checkpoint
from batchgen.weights.gguf_architectures import ARCHITECTURES

SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
EXPERTS = {
    "mixtral": Row("MixtralForCausalLM", "mixtral", {"num_local_experts": 4, "head_dim": 16}),
    "qwen2-moe": Row("Qwen2MoeForCausalLM", "qwen2_moe", {**SMALL_EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen3-moe": Row("Qwen3MoeForCausalLM", "qwen3_moe", {**SMALL_EXPERTS, "norm_topk_prob": True}),
    "olmoe": Row("OlmoeForCausalLM", "olmoe", {**SMALL_EXPERTS, "pad_token_id": 0}),
}
# what such files have no place for
UNSAID = {
    "llama-gelu",  # the activation
    "qwen2-window",
    "smollm3-window",
    "falcon-rw",  # one after the other instead of parallel
}
# of the sliding layers' rotation Gemma's is fixed, and OLMo's has the other layers' base
GEMMA3_ROPES = {**LINEAR_BY_TYPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
OLMO3_ROPES = {**BY_TYPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},  # follows from the head size
    "gemma3": {"query_pre_attn_scalar": 32, "rope_parameters": GEMMA3_ROPES},
    "olmo3": {"rope_parameters": OLMO3_ROPES},
}


def gguf_rows() -> dict[str, Row]:
    rows = {**ROWS, **EXPERTS}
    return {name: row for name, row in rows.items() if row.model_type in GGUF_FORMS and name not in UNSAID}


def test_every_architecture_has_a_row() -> None:
    assert {GGUF_FORMS[row.model_type].arch for row in gguf_rows().values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", gguf_rows())
def test_tensors_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    row = gguf_rows()[name]
    model = tiny_model(tmp_path, row.model_type, **{**row.changes, **CHANGED.get(name, {})})
    path = tmp_path / "model.gguf"
    tiny_gguf(path, model, "F32")
    saved = dict(open_checkpoint(tmp_path).stream())
    found = dict(open_checkpoint(path).stream())
    assert sorted(found) == sorted(saved)
    for tensor_name, tensor in found.items():
        # a norm's offset was added to its weights in float32
        torch.testing.assert_close(tensor, saved[tensor_name], atol=2e-7, rtol=0)
    if row.architecture not in FAMILIES:
        return
    tokens = sequences(model.config.vocab_size, 40)[0]
    logits = Harness(path, max_model_len=64).step({0: tokens})[0]
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.1, "logits that hardly differ show nothing"
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
