"""8-bit matmuls at the shapes of a 135M Llama: native, twin, and beside them oneDNN's matmul in --dtype, packed."""

from __future__ import annotations

from functools import partial

import torch
from batchgen_kernels import reference
from batchgen_kernels.reference import Int8Weight, quantize
from measure import parse, report, report_machine


def main() -> None:
    ops, dtype = parse()
    report_machine(dtype)
    for in_features, out_features in ((576, 960), (576, 3072), (1536, 576), (576, 49152)):
        weight = torch.randn(out_features, in_features)
        packed = Int8Weight.pack(*quantize(weight))
        wide = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
        for rows in (8, 32, 96, 512):
            x = torch.randn(rows, in_features).to(dtype)
            runs = {
                ops.isa: partial(ops.int8_linear, x, packed),
                "twin": partial(reference.int8_linear, x, packed),
                "oneDNN": partial(torch.ops.mkldnn._linear_pointwise, x, wide, None, "none", [], ""),
            }
            num_bytes = weight.numel() + x.nbytes + rows * out_features * dtype.itemsize
            flops = 2 * rows * weight.numel()
            report("int8_linear", f"{rows} x {in_features} -> {out_features}", runs, num_bytes=num_bytes, flops=flops)


if __name__ == "__main__":
    main()
