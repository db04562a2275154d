"""Keyed Gumbel noise for a batch of rows over a vocabulary of 49,152."""

from __future__ import annotations

from functools import partial

import torch
from measure import by_name, parse, report


def main() -> None:
    ops, _ = parse()
    for rows in (1, 96):
        keys, zeros = torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.zeros(rows, dtype=torch.int32)
        runs = {name: partial(by.keyed_gumbel, keys, zeros, zeros, 49152) for name, by in by_name(ops).items()}
        report("keyed_gumbel", f"{rows} x 49152", runs, num_bytes=rows * 49152 * 4)


if __name__ == "__main__":
    main()
