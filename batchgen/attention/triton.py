"""The Triton attention backend for GPUs: its KV pool, and each step's work planned on the host and uploaded once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from batchgen_kernels import attention, cache, work
from batchgen_kernels.tuning import Config, architecture
from batchgen_kernels.work import Work

from batchgen.attention.base import AttentionMetadata
from batchgen.device import Device
from batchgen.errors import ModelError
from batchgen.models.config import KVSpec

MAX_PARTS = 4096  # of tokens' softmaxes that a step may merge
ITEMS_PER_MULTIPROCESSOR = 4  # of one KV head each, from which on there is no need to cut them
MERGES_PER_MULTIPROCESSOR = 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


class _Kind(NamedTuple):
    """Layers that are alike in it share a plan."""

    num_heads: int
    num_kv_heads: int
    window: int | None
    small: int  # rows of the kernel's tiles
    large: int

    @property
    def shares(self) -> bool:
        """Whether sequences may go over a prefix together."""
        return self.window is None and self.large > self.small


class _Launch(NamedTuple):
    config: Config
    kind: _Kind


class _Step(NamedTuple):
    metadata: AttentionMetadata
    decode: bool
    works: dict[_Kind, Work]


class TritonAttention:
    """`block_size` is one of attention.BLOCK_SIZES."""

    name = "triton"

    def __init__(self, device: Device, block_size: int = 32) -> None:
        self.block_size = block_size
        self._device = device
        self._layers: tuple[KVSpec, ...] = ()
        self._pools: list[torch.Tensor] = []  # one a layer, in the layout of batchgen_kernels.attention
        self._launches: dict[bool, list[_Launch]] = {}  # of each layer, for steps of decodes alone and for others
        self._parts = self._part_lses = torch.empty(0)  # the next layer's as soon as one has merged its own
        self._steps: deque[_Step] = deque(maxlen=2)  # a step has two: for all its tokens, and for those that sample
        self._uploads: dict[int, torch.Tensor] = {}  # by capacity: what graphs read

    def bytes_per_block(self, layers: Sequence[KVSpec], dtype: torch.dtype) -> int:
        return sum(math.prod(self._pool_shape(1, spec)) for spec in layers) * dtype.itemsize

    def allocate(self, layers: Sequence[KVSpec], num_blocks: int, dtype: torch.dtype) -> None:
        _check_dtype(dtype)
        where = self._device.torch_device
        self._layers = tuple(layers)
        self._pools = [torch.zeros(self._pool_shape(num_blocks, spec), dtype=dtype, device=where) for spec in layers]
        self._launches = {decode: [_launch(spec, dtype, decode) for spec in layers] for decode in (False, True)}
        self._parts = torch.empty(MAX_PARTS * max(spec.num_heads * spec.value_size for spec in layers), device=where)
        self._part_lses = torch.empty(MAX_PARTS * max(spec.num_heads for spec in layers), device=where)

    def _pool_shape(self, num_blocks: int, spec: KVSpec) -> tuple[int, int, int]:
        try:
            if spec.num_heads % spec.num_kv_heads:
                raise ValueError(f"num_heads {spec.num_heads}: expected a multiple of the {spec.num_kv_heads} KV heads")
            return attention.pool_shape(num_blocks, spec.num_kv_heads, spec.head_dim, spec.value_size, self.block_size)
        except ValueError as error:
            raise ModelError(f"the Triton attention cannot serve this model: {error}") from None

    def prepare(self, metadata: AttentionMetadata, *, capacity: int | None = None) -> None:
        num_tokens = len(metadata.slot_mapping) if capacity is None else capacity
        decode = int(metadata.query_starts[-1]) == len(metadata.slots)
        assert decode or capacity is None
        kinds = list(dict.fromkeys(launch.kind for launch in self._launches[decode]))
        targets = [
            self._device.num_multiprocessors * ITEMS_PER_MULTIPROCESSOR // kind.num_kv_heads + 1 for kind in kinds
        ]
        rooms = [None if capacity is None else work.room_of(capacity, target) for target in targets]
        plans = [
            work.plan(
                metadata.query_starts,
                metadata.context_lens,
                metadata.slots,
                metadata.host_table,
                num_tokens,
                group=kind.num_heads // kind.num_kv_heads,
                window=kind.window,
                small=kind.small,
                large=kind.large,
                block_size=self.block_size,
                target_items=target,
                max_parts=MAX_PARTS,
                max_items=None if room is None else room.items,
            )
            for kind, target, room in zip(kinds, targets, rooms, strict=True)
        ]
        used = [plan.room if room is None else room for plan, room in zip(plans, rooms, strict=True)]
        uploaded = self._upload(work.pack(plans, used), capacity)
        works = {}
        for kind, plan, room, sections in zip(kinds, plans, used, work.unpack(uploaded, used), strict=True):
            merges = min(room.merged * kind.num_heads, MERGES_PER_MULTIPROCESSOR * self._device.num_multiprocessors)
            # only decodes choose: a mixed step that needs no large tiles must not wait for a kernel without them
            with_large = kind.shares if capacity is not None else plan.with_large or not decode
            works[kind] = Work(*sections, self._parts, self._part_lses, with_large, merges)
        self._steps.append(_Step(metadata, decode, works))

    def _upload(self, packed: work.IntArray, capacity: int | None) -> torch.Tensor:
        if capacity is None:
            return self._device.upload(packed)
        if capacity not in self._uploads:
            self._uploads[capacity] = torch.empty(len(packed), dtype=torch.int32, device=self._device.torch_device)
        return self._device.upload(packed, self._uploads[capacity])

    def rope_and_write(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        metadata: AttentionMetadata,
    ) -> None:
        slots, pool, size = metadata.slot_mapping, self._pools[layer], self.block_size
        cache.rope_and_write(query, key, value, cos, sin, slots, pool, block_size=size, interleaved=interleaved)

    def attend(
        self, layer: int, query: torch.Tensor, metadata: AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec = self._layers[layer]
        step = next(step for step in self._steps if step.metadata is metadata)
        launch = self._launches[step.decode][layer]
        return attention.paged_attention(
            query,
            self._pools[layer],
            metadata.block_table,
            step.works[launch.kind],
            config=launch.config,
            block_size=self.block_size,
            value_dim=spec.value_size,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks=sinks,
        )

    def copy_block(self, source: int, target: int) -> None:
        cache.copy_block(self._pools, source, target)


def _launch(spec: KVSpec, dtype: torch.dtype, decode: bool) -> _Launch:
    shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_size)
    config = attention.launch_config(*shape, dtype, decode=decode)
    blocks = config.blocks
    return _Launch(config, _Kind(spec.num_heads, spec.num_kv_heads, spec.window, blocks["small"], blocks["large"]))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ModelError(f"the Triton attention keeps keys and values in {', '.join(map(str, DTYPES))}, not in {dtype}")
    arch = architecture()
    if dtype == torch.float8_e4m3fn and arch.startswith("sm_") and int(arch[3:]) < 89:
        raise ModelError(f"this GPU ({arch}) has no 8-bit floats for keys and values; expected the model's dtype")
