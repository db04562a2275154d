"""The whole engine on Triton kernels, as on a GPU: two steps open at once, decodes replayed, results that come late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late import LateDevice
from tiny import tiny_model

from batchgen import loader, spec
from batchgen.attention.triton import TritonAttention
from batchgen.device import Cpu, Cuda
from batchgen.engine.engine import Engine
from batchgen.errors import ConfigError
from batchgen.models.experts import SeparateExperts, StackedExperts
from batchgen.tokenizer import Tokenizer
from batchgen.types import Request, RowKey, SamplingParams

VOCAB = 331
OUTPUT = 5
GIB = 1 << 30


class FakeGpu(LateDevice, Cuda):
    """Kernels run in Triton's interpreter; a step takes 100 MiB."""

    name = "a GPU that is none"
    total_bytes = 4 * GIB
    num_multiprocessors = 4
    step_bytes = 100 << 20

    def free_bytes(self) -> int:
        return 3 * GIB

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return self.step_bytes


@pytest.fixture(autouse=True)
def numbers_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "load", lambda path, chat_template: Tokenizer.of_numbers(VOCAB))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    device = FakeGpu(captures=True)
    monkeypatch.setattr(loader, "open_device", lambda asked: device)
    return device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "qwen3", sliding_window=7, use_sliding_window=True, max_window_layers=1)
    return folder


def engine_of(folder: Path, **engine: Any) -> Engine:
    settings = {"max_num_seqs": 4, "max_batch_tokens": 24, "kv_memory": 1 << 20, **engine}
    return loader.Model(spec.ModelSpec(path=str(folder)), spec.EngineSpec(**settings)).engine()


def requests(output: int = OUTPUT) -> list[Request]:
    """Prompts of 1 to 23 tokens, some with a common beginning; greedy and drawn ones, some of two samples."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, VOCAB, 17)
    rows = []
    for number in range(7):
        prompt = rng.integers(3, VOCAB, 1 + number)
        if number % 3 == 0:
            prompt = np.concatenate((shared, prompt))
        params: dict[str, Any] = {"max_tokens": max(1, output - number % 3), "ignore_eos": number % 2 == 0}
        if number % 2:
            params.update(temperature=0.9, top_k=20, top_p=0.9, n=1 + number % 4 // 2)
        rows.append(Request(RowKey(0, number), prompt.astype(np.int32), SamplingParams(**params), 77 + number))
    return rows


def answers(engine: Engine, output: int = OUTPUT) -> dict[tuple[int, int], list[int]]:
    return {(done.key.row, done.sample): done.token_ids.tolist() for done in engine.generate(requests(output))}


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[tuple[int, int], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", lambda path, chat_template: Tokenizer.of_numbers(VOCAB))
        return answers(engine_of(folder, attention="reference", device="cpu"))


def test_triton_gives_the_tokens_of_the_reference(
    folder: Path, gpu: FakeGpu, expected: dict[tuple[int, int], list[int]]
) -> None:
    engine = engine_of(folder, block_size=16)
    assert isinstance(engine.runner._backend, TritonAttention)  # type: ignore[attr-defined]
    assert answers(engine) == expected
    assert 0 < gpu.num_captured <= 3, "for 1, 2 and 4 rows, and each once"
    place = {event: index for index, event in enumerate(gpu.events)}
    begun = [number for event, number in place if event == "begun"]
    assert sum(place["begun", n + 1] < place["waited", n] for n in begun[:-1]) > 0.8 * len(begun), "depth 2"


def test_values_of_another_size_than_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As latent attention has, through every backend."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 40, "kv_lora_rank": 24}
    tiny_model(tmp_path, "deepseek_v3", num_key_value_heads=6, first_k_dense_replace=2, **sizes)
    expected = answers(engine_of(tmp_path, attention="reference", device="cpu"))
    assert answers(engine_of(tmp_path, device="cpu")) == expected
    monkeypatch.setattr(loader, "open_device", lambda asked: FakeGpu(captures=True))
    engine = engine_of(tmp_path, block_size=16)
    assert isinstance(engine.runner._backend, TritonAttention)  # type: ignore[attr-defined]
    assert answers(engine) == expected


def test_a_mixture_of_experts(tmp_path: Path, gpu: FakeGpu) -> None:
    """Whose experts are sorted and multiplied on the device, in replayed steps too."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tiny_model(tmp_path, "qwen2_moe", head_dim=16, shared_expert_intermediate_size=48, **experts)
    engine = engine_of(tmp_path)
    mixture = engine.runner._decoder.layers[0].mlp.mixture  # type: ignore[attr-defined]
    assert isinstance(mixture, StackedExperts)
    found = answers(engine)
    assert gpu.num_captured > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "open_device", lambda asked: Cpu())
        plain = engine_of(tmp_path, attention="reference")
    mixture = plain.runner._decoder.layers[0].mlp.mixture  # type: ignore[attr-defined]
    assert isinstance(mixture, SeparateExperts)
    assert found == answers(plain)


def test_graphs_change_nothing(folder: Path, gpu: FakeGpu, expected: dict[tuple[int, int], list[int]]) -> None:
    gpu.captures = False
    assert answers(engine_of(folder)) == expected
    assert gpu.num_captured == 0


def test_the_pool_takes_what_the_largest_step_leaves(folder: Path, gpu: FakeGpu) -> None:
    engine = engine_of(folder, kv_memory="auto")
    per_block = 2 * 2 * 2 * 32 * 4 * engine.settings.block_size
    taken = engine.settings.num_blocks * per_block
    beside = gpu.step_bytes + gpu.step_bytes * 4 // 24 + loader.GRAPHS_BYTES + int(0.02 * 4 * GIB)
    assert 3 * GIB - beside - per_block < taken <= 3 * GIB - beside


def test_a_step_that_the_gpu_has_no_room_for(folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("batchgen.models.decoder.Decoder.logits", fails)
    with pytest.raises(ConfigError, match=r"engine.max_batch_tokens, engine.max_num_seqs: the largest step"):
        engine_of(folder)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"attention": "cpu"}, "engine.attention: cpu, but the model runs on a GPU"),
        ({"kv_memory": 3 * GIB}, "engine.kv_memory: 3.00 GiB, but 2"),
    ],
)
def test_what_does_not_go_on_a_gpu(folder: Path, gpu: FakeGpu, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(folder, **engine)


def test_int8_is_refused_on_a_gpu(folder: Path, gpu: FakeGpu) -> None:
    model = loader.Model(spec.ModelSpec(path=str(folder), quantization="int8"), spec.EngineSpec())
    with pytest.raises(ConfigError, match=r"model.quantization: int8 does not run on a GPU yet"):
        model.engine()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"device": "cuda"}, "engine.device: cuda, but torch .* can use no GPU"),
        ({"device": "cpu", "attention": "triton"}, "engine.attention: triton needs a GPU"),
        ({"device": "cpu", "kv_dtype": "fp8"}, "engine.kv_dtype: fp8 does not run on a CPU"),
        ({"device": "cpu", "kv_dtype": "float16"}, "engine.kv_dtype: float16 does not run on a CPU"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_does_not_go_on_a_cpu(folder: Path, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(folder, **engine)


def test_8_bit_keys_and_values_change_little(
    folder: Path, gpu: FakeGpu, expected: dict[tuple[int, int], list[int]]
) -> None:
    found = answers(engine_of(folder, kv_dtype="fp8"), output=1)
    assert found.keys() == expected.keys()
    greedy = [key for key in found if key[0] % 2 == 0]
    first = [found[key][0] == expected[key][0] for key in greedy]
    assert sum(first) >= len(first) / 2, "the first token comes out of the prompt's keys and values alone"
