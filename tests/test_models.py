"""The decoder against transformers on tiny random models, and how configurations and tensors are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import batch
from batchgen_kernels import reference as ops
from batchgen_kernels.pages import Arena
from parity import BLOCK_SIZE, Harness, reference_logits, sequences
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from batchgen.attention.reference import ReferenceBackend
from batchgen.errors import ModelError
from batchgen.models import layers, registry
from batchgen.models.config import KVSpec
from batchgen.models.rope import inverse_frequencies
from batchgen.weights import open_checkpoint


def test_last_layer_computes_sampled_rows_only_and_gets_the_same_logits(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "qwen3")
    texts = sequences(model.config.vocab_size, 19, 6, 11)
    every, sampled = Harness(tmp_path), Harness(tmp_path)
    for chunks in (texts, {number: [5 + number] for number in texts}):
        all_rows, last_rows = every.step(chunks), sampled.step(chunks, sample=True, padding=2)
        for number in texts:
            torch.testing.assert_close(last_rows[number][0], all_rows[number][-1], atol=1e-5, rtol=0)


def test_files_can_be_read_side_by_side(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    tokens = sequences(model.config.vocab_size, 30)[0]
    logits = Harness(tmp_path, readers=4).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)
    (shard,) = [path for path in tmp_path.glob("*.safetensors") if "00003-of" in path.name]
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(3)}, shard)
    with pytest.raises(ModelError, match=f"tensor {name} has shape"):
        Harness(tmp_path, readers=4)


def test_a_step_that_samples_nothing_still_writes_the_cache(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    tokens = sequences(model.config.vocab_size, 12)[0]
    run = Harness(tmp_path)
    run.blocks, run.context = {0: [3, 1, 2]}, {0: 11}
    nothing = torch.empty(0, dtype=torch.int64)
    metadata = run.metadata([(0, 11)])
    hidden = run.decoder.forward(torch.tensor(tokens[:11]), torch.arange(11), metadata, nothing, metadata)
    assert hidden.shape == (0, model.config.hidden_size)
    logits = run.step({0: tokens[11:]}, sample=True)[0]
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=1e-4, rtol=0)


def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, dtype=torch.bfloat16)
    tokens = sequences(model.config.vocab_size, 40)[0]
    exact = reference_logits(model, tokens)
    theirs = (reference_logits(model.bfloat16(), tokens) - exact).square().mean().sqrt()
    ours = (Harness(tmp_path, dtype=torch.bfloat16).step({0: tokens})[0] - exact).square().mean().sqrt()
    assert registry.read_config(open_checkpoint(tmp_path).config).dtype == "bfloat16"
    assert 0 < ours < 1.2 * theirs


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-untruncated": {"factor": 4.0, "original_max_position_embeddings": 16, "truncate": False, "beta_fast": 20.0},
    "longrope": {
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.1 * n for n in range(16)],
        "long_factor": [2.0 + 0.5 * n for n in range(16)],
    },
    "longrope-factor": {
        "original_max_position_embeddings": 16,
        "factor": 4.0,
        "attention_factor": 1.3,
        "short_factor": [1.0] * 16,
        "long_factor": [3.0] * 16,
    },
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("key", ["rope_type", "type", "rope_parameters"])
def test_rope_scaling_past_the_original_length_equals_transformers(tmp_path: Path, kind: str, key: str) -> None:
    rope_type, length = kind.partition("-")[0], 48
    rope = {"rope_theta": 5000.0, "rope_type": rope_type, **ROPES[kind]}
    model = tiny_model(tmp_path, rope_parameters=dict(rope), max_position_embeddings=16 if kind == "dynamic" else 64)
    raw = json.loads((tmp_path / "config.json").read_text())
    if key != "rope_parameters":  # the older spelling
        del raw["rope_parameters"]
        raw["rope_theta"] = rope.pop("rope_theta")
        raw["rope_scaling"] = {key: rope.pop("rope_type"), **rope}
        (tmp_path / "config.json").write_text(json.dumps(raw))
    run = Harness(tmp_path, max_model_len=length)
    config = run.decoder.config
    inverse, attention_factor = inverse_frequencies(config.ropes[0], length)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope_type](model.config, "cpu", seq_len=length)
    torch.testing.assert_close(inverse, expected, atol=0, rtol=1e-6)
    assert attention_factor == pytest.approx(expected_factor)
    tokens = sequences(model.config.vocab_size, length)[0]
    logits = torch.cat([run.step({0: tokens[start : start + 20]})[0] for start in (0, 20, 40)])
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-3, rtol=0)


def test_a_job_that_stays_within_the_original_length_uses_unstretched_frequencies(tmp_path: Path) -> None:
    tiny_model(tmp_path, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **ROPES["longrope"]})
    rope = registry.read_config(open_checkpoint(tmp_path).config).ropes[0]
    short, long = inverse_frequencies(rope, 16)[0], inverse_frequencies(rope, 17)[0]
    assert short[0] == 1.0 and long[0] == 0.5


RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "not declared"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": 66}, r"no head_dim, and hidden_size \(66\)"),
        ({"head_dim": [16, 32]}, r"head_dim is \[16, 32\], expected one positive whole number"),
        ({"num_key_value_heads": [4, 2]}, "num_key_value_heads is"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"hidden_act": "swiglu"}, "hidden_act 'swiglu'.*silu"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope type 'su'.*longrope"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "expected 8 numbers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat dictionary"),
        ({"dtype": "F8_E4M3"}, "F8_E4M3 is not supported"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": "9"}, "sliding_window"),
    ],
)
def test_configurations_that_are_refused_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        registry.read_config({**RAW, **change})


def test_config_defaults_are_the_reference_implementations() -> None:
    config = registry.read_config(RAW)
    assert config.layers[0] == KVSpec(num_heads=4, num_kv_heads=4, head_dim=16, scale=0.25)
    assert (config.ropes[0].theta, config.ropes[0].rotary_dim, config.dtype) == (10000.0, 16, "float32")
    assert registry.read_config({**RAW, "head_dim": 32, "eos_token_id": [5, 3]}).eos_token_ids == (3, 5)
    assert registry.read_config({**RAW, "head_dim": 32}).layers[0].head_dim == 32
    assert registry.read_config({**RAW, "head_dim": None}).layers[0].head_dim == 16
    assert registry.read_config({**RAW, "partial_rotary_factor": 0.5}).ropes[0].rotary_dim == 8
    mistral = {**RAW, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert registry.read_config(mistral).layers[1].window == 4096
    assert registry.read_config({**mistral, "sliding_window": None}).layers[1].window is None
    qwen = {**RAW, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
    assert registry.read_config(qwen).layers[1] == KVSpec(4, 2, 128, 128**-0.5, window=None)
    sliding = {**qwen, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    assert [layer.window for layer in registry.read_config(sliding).layers] == [None, 9]
    # dynamic scaling stretches from max_position_embeddings, whatever else is written beside it
    dynamic = {**RAW, "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}}
    assert dict(registry.read_config(dynamic).ropes[0].scaling)["original_max_position_embeddings"] == 256


def test_eos_ids_join_those_of_the_generation_config(tmp_path: Path) -> None:
    tiny_model(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [106, 2]}')
    assert Harness(tmp_path).decoder.config.eos_token_ids == (2, 106)


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Set or delete tensors of a saved model; "__" in a keyword stands for "."."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def test_tied_head_ignores_a_stored_copy_and_warns_when_it_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(tmp_path, tie_word_embeddings=True)
    tokens = sequences(model.config.vocab_size, 9)[0]
    expected = reference_logits(model, tokens)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).names
    torch.testing.assert_close(Harness(tmp_path).step({0: tokens})[0], expected, atol=1e-4, rtol=0)
    copy = model.lm_head.weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        edit_tensors(tmp_path, lm_head__weight=copy)
        torch.testing.assert_close(Harness(tmp_path).step({0: tokens})[0], expected, atol=1e-4, rtol=0)
        assert not caplog.records
        edit_tensors(tmp_path, lm_head__weight=copy + 1)
        torch.testing.assert_close(Harness(tmp_path).step({0: tokens})[0], expected, atol=1e-4, rtol=0)
    assert "the head is model.embed_tokens.weight" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__layers__1__mlp__up_proj__weight": None}, "lacks 1 of.*model.layers.1.mlp.up_proj.weight"),
        ({"lm_head__weight": None}, "lacks 1 of.*lm_head.weight"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.zeros(192)}, "have no place.*q_proj.bias"),
        ({"model__layers__0__mlp__gate_proj__weight_scale": torch.ones(1)}, "have no place.*weight_scale"),
        ({"model__norm__weight": torch.ones(95)}, r"model.norm.weight has shape \(95,\).*\(96,\)"),
        ({"model__layers__0__self_attn__k_proj__weight": torch.ones(32, 96)}, r"k_proj.weight has shape \(32, 96\)"),
    ],
)
def test_every_tensor_is_used_or_known_to_be_needless(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    tiny_model(tmp_path)
    edit_tensors(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        Harness(tmp_path)


def test_norms_keep_their_weights_in_float32_whatever_the_models_dtype(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "gemma", hidden_act="gelu")
    decoder = Harness(tmp_path, dtype=torch.bfloat16).decoder
    assert decoder.embedding.dtype == torch.bfloat16
    assert torch.equal(decoder.norm.weight, model.model.norm.weight + 1)


def test_stored_rotary_tables_are_needless(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    edit_tensors(
        tmp_path,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16),
        model__rotary_emb__inv_freq=torch.ones(16),
    )
    Harness(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 37])
def test_linear_fuses_parts_loaded_in_any_order(dtype: torch.dtype, rows: int) -> None:
    linear = layers.Linear(48, (5, 7, 9), bias=True, dtype=dtype)
    parts = [torch.randn(size, 48) for size in linear.parts]
    biases = [torch.randn(size) for size in linear.parts]
    for part in (2, 0, 1):
        linear.load_weight(part, parts[part])
        linear.load_bias(part, biases[part])
    assert (linear.weight is None) == layers.can_prepack(dtype)  # never two copies
    x = torch.randn(rows, 48).to(dtype)
    expected = F.linear(x.double(), torch.cat(parts).to(dtype).double(), torch.cat(biases).to(dtype).double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(linear(x).double(), expected, atol=tolerance, rtol=tolerance)
    assert linear(x).dtype == dtype and linear(x, wide=True).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_gives_a_single_row_the_bits_it_has_beside_others(dtype: torch.dtype) -> None:
    linear = layers.Linear(256, (70,), bias=False, dtype=dtype)
    linear.use(torch.randn(70, 256).to(dtype))
    x = torch.randn(40, 256).to(dtype)
    assert torch.equal(linear(x[:1]), linear(x)[:1])


def test_int8_linear_is_close_to_the_dense_one_and_rounds_as_the_ops_do() -> None:
    torch.manual_seed(0)
    quantised = layers.Int8Linear(48, (5, 7, 9), bias=True, dtype=torch.float32, ops=ops, arena=Arena())
    dense = layers.Linear(48, (5, 7, 9), bias=True, dtype=torch.float32)
    for part, size in ((2, 9), (0, 5), (1, 7)):
        weight, bias = torch.randn(size, 48), torch.randn(size)
        for linear in (dense, quantised):
            linear.load_weight(part, weight)
            linear.load_bias(part, bias)
    assert quantised.weight is None  # no copy of the wide one is left
    x = torch.randn(30, 48)
    error = (quantised(x) - dense(x)).std() / dense(x).std()
    assert 0.001 < error < 0.02


def test_quantising_a_large_weight_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(50, 12), torch.randn(3, 12)
    outs = []
    for rows in (4096, 16):
        monkeypatch.setattr(layers, "QUANTIZE_ROWS", rows)
        linear = layers.Int8Linear(12, (50,), bias=False, dtype=torch.float32, ops=ops, arena=Arena())
        linear.use(weight)
        outs.append(linear(x))
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {}),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2}),
        ("deepseek_v3", {"num_key_value_heads": 6, "kv_lora_rank": 48, "q_lora_rank": 64, "first_k_dense_replace": 2}),
    ],
)
def test_a_quantised_model_is_near_the_reference(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(tmp_path, family, **changes)
    harness = Harness(tmp_path, quantization="int8")
    tokens = sequences(harness.decoder.config.vocab_size, 40)
    logits, expected = harness.step(tokens)[0], reference_logits(model, tokens[0])
    error = (logits - expected).std() / expected.std()
    assert 0.001 < error < 0.1


def test_linear_without_prepacking_shares_a_tied_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    embedding, x = torch.randn(11, 8), torch.randn(3, 8)
    head = layers.Linear(8, (11,), bias=False, dtype=torch.float32)
    head.use(embedding)
    assert head.weight is embedding
    torch.testing.assert_close(head(x), x @ embedding.T)


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: KVSpec, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """One query head, one query at a time, in float64: (length, heads, dim) each."""
    out = torch.zeros(*query.shape[:2], spec.value_size, dtype=torch.float64)
    for position in range(len(query)):
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(spec.num_heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            keys = key[first : position + 1, kv_head].double()
            scores = keys @ query[position, head].double() * spec.scale
            if spec.soft_cap:
                scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[position, head] = weights / total @ value[first : position + 1, kv_head].double()
    return out


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"window": 3},
        {"soft_cap": 0.5},
        {"window": 5, "soft_cap": 2.0},
        {"value_dim": 4},
        {"sinks": True},
        {"window": 5, "soft_cap": 2.0, "value_dim": 12, "sinks": True},
    ],
    ids=str,
)
def test_reference_backend_windows_soft_caps_value_sizes_and_sinks(given: dict[str, Any]) -> None:
    spec = KVSpec(num_heads=6, num_kv_heads=2, head_dim=8, scale=0.5, **given)
    sinks = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5, 8.0]) if spec.sinks else None
    backend = ReferenceBackend(BLOCK_SIZE)
    backend.allocate([spec], 8, torch.float32)
    assert backend.bytes_per_block([spec, spec], torch.bfloat16) == 2 * BLOCK_SIZE * 2 * (8 + spec.value_size) * 2
    query, key, value = torch.randn(11, 6, 8), torch.randn(11, 2, 8), torch.randn(11, 2, spec.value_size)
    table = [7, 2, 5]  # 7 is the last: where a careless -1 would land
    slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(11)] + [-1, -1]
    cos, sin = torch.ones(13, 4), torch.zeros(13, 4)
    pad = torch.full((2, 8, 12), 9.0)
    metadata = batch(backend, [11], [11], [table], slots)
    queries, keys, values = (
        torch.cat((states, pad[:, : states.shape[1], : states.shape[2]])) for states in (query, key, value)
    )
    backend.rope_and_write(0, queries, keys, values, cos, sin, False, metadata)
    out = backend.attend(0, queries, metadata, sinks)
    expected = dense_attention(query, key, value, spec, sinks)
    torch.testing.assert_close(out[:11].double(), expected, atol=1e-5, rtol=1e-5)
    assert not out[11:].any()

    backend.copy_block(2, 6)  # a decode that reads a copy in place of the middle block
    moved = batch(backend, [1], [11], [[7, 6, 5]], slots[10:11])
    torch.testing.assert_close(backend.attend(0, queries[10:11], moved, sinks), out[10:11])


def test_reference_backend_rotates_part_of_a_head_in_pairs_or_halves() -> None:
    spec = KVSpec(num_heads=1, num_kv_heads=1, head_dim=6, scale=1.0)
    backend = ReferenceBackend(BLOCK_SIZE)
    backend.allocate([spec], 1, torch.float32)
    metadata = batch(backend, [1], [1], [[0]], [0])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])  # turn the first pair by a quarter
    for interleaved, expected in ((False, [-3, 2, 1, 4, 5, 6]), (True, [-2, 1, 3, 4, 5, 6])):
        whole = torch.arange(1.0, 7.0).repeat(1, 3, 1)  # query, key and value as views of one tensor
        query, key, value = whole.split(1, dim=1)
        backend.rope_and_write(0, query, key, value, cos, sin, interleaved, metadata)
        assert query.flatten().tolist() == expected and key.flatten().tolist() == expected
        assert backend.attend(0, query, metadata).flatten().tolist() == [1, 2, 3, 4, 5, 6]
