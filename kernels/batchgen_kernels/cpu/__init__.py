"""The native CPU ops: finds the library that was built from ops.cpp, checks tensors, passes pointers.

`Ops` has the functions of `batchgen_kernels.reference` as methods.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from batchgen_kernels import reference
from batchgen_kernels.cpu import items as cut
from batchgen_kernels.cpu.items import Items, attention_items
from batchgen_kernels.draws import Bias, Drawn, Penalties, SamplingRows

ISAS = ("portable", "avx2", "avx512", "avx512_bf16")  # by level
BLOCK_SIZES = (16, 32, 64, 128)  # what divides the tile of keys
MAX_HEAD_DIM = 256
_INTERFACE = 8  # bg_interface() of the ops.cpp that belongs to this file
_LINEAR_ROWS = 12  # of a register tile of a matmul at most
_FLAGS = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES = {  # i int, l long, f float, p pointer
    "bg_attention": "iiii" + "pllpppl" + "plppipp" + "iiiii" + "ffi" + "l",
    "bg_rope_and_write": "iiii" + "pll" * 3 + "ppplp" + "iiiiiii",
    "bg_rms_norm": "iiipllppl" + "pliif",
    "bg_gate": "iiiiplpli",
    "bg_gumbel": "iippppli",
    "bg_int8_linear": "iiiipl" + "pppp" + "pl" + "iipp",
    "bg_float_linear": "iiiipl" + "pppl" + "iip",
}
_TYPES = {"i": ctypes.c_int, "l": ctypes.c_long, "f": ctypes.c_float, "p": ctypes.c_void_p}


def load() -> Ops | None:
    """The ops at the best instruction set of this machine; None where no usable library was built."""
    path = Path(__file__).with_name("_ops.abi3.so")
    if not path.exists():
        return None
    try:
        library = _open(path)
    except OSError as error:
        logging.getLogger("batchgen_kernels").warning("%s does not load (%s): reinstall to build it again", path, error)
        return None
    if library.bg_interface() != _INTERFACE or not _sizes_agree(library):
        logging.getLogger("batchgen_kernels").warning("%s is of another version: reinstall to build it again", path)
        return None
    return Ops(library, library.bg_best_level())


def _sizes_agree(library: ctypes.CDLL) -> bool:
    """Work is cut and room is made here for kernels that would write past it if they were of other sizes."""
    sizes = [cut.KEY_TILE, cut.QUERY_ROWS, cut.REGISTER_ROWS, cut.ITEM_WORDS, MAX_HEAD_DIM, _LINEAR_ROWS]
    sizes += [reference.GROUP, reference.PANEL, _state_floats(1), _state_floats(MAX_HEAD_DIM)]
    return [library.bg_size(index) for index in range(len(sizes) + 1)] == [*sizes, -1]


def _state_floats(value_dim: int) -> int:
    """Of a row between two items."""
    return 32 + (value_dim + 15) // 16 * 16


def _open(path: Path) -> ctypes.CDLL:
    """The library, bound to the OpenMP runtime that torch has loaded.

    It names no runtime itself: torch's own copy, whatever its file is called, is visible to all because torch opens
    it globally. A system's libgomp is taken only where torch brought none.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[kind] for kind in signature]
        function.restype = None
    return library


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The tensor is on the CPU and has this dtype and shape, its last dimension contiguous."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu:
        raise ValueError(
            f"{name}: expected {dtype} {shape} on the CPU, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}")


def _check_contiguous(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _check(name, tensor, dtype, shape)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def _flag(name: str, tensor: torch.Tensor) -> int:
    flag = _FLAGS.get(tensor.dtype)
    if flag is None:
        raise ValueError(f"{name}: expected float32 or bfloat16, got {tensor.dtype}")
    return flag


class Ops:
    """One loaded library at one instruction set. What each op computes is said at its twin in `reference`."""

    def __init__(self, library: ctypes.CDLL, level: int) -> None:
        self._library = library
        self._level = level

    @property
    def isa(self) -> str:
        return ISAS[self._level]

    def with_isa(self, isa: str) -> Ops:
        """The same ops held to an instruction set, at most the machine's own."""
        usable = ISAS[: self._library.bg_best_level() + 1]
        if isa not in usable:
            raise ValueError(f"instruction set {isa!r}: this machine has {', '.join(usable)}")
        return Ops(self._library, ISAS.index(isa))

    def pool_shape(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, value_dim: int | None = None
    ) -> tuple[int, int, int]:
        if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim {head_dim}: expected an even number up to {MAX_HEAD_DIM}")
        if value_dim is not None and not 0 < value_dim <= MAX_HEAD_DIM:
            raise ValueError(f"value_dim {value_dim}: expected a number up to {MAX_HEAD_DIM}")
        if block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {block_size}: expected one of {', '.join(map(str, BLOCK_SIZES))}")
        return reference.pool_shape(num_blocks, num_kv_heads, head_dim, block_size, value_dim)

    def rope_and_write(
        self,
        query: torch.Tensor,  # (num_tokens, num_heads, head_dim), rotated in place
        key: torch.Tensor,  # (num_tokens, num_kv_heads, head_dim), rotated in place
        value: torch.Tensor,  # (num_tokens, num_kv_heads, value_dim)
        cos: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
        sin: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
        slot_mapping: torch.Tensor,  # (num_tokens,) int64; -1 writes nothing
        pool: torch.Tensor,
        *,
        block_size: int,
        interleaved: bool = False,
    ) -> None:
        bf16, pool_bf16, dtype = _flag("query", query), _flag("pool", pool), query.dtype
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, num_kv_heads, _ = pool.shape
        value_dim, half = value.shape[-1], cos.shape[1]
        _check("query", query, dtype, (num_tokens, num_heads, head_dim))
        _check("key", key, dtype, (num_tokens, num_kv_heads, head_dim))
        _check("value", value, dtype, (num_tokens, num_kv_heads, value_dim))
        _check_contiguous("cos", cos, torch.float32, (num_tokens, half))
        _check_contiguous("sin", sin, torch.float32, (num_tokens, half))
        _check_contiguous("slot_mapping", slot_mapping, torch.int64, (num_tokens,))
        shape = self.pool_shape(num_blocks, num_kv_heads, head_dim, block_size, value_dim)
        _check_contiguous("pool", pool, pool.dtype, shape)
        if 2 * half > head_dim:
            raise ValueError(f"cos: expected at most {head_dim // 2} columns for head_dim {head_dim}, got {half}")
        self._library.bg_rope_and_write(
            self._level,
            torch.get_num_threads(),
            bf16,
            pool_bf16,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.data_ptr(),
            value.stride(0),
            value.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            slot_mapping.data_ptr(),
            num_tokens,
            pool.data_ptr(),
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            2 * half,
            block_size,
            interleaved,
        )

    def attention_items(
        self,
        query_starts: torch.Tensor,  # (num_seqs + 1,) int32
        context_lens: torch.Tensor,  # (num_seqs,) int32
        block_table: torch.Tensor | None,  # (num_seqs, max_blocks) int32; without it nothing is shared
        num_heads: int,
        num_kv_heads: int,
        *,
        block_size: int,
        window: int | None = None,
    ) -> Items:
        """As the twin's, cut into tiles of rows and sorted by cost; what sequences share comes first, once for all."""
        return attention_items(
            query_starts.numpy(),
            context_lens.numpy(),
            None if block_table is None else block_table.numpy(),
            num_heads,
            num_kv_heads,
            window,
            block_size,
            torch.get_num_threads(),
        )

    def paged_attention(
        self,
        query: torch.Tensor,  # (num_tokens, num_heads, head_dim)
        pool: torch.Tensor,
        block_table: torch.Tensor,  # (num_seqs, max_blocks) int32
        items: Items,
        *,
        block_size: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        value_dim: int | None = None,
        sinks: torch.Tensor | None = None,  # (num_heads,) float32
    ) -> torch.Tensor:  # (num_tokens, num_heads, value_dim or head_dim)
        bf16, pool_bf16 = _flag("query", query), _flag("pool", pool)
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, num_kv_heads, _ = pool.shape
        num_seqs, max_blocks = block_table.shape
        value_dim = head_dim if value_dim is None else value_dim
        _check("query", query, query.dtype, (num_tokens, num_heads, head_dim))
        shape = self.pool_shape(num_blocks, num_kv_heads, head_dim, block_size, value_dim)
        _check_contiguous("pool", pool, pool.dtype, shape)
        _check("block_table", block_table, torch.int32, (num_seqs, max_blocks))
        if sinks is not None:
            _check_contiguous("sinks", sinks, torch.float32, (num_heads,))
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads}: expected a multiple of the {num_kv_heads} KV heads")
        if scale <= 0 or (window is not None and window <= 0) or (soft_cap is not None and soft_cap <= 0):
            raise ValueError(f"scale {scale}, window {window}, soft_cap {soft_cap}: expected positive numbers")
        if len(items.tokens) > num_tokens:
            raise ValueError(f"query: expected at least the {len(items.tokens)} tokens of the items, got {num_tokens}")
        out = torch.empty(num_tokens, num_heads, value_dim, dtype=query.dtype)
        states = torch.empty(items.num_shared * num_heads * _state_floats(value_dim))
        self._library.bg_attention(
            self._level,
            torch.get_num_threads(),
            bf16,
            pool_bf16,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            out.data_ptr(),
            pool.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
            items.tokens.ctypes.data,
            len(items.tokens),
            items.rows.ctypes.data,
            items.phases.ctypes.data,
            len(items.phases) - 1,
            states.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            block_size,
            scale,
            soft_cap or 0.0,
            window or 0,
            num_tokens,
        )
        return out

    def rms_norm(
        self,
        x: torch.Tensor,  # (num_tokens, dim) or (num_tokens, num_heads, dim)
        weight: torch.Tensor,  # (dim,) float32
        eps: float,
        residual: torch.Tensor | None = None,  # (num_tokens, dim)
    ) -> torch.Tensor:
        bf16, dtype = _flag("x", x), x.dtype
        heads = x.shape[1] if x.dim() == 3 else 1
        num_tokens, dim = x.shape[0], x.shape[-1]
        _check("x", x, dtype, (num_tokens, heads, dim) if x.dim() == 3 else (num_tokens, dim))
        _check_contiguous("weight", weight, torch.float32, (dim,))
        if residual is not None:
            _check("residual", residual, dtype, (num_tokens, dim))
        out = torch.empty(x.shape, dtype=dtype)
        self._library.bg_rms_norm(
            self._level,
            torch.get_num_threads(),
            bf16,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            weight.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            out.data_ptr(),
            num_tokens,
            heads,
            dim,
            eps,
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
        return self._gate(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
        return self._gate(gate_up, gelu=True)

    # those that no kernel of ours is faster at
    clamped_swiglu_mul = staticmethod(reference.clamped_swiglu_mul)
    grouped_linear = staticmethod(reference.grouped_linear)
    grouped_linear_pays = staticmethod(reference.grouped_linear_pays)
    sort_tokens = staticmethod(reference.sort_tokens)
    tile_rows = staticmethod(reference.tile_rows)

    def _gate(self, gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
        bf16 = _flag("gate_up", gate_up)
        num_tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
        _check("gate_up", gate_up, gate_up.dtype, (num_tokens, 2 * dim))
        out = torch.empty(num_tokens, dim, dtype=gate_up.dtype)
        self._library.bg_gate(
            self._level,
            torch.get_num_threads(),
            bf16,
            gelu,
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            num_tokens,
            dim,
        )
        return out

    def keyed_gumbel(
        self,
        keys: torch.Tensor,  # (num_rows,) int64
        positions: torch.Tensor,  # (num_rows,) int32
        samples: torch.Tensor,  # (num_rows,) int32
        vocab: int,
    ) -> torch.Tensor:
        rows = keys.shape[0]
        _check_contiguous("keys", keys, torch.int64, (rows,))
        _check_contiguous("positions", positions, torch.int32, (rows,))
        _check_contiguous("samples", samples, torch.int32, (rows,))
        out = torch.empty(rows, vocab, dtype=torch.float32)
        self._library.bg_gumbel(
            self._level,
            torch.get_num_threads(),
            keys.data_ptr(),
            positions.data_ptr(),
            samples.data_ptr(),
            out.data_ptr(),
            rows,
            vocab,
        )
        return out

    def sample(
        self,
        logits: torch.Tensor,  # (num_rows, at least vocab) float32; penalties and bias change it in place
        rows: SamplingRows,
        vocab: int,
        *,
        penalties: Penalties | None = None,
        bias: Bias | None = None,
        allowed: torch.Tensor | None = None,  # (num_rows, ceil(vocab / 32)) int32
        num_logprobs: int | None = None,
    ) -> Drawn:
        """The twin with native noise: its argmax and topk are no slower than ours would be."""
        return reference.sample(
            logits,
            rows,
            vocab,
            penalties=penalties,
            bias=bias,
            allowed=allowed,
            num_logprobs=num_logprobs,
            gumbel=self.keyed_gumbel,
        )

    def int8_linear(
        self,
        x: torch.Tensor,  # (num_tokens, in_features)
        weight: reference.Int8Weight,
        bias: torch.Tensor | None = None,  # (out_features,) float32
        *,
        wide: bool = False,
    ) -> torch.Tensor:  # (num_tokens, out_features)
        bf16, dtype = _flag("x", x), x.dtype
        num_tokens, quads = x.shape[0], weight.panels.shape[1]
        channels, groups = weight.panels.shape[0] * reference.PANEL, -(-weight.in_features // reference.GROUP)
        _check("x", x, dtype, (num_tokens, weight.in_features))
        if not weight.in_features:
            raise ValueError("panels: expected a weight of at least one input")
        _check_contiguous("panels", weight.panels, torch.int8, (weight.panels.shape[0], quads, reference.PANEL, 4))
        _check_contiguous("scales", weight.scales, torch.float32, (channels,))
        _check_contiguous("sums", weight.sums, torch.int32, (groups, channels))
        if bias is not None:
            _check_contiguous("bias", bias, torch.float32, (weight.out_features,))
        out = torch.empty(num_tokens, weight.out_features, dtype=torch.float32 if wide else dtype)
        lanes = torch.empty((num_tokens + _LINEAR_ROWS) * 2 * quads, dtype=torch.int32)
        row_scales = torch.empty((num_tokens + _LINEAR_ROWS) * groups, dtype=torch.float32)
        self._library.bg_int8_linear(
            self._level,
            torch.get_num_threads(),
            bf16,
            _FLAGS[out.dtype],
            x.data_ptr(),
            x.stride(0),
            weight.panels.data_ptr(),
            weight.scales.data_ptr(),
            weight.sums.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_tokens,
            weight.in_features,
            weight.out_features,
            lanes.data_ptr(),
            row_scales.data_ptr(),
        )
        return out

    def float_linear_pays(self, dtype: torch.dtype) -> bool:
        """Whether it is at least as fast as torch's own: it reaches or passes oneDNN's, except in portable code and
        where oneDNN has matrix tiles (AMX), which this does not."""
        tiles = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        return self.isa != "portable" and not tiles

    def float_linear(
        self,
        x: torch.Tensor,  # (num_tokens, in_features) float32 or bfloat16
        weight: reference.FloatWeight,
        bias: torch.Tensor | None = None,  # (out_features,)
        *,
        wide: bool = False,
    ) -> torch.Tensor:  # (num_tokens, out_features); a row's bits do not depend on the other rows
        bf16, dtype = _flag("x", x), x.dtype
        num_panels, num_lanes, _, per_lane = weight.panels.shape
        num_tokens = x.shape[0]
        _check("x", x, dtype, (num_tokens, weight.in_features))
        _check_contiguous(
            "panels", weight.panels, dtype, (num_panels, num_lanes, reference.PANEL, reference.lane_inputs(dtype))
        )
        expected = (-(-weight.out_features // reference.PANEL), -(-weight.in_features // per_lane))
        if expected != (num_panels, num_lanes) or not num_lanes:
            raise ValueError(
                f"panels: {num_panels} of {num_lanes} lanes cannot be of {weight.out_features} channels and "
                f"{weight.in_features} inputs"
            )
        if bias is not None:
            _check_contiguous("bias", bias, dtype, (weight.out_features,))
        out = torch.empty(num_tokens, weight.out_features, dtype=torch.float32 if wide else dtype)
        lanes = torch.empty((num_tokens + _LINEAR_ROWS) * num_lanes, dtype=torch.int32)
        self._library.bg_float_linear(
            self._level,
            torch.get_num_threads(),
            bf16,
            _FLAGS[out.dtype],
            x.data_ptr(),
            x.stride(0),
            weight.panels.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_tokens,
            weight.in_features,
            weight.out_features,
            lanes.data_ptr(),
        )
        return out
