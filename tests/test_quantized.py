"""Quantised safetensors checkpoints: numbers as the formats define them, whole models, and refusals before reading."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Harness, reference_logits, sequences
from quantizers import FORMATS, NF4, Format, Tensors, compressed
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import PreTrainedModel

from batchgen.errors import ModelError
from batchgen.models import registry
from batchgen.weights import dequantize, open_checkpoint

LAYER = "model.layers.0.mlp.up_proj"
PLAIN = "model.layers.1.self_attn.k_proj"  # left as it is in every checkpoint here


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """As safetensors wants them: in one piece, and no two in the same memory."""
    return tensor.clone(memory_format=torch.contiguous_format)


def write(folder: Path, tensors: Tensors, quantization: dict[str, Any] | None, **config: Any) -> None:
    """A folder with `tensors` and nothing else that a model has."""
    folder.mkdir(exist_ok=True)
    save_file({name: copied(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path, dtype: torch.dtype | None = None) -> Tensors:
    return {name: tensor.clone() for name, tensor in open_checkpoint(folder).stream(dtype=dtype)}


def quantised_model(folder: Path, form: Format, max_shard_size: str = "5GB") -> PreTrainedModel:
    """Save a tiny model with its layers in `form`, all but the head and PLAIN; return it dequantised."""
    model = tiny_model(folder, max_shard_size=max_shard_size)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight") and not name.startswith(PLAIN)]:
            stored, meant = form.encode(tensors.pop(name))
            tensors |= {f"{name.removesuffix('weight')}{key}": copied(tensor) for key, tensor in stored.items()}
            with torch.no_grad():
                model.get_parameter(name).copy_(meant)
        save_file(tensors, file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        placed = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
        index.write_text(json.dumps({"weight_map": placed}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return model


@pytest.mark.parametrize("label", FORMATS)
def test_quantised_models_compute_what_their_dequantised_weights_do(tmp_path: Path, label: str) -> None:
    model = quantised_model(tmp_path, FORMATS[label])
    checkpoint = open_checkpoint(tmp_path)
    meant = model.state_dict()
    assert sorted(checkpoint.names) == sorted(meant)
    for name, tensor in checkpoint.stream():
        torch.testing.assert_close(
            tensor, meant[name], rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name} {text}"
        )
    harness = Harness(tmp_path)
    assert harness.decoder.config.dtype == "bfloat16"
    for number, tokens in sequences(331, 9, 23).items():
        logits = harness.step({number: tokens})[number]
        torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_tensors_come_in_the_dtype_that_is_asked_for_rounded_once(tmp_path: Path) -> None:
    model = quantised_model(tmp_path, FORMATS["gptq 4"])
    for name, tensor in open_checkpoint(tmp_path).stream(dtype=torch.bfloat16):
        assert torch.equal(tensor, model.state_dict()[name].bfloat16())


@pytest.mark.parametrize("label", ["fp8 blocks", "ct packed 4 ordered", "gptq 3", "awq", "bnb nf4 nested"])
def test_large_tensors_are_dequantised_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    quantised_model(tmp_path, FORMATS[label])
    whole = read(tmp_path)
    sizes: list[int] = []
    look_up, apply = dequantize.lookup, dequantize.Scales.apply

    def measured_lookup(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        found = look_up(table, codes)
        sizes.append(found.numel())
        return found

    def measured_apply(scales: dequantize.Scales, codes: torch.Tensor, start: int) -> torch.Tensor:
        sizes.append(codes.numel())
        return apply(scales, codes, start)

    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(dequantize, "lookup", measured_lookup)
    monkeypatch.setattr(dequantize.Scales, "apply", measured_apply)
    for name, tensor in read(tmp_path).items():
        assert torch.equal(tensor, whole[name])
    assert 700 < max(sizes) <= 1536, "one chunk, or eight rows where a word holds so many"


@pytest.mark.parametrize("label", ["fp8 channel", "gptq 4", "bnb nf4"])
def test_parts_of_a_layer_may_lie_in_several_files(tmp_path: Path, label: str) -> None:
    model = quantised_model(tmp_path, FORMATS[label], max_shard_size="150KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    tensors = [load_file(file) for file in files]
    moved = 0
    for here, there in zip(tensors, [*tensors[1:], tensors[0]], strict=True):
        for name in [name for name in here if "scale" in name or "absmax" in name]:
            if name not in there:
                there[name] = here.pop(name)
                moved += 1
    assert moved > 5
    placed = {}
    for file, content in zip(files, tensors, strict=True):
        save_file(content, file)
        placed |= dict.fromkeys(content, file.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    checkpoint = open_checkpoint(tmp_path)
    grouped = checkpoint.by_file(checkpoint.names)
    assert len(grouped) > 2
    assert sorted(name for names in grouped for name in names) == sorted(checkpoint.names)
    codes = {"gptq 4": f"{LAYER}.qweight"}.get(label, f"{LAYER}.weight")  # the largest part: where the reading is
    with_codes = next(number for number, content in enumerate(tensors) if codes in content)
    assert [f"{LAYER}.weight" in names for names in grouped].index(True) == with_codes
    seen = [name for names in grouped for name, _ in checkpoint.stream(names)]
    assert sorted(seen) == sorted(checkpoint.names)
    tokens = sequences(331, 12)[0]
    logits = Harness(tmp_path, readers=3).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=1e-4, atol=1e-4)


# --- bit orders, against what the formats' own libraries packed and unpacked


def int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_awq_order_of_bits(tmp_path: Path) -> None:
    tensors = {  # AutoAWQ's dequantize_gemm gave the numbers below for these
        "a.qweight": int32(
            [[-368478959, 656622549], [-1596702072, -853096111], [-503177457, -47591151], [318561811, -2081741590]]
        ),
        "a.qzeros": int32([[-720237920, -493372985], [998442595, -1246538393]]),
        "a.scales": torch.arange(1, 33).view(2, 16) / 16,
    }  # fmt: skip
    write(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "group_size": 2, "version": "GEMM", "zero_point": True})
    assert read(tmp_path)["a.weight"].tolist() == [
        [0.0625, 0.5, 12.75, 0.0], [0.875, 0.25, -1.125, 10.125], [-1.6875, -0.375, -7.125, -5.9375],
        [-0.25, 3.0, -10.0, 8.75], [-1.5625, -2.5, 11.8125, 10.5], [1.875, -1.875, -12.375, -12.375],
        [3.0625, 1.75, 1.4375, 18.6875], [0.5, -1.5, 16.5, -3.0], [-1.125, -3.375, -9.375, 4.6875],
        [-2.5, -0.625, 9.75, 13.0], [0.6875, -4.8125, -8.4375, 13.5], [-5.25, -5.25, -15.75, 5.25],
        [-4.875, 0.0, -7.25, -1.8125], [4.375, 9.625, 15.0, -3.75], [-6.5625, 0.9375, 15.5, -5.8125],
        [-12.0, -2.0, 8.0, -6.0],
    ]  # fmt: skip


# bits -> words of AutoGPTQ's qweight for rows 0 and 31 of the layer below, and its qzeros
GPTQ_WORDS = {
    3: ([-1733573736, -1013404733, -1413244757], [1930786931, 2020808056, 360215317],
        [[1881787265, -1490156231, -1206590016], [1402405532, 1544188640, 701202766]]),
    4: ([-763619664, 1525980728, -763619664, 1525980728], [-1926774421, 95373795, -1926774421, 95373795],
        [[-686142095, 441282980, 1299293399, 1906628378], [441282980, 1299293399, 1906628378, -1529406899]]),
}  # fmt: skip


@pytest.mark.parametrize("bits", GPTQ_WORDS)
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_order_of_bits_and_zero_points_less_one(tmp_path: Path, bits: int, version: int) -> None:
    first, last, zeros = GPTQ_WORDS[bits]
    words = torch.zeros(bits, 32, dtype=torch.int32)
    words[:, 0], words[:, 31] = int32([first])[0], int32([last])[0]
    tensors = {"a.qweight": words, "a.qzeros": int32(zeros), "a.scales": torch.full((2, 32), 0.5)}
    form = {1: "gptq", 2: "gptq_v2"}[version]
    write(tmp_path, tensors, {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": form})
    found = read(tmp_path)["a.weight"]
    for row in (0, 31):
        codes = [(11 * (32 * row + column) + 5 * row) % 2**bits for column in range(32)]
        points = [(3 * (2 * row + group) + 1) % (2**bits - 1) + 1 for group in (0, 1)]
        less = 0 if version == 1 else 1
        assert found[row].tolist() == [(code - points[i // 16] + less) / 2 for i, code in enumerate(codes)]


def test_gptq_zero_point_0_wraps_round_in_version_1(tmp_path: Path) -> None:
    tensors = {"a.qweight": int32([[0x76543210] * 8]), "a.qzeros": int32([[-1]]), "a.scales": torch.ones(1, 8)}
    write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 8})
    assert read(tmp_path)["a.weight"].tolist() == [list(range(8))] * 8


def test_packed_order_of_bits(tmp_path: Path) -> None:
    tensors = {  # packed and dequantised by the compressed-tensors package
        "a.weight_packed": int32([[442694736], [-1510207502], [-3211215]]),
        "a.weight_zero_point": int32([[137, 4022]]),
        "a.weight_scale": torch.tensor([[0.25, 0.5], [0.125, 0.375], [1.0, 0.75]]),
        "a.weight_shape": torch.tensor([3, 8]),
    }
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 4}
    write(tmp_path, tensors, compressed("pack-quantized", weights))
    assert read(tmp_path)["a.weight"].tolist() == [
        [-2.25, -1.0, 0.75, 1.5, -2.0, 0.0, 2.0, -2.5],
        [-0.75, 0.875, 0.875, -1.0, 0.375, 1.5, -2.25, -0.375],
        [1.0, 3.0, 0.0, 0.0, 0.0, -2.25, 0.0, 0.0],
    ]


def test_packed_layers_of_older_files(tmp_path: Path) -> None:
    """Zero points are bytes, symmetric layers have some too, and an index of -1 stands for none."""
    tensors = {
        "a.weight_packed": int32([[0x76543210], [-1]]),  # 0 to 7, and 15s
        "a.weight_zero_point": torch.tensor([[-8, -7], [0, 7]], dtype=torch.int8),
        "a.weight_scale": torch.tensor([[1.0, 2.0], [1.0, 1.0]]),
        "a.weight_shape": torch.tensor([2, 8], dtype=torch.int32),
        "a.weight_g_idx": torch.full((8,), -1, dtype=torch.int32),
    }
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 4}
    write(tmp_path, tensors, compressed("pack-quantized", weights))
    assert read(tmp_path)["a.weight"].tolist() == [[0, 1, 2, 3, 6, 8, 10, 12], [7, 7, 7, 7, 0, 0, 0, 0]]
    tensors["a.weight_zero_point"] = torch.zeros(2, 2, dtype=torch.int8)
    write(tmp_path, tensors, compressed("pack-quantized", {**weights, "symmetric": True}))
    assert read(tmp_path)["a.weight"].tolist() == [[-8, -7, -6, -5, -8, -6, -4, -2], [7] * 8]


def test_nf4_order_of_bits(tmp_path: Path) -> None:
    state = b'{"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": [2, 16]}'
    tensors = {  # quantised by bitsandbytes
        "a.weight": torch.tensor([238, 255, 241, 18, 35, 51, 68, 86, 119, 119, 136, 136, 137, 153, 153, 154]).byte(),
        "a.weight.absmax": torch.tensor([3.0]),
        "a.weight.quant_map": torch.tensor(NF4),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state)).byte(),
    }  # fmt: skip
    write(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    expected = [
        2.168870449066162, 2.168870449066162, 3.0, 3.0, 3.0, -2.088578462600708, -2.088578462600708,
        -1.5752191543579102, -1.5752191543579102, -1.1847524642944336, -1.1847524642944336, -1.1847524642944336,
        -0.8533241748809814, -0.8533241748809814, -0.5543202757835388, -0.27315011620521545, 0.0, 0.0, 0.0, 0.0,
        0.23874089121818542, 0.23874089121818542, 0.23874089121818542, 0.23874089121818542, 0.23874089121818542,
        0.48279058933258057, 0.48279058933258057, 0.48279058933258057, 0.48279058933258057, 0.48279058933258057,
        0.48279058933258057, 0.7383369207382202,
    ]  # fmt: skip
    assert read(tmp_path)["a.weight"].reshape(-1).tolist() == expected


def test_mxfp4_experts_are_transposed_and_low_bits_come_first(tmp_path: Path) -> None:
    blocks = [0, 8, 16, 25, 33, 41, 50, 58, 66, 75, 83, 91, 100, 108, 116, 125,
              133, 141, 150, 158, 166, 175, 183, 191, 200, 208, 216, 225, 233, 241, 250, 2]  # fmt: skip
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}_blocks": torch.tensor(blocks, dtype=torch.uint8).view(1, 2, 1, 16),
        f"{name}_scales": torch.tensor([[[126], [129]]], dtype=torch.uint8),
        f"{name}_bias": torch.ones(1, 2, dtype=torch.bfloat16),
    }
    write(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    found = read(tmp_path, torch.bfloat16)
    assert found[name].shape == (1, 32, 2)  # (experts, hidden size, gates and ups)
    assert found[name][0].t().tolist() == [  # computed by transformers
        [0, 0, 0, 0, 0, 0.25, -0.25, 0.25, 0.25, 0.5, -0.25, 0.5, 0.5, 0.75, -0.5, 0.75, 0.5, 1, -0.75, 1, 0.75, 1.5,
         -0.75, 1.5, 1, 2, -1, 2, 1, 3, -1.5, 3],
        [12, 0, -12, 0, 16, -2, -16, -2, 16, -4, -24, -4, 24, -6, -24, -6, 0, -8, 0, -12, 0, -12, 2, -16, -2, -16, 2,
         -24, -4, -24, 4, 0],
    ]  # fmt: skip
    assert found[f"{name}_bias"].tolist() == [[1.0, 1.0]]


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 40, 5), dtype=torch.uint8, generator=generator)
    write(tmp_path, {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, {"quant_method": "mxfp4"})
    assert torch.equal(read(tmp_path, torch.bfloat16)["e.down_proj"], convert_moe_packed_tensors(blocks, scales))


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = tiny_model(tmp_path, "gpt_oss", num_local_experts=5, num_experts_per_tok=2, sliding_window=9)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        groups = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, groups, dtype=torch.uint8, generator=generator)
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = sequences(model.config.vocab_size, 30)[0]
    logits = Harness(tmp_path, max_model_len=64).step({0: tokens})[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)


# --- float8 in the shapes and places that it comes in


def test_float8_experts_and_scales_that_are_exponents(tmp_path: Path) -> None:
    codes = torch.randn(3, 10, 12, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    exponents = torch.arange(120, 126, dtype=torch.uint8)
    factors = 2.0 ** (exponents.float() - 127)
    tensors = {
        "blocks": codes, "blocks_scale_inv": factors.view(3, 2, 1),
        "bytes": codes, "bytes_scale_inv": exponents.view(3, 2, 1),
        "e8m0": codes, "e8m0_scale_inv": exponents.view(3, 2, 1).view(torch.float8_e8m0fnu),
        "columns": codes, "columns_scale": torch.arange(36.0).view(3, 1, 12),
        "alone": codes, "alone_scale": torch.tensor([2.0, 3.0, 4.0]),
        "e5m2": codes[0].float().to(torch.float8_e5m2), "e5m2_scale": torch.tensor(0.5),
    }  # fmt: skip
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [5, 12]})
    found, plain = read(tmp_path), codes.float()
    by_blocks = plain * factors.repeat_interleave(5).view(3, 10, 1)
    for name in ("blocks", "bytes", "e8m0"):
        assert torch.equal(found[name], by_blocks)
    assert torch.equal(found["columns"], plain * torch.arange(36.0).view(3, 1, 12))
    assert torch.equal(found["alone"], plain * torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1))
    assert torch.equal(found["e5m2"], plain[0].to(torch.float8_e5m2).float() * 0.5)


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    model = quantised_model(tmp_path, FORMATS["modelopt"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"stored as F8_E4M3, but by config.json there is no quantization_config"):
        open_checkpoint(tmp_path)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    first = open_checkpoint(tmp_path)
    fingerprint = first.fingerprint()
    torch.testing.assert_close(dict(first.stream())[f"{LAYER}.weight"], model.get_parameter(f"{LAYER}.weight").data)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said) + "\n")
    assert open_checkpoint(tmp_path).fingerprint() != fingerprint
    said["quantization"]["quant_algo"] = "NVFP4"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"ModelOpt's quant_algo is 'NVFP4'.*expected fp8"):
        open_checkpoint(tmp_path)


# --- which layers


def test_several_groups_of_layers_and_ignored_ones(tmp_path: Path) -> None:
    packed, of_packed = FORMATS["ct packed 4 group"].encode(torch.randn(8, 64))
    eight, of_eight = FORMATS["ct int8 channel"].encode(torch.randn(8, 64))
    float8, of_float8 = FORMATS["ct float tensor"].encode(torch.randn(8, 64))
    groups = {
        "group_0": {
            "format": "int-quantized",
            "targets": ["re:.*attn.*"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        },
        "group_1": {
            "format": "pack-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32},
        },
        "group_2": {
            "format": "float-quantized",
            "targets": ["m.attn.special"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
        "group_3": {"targets": ["LlamaAttention"], "weights": None, "output_activations": {"num_bits": 8}},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*gate$"],
    }
    tensors = {"lm_head.weight": torch.ones(2, 2), "m.gate.weight": torch.ones(2, 2), "m.attn.k_scale": torch.ones(1)}
    for module, stored in {"m.attn.q": eight, "m.up": packed, "m.attn.special": float8}.items():
        tensors |= {f"{module}.{key}": tensor for key, tensor in stored.items()}
    write(tmp_path, tensors, quantization)
    found = read(tmp_path)
    assert sorted(found) == [
        "lm_head.weight",
        "m.attn.q.weight",
        "m.attn.special.weight",
        "m.gate.weight",
        "m.up.weight",
    ]
    assert torch.equal(found["m.attn.q.weight"], of_eight)
    assert torch.equal(found["m.up.weight"], of_packed)
    assert torch.equal(found["m.attn.special.weight"], of_float8)
    write(tmp_path, tensors, {**quantization, "ignore": ["m.up"]})
    with pytest.raises(ModelError, match=r"'m.up.weight_packed' is stored as I32, but .* ignores 'm.up'"):
        open_checkpoint(tmp_path)
    del groups["group_1"]
    write(tmp_path, tensors, quantization)
    with pytest.raises(ModelError, match=r"'m.up.weight_packed' is stored as I32, but no group .* targets it"):
        open_checkpoint(tmp_path)


def test_gptq_layers_with_other_bits_or_left_out(tmp_path: Path) -> None:
    four, of_four = FORMATS["gptq 4"].encode(torch.randn(32, 64))
    eight, of_eight = FORMATS["gptq 8"].encode(torch.randn(32, 64))
    tensors = {"c.weight": torch.ones(2, 2)}
    tensors |= {f"a.{key}": t for key, t in four.items()} | {f"b.{key}": t for key, t in eight.items()}
    config = FORMATS["gptq 4"].config
    write(tmp_path, tensors, {**config, "dynamic": {"-:c": {}}})
    with pytest.raises(ModelError, match=r"b.scales"):
        open_checkpoint(tmp_path)
    stored = {key: (t + 1 if key == "b.qzeros" else t) for key, t in tensors.items()}
    del stored["b.qzeros"]
    zeros = tensors["b.qzeros"].view(torch.uint8) - 1  # the 8 bits come from version 2, which is not what is said here
    write(
        tmp_path,
        {**stored, "b.qzeros": zeros.view(torch.int32)},
        {**config, "dynamic": {"-:c": {}, "+:b": {"bits": 8}}},
    )
    found = read(tmp_path)
    assert torch.equal(found["a.weight"], of_four)
    assert torch.equal(found["b.weight"], of_eight)
    write(tmp_path, tensors, {**config, "dynamic": {"-:a": {}, "+:b": {"bits": 8}}})
    with pytest.raises(ModelError, match=r"leaves 'a' out, but it is stored quantised"):
        open_checkpoint(tmp_path)


# --- refusals, all of them before a weight is read


@pytest.fixture(scope="module")
def stored_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(label: str) -> Path:
        if label not in made:
            made[label] = tmp_path_factory.mktemp("model")
            quantised_model(made[label], FORMATS[label])
        return made[label]

    return model


def without(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(f"{LAYER}.{name}") for name in names]


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{LAYER}.{new}": tensors.pop(f"{LAYER}.{old}")})


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{LAYER}.{name}": change(tensors[f"{LAYER}.{name}"]).contiguous()})


def fewer(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


BROKEN = [
    ("fp8 blocks", without("weight_scale_inv"), "up_proj.weight' is quantised, but .*weight_scale_inv"),
    ("fp8 blocks", renamed("weight_scale_inv", "scales"), r"weight_scale_inv'.* is not there .*up_proj.scales"),
    ("fp8 tensor", without("weight_scale"), "weight_scale', without which"),
    ("fp8 blocks", changed("weight_scale_inv", fewer), r"weight_scale_inv' has shape \(2, 3\), expected \(3, 3\) or"),
    ("fp8 blocks", changed("weight_scale_inv", torch.Tensor.int), "is stored as I32, expected F32"),
    ("fp8 channel", changed("weight_scale", fewer), r"weight_scale' has shape \(159,\)"),
    ("ct float channel", without("weight_scale"), "weight_scale', without which"),
    ("ct float channel", changed("weight", lambda t: t.view(torch.int8)), "stored as I8, expected F8_E4M3 or F8_E5M2"),
    ("ct int8 channel", renamed("weight_scale", "weight_scal"), "weight_scale'.*there are .*weight_scal"),
    ("ct int8 channel asymmetric", without("weight_zero_point"), "weight_zero_point', without which"),
    ("ct packed 4 group", without("weight_shape"), "weight_shape', without which"),
    ("ct packed 4 group", changed("weight_shape", lambda t: t * 2), r"weight_packed' has .* expected \(320, 24\)"),
    ("ct packed 4 group", changed("weight_scale", fewer), r"weight_scale' has shape \(159, 3\), expected \(160, 3\)"),
    ("ct packed 4 ordered", without("weight_g_idx"), "weight_g_idx', without which"),
    ("gptq 4", without("scales"), "up_proj.scales', without which"),
    ("gptq 4", without("qzeros"), "up_proj.qzeros', without which"),
    ("gptq 4", changed("qzeros", fewer), r"qzeros' has shape \(2, 20\), expected \(3, 20\)"),
    ("gptq 4", without("qweight"), r"up_proj.g_idx' is stored as I32, but .*'gptq' has no use for it"),
    ("gptq 4 ordered", without("g_idx"), "g_idx', without which"),
    ("gptq 4 ordered", changed("g_idx", fewer), r"g_idx' has shape \(95,\), expected \(96,\)"),
    ("gptq 3", changed("qweight", fewer), r"qweight' has shape \(8, 160\), expected a multiple of 3 rows"),
    ("awq", changed("scales", fewer), r"scales' has shape \(2, 160\), expected \(3, 160\)"),
    ("awq", changed("qweight", lambda t: t.to(torch.int64)), "qweight' is stored as I64, expected I32"),
    ("bnb int8", without("SCB"), "up_proj.SCB', without which"),
    ("bnb int8", changed("weight_format", lambda t: t + 2), "stored tiled"),
    ("bnb nf4", without("weight.absmax"), "weight.absmax', without which"),
    ("bnb nf4", without("weight.quant_map"), "weight.quant_map', without which"),
    ("bnb nf4", without("weight"), "up_proj.weight', without which"),
    ("bnb nf4", changed("weight", fewer), "has 7679 bytes, expected 7680"),
    ("bnb nf4", changed("weight.quant_state.bitsandbytes__nf4", fewer), "does not say how .* is the file damaged"),
    ("bnb nf4", without("weight.quant_state.bitsandbytes__nf4", "weight.quant_map"), "bytes' has no use for it"),
    ("bnb nf4 nested", without("weight.nested_absmax"), "nested_absmax', without which"),
]  # fmt: skip


@pytest.mark.parametrize(("label", "damage", "message"), BROKEN)
def test_what_does_not_fit_is_refused(
    stored_models: Callable[[str], Path], tmp_path: Path, label: str, damage: Callable[[Tensors], object], message: str
) -> None:
    shutil.copytree(stored_models(label), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
REFUSED = [
    ("gptq 4", {"quant_method": "aqlm"}, "quant_method 'aqlm' are not supported, expected one of awq, .*mxfp4"),
    ("gptq 4", {"quant_method": "exl2"}, "'exl2'"),
    ("gptq 4", {"quant_method": "hqq"}, "'hqq'"),
    ("gptq 4", {"quant_method": None}, "quant_method None"),
    ("gptq 4", {"bits": 5}, "GPTQ's bits is 5 .* expected 2 or 3 or 4 or 8"),
    ("gptq 4", {"bits": 8}, "up_proj.scales' has shape|proj.scales' has shape"),
    ("gptq 4", {"bits": "four"}, "bits is 'four'"),
    ("gptq 4", {"group_size": 0}, "group_size is 0"),
    ("gptq 4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin' .* expected gptq or gptq_v2"),
    ("gptq 4", {"is_marlin_format": True}, "is_marlin_format is True"),
    ("awq", {"version": "gemv"}, "AWQ's version is 'gemv' .* expected gemm"),
    ("awq", {"bits": 8}, "AWQ's bits is 8"),
    ("awq", {"zero_point": False}, "zero_point is False"),
    ("fp8 blocks", {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
    ("fp8 blocks", {"weight_block_size": [128, 128]}, "weight_scale_inv' has shape"),
    ("fp8 blocks", {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ("modelopt", {"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
    ("ct packed 4 group", compressed("marlin-24", WEIGHTS), "format is 'marlin-24' .* expected float-quantized or"),
    ("ct packed 4 group", compressed("nvfp4-pack-quantized", WEIGHTS), "format is 'nvfp4-pack-quantized'"),
    ("ct packed 4 group", compressed("mixed-precision", WEIGHTS), "format is 'mixed-precision'"),
    ("ct packed 4 group", compressed("pack-quantized", {**WEIGHTS, "num_bits": 3}), "num_bits is 3 .* 2 or 4 or 8"),
    ("ct packed 4 group", compressed("pack-quantized", {**WEIGHTS, "type": "float"}), "type is 'float'"),
    ("ct packed 4 group", compressed("pack-quantized", {**WEIGHTS, "strategy": "tensor_group"}), "'tensor_group'"),
    ("ct packed 4 group", compressed("pack-quantized", {**WEIGHTS, "group_size": 16}), "weight_scale' has shape"),
    ("ct packed 4 group", compressed("int-quantized", WEIGHTS), "there is .*weight_packed', but"),
    ("ct packed 4 group", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse checkpoints are not supported"),
    ("ct packed 4 group", {"transform_config": {"config_groups": {"R1": {}}}}, "rotated weights are not supported"),
    ("ct float blocks", compressed("float-quantized", {"type": "float", "num_bits": 4}), "num_bits is 4"),
    ("ct packed 4 group", {"config_groups": {"W4A16": ["Linear"]}}, r"group \['Linear'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("label", "change", "message"), REFUSED)
def test_configurations_that_cannot_be_read_are_refused(
    stored_models: Callable[[str], Path], tmp_path: Path, label: str, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(stored_models(label), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("label", ["fp8 blocks", "modelopt", "ct packed 4 ordered", "gptq 4", "awq", "bnb nf4"])
def test_malformed_configurations_are_refused_and_not_crashed_upon(
    stored_models: Callable[[str], Path], tmp_path: Path, label: str
) -> None:
    shutil.copytree(stored_models(label), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = FORMATS[label].config | dict.fromkeys(
        ("dynamic", "ignore", "sparsity_config", "transform_config", "quantization", "weight_block_size")
    )
    refused = 0

    def try_all(given: dict[str, Any]) -> None:
        nonlocal refused
        for key, value in list(given.items()):
            for wrong in (None, 7, -1, True, 1.5, "x", "re:(", [], [1], ["re:("], {}, {"x": 1}, {"(": {}}):
                given[key] = wrong
                (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
                try:
                    open_checkpoint(tmp_path)
                except ModelError:
                    refused += 1
            given[key] = value
            if isinstance(value, dict):
                try_all(value)

    try_all(quantization)
    assert refused >= 12


def test_groups_that_have_no_scales_are_refused_when_they_are_read(
    stored_models: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(stored_models("gptq 4 ordered"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{LAYER}.g_idx"][5] = 3
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(f"'{LAYER}.g_idx' puts columns into groups 0 to 3")):
        read(tmp_path)


def test_a_left_over_scale_has_no_place_in_the_model(stored_models: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(stored_models("fp8 channel"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{PLAIN}.weight_scale"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"no place .*{PLAIN}.weight_scale"):
        Harness(tmp_path)


# --- the configuration


def test_configuration_of_the_model_is_that_of_a_plain_one(tmp_path: Path) -> None:
    stored, _ = FORMATS["gptq 4"].encode(torch.randn(32, 64))
    tensors = {f"a.{key}": tensor for key, tensor in stored.items()} | {"b.weight": torch.ones(900, 90).half()}
    config = FORMATS["gptq 4"].config
    write(tmp_path, tensors, config, hidden_size=7, torch_dtype="float16")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == {"hidden_size": 7, "torch_dtype": "float16", "dtype": "bfloat16"}
    fingerprint = checkpoint.fingerprint()
    write(tmp_path, tensors, {**config, "desc_act": True}, hidden_size=7, torch_dtype="float16")
    assert open_checkpoint(tmp_path).fingerprint() != fingerprint  # another way to read the same bytes
    write(tmp_path, tensors, None, text_config={"hidden_size": 7, "quantization_config": config})
    assert open_checkpoint(tmp_path).config == {"text_config": {"hidden_size": 7}, "dtype": "bfloat16"}


def test_fingerprint_sees_scales(stored_models: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(stored_models("gptq 4"), tmp_path, dirs_exist_ok=True)
    seen = {open_checkpoint(tmp_path).fingerprint()}
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors = load_file(tmp_path / "model.safetensors")
        tensors[f"{LAYER}.{part}"].view(torch.uint8).view(-1)[0] ^= 1
        save_file(tensors, tmp_path / "model.safetensors")
        seen.add(open_checkpoint(tmp_path).fingerprint())
    assert len(seen) == 5


def test_a_plain_checkpoint_may_say_how_it_would_be_quantised(tmp_path: Path) -> None:
    tiny_model(tmp_path, dtype=torch.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert registry.read_config(open_checkpoint(tmp_path).config).dtype == "float16"
    Harness(tmp_path)


def test_float8_without_a_configuration_is_no_dtype_of_a_model(tmp_path: Path) -> None:
    write(tmp_path, {"a.weight": torch.ones(64, 64).to(torch.float8_e4m3fn), "norm.weight": torch.ones(4)}, None)
    with pytest.raises(ModelError, match=r"'a.weight' is stored as F8_E4M3.*no quantization_config"):
        open_checkpoint(tmp_path)
