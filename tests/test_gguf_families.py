"""Every family's GGUF form: the tensors of the same model saved by transformers, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from parity import Harness, reference_logits, sequences
from test_families import BY_TYPE, LINEAR_BY_TYPE, ROWS, Row
from tiny import GGUF_FORMS, tiny_gguf, tiny_model

from batchgen.errors import ModelError
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
    mixtures = {row.model_type for row in EXPERTS.values()}  # with what the files assume: all layers, no windows
    dense = {name: row for name, row in ROWS.items() if row.model_type in GGUF_FORMS and name not in UNSAID}
    return {**{name: row for name, row in dense.items() if row.model_type not in mixtures}, **EXPERTS}


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


def test_a_model_split_over_files(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    tiny_gguf(tmp_path / "whole.gguf", model, "F32")
    tiny_gguf(tmp_path / "split.gguf", model, "F32", split_max_tensors=8)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert [part.name for part in parts] == [f"split-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    split, whole = open_checkpoint(parts[0]), dict(open_checkpoint(tmp_path / "whole.gguf").stream())
    streamed = dict(split.stream())
    assert sorted(streamed) == sorted(whole) and all(torch.equal(streamed[name], whole[name]) for name in whole)
    assert [len(names) for names in split.by_file(split.names)] == [8, 8, len(whole) - 16]
    tokens = sequences(model.config.vocab_size, 20)[0]
    logits = Harness(parts[0], max_model_len=64, readers=2).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)
    before = split.fingerprint()
    content = bytearray(parts[2].read_bytes())
    content[-20] ^= 1
    parts[2].write_bytes(content)
    assert open_checkpoint(parts[0]).fingerprint() != before
    with pytest.raises(ModelError, match=r"part of a GGUF model split over 3 files; name the first.*-00001-of-0000N"):
        open_checkpoint(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"split-00003-of-00003\.gguf does not exist.*split over 3 files"):
        open_checkpoint(parts[0])


QUANTISATIONS = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
)


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_every_quantisation_loads_as_the_gguf_package_dequantises_it(tmp_path: Path, quantisation: str) -> None:
    kind = gguf.GGMLQuantizationType[quantisation]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    experts, rows, columns = 3, 5, 512
    count = experts * rows * columns // block
    generator = np.random.default_rng(4)
    blocks = generator.integers(0, 256, (2 * count, size), dtype=np.uint8)
    if quantisation in ("F32", "F16", "BF16"):
        values = generator.standard_normal((2 * count, 1)).astype(np.float32)
        blocks = gguf.quantize(values, kind).view(np.uint8).reshape(2 * count, size)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.dequantize(blocks, kind)).all(-1)
    blocks = blocks[finite][:count]  # as any bytes may stand in a block, but for scales that are no number
    assert len(blocks) == count
    raw = blocks.reshape(experts, rows, -1)
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for key, value in {"embedding_length": columns, "block_count": 1, "attention.head_count": 4}.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_tensor("token_embd.weight", raw.reshape(experts * rows, -1), raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_gate_exps.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(gguf.dequantize(raw.reshape(experts * rows, -1), kind))
    assert expected.shape == (experts * rows, columns) and expected.float().std() > 0
    for dtype in (torch.float32, torch.bfloat16):
        found = dict(open_checkpoint(path).stream(dtype=dtype))
        assert torch.equal(found["model.embed_tokens.weight"], expected.to(dtype))
        for expert in range(experts):
            tensor = found[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"]
            assert torch.equal(tensor, expected[expert * rows : (expert + 1) * rows].to(dtype))
