"""Drawing tokens for a batch of rows over the vocabularies of a 135M Llama and of Qwen 3.

The bytes are those of the logits, read once: greedy rows need no more, others read them twice or more.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from batchgen_kernels.draws import SamplingRows, pack
from measure import by_name, parse, report

KINDS = {  # temperature, top_k (0: off), top_p
    "greedy": (0.0, 0, np.inf),
    "unlimited": (1.0, 0, np.inf),
    "top_p 0.95": (0.8, 0, 0.95),
    "top_k 50": (1.0, 50, np.inf),
    "top_k 50, top_p 0.9": (1.0, 50, 0.9),
}


def main() -> None:
    ops, _ = parse()
    for vocab in (49_152, 151_936):
        for num_rows in (1, 128):
            logits = torch.randn(num_rows, vocab) * 3
            for kind, (temperature, top_k, top_p) in KINDS.items():
                floats = (np.full(num_rows, value, np.float32) for value in (temperature, top_p, -np.inf))
                heat, share, log_min_p = floats
                zeros, most = np.zeros(num_rows, np.int32), np.full(num_rows, top_k or vocab, np.int32)
                packed = pack(np.arange(num_rows), zeros, zeros, heat, most, share, log_min_p)
                rows = SamplingRows.unpack(torch.from_numpy(packed).to(logits.device))
                runs = {name: partial(by.sample, logits, rows, vocab) for name, by in by_name(ops).items()}
                report("sample", f"{num_rows} x {vocab}, {kind}", runs, num_bytes=logits.nbytes)


if __name__ == "__main__":
    main()
