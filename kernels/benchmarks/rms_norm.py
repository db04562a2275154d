"""RMS norm with the residual added, at the shapes of a 135M and an 8B Llama."""

from __future__ import annotations

from functools import partial

import torch
from measure import by_name, parse, report


def main() -> None:
    ops, dtype = parse()
    for tokens, dim in [(96, 576), (512, 576), (512, 4096), (8192, 4096)]:
        x, residual = torch.randn(2, tokens, dim).to(dtype)
        weight = torch.randn(dim)
        x.zero_()  # what is added to the residual again and again
        runs = {name: partial(by.rms_norm, x, weight, 1e-5, residual) for name, by in by_name(ops).items()}
        report("rms_norm", f"{tokens} x {dim}, residual", runs, num_bytes=4 * x.nbytes)


if __name__ == "__main__":
    main()
