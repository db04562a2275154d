"""Resolves every `auto` of the model and engine sections and builds the engine: the one place where they meet."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from batchgen_kernels import cpu as native
from batchgen_kernels import reference as reference_ops

from batchgen import memory, weights
from batchgen.attention.base import AttentionBackend
from batchgen.attention.cpu import CpuAttention
from batchgen.attention.reference import ReferenceBackend
from batchgen.device import Cpu, Cuda, device_error, is_out_of_memory
from batchgen.engine.engine import Engine
from batchgen.engine.runner import Runner
from batchgen.engine.sampler import SamplingOps
from batchgen.engine.step import EngineSettings, OutOfMemoryStep
from batchgen.errors import ConfigError, ModelError
from batchgen.models import registry
from batchgen.models.config import ModelConfig
from batchgen.models.layers import Ops
from batchgen.spec import EngineSpec, ModelSpec
from batchgen.tokenizer import Tokenizer
from batchgen.types import Demand, TokenIds
from batchgen.weights.random import RandomCheckpoint

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn}
CPU_STEP = 128, 512  # sequences, tokens; larger steps leave the caches: 6 % slower in int8, the same in bfloat16
BLOCK_SIZES = {"triton": 32, "cpu": 32, "reference": 16}  # of each attention backend, where the job gives none
GPU_STEP = 1024, 8192
GPU_READERS = 8  # files of a checkpoint that are read at once
GPU_LEFT_FREE = 0.02  # of a GPU's memory: for what kernels and libraries take beside torch
GRAPHS_BYTES = 512 << 20  # what the driver keeps of all captured graphs
SMALLEST_POOL = 2  # blocks
KV_SHARE = 0.8  # `kv_memory: auto` takes at most this share of what is free beside weights, steps and rows
ROWS_BYTES = 512 << 20  # for rows on their way in and out: what the loop and the writer hold at most
TYPICAL_CONTEXT = 512  # tokens of a sample that nothing is known of
TYPICAL_OUTPUT = 1024  # output tokens that a sample which may have more is given room for at once
SPREAD = 0.9  # where more rows are to come, room is made for samples as long as this quantile of the first ones
APART = 1.2  # of what samples hold at once: they start one after the other, and admission reckons from above
GIB = 1 << 30


class DeviceOps(Ops, SamplingOps, Protocol):
    """All kernels that a model needs beside attention's."""


class Model:
    """A checkpoint that is found and read about, but not loaded; `engine()` loads it.

    Raises ModelError where it is unsupported or incomplete, ConfigError where the job asks too much of it.
    """

    def __init__(
        self,
        model: ModelSpec,
        engine: EngineSpec,
        *,
        random_weights: dict[str, Any] | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """`random_weights` holds config.json's keys: a model of that shape without any file, named `model.path`."""
        self._engine_spec = engine
        self._device = open_device(engine.device)
        self.device = str(self._device.torch_device)
        self._skip_special_tokens = skip_special_tokens
        self._checkpoint: weights.Checkpoint
        if random_weights is None:
            self._checkpoint = weights.open_checkpoint(
                weights.resolve(model.path, model.revision, model.storage_options, ignore_index=model.ignore_index),
                ignore_index=model.ignore_index,
            )
        else:
            shapes = registry.tensor_shapes(registry.read_config(random_weights))
            self._checkpoint = RandomCheckpoint(model.path, random_weights, shapes)
        self.config = registry.read_config(self._checkpoint.config)
        self.path = str(self._checkpoint.path)
        self.tokenizer_path = model.tokenizer or self.path
        self.generation_config: Mapping[str, Any] = self._checkpoint.generation_config
        self._quantization = model.quantization
        self.dtype = resolve_dtype(model.dtype, self.config.dtype, on_gpu=isinstance(self._device, Cuda))
        self.max_model_len = self._max_model_len(model.max_model_len)
        if random_weights is None:
            self.tokenizer = Tokenizer.load(self.tokenizer_path, chat_template=model.chat_template)
        else:
            self.tokenizer = Tokenizer.of_numbers(self.config.vocab_size)

    def _max_model_len(self, asked: int | None) -> int:
        most = self.config.max_position_embeddings
        if asked is not None and asked > most:
            raise ConfigError(
                f"model.max_model_len: {asked}, but {self.path} was made for {most} tokens (max_position_embeddings); "
                f"give at most {most}, or leave it out"
            )
        return asked or most

    def fingerprint(self) -> str:
        """SHA-256 over the checkpoint's configuration, headers and sampled tensors, and over the tokenizer."""
        return f"{self._checkpoint.fingerprint()}+{self.tokenizer.fingerprint()}"

    def engine(self, demand: Callable[[], Demand | None] = lambda: None) -> Engine:
        """Load the weights, make the KV pool and put the engine together.

        `demand` says what the job needs room for; it is called once the weights are loaded.
        """
        try:
            return self._engine(demand)
        except Exception as error:
            if is_out_of_memory(error):
                raise ConfigError(
                    f"engine.kv_memory: the memory of the {self._device.name} ran out while the model was loaded "
                    f"({error}); does another process use it? Lower it, or free memory"
                ) from error
            meant = device_error(error)
            if meant is None:
                raise
            raise meant from error

    def _engine(self, demand: Callable[[], Demand | None]) -> Engine:
        ops = self._ops()
        backend = make_backend(self._engine_spec, self._device, ops)
        dtype = DTYPES[self.dtype]
        kv_dtype = resolve_kv_dtype(self._engine_spec.kv_dtype, dtype, on_gpu=isinstance(self._device, Cuda))
        self._refuse_without_memory()
        decoder = registry.build(
            self._checkpoint,
            dtype=dtype,
            quantization=self._quantization,
            backend=backend,
            max_model_len=self.max_model_len,
            ops=ops,
            device=self._device.torch_device,
            readers=GPU_READERS if isinstance(self._device, Cuda) else 1,
        )
        memory.give_back()

        def runner(settings: EngineSettings) -> Runner:
            backend.allocate(self.config.layers, settings.num_blocks, kv_dtype)
            limit = self.tokenizer.vocab_size
            return Runner(decoder, backend, settings, ops=ops, vocab_limit=limit, device=self._device)

        settings = self._settings(backend, kv_dtype, demand(), lambda probe: runner(probe).largest_step())
        eos = {*decoder.config.eos_token_ids, *self.tokenizer.eos_token_ids}
        depth = 2 if isinstance(self._device, Cuda) else 1
        return Engine(runner(settings), settings=settings, eos_token_ids=eos, stream_factory=self._stream, depth=depth)

    def _ops(self) -> DeviceOps:
        """The kernels of this device."""
        if isinstance(self._device, Cuda):
            from batchgen_kernels import gpu

            if self._quantization:
                raise ConfigError(f"model.quantization: {self._quantization} does not run on a GPU yet; leave it out")
            return gpu
        # torch alone would leave out what it takes for second threads of a core
        if "OMP_NUM_THREADS" not in os.environ:
            usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
            torch.set_num_threads(len(usable))
        ops = native.load()
        if ops is None:
            logger.warning(
                "the native CPU kernels were not built (no C++ compiler at install?): running on plain torch, several "
                "times slower; install a compiler and reinstall batchgen"
            )
        return ops or reference_ops

    def _stream(self) -> Any:
        return self.tokenizer.stream(skip_special_tokens=self._skip_special_tokens, answers=True)

    def _refuse_without_memory(self) -> None:
        """Before the system does it in its way."""
        needed = weight_bytes(self.config, DTYPES[self.dtype], self._quantization)
        free = self._device.free_bytes()
        if needed > free:
            hint = "model.dtype: bfloat16 halves that, " if self.dtype == "float32" else ""
            raise ConfigError(
                f"model.path: the weights of {self.path} take {needed / GIB:.1f} GiB in {self.dtype}, but only "
                f"{free / GIB:.1f} GiB of memory are free; {hint}or use a smaller model, or a machine (or a limit of "
                "its container) with more memory"
            )

    def _settings(
        self,
        backend: AttentionBackend,
        kv_dtype: torch.dtype,
        demand: Demand | None,
        largest_step: Callable[[EngineSettings], None],
    ) -> EngineSettings:
        """`largest_step` runs it, with a pool of the settings' size."""
        spec = self._engine_spec
        max_num_seqs, max_batch_tokens = self._step_sizes()

        def settings(num_blocks: int) -> EngineSettings:
            return EngineSettings(
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                num_blocks=num_blocks,
                block_size=backend.block_size,
                max_model_len=self.max_model_len,
                prefix_cache=spec.prefix_cache,
            )

        if isinstance(self._device, Cuda):
            step = self._peak_of_step(self._device, lambda: largest_step(settings(SMALLEST_POOL)))
            graphs = step * max_num_seqs // max_batch_tokens + GRAPHS_BYTES
            beside = step + graphs + int(self._device.total_bytes * GPU_LEFT_FREE)
        else:
            beside = ROWS_BYTES + step_bytes(self.config, DTYPES[self.dtype], max_batch_tokens, max_num_seqs)
        free = self._device.free_bytes()
        room = max(0, free - beside)
        what = (
            f"{room / GIB:.2f} GiB of memory are free for it: {free / GIB:.2f} GiB, less {beside / GIB:.2f} for the "
            "engine's steps and for rows on their way"
        )
        lower = "lower engine.max_num_seqs and engine.max_batch_tokens, or free memory"
        per_block = backend.bytes_per_block(self.config.layers, kv_dtype)
        if room < 2 * per_block:  # whatever kv_memory is
            raise ConfigError(
                f"engine.max_num_seqs: {max_num_seqs}, engine.max_batch_tokens: {max_batch_tokens}: steps of this size "
                f"leave no room for keys and values: {what}; {lower}"
            )
        if spec.kv_memory == "auto" and isinstance(self._device, Cuda):
            budget = room  # nobody else wants it
        elif spec.kv_memory == "auto":
            useful = useful_blocks(
                demand,
                max_num_seqs=max_num_seqs,
                max_model_len=self.max_model_len,
                block_size=backend.block_size,
                prefix_cache=spec.prefix_cache,
            )
            budget = min(int(room * KV_SHARE), useful * per_block)
        elif isinstance(spec.kv_memory, float):
            budget = int(room * spec.kv_memory)
        else:
            budget = spec.kv_memory
            if budget > room:
                raise ConfigError(f"engine.kv_memory: {budget / GIB:.2f} GiB, but {what}; lower it, or {lower}")
        num_blocks = budget // per_block
        if num_blocks < 2:
            raise ConfigError(
                f"engine.kv_memory: {budget} bytes hold {num_blocks} blocks of {per_block} bytes, expected at least 2; "
                f"{what}; give it more, or {lower}"
            )
        return settings(num_blocks)

    def _peak_of_step(self, device: Cuda, step: Callable[[], None]) -> int:
        try:
            return device.peak_of(step)
        except OutOfMemoryStep as error:
            raise ConfigError(
                f"engine.max_batch_tokens, engine.max_num_seqs: the largest step does not fit into the memory of the "
                f"{device.name} beside the weights; lower them ({error})"
            ) from None

    def _step_sizes(self) -> tuple[int, int]:
        """max_num_seqs and max_batch_tokens."""
        spec = self._engine_spec
        most_seqs, most_tokens = GPU_STEP if isinstance(self._device, Cuda) else CPU_STEP
        max_batch_tokens = most_tokens if spec.max_batch_tokens == "auto" else spec.max_batch_tokens
        max_num_seqs = min(most_seqs, max_batch_tokens) if spec.max_num_seqs == "auto" else spec.max_num_seqs
        if spec.max_batch_tokens == "auto":
            max_batch_tokens = max(max_batch_tokens, max_num_seqs)
        elif max_batch_tokens < max_num_seqs:
            raise ConfigError(
                f"engine.max_batch_tokens: {max_batch_tokens} is less than engine.max_num_seqs ({max_num_seqs}), but "
                "each of these needs one token in a step"
            )
        return max_num_seqs, max_batch_tokens


def useful_blocks(
    demand: Demand | None, *, max_num_seqs: int, max_model_len: int, block_size: int, prefix_cache: bool
) -> int:
    """KV blocks that a job can put to use: for the samples that run at once, and for its longest one."""
    used, longest = max_num_seqs * -(-min(TYPICAL_CONTEXT, max_model_len) // block_size), max_model_len
    if demand is not None and demand.prompts:
        prompts = np.array([len(prompt) for prompt in demand.prompts])  # (num_samples,)
        most = np.minimum(prompts + np.array(demand.max_tokens), max_model_len)
        outputs = np.minimum(most - prompts, TYPICAL_OUTPUT)
        shared, distinct = np.zeros_like(prompts), 0
        if prefix_cache:
            shared, distinct = _shared_blocks(demand.prompts, block_size)
        blocks = -(-(prompts + outputs) // block_size)
        own = _at_once(blocks - shared, max_num_seqs, demand.complete)
        if demand.complete and len(prompts) <= max_num_seqs:
            own = min(own, _together(prompts, outputs, shared, block_size))
        found = min(_at_once(blocks, max_num_seqs, demand.complete), distinct + own)
        if demand.complete:
            used, longest = found, int(most.max())
        else:
            used = max(used, found)  # the first rows may be the short ones
    elif demand is not None and demand.complete:
        used, longest = 0, 0
    return max(used, -(-longest // block_size), 2)


def _at_once(blocks: npt.NDArray[np.int64], max_num_seqs: int, complete: bool) -> int:
    """Blocks of the samples that run at the same time: the longest ones, if these are all that there are."""
    if complete:
        return int(np.sort(blocks)[-max_num_seqs:].sum())
    return int(max_num_seqs * np.quantile(blocks, SPREAD))


def _together(
    prompts: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64], shared: npt.NDArray[np.int64], block_size: int
) -> int:
    """Enough own blocks for samples that start as soon as they can and give back what they have when they end: what
    they would hold at most if they started together, and some more."""
    peak = 0
    for length in range(block_size, int(outputs.max(initial=0)) + 2 * block_size, block_size):
        held = -(-(prompts + np.minimum(outputs, length)) // block_size) - shared
        peak = max(peak, int(held[outputs > length - block_size].sum()))
    return math.ceil(peak * APART)


def _shared_blocks(prompts: Sequence[TokenIds], block_size: int) -> tuple[npt.NDArray[np.int64], int]:
    """How many of each prompt's first blocks another one begins with too, (num_samples,), and how many such blocks
    there are. They are in memory once; a prompt's last token is always computed, so its block is its own."""
    chains: list[list[int]] = []
    for prompt in prompts:
        link, chain = 0, []
        for start in range(0, (len(prompt) - 1) // block_size * block_size, block_size):
            link = hash((link, prompt[start : start + block_size].tobytes()))
            chain.append(link)
        chains.append(chain)
    times = Counter(link for chain in chains for link in chain)
    shared = np.array([sum(times[link] > 1 for link in chain) for chain in chains])
    return shared, sum(count > 1 for count in times.values())


def layer_weights(config: ModelConfig) -> int:
    """Numbers in all layers: what the model has beside embedding and head."""
    numbers = sum(math.prod(shape) for shape in registry.tensor_shapes(config).values())
    return numbers - config.hidden_size * config.vocab_size * (1 if config.tied_head else 2)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantization: str | None = None) -> int:
    """The layers, the embedding, and the head, which is a copy of the embedding where the two are tied."""
    linear, embedding = layer_weights(config), config.hidden_size * config.vocab_size
    return (linear + embedding) * (1 if quantization == "int8" else dtype.itemsize) + embedding * dtype.itemsize


def step_bytes(config: ModelConfig, dtype: torch.dtype, max_batch_tokens: int, max_num_seqs: int) -> int:
    """Activations of the largest step: those of one layer for all its tokens, and logits of all samples in float32,
    three times over for drawing from them."""
    layer = max(config.layers, key=lambda layer: layer.num_heads * layer.head_dim)
    heads = (layer.num_heads + layer.num_kv_heads) * (layer.head_dim + layer.value_size)
    mlp = 3 * config.intermediate_size
    if (experts := config.experts) is not None:  # each of a token's gets an input and gives a result in float32
        mlp = max(mlp, experts.top_k * (4 * config.hidden_size + 3 * experts.intermediate_size))
    values = max_batch_tokens * (4 * config.hidden_size + heads + mlp)
    return values * dtype.itemsize + max_num_seqs * config.vocab_size * (dtype.itemsize + 3 * 4)


def open_device(asked: str) -> Cpu | Cuda:
    """The device of engine.device: `auto` is the GPU where torch sees one."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return Cpu()
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no GPU or no driver is there"
        raise ConfigError(f"engine.device: cuda, but torch {torch.__version__} can use no GPU: {why}")
    return Cuda()


def make_backend(spec: EngineSpec, device: Cpu | Cuda, ops: Ops) -> AttentionBackend:
    """The attention backend asked for; `auto` is Triton on a GPU, on a CPU the native one where it was built."""
    kind = spec.attention
    if isinstance(device, Cuda):
        if kind == "cpu":
            raise ConfigError("engine.attention: cpu, but the model runs on a GPU; expected auto, triton or reference")
        kind = "triton" if kind == "auto" else kind
    elif kind == "triton":
        raise ConfigError("engine.attention: triton needs a GPU; expected auto, cpu or reference")
    elif kind == "auto":
        kind = "cpu" if isinstance(ops, native.Ops) else "reference"
    block_size = BLOCK_SIZES[kind] if spec.block_size == "auto" else spec.block_size
    if kind == "reference":
        device.captures = False  # it waits for the device, which no graph can
        return ReferenceBackend(block_size, device.torch_device)
    if kind == "cpu":
        if not isinstance(ops, native.Ops):
            raise ModelError("engine.attention: cpu needs the native CPU kernels, which were not built at install")
        return CpuAttention(ops, block_size)
    from batchgen.attention.triton import TritonAttention

    return TritonAttention(device, block_size)


def resolve_dtype(asked: str, stored: str, *, on_gpu: bool) -> str:
    """`auto` is the stored dtype; on a CPU float32 for stored float16 and where bfloat16 instructions are missing."""
    if asked == "float16" and not on_gpu:
        raise ConfigError("model.dtype: float16 does not run on a CPU; expected auto, float32 or bfloat16")
    if asked != "auto":
        return asked
    if on_gpu or (stored == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return stored
    return "float32"


def resolve_kv_dtype(asked: str, dtype: torch.dtype, *, on_gpu: bool) -> torch.dtype:
    """`auto` is the model's."""
    if asked in ("float16", "fp8") and not on_gpu:
        raise ConfigError(f"engine.kv_dtype: {asked} does not run on a CPU; expected auto, float32 or bfloat16")
    return dtype if asked == "auto" else KV_DTYPES[asked]
