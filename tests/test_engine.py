"""The engine with a real decoder: the same tokens as transformers, whatever runs beside a row and however it is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from batchgen_kernels import cpu as native
from batchgen_kernels import reference as ops
from batchgen_kernels.cpu.items import Items
from late import LateDevice
from simulated import EOS, Letters, SimulatedRunner, check, make
from test_scheduler import request as simulated_request
from tiny import tiny_model
from transformers import PreTrainedModel

from batchgen.attention.base import AttentionBackend
from batchgen.attention.cpu import CpuAttention
from batchgen.attention.reference import ReferenceBackend
from batchgen.device import Device
from batchgen.engine import forecast
from batchgen.engine.engine import Engine
from batchgen.engine.runner import Runner
from batchgen.engine.step import EngineSettings
from batchgen.errors import BatchgenError, Interrupted
from batchgen.models import registry
from batchgen.models.decoder import Decoder
from batchgen.types import Completion, Request, RowKey, SamplingParams
from batchgen.weights import open_checkpoint

VOCAB = 331
END = 2
NUM_ROWS = 64
OUTPUT = 12


class Model:
    """One tiny random Llama, in transformers and as a decoder; `engine` makes a fresh pool over it each time."""

    def __init__(self, folder: Path) -> None:
        self.reference: PreTrainedModel = tiny_model(folder)
        self._checkpoint = open_checkpoint(folder)

    def engine(
        self,
        *,
        depth: int = 1,
        vocab_limit: int = VOCAB,
        backend: AttentionBackend | None = None,
        device: Device | None = None,
        **settings: object,
    ) -> tuple[Engine, Decoder]:
        sizes = {"max_num_seqs": 64, "max_batch_tokens": 512, "num_blocks": 512, "max_model_len": 128, **settings}
        backend = backend or ReferenceBackend(4)
        resolved = EngineSettings(block_size=backend.block_size, **sizes)  # type: ignore[arg-type]
        decoder = registry.build(
            self._checkpoint, dtype=torch.float32, backend=backend, max_model_len=resolved.max_model_len, ops=ops
        )
        backend.allocate(decoder.config.layers, resolved.num_blocks, torch.float32)
        runner = Runner(decoder, backend, resolved, ops=ops, vocab_limit=vocab_limit, device=device)
        return Engine(runner, settings=resolved, eos_token_ids={END}, stream_factory=Letters, depth=depth), decoder

    def generate(self, prompt: np.ndarray) -> list[int]:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are too small to share, and threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    """Of 1 to 40 tokens; every third continues one of two prefixes."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(3, VOCAB, (2, 18))
    own = [rng.integers(3, VOCAB, rng.integers(1, 41)) for _ in range(NUM_ROWS)]
    mixed = [np.concatenate([prefixes[i % 2], p[:8]]) if i % 3 == 0 else p for i, p in enumerate(own)]
    return [prompt.astype(np.int32) for prompt in mixed]


@pytest.fixture(scope="module")
def greedy(model: Model, prompts: list[np.ndarray]) -> list[list[int]]:
    return [model.generate(prompt) for prompt in prompts]


def row(number: int, prompt: np.ndarray, **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": OUTPUT, **sampling})  # type: ignore[arg-type]
    return Request(RowKey(0, number), prompt, params, noise_key=0x9E3779B97F4A7C15 * (number + 1) % 2**64)


def run(engine: Engine, requests: Iterable[Request]) -> dict[tuple[int, int], Completion]:
    return {(done.key.row, done.sample): done for done in engine.generate(requests)}


SHAPES = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 7},
    {"max_num_seqs": 64},
    {"max_num_seqs": 64, "max_batch_tokens": 11, "depth": 2},  # every prompt in chunks
    {"max_num_seqs": 64, "prefix_cache": False, "depth": 2},
    {"max_num_seqs": 16, "num_blocks": 30},  # preempts
    {"max_num_seqs": 16, "num_blocks": 30, "max_batch_tokens": 23, "depth": 3},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_tokens_are_those_of_transformers(
    model: Model, prompts: list[np.ndarray], greedy: list[list[int]], shape: dict[str, object]
) -> None:
    engine, _ = model.engine(**shape)  # type: ignore[arg-type]
    with patch.object(forecast, "MEAN_UNTIL_KNOWN", 0):
        done = run(engine, (row(number, prompt) for number, prompt in enumerate(prompts)))
    assert [done[number, 0].token_ids.tolist() for number in range(NUM_ROWS)] == greedy
    for completion in done.values():
        ended = completion.token_ids[-1] == END
        assert completion.finish_reason == ("stop" if ended else "length")
        assert completion.stop_reason is None
    stats = engine.stats()
    assert (stats.preemptions > 0) == ("num_blocks" in shape)
    assert (stats.cached_tokens > 0) == shape.get("prefix_cache", True)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.output_tokens == sum(map(len, greedy))


@pytest.mark.parametrize("shape", [{}, {"max_batch_tokens": 90, "depth": 2}], ids=["whole", "chunks"])
def test_a_prefix_read_once_for_all_rows_changes_no_token(model: Model, shape: dict[str, int]) -> None:
    """Rows behind 300 tokens in common, half of them behind 280 more: attended together, alone, and in plain torch."""
    kernels = native.load()
    if kernels is None:
        pytest.skip("the native ops were not built")
    rng = np.random.default_rng(1)
    outer, inner = rng.integers(3, VOCAB, 300), rng.integers(3, VOCAB, 280)
    own = [rng.integers(3, VOCAB, 3 + 5 * number) for number in range(8)]
    prompts = [np.concatenate([outer, inner, p] if number % 2 else [outer, p]) for number, p in enumerate(own)]
    made: list[Items] = []

    class Ops(native.Ops):
        share = True

        def attention_items(self, starts: torch.Tensor, lens: torch.Tensor, table: object, *a: Any, **k: Any) -> Items:
            made.append(super().attention_items(starts, lens, table if self.share else None, *a, **k))  # type: ignore[arg-type]
            return made[-1]

    def tokens(backend: AttentionBackend) -> list[list[int]]:
        engine, _ = model.engine(backend=backend, max_num_seqs=8, max_model_len=700, **shape)
        run(engine, [row(99, prompts[1][:590].astype(np.int32), max_tokens=1)])  # leaves both prefixes in the cache
        made.clear()
        done = run(engine, [row(number, prompt.astype(np.int32)) for number, prompt in enumerate(prompts)])
        return [done[number, 0].token_ids.tolist() for number in range(len(prompts))]

    together = Ops(kernels._library, native.ISAS.index(kernels.isa))
    shared = tokens(CpuAttention(together, 16))
    assert max(len(items.phases) - 1 for items in made) == 3  # outer, inner, own
    assert max(items.num_shared for items in made) >= len(prompts)
    together.share = False
    assert tokens(CpuAttention(together, 16)) == shared
    assert not any(items.num_shared for items in made)
    assert tokens(ReferenceBackend(16)) == shared


def test_drawn_tokens_do_not_depend_on_batch_chunks_or_preemption(model: Model, prompts: list[np.ndarray]) -> None:
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "n": 3},
    ]
    requests = [row(number, prompt, **kinds[number % 4]) for number, prompt in enumerate(prompts[:24])]
    want: dict[tuple[int, int], list[int]] = {}
    for shape in (SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[6]):
        engine, _ = model.engine(**shape)  # type: ignore[arg-type]
        with patch.object(forecast, "MEAN_UNTIL_KNOWN", 0):
            done = run(engine, requests)
        got = {key: completion.token_ids.tolist() for key, completion in done.items()}
        assert len(got) == sum(one.sampling.n for one in requests)
        want = want or got
        assert got == want
    drawn_thrice = [number for number in range(24) if number % 4 == 3]
    assert all(want[number, 0] != want[number, 1] != want[number, 2] for number in drawn_thrice)


def test_an_interrupted_run_goes_on_to_the_same_tokens(
    model: Model, prompts: list[np.ndarray], greedy: list[list[int]]
) -> None:
    engine, _ = model.engine(max_num_seqs=16)
    for number, prompt in enumerate(prompts[:20]):
        engine.add(row(number, prompt))
    finished = [done for _ in range(7) for done in engine.step()]
    kept = {(one.key.row, one.sample): one.token_ids for one in engine.snapshot()}
    assert len(kept) > 5
    again = []
    for number, prompt in enumerate(prompts[:20]):
        fresh = row(number, prompt)
        resume = {0: kept[number, 0]} if (number, 0) in kept else {}
        again.append(Request(fresh.key, prompt, fresh.sampling, fresh.noise_key, resume))
    ended = {done.key.row for done in finished}
    second, _ = model.engine(max_num_seqs=16)
    done = run(second, [one for one in again if one.key.row not in ended])
    done.update(((one.key.row, 0), one) for one in finished)
    assert [done[number, 0].token_ids.tolist() for number in range(20)] == greedy[:20]


def test_ids_the_tokenizer_does_not_have_are_never_drawn(model: Model, prompts: list[np.ndarray]) -> None:
    engine, _ = model.engine(vocab_limit=150)
    kinds: list[dict[str, object]] = [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_p": 0.95}]
    done = run(engine, [row(number, prompts[number], **kinds[number % 3]) for number in range(30)])
    assert max(int(one.token_ids.max()) for one in done.values()) < 150


def test_nan_in_one_row_stays_in_that_row(model: Model, prompts: list[np.ndarray], greedy: list[list[int]]) -> None:
    """Also where others are given its blocks, NaN still in them."""
    engine, decoder = model.engine(max_num_seqs=4, num_blocks=40)
    unused = next(i for i in range(3, VOCAB) if not any(i in p for p in prompts) and not any(i in g for g in greedy))
    decoder.embedding[unused] = torch.nan
    poisoned = [
        np.append(prompt, np.int32(unused)) if number % 4 == 0 else prompt for number, prompt in enumerate(prompts)
    ]
    done = run(engine, [row(number, prompt) for number, prompt in enumerate(poisoned[:40])])
    for number in range(40):
        completion = done[number, 0]
        if number % 4 == 0:
            assert completion.error is not None and completion.error.code == "nonfinite_logits"
        else:
            assert completion.token_ids.tolist() == greedy[number]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_costs_time_but_no_row(
    model: Model, prompts: list[np.ndarray], greedy: list[list[int]], depth: int, error: Exception
) -> None:
    engine, decoder = model.engine(depth=depth)
    forward, calls, sizes = decoder.forward, iter(range(1000)), []

    def limited(*args: torch.Tensor) -> torch.Tensor:
        if next(calls) == 9 or len(args[0]) > 200:
            raise error
        sizes.append(len(args[0]))
        return forward(*args)

    with patch.object(decoder, "forward", limited):
        done = run(engine, [row(number, prompt) for number, prompt in enumerate(prompts)])
    assert [done[number, 0].token_ids.tolist() for number in range(NUM_ROWS)] == greedy
    assert max(sizes) > 50


def test_the_host_prepares_a_step_while_the_device_is_at_another(
    model: Model, prompts: list[np.ndarray], greedy: list[list[int]]
) -> None:
    device = LateDevice()
    engine, _ = model.engine(depth=2, device=device, num_blocks=60)  # of which the rows do not all fit in at once
    done = run(engine, [row(number, prompt) for number, prompt in enumerate(prompts)])
    assert [done[number, 0].token_ids.tolist() for number in range(NUM_ROWS)] == greedy
    place = {event: index for index, event in enumerate(device.events)}
    steps = len(place) // 2
    late = sum(place["begun", step + 1] < place["waited", step] for step in range(steps - 1))
    assert late > 0.9 * steps, "steps were waited for before the next one was begun"


@pytest.mark.parametrize("part", ["submit", "sample", "collect"])
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: unspecified launch failure\nCUDA kernel errors might be", Interrupted),
        ("CUDA error: uncorrectable ECC error encountered", Interrupted),
        ("HIP error: the operation cannot be performed in the present state", Interrupted),
        ("Triton Error [CUDA]: unspecified launch failure", Interrupted),
        ("CUDA error: an illegal memory access was encountered", BatchgenError),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`", BatchgenError),
    ],
)
def test_a_device_that_dies_is_told_from_a_bug(
    model: Model, prompts: list[np.ndarray], part: str, message: str, kind: type[BatchgenError]
) -> None:
    device = LateDevice()
    engine, decoder = model.engine(device=device)

    def fails(*given: Any) -> Any:
        raise RuntimeError(message)

    def begins(*given: Any) -> Any:
        return fails

    engine.add(row(0, prompts[0]))
    where = {"submit": (decoder, "forward", fails), "sample": (decoder, "logits", fails)}
    with patch.object(*where.get(part, (device, "download", begins))), pytest.raises(BatchgenError) as error:
        engine.step()
    assert type(error.value) is kind and message.splitlines()[0] in str(error.value)
    assert error.value.exit_code == (75 if kind is Interrupted else 70)
    if isinstance(error.value, Interrupted):
        assert error.value.reason == "device"


def test_other_errors_of_the_device_are_not_taken_for_a_lack_of_memory(model: Model, prompts: list[np.ndarray]) -> None:
    engine, decoder = model.engine()
    engine.add(row(0, prompts[0]))
    with patch.object(decoder, "forward", side_effect=RuntimeError("shape mismatch")), pytest.raises(RuntimeError):
        engine.step()


def test_generate_reads_requests_as_it_needs_them_and_drops_the_rest_when_left() -> None:
    settings = EngineSettings(max_num_seqs=4, max_batch_tokens=16, num_blocks=64, block_size=4, max_model_len=64)
    engine, _ = make(settings, depth=2)
    read = []

    def source() -> Iterator[Request]:
        for number in range(1000):
            read.append(number)
            yield simulated_request(number, [1 + number % 9, 2])

    completions = engine.generate(source())
    next(completions)
    assert len(read) < 20
    completions.close()
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    requests = [simulated_request(number, [1 + number % 9, 3]) for number in range(10)]
    check(list(engine.generate(requests)), requests, settings)


@pytest.mark.parametrize("part", ["submit", "sample", "collect"])
def test_an_error_of_the_runner_comes_out_and_the_engine_can_go_on(part: str) -> None:
    settings = EngineSettings(max_num_seqs=4, max_batch_tokens=16, num_blocks=64, block_size=4, max_model_len=64)
    engine, runner = make(settings, depth=2)
    real, calls = getattr(runner, part), []

    def fails_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise ValueError("a broken device")
        return real(*given)

    requests = [simulated_request(number, [1 + number % 9, 2, 3, 4, 5, 6]) for number in range(10)]
    with patch.object(runner, part, fails_once), pytest.raises(ValueError, match="a broken device"):
        list(engine.generate(requests))
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    engine._scheduler.blocks.check()
    runner._open.clear()  # what the device had begun
    check(list(engine.generate(requests)), requests, settings)


def test_standing_still_is_an_error_not_a_hang() -> None:
    settings = EngineSettings(max_num_seqs=4, max_batch_tokens=16, num_blocks=64, block_size=4, max_model_len=64)
    engine = Engine(SimulatedRunner(settings), settings=settings, eos_token_ids=EOS, stream_factory=Letters)
    engine.add(simulated_request(0, [1, 2]))
    with patch.object(engine._scheduler, "plan", lambda: None), pytest.raises(BatchgenError, match="1 samples wait"):
        engine.step()
