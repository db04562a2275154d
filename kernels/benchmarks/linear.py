"""Matmuls at the shapes of a 135M Llama: in 8 bits, dense in --dtype, and oneDNN's in --dtype with packed weights."""

from __future__ import annotations

from functools import partial

import torch
from batchgen_kernels.reference import FloatWeight, Int8Weight, quantize
from measure import parse, report, report_machine


def main() -> None:
    ops, dtype = parse()
    report_machine(dtype)
    for in_features, out_features in ((576, 960), (576, 3072), (1536, 576), (576, 49152)):
        weight = torch.randn(out_features, in_features)
        packed, panels = Int8Weight.pack(*quantize(weight)), FloatWeight.pack(weight.to(dtype))
        wide = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
        for rows in (8, 32, 96, 512):
            x = torch.randn(rows, in_features)
            case, flops = f"{rows} x {in_features} -> {out_features}", 2 * rows * weight.numel()
            given = x.to(dtype)
            runs = {
                "int8": (partial(ops.int8_linear, given, packed), dtype.itemsize, 1),
                "dense": (partial(ops.float_linear, given, panels), dtype.itemsize, dtype.itemsize),
                "oneDNN": (
                    partial(torch.ops.mkldnn._linear_pointwise, given, wide, None, "none", [], ""),
                    dtype.itemsize,
                    dtype.itemsize,
                ),
            }
            for name, (run, size, weight_size) in runs.items():
                num_bytes = weight.numel() * weight_size + rows * (in_features + out_features) * size
                report("linear", case, {name: run}, num_bytes=num_bytes, flops=flops)


if __name__ == "__main__":
    main()
