"""Resolves every `auto` of the model and engine sections and builds the engine: the one place where they meet."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from batchgen_kernels import cpu as native
from batchgen_kernels import reference as reference_ops

from batchgen import weights
from batchgen.attention.base import AttentionBackend
from batchgen.attention.cpu import CpuAttention
from batchgen.attention.reference import ReferenceBackend
from batchgen.engine.engine import Engine
from batchgen.engine.runner import Runner
from batchgen.engine.step import EngineSettings
from batchgen.errors import ConfigError, ModelError
from batchgen.models import registry
from batchgen.spec import EngineSpec, ModelSpec
from batchgen.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_MAX_NUM_SEQS = 128
CPU_MAX_BATCH_TOKENS = 1024
KV_SHARE = 0.4  # of the memory that is free once the weights are loaded
TYPICAL_CONTEXT = 1024  # tokens for which `kv_memory: auto` gives every running sample room, if the memory is there


class Model:
    """A checkpoint that is found and read about, but not loaded; `engine()` loads it.

    Raises ModelError where it is unsupported or incomplete, ConfigError where the job asks too much of it.
    """

    device = "cpu"

    def __init__(self, model: ModelSpec, engine: EngineSpec, *, skip_special_tokens: bool = True) -> None:
        self._engine_spec = engine
        self._skip_special_tokens = skip_special_tokens
        self._checkpoint = weights.open_checkpoint(weights.resolve(model.path, model.revision))
        self.config = registry.read_config(self._checkpoint.config)
        self.path = str(self._checkpoint.path)
        self.tokenizer_path = model.tokenizer or self.path
        self.generation_config: Mapping[str, Any] = self._checkpoint.generation_config
        self.dtype = resolve_dtype(model.dtype, self.config.dtype)
        self.max_model_len = self._max_model_len(model.max_model_len)
        self.tokenizer = Tokenizer.load(self.tokenizer_path, chat_template=model.chat_template)

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

    def engine(self) -> Engine:
        """Load the weights, make the KV pool and put the engine together."""
        spec = self._engine_spec
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        ops = native.load()
        if ops is None:
            logger.warning(
                "the native CPU kernels were not built (no C++ compiler at install?): running on plain torch, several "
                "times slower; install a compiler and reinstall batchgen"
            )
        dtype = DTYPES[self.dtype]
        kv_dtype = dtype if spec.kv_dtype == "auto" else DTYPES[spec.kv_dtype]
        backend = make_backend(spec, ops)
        decoder = registry.build(
            self._checkpoint,
            dtype=dtype,
            backend=backend,
            max_model_len=self.max_model_len,
            ops=ops or reference_ops,
        )
        settings = self._settings(backend, kv_dtype)
        backend.allocate(self.config.layers, settings.num_blocks, kv_dtype)
        runner = Runner(decoder, backend, settings, ops=ops or reference_ops, vocab_limit=self.tokenizer.vocab_size)
        eos = {*decoder.config.eos_token_ids, *self.tokenizer.eos_token_ids}
        return Engine(runner, settings=settings, eos_token_ids=eos, stream_factory=self._stream)

    def _stream(self) -> Any:
        return self.tokenizer.stream(skip_special_tokens=self._skip_special_tokens)

    def _settings(self, backend: AttentionBackend, kv_dtype: torch.dtype) -> EngineSettings:
        spec = self._engine_spec
        max_batch_tokens = CPU_MAX_BATCH_TOKENS if spec.max_batch_tokens == "auto" else spec.max_batch_tokens
        max_num_seqs = min(CPU_MAX_NUM_SEQS, max_batch_tokens) if spec.max_num_seqs == "auto" else spec.max_num_seqs
        if spec.max_batch_tokens == "auto":
            max_batch_tokens = max(max_batch_tokens, max_num_seqs)
        elif max_batch_tokens < max_num_seqs:
            raise ConfigError(
                f"engine.max_batch_tokens: {max_batch_tokens} is less than engine.max_num_seqs ({max_num_seqs}), but "
                "each of these needs one token in a step"
            )
        per_block = backend.bytes_per_block(self.config.layers, kv_dtype)
        free = available_memory()
        if spec.kv_memory == "auto":
            useful = max_num_seqs * min(self.max_model_len, TYPICAL_CONTEXT) // backend.block_size * per_block
            budget = min(int(free * KV_SHARE), max(useful, blocks_for(self.max_model_len, backend) * per_block))
        elif isinstance(spec.kv_memory, float):
            budget = int(free * spec.kv_memory)
        else:
            budget = spec.kv_memory
            if budget > free:
                raise ConfigError(
                    f"engine.kv_memory: {budget / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of memory are free"
                )
        num_blocks = budget // per_block
        if num_blocks < 2:
            raise ConfigError(
                f"engine.kv_memory: {budget} bytes hold {num_blocks} blocks of {per_block} bytes, expected at least 2; "
                "give it more, or free memory"
            )
        return EngineSettings(
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            num_blocks=num_blocks,
            block_size=backend.block_size,
            max_model_len=self.max_model_len,
            prefix_cache=spec.prefix_cache,
        )


def blocks_for(num_tokens: int, backend: AttentionBackend) -> int:
    return -(-num_tokens // backend.block_size)


def make_backend(spec: EngineSpec, ops: native.Ops | None) -> AttentionBackend:
    """The attention backend asked for; `auto` is the native one where it was built."""
    size = {} if spec.block_size == "auto" else {"block_size": spec.block_size}
    if spec.attention == "reference" or (spec.attention == "auto" and ops is None):
        return ReferenceBackend(**size)
    if ops is None:
        raise ModelError("engine.attention: cpu needs the native CPU kernels, which were not built at install")
    return CpuAttention(ops, **size)


def resolve_dtype(asked: str, stored: str) -> str:
    """`auto` is the stored dtype; on a CPU float32 for stored float16 and where bfloat16 instructions are missing."""
    if asked == "float16":
        raise ConfigError("model.dtype: float16 does not run on a CPU; expected auto, float32 or bfloat16")
    if asked != "auto":
        return asked
    if stored == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "bfloat16"
    return "float32"


def available_memory() -> int:
    """Bytes this process may still take: what the machine has left, or what its control group has."""
    free = psutil.virtual_memory().available
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            group = {name: Path(folder, name).read_text() for name in (limit, used, "memory.stat")}
            counts = dict(line.split() for line in group["memory.stat"].splitlines())
            # files in the page cache, the weights just read among them, give way
            free = min(free, int(group[limit]) - int(group[used]) + int(counts.get(cache, 0)))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(free, 0)
