"""Quantises matrices as the formats define it, independently of the code that reads them: bits, scales and layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, 0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4]


@dataclass
class Format:
    """A quantization_config and how a layer named "" is stored under it: (tensors, the numbers they stand for)."""

    config: dict[str, Any]
    encode: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, n) unsigned -> int32 words along the rows: number i lies at bit `i * bits` of its row."""
    stream = (codes.numpy()[:, :, None] >> np.arange(bits)) & 1
    octets = np.packbits(stream.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")
    octets = np.pad(octets, [(0, 0), (0, -octets.shape[1] % 4)])
    return torch.from_numpy(octets.view("<i4").copy())


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """(block rows, block columns) -> one for every number of a matrix."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def biggest(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of every block, the last ones of which may be cut off."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // block[0]) * block[0], -(-columns // block[1]) * block[1])
    padded[:rows, :columns] = weight.abs()
    return padded.view(-1, block[0], padded.shape[1] // block[1], block[1]).amax((1, 3))


def sized(block: tuple[int, int], weight: torch.Tensor) -> tuple[int, int]:
    """-1 stands for all rows or columns."""
    return (weight.shape[0] if block[0] < 0 else block[0], weight.shape[1] if block[1] < 0 else block[1])


def float8(
    config: dict[str, Any], block: tuple[int, int], scale_name: str, shape: tuple[int, ...] | None = None, **more: Any
) -> Format:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        of_layer = sized(block, weight)
        scales = biggest(weight, of_layer) / 448
        full = spread(scales, of_layer, weight.shape)
        codes = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scales if shape is None else scales.view(shape)
        return {"weight": codes, scale_name: stored, **more}, codes.float() * full

    return Format(config, encode)


def compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def affine(weight: torch.Tensor, group_size: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes (rows, columns), float16 scales and zero points (rows, groups)."""
    groups = weight.view(len(weight), -1, group_size)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1).to(torch.int64)
    codes = (groups / scales.float().unsqueeze(2)).round().to(torch.int64) + zeros.unsqueeze(2)
    return codes.clamp(0, 2**bits - 1).view(weight.shape), scales, zeros


def numbers(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, group]) * scales.float()[:, group]


def gptq(bits: int, version: int, *, shuffled: bool = False, group_size: int = 32) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": shuffled}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        size = columns if group_size < 0 else group_size
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)) if shuffled else None
        sorted_ = weight if order is None else weight[:, order]
        codes, scales, zeros = affine(sorted_, size, bits)
        group = torch.arange(columns) // size
        if order is not None:
            back = order.argsort()
            codes, group = codes[:, back], group[back]
        stored_zeros = (zeros.t() - (1 if version == 1 else 0)) % 2**bits
        stored = {
            "qweight": pack(codes, bits).t(),
            "qzeros": pack(stored_zeros, bits),
            "scales": scales.t(),
            "g_idx": group.to(torch.int32),
        }
        return stored, numbers(codes, scales, zeros, group)

    return Format(config, encode)


def awq() -> Format:
    def reordered(codes: torch.Tensor) -> torch.Tensor:
        return pack(codes.view(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 4)

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = affine(weight, 32, 4)
        stored = {"qweight": reordered(codes.t()), "qzeros": reordered(zeros.t()), "scales": scales.t()}
        return stored, numbers(codes, scales, zeros, torch.arange(weight.shape[1]) // 32)

    return Format({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, encode)


def packed(bits: int, group_size: int, *, symmetric: bool, shuffled: bool = False) -> Format:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"group_size": group_size, "strategy": "group"} if group_size > 0 else {"strategy": "channel"}
    weights |= {"actorder": "group"} if shuffled else {}

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        size = columns if group_size < 0 else group_size
        group = torch.arange(columns) // size
        codes, scales, zeros = affine(weight, size, bits)
        if symmetric:
            scales = (biggest(weight, (1, size)) / (2 ** (bits - 1) - 1)).half()
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
            codes = (weight / scales.float()[:, group]).round().to(torch.int64) + 2 ** (bits - 1)
        stored = {"weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
        if shuffled:  # the layer is another one then, with the same codes in other columns
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(3))
            codes, group = codes[:, order], group[order]
            stored["weight_g_idx"] = group.to(torch.int32)
        stored["weight_packed"] = pack(codes, bits)
        if not symmetric:
            stored["weight_zero_point"] = pack(zeros.t(), bits).t()
        return stored, numbers(codes, scales, zeros, group)

    return Format(compressed("pack-quantized", weights), encode)


def int8(strategy: str, block: tuple[int, int], *, symmetric: bool, form: str = "int-quantized", **more: Any) -> Format:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        of_layer = sized(block, weight)
        scales = (biggest(weight, of_layer) / 100).bfloat16()
        zeros = torch.arange(scales.numel()).view(scales.shape).fmod(40).sub(20).to(torch.int8) * (not symmetric)
        full, offset = spread(scales.float(), of_layer, weight.shape), spread(zeros, of_layer, weight.shape)
        codes = ((weight / full).round() + offset).clamp(-128, 127).to(torch.int8)
        stored = {"weight": codes, "weight_scale": scales} | ({} if symmetric else {"weight_zero_point": zeros})
        return stored, (codes.float() - offset) * full

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy, **more}
    return Format(compressed(form, weights), encode)


def llm_int8() -> Format:
    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        biggest_of_row = weight.abs().amax(1)
        codes = (weight * 127 / biggest_of_row[:, None]).round().to(torch.int8)
        stored = {"weight": codes, "SCB": biggest_of_row, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, codes * biggest_of_row[:, None] / 127

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, encode)


def four_bits(kind: str, *, nested: bool, storage: torch.dtype = torch.uint8, block: int = 64) -> Format:
    """bitsandbytes' blocks of a flat tensor; nested scales are bytes that name numbers of a table."""
    table = torch.tensor({"nf4": NF4, "fp4": FP4}[kind], dtype=torch.float32)

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        flat = weight.reshape(-1)
        scales = biggest(flat.view(1, -1), (1, block))[0]
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        stored = {"weight.absmax": scales}
        if nested:
            nested_table = torch.linspace(-1, 1, 256)
            offset, nested_block = float(scales.mean()), 16
            spans = biggest((scales - offset).view(1, -1), (1, nested_block))[0]
            span = spans.repeat_interleave(nested_block)[: len(scales)]
            codes = ((scales - offset)[:, None] / span[:, None] - nested_table).abs().argmin(1)
            scales = nested_table[codes] * span + offset
            stored = {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": spans,
                "weight.nested_quant_map": nested_table,
            }
            state |= {"nested_blocksize": nested_block, "nested_offset": offset, "nested_dtype": "float32"}
        full = scales.repeat_interleave(block)[: len(flat)]
        chosen = (flat[:, None] / full[:, None] - table).abs().argmin(1)
        octets = (chosen[0::2] << 4 | chosen[1::2]).to(torch.uint8)
        stored["weight"] = octets.view(storage).view(-1, 1)
        stored["weight.quant_map"] = table
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
        return stored, (table[chosen] * full).view(weight.shape)

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True}, encode)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
ONE = torch.ones(())

FORMATS: dict[str, Format] = {
    "fp8 blocks": float8({"quant_method": "fp8", "weight_block_size": [64, 40]}, (64, 40), "weight_scale_inv"),
    "fp8 tensor": float8({"quant_method": "fp8"}, (-1, -1), "weight_scale", (), input_scale=ONE),
    "fp8 tensor inverse": float8(
        {"quant_method": "fp8", "weight_block_size": None}, (-1, -1), "weight_scale_inv", (1,)
    ),
    "fp8 channel": float8({"quant_method": "fp8"}, (1, -1), "weight_scale", (-1,)),
    "fbgemm": float8({"quant_method": "fbgemm_fp8"}, (1, -1), "weight_scale", input_scale_ub=ONE.view(1)),
    "modelopt": float8(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, (-1, -1), "weight_scale", (), input_scale=ONE, k_scale=ONE
    ),
    "ct float channel": float8(
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}), (1, -1), "weight_scale", (-1, 1)
    ),
    "ct float tensor": float8(
        compressed("float-quantized", {**FLOAT8, "strategy": "tensor"}), (-1, -1), "weight_scale", (1,), input_scale=ONE
    ),
    "ct float blocks": float8(
        compressed("naive-quantized", {**FLOAT8, "strategy": "block", "block_structure": [64, 40]}),
        (64, 40),
        "weight_scale",
    ),
    "ct int8 channel": int8("channel", (1, -1), symmetric=True),
    "ct int8 channel asymmetric": int8("channel", (1, -1), symmetric=False),
    "ct int8 group": int8("group", (1, 32), symmetric=False, form="naive-quantized", group_size=32),
    "ct int8 blocks": int8("block", (16, 32), symmetric=True, block_structure="16x32"),
    "ct packed 4 group": packed(4, 32, symmetric=True),
    "ct packed 4 group asymmetric": packed(4, 16, symmetric=False),
    "ct packed 4 ordered": packed(4, 32, symmetric=False, shuffled=True),
    "ct packed 8 channel": packed(8, -1, symmetric=True),
    "ct packed 8 channel asymmetric": packed(8, -1, symmetric=False),
    "gptq 4": gptq(4, 1),
    "gptq 4 ordered": gptq(4, 1, shuffled=True),
    "gptq 4 whole columns": gptq(4, 2, group_size=-1),
    "gptq 2": gptq(2, 2),
    "gptq 3": gptq(3, 1),
    "gptq 8": gptq(8, 2, shuffled=True),
    "awq": awq(),
    "bnb int8": llm_int8(),
    "bnb nf4": four_bits("nf4", nested=False),
    "bnb nf4 nested": four_bits("nf4", nested=True),
    "bnb fp4 in bfloat16": four_bits("fp4", nested=True, storage=torch.bfloat16),
}
