"""The workloads of the benchmarks: how long prompts and answers are, and prompts of these lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.types import TokenIds

LengthArray = npt.NDArray[np.int64]
VOCABULARY = (100, 32_000)  # prompts are drawn from these ids, which every tokenizer in use has


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload: exactly `output_tokens` are generated, EOS is ignored."""

    prompt: TokenIds
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`lengths` draws (num_rows,) prompt and (num_rows,) output lengths; each prompt begins with `shared` tokens that
    all rows have and that its length leaves out. `num_rows` is the usual size."""

    num_rows: int
    lengths: Callable[[np.random.Generator, int], tuple[LengthArray, LengthArray]]
    shared: int = 0

    def items(self, rng: np.random.Generator) -> list[Item]:
        shared = random_prompt(rng, self.shared)
        inputs, outputs = self.lengths(rng, self.num_rows)
        prompts = [random_prompt(rng, length) for length in inputs.tolist()]
        if self.shared:
            prompts = [np.concatenate([shared, prompt]) for prompt in prompts]
        return [Item(prompt, output) for prompt, output in zip(prompts, outputs.tolist(), strict=True)]


def random_prompt(rng: np.random.Generator, length: int) -> TokenIds:
    return rng.integers(*VOCABULARY, size=length).astype(np.int32)


def _nano(rng: np.random.Generator, count: int) -> tuple[LengthArray, LengthArray]:
    """Prompts and answers of 100 to 1,024 tokens, each length equally likely."""
    return rng.integers(100, 1025, count), rng.integers(100, 1025, count)


def _mixed(rng: np.random.Generator, count: int) -> tuple[LengthArray, LengthArray]:
    """Log-normal prompts around 200 tokens and answers around 90."""
    return _lognormal(rng, 230, 0.7, 16, 1024, count), _lognormal(rng, 100, 0.7, 8, 512, count)


def _prefix(rng: np.random.Generator, count: int) -> tuple[LengthArray, LengthArray]:
    """Behind what is shared, 32 to 128 tokens of each row's own; answers of 32 to 128."""
    return rng.integers(32, 129, count), rng.integers(32, 129, count)


def _longtail(rng: np.random.Generator, count: int) -> tuple[LengthArray, LengthArray]:
    """Short prompts; most answers are short and a few very long (Pareto)."""
    inputs = _lognormal(rng, 80, 0.5, 16, 512, count)
    return inputs, np.clip((rng.pareto(1.2, count) + 1) * 16, 8, 1024).astype(np.int64)


def _summarise(rng: np.random.Generator, count: int) -> tuple[LengthArray, LengthArray]:
    """Long documents, short answers."""
    return _lognormal(rng, 900, 0.4, 200, 1800, count), _lognormal(rng, 60, 0.4, 16, 160, count)


def _lognormal(rng: np.random.Generator, mean: float, sigma: float, low: int, high: int, count: int) -> LengthArray:
    """Lengths whose logarithm is normal, of this mean, within bounds."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn, low, high).astype(np.int64)


WORKLOADS = {
    "nano": Workload(256, _nano),
    "mixed": Workload(96, _mixed),
    "prefix": Workload(96, _prefix, shared=512),
    "longtail": Workload(192, _longtail),
    "summarise": Workload(64, _summarise),
}
