"""Mixtures of experts against transformers' blocks, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batchgen_kernels import cpu, reference
from safetensors.torch import load_file
from tiny import SHAPE, tiny_model

from batchgen import loader
from batchgen.errors import ModelError
from batchgen.models import layouts, mixtures
from batchgen.models.config import ExpertsConfig, ModelConfig
from batchgen.models.experts import Experts, Router, experts_kind
from batchgen.models.layers import Layout, Ops, linear_kind
from batchgen.models.registry import read_config, tensor_shapes
from batchgen.weights.random import RandomCheckpoint

DEEPSEEK = {"num_experts_per_tok": 3, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
DEEPSEEK |= {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
V3 = {**DEEPSEEK, "n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
V2 = {**DEEPSEEK, "n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
GROUPS = {"n_group": 4, "topk_group": 2}
# model type, how its configuration is read, its tensors, the changes
BLOCKS: dict[str, tuple[str, Callable[..., Any], Layout, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", mixtures.gpt_oss, layouts.GPT_OSS, {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "deepseek-v2": ("deepseek_v2", mixtures.deepseek_v2, layouts.DEEPSEEK_MOE, V2),
    "deepseek-v2-groups": (
        "deepseek_v2",
        mixtures.deepseek_v2,
        layouts.DEEPSEEK_MOE,
        {**V2, **GROUPS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("deepseek_v3", mixtures.deepseek_v3, layouts.DEEPSEEK_MOE, {**V3, **GROUPS}),
    "deepseek-v3-not-normalised": (
        "deepseek_v3",
        mixtures.deepseek_v3,
        layouts.DEEPSEEK_MOE,
        {**V3, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
}


class Stacking:
    """The twin's ops, as those of a GPU: experts in one tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def grouped_linear_pays(self) -> bool:
        return True


STACKING: Ops = Stacking()
ALL_OPS: dict[str, Ops] = {"separate": reference, "stacked": STACKING}
if (native := cpu.load()) is not None:
    ALL_OPS["native"] = native


def model_config(experts: ExpertsConfig, **changes: Any) -> ModelConfig:
    llama = read_config({**SHAPE, "architectures": ["LlamaForCausalLM"]})
    return replace(llama, experts=experts, expert_layers=(True,) * llama.num_layers, **changes)


def make(config: ModelConfig, ops: Ops, dtype: torch.dtype = torch.float32, quantization: str | None = None) -> Experts:
    linear = linear_kind(dtype, quantization, ops)
    return experts_kind(linear, partial(torch.empty, dtype=dtype), ops)(config)


def load(experts: Experts, layout: Layout, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> set[str]:
    places = dict(experts.places(layout))
    for name, place in places.items():
        assert tuple(tensors[name].shape) == place.shape, name
        place.load(tensors[name].to(torch.float32 if place.wide else dtype))
    return set(places)


def random_experts(
    own: ExpertsConfig, ops: Ops, dtype: torch.dtype = torch.float32, quantization: str | None = None, **changes: Any
) -> Experts:
    """Qwen's tensors, the same for all ops."""
    layout = layouts.DEEPSEEK_MOE.of_layer(0)
    experts = make(model_config(own, **changes), ops, dtype, quantization)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(place.shape, generator=generator) * place.shape[-1] ** -0.5
        for name, place in experts.places(layout)
    }
    load(experts, layout, tensors, dtype)
    return experts


@pytest.mark.parametrize("kind", ALL_OPS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_equals_transformers(tmp_path: Path, name: str, kind: str) -> None:
    model_type, read, layout, changes = BLOCKS[name]
    model = tiny_model(tmp_path, model_type, **changes)
    block = model.model.layers[1].mlp
    prefix = "model.layers.1.mlp."
    tensors = load_file(tmp_path / "model.safetensors")
    if model_type == "deepseek_v3":  # a buffer, which is zero in a new model
        bias = torch.randn(8, generator=torch.Generator().manual_seed(5))
        block.gate.e_score_correction_bias.copy_(bias)
        tensors[f"{prefix}gate.e_score_correction_bias"] = bias
    raw = model.config.to_dict()
    fields = read({**raw, "num_local_experts": raw.get("num_local_experts") or raw["n_routed_experts"]})
    assert fields["expert_layers"] == ((True, True) if model_type == "gpt_oss" else (False, True))
    config = model_config(fields["experts"], activation="clamped_swiglu" if model_type == "gpt_oss" else "silu")
    experts = make(config, ALL_OPS[kind])
    named = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    taken = load(experts, layout.of_layer(1), named, torch.float32)
    assert taken == {key for key in named if f"model.{key}".startswith(prefix)}
    x = torch.randn(41, 96, generator=torch.Generator().manual_seed(2)) * 3  # far enough for GPT-OSS's limits
    with torch.inference_mode():
        expected = block(x[None])
        expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
        got = experts(ALL_OPS[kind], x)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in ALL_OPS if kind != "stacked"])
def test_a_token_gets_the_same_in_any_company(kind: str, dtype: torch.dtype, quantization: str | None) -> None:
    own = ExpertsConfig(9, 4, 48, normalize=True, shared_size=80, shared_gate=False)
    experts = random_experts(own, ALL_OPS[kind], dtype, quantization)
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    together = experts(ALL_OPS[kind], x)
    for rows in (slice(0, 1), slice(5, 7), slice(10, 31)):
        assert torch.equal(experts(ALL_OPS[kind], x[rows]), together[rows])
    shuffled = torch.randperm(33, generator=torch.Generator().manual_seed(3))
    assert torch.equal(experts(ALL_OPS[kind], x[shuffled]), together[shuffled])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_and_separate_experts_agree(dtype: torch.dtype) -> None:
    own = ExpertsConfig(9, 4, 48, shared_size=80)
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = [random_experts(own, ops, dtype)(ops, x).float() for ops in ALL_OPS.values()]
    for other in got[1:]:
        torch.testing.assert_close(
            other, got[0], **({"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02})
        )


def test_eight_bits_change_little() -> None:
    own = ExpertsConfig(9, 4, 48, normalize=True)
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(2))
    exact, coarse = (random_experts(own, reference, quantization=kind)(reference, x) for kind in (None, "int8"))
    assert 0 < (exact - coarse).norm() / exact.norm() < 0.03


def router(**fields: Any) -> Router:
    """Whose logits are its input."""
    own = ExpertsConfig(**{"num_experts": 6, "top_k": 2, "intermediate_size": 1, **fields})
    made = Router(own, own.num_experts, torch.device("cpu"))
    made.linear.load_weight(0, torch.eye(own.num_experts))
    return made


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lowest_experts_are_chosen(scoring: str) -> None:
    logits = torch.tensor([[0.0] * 6, [1.0, 2.0, 1.0, 2.0, 2.0, 1.0], [1.0, 0.0, 0.0, 0.0, 3.0, 0.0]])
    _, chosen = router(scoring=scoring)(logits)
    assert chosen.tolist() == [[0, 1], [1, 3], [4, 0]]
    _, chosen = router(scoring=scoring, num_groups=3, top_groups=1)(logits)
    assert chosen.tolist() == [[0, 1], [1, 0], [4, 5]]
    _, chosen = router(scoring=scoring, num_groups=3, top_groups=1, group_score="top2")(logits)
    assert chosen.tolist() == [[0, 1], [1, 0], [4, 5]]


def test_a_bias_for_choosing_does_not_weigh() -> None:
    made = router(scoring="sigmoid", choice_bias=True, scale=2.0)
    assert made.choice_bias is not None
    made.choice_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 4.0]))
    weights, chosen = made(torch.zeros(1, 6))
    assert chosen.tolist() == [[4, 5]] and weights.tolist() == [[1.0, 1.0]]


QWEN3 = {**SHAPE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 7, "num_experts_per_tok": 3}
QWEN3 |= {"moe_intermediate_size": 48, "mlp_only_layers": [0]}


def test_memory_is_reckoned_with_all_experts() -> None:
    config = read_config(QWEN3)
    dense, router_and_experts = 3 * 96 * 160, 7 * 96 + 7 * 3 * 96 * 48
    without = loader.layer_weights(replace(config, expert_layers=()))
    assert loader.layer_weights(config) == without - dense + router_and_experts
    assert loader.weight_bytes(config, torch.bfloat16) > 2 * loader.layer_weights(config)
    assert loader.step_bytes(config, torch.float32, 64, 8) > loader.step_bytes(
        replace(config, experts=None), torch.float32, 64, 8
    )


@pytest.mark.parametrize("raw", [QWEN3, {**SHAPE, "architectures": ["MixtralForCausalLM"]}])
def test_random_weights(raw: dict[str, Any]) -> None:
    shapes = tensor_shapes(read_config(raw))
    for name, tensor in RandomCheckpoint("random", raw, shapes).stream():
        assert tuple(tensor.shape) == shapes[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok is 8, but a token chooses among 7 experts"),
        ({"num_experts": 0}, "num_local_experts is 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config({**QWEN3, **change})


@pytest.mark.parametrize(
    ("read", "change", "message"),
    [
        (mixtures.deepseek_v2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (mixtures.deepseek_v2, {"norm_topk_prob": True}, "norm_topk_prob true"),
        (mixtures.deepseek_v3, {"scoring_func": "softmax"}, "scoring_func other than sigmoid"),
        (mixtures.deepseek_v3, {"n_group": 3}, r"n_group \(3\) and topk_group \(2\) do not go with 8 experts"),
        (mixtures.deepseek_v3, {"n_group": 8, "topk_group": 4}, "groups of two experts or more"),
        (mixtures.deepseek_v3, {"first_k_dense_replace": None}, "first_k_dense_replace is None"),
    ],
)
def test_deepseeks_that_are_refused(read: Callable[..., Any], change: dict[str, Any], message: str) -> None:
    raw = {**SHAPE, **V3, **GROUPS, "num_local_experts": 8, "norm_topk_prob": False, **change}
    with pytest.raises(ModelError, match=message):
        read(raw)
