"""The ops of a GPU, in Triton: a module that can stand for `reference` or for `cpu.Ops`.

Attention is not among them: it is planned and launched by its backend, from `attention` and `work`. Matmuls of our own
are not worth it on a GPU, so that the plain-torch forms serve.
"""

from __future__ import annotations

from batchgen_kernels.cache import rope_and_write
from batchgen_kernels.fused import clamped_swiglu_mul, gelu_tanh_mul, rms_norm, silu_mul
from batchgen_kernels.moe import grouped_linear, grouped_linear_pays, sort_tokens, tile_rows
from batchgen_kernels.reference import float_linear, float_linear_pays, int8_linear
from batchgen_kernels.sampling import keyed_gumbel, sample

__all__ = [
    "clamped_swiglu_mul",
    "float_linear",
    "float_linear_pays",
    "gelu_tanh_mul",
    "grouped_linear",
    "grouped_linear_pays",
    "int8_linear",
    "keyed_gumbel",
    "rms_norm",
    "rope_and_write",
    "sample",
    "silu_mul",
    "sort_tokens",
    "tile_rows",
]
