"""Sampling against a plain reference, one row at a time, with an independent Philox."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from batchgen_kernels import cpu, reference
from batchgen_kernels.draws import SamplingRows

from batchgen.engine.sampler import Sampler
from batchgen.engine.step import IntArray
from batchgen.types import SamplingParams

MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 as its paper states it, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def gumbel(key: int, position: int, sample: int, vocab: int) -> np.ndarray:
    words = [word for q in range(-(-vocab // 4)) for word in philox((q, position, sample, 0), key)]
    u = ((np.array(words[:vocab], np.uint32) >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(u))


@cache
def remembered_gumbel(key: int, position: int, sample: int, vocab: int) -> np.ndarray:
    return gumbel(key & (2**64 - 1), position, sample, vocab)


def python_gumbel(keys: torch.Tensor, positions: torch.Tensor, samples: torch.Tensor, vocab: int) -> torch.Tensor:
    """`keyed_gumbel` by the reference above; remembers rows, as it is slow."""
    assert (keys.dtype, positions.dtype, samples.dtype) == (torch.int64, torch.int32, torch.int32)
    rows = zip(keys.tolist(), positions.tolist(), samples.tolist(), strict=True)
    return torch.from_numpy(np.stack([remembered_gumbel(*row, vocab) for row in rows]))


class Drawing(Sampler):
    """Draws for its slots, with the noise above unless told otherwise."""

    gumbel: reference.Gumbel = staticmethod(python_gumbel)

    def sample(
        self, logits: torch.Tensor, slots: IntArray, positions: IntArray, allowed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = SamplingRows.unpack(torch.from_numpy(self.gather(slots, positions)))
        tokens, finite, _ = reference.sample(logits, rows, self.vocab_size, allowed=allowed, gumbel=self.gumbel)
        return tokens, finite


def draw_one(logits: np.ndarray, params: SamplingParams, key: int, position: int, sample: int) -> int:
    """The definition, in float64 but for the noise, with a full sort."""
    if params.greedy:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / np.float64(np.float32(params.temperature))
    scaled -= scaled.max()
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if params.top_k is not None:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        probabilities = np.exp(scaled[order])
        probabilities /= probabilities.sum()
        before = np.concatenate([[0.0], np.cumsum(probabilities)[:-1]])
        order = order[before < params.top_p]
    order = order[np.exp(scaled[order]) >= params.min_p]
    scores = scaled[order] + gumbel(key, position, sample, len(logits))[order]
    return int(order[scores.argmax()])


def make(params: list[SamplingParams], vocab: int, keys: list[int], samples: list[int] | None = None) -> Drawing:
    sampler = Drawing(len(params), vocab)
    for slot, (one, key) in enumerate(zip(params, keys, strict=True)):
        sampler.start(slot, one, key, samples[slot] if samples else 0)
    return sampler


PARAMS = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.7),
    SamplingParams(1, temperature=1.0, top_p=0.9),
    SamplingParams(1, temperature=1.3, top_k=5),
    SamplingParams(1, temperature=1.0, top_k=1),
    SamplingParams(1, temperature=2.0, top_k=150, top_p=0.95),
    SamplingParams(1, temperature=1.0, min_p=0.2),
    SamplingParams(1, temperature=1.5, top_k=40, top_p=0.8, min_p=0.05),
    SamplingParams(1, temperature=3.0, top_p=0.999),
    SamplingParams(1, temperature=1.0, top_p=1e-4),
    SamplingParams(1, temperature=1e-4),
    SamplingParams(1, temperature=1.0, top_k=10**6),
]


def test_the_python_philox_has_the_published_answers() -> None:
    assert philox((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((MASK,) * 4, 2**64 - 1) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    key = 0x299F31D0_A4093822
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), key) == (
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


def test_all_forms_of_the_noise_agree() -> None:
    native = cpu.load()
    keys = torch.tensor([0, 1, -1, 0x299F31D0A4093822, -(2**63)], dtype=torch.int64)
    positions = torch.tensor([0, 7, 2**31 - 1, 3, 100_000], dtype=torch.int32)
    samples = torch.tensor([0, 1, 2, 3, 1023], dtype=torch.int32)
    for vocab in (1, 7, 64, 331):
        want = python_gumbel(keys, positions, samples, vocab)
        for ops in [reference] if native is None else [reference, native]:
            torch.testing.assert_close(ops.keyed_gumbel(keys, positions, samples, vocab), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widths", [(64, 1024), (4, 16), ()])
def test_every_kind_of_row_is_drawn_as_defined(widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "WIDTHS", widths)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 3 * 200)
    rng = np.random.default_rng(0)
    for round_ in range(6):
        logits = rng.normal(0, 2.5, (3 * len(PARAMS), 200)).astype(np.float32)
        if round_ >= 3:
            logits = np.round(logits)  # many ties
        params = PARAMS * 3
        keys = [int(key) for key in rng.integers(0, 2**64, len(params), dtype=np.uint64)]
        samples = rng.integers(0, 4, len(params)).tolist()
        sampler = make(params, 200, keys, samples)
        slots = rng.permutation(len(params)).astype(np.int32)
        positions = rng.integers(0, 1000, len(params)).astype(np.int32)
        tokens, finite = sampler.sample(torch.from_numpy(logits), slots, positions)
        assert finite.all()
        want = [
            draw_one(logits[row], params[slot], keys[slot], int(positions[row]), samples[slot])
            for row, slot in enumerate(slots)
        ]
        assert tokens.tolist() == want


def test_a_row_is_drawn_the_same_beside_any_others() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 2, (len(PARAMS), 200)).astype(np.float32))
    sampler = make(PARAMS, 200, list(range(100, 100 + len(PARAMS))))
    slots, positions = np.arange(len(PARAMS), dtype=np.int32), np.full(len(PARAMS), 5, np.int32)
    together, _ = sampler.sample(logits, slots, positions)
    backwards, _ = sampler.sample(logits.flip(0), slots[::-1].copy(), positions)
    alone = [int(sampler.sample(logits[s : s + 1], slots[s : s + 1], positions[:1])[0]) for s in range(len(PARAMS))]
    assert together.tolist() == alone == backwards.flip(0).tolist()


def test_low_temperatures_are_greedy_and_never_nan() -> None:
    logits = np.random.default_rng(2).permutation(np.linspace(-60, 60, 121)).astype(np.float16).astype(np.float32)
    params = [SamplingParams(1, temperature=t) for t in (0.0, 1e-12, 1e-4, 0.01)]
    params += [SamplingParams(1, temperature=t, top_p=1e-4) for t in (1e-4, 0.01, 1.0)]
    sampler = make(params, 121, list(range(len(params))))
    rows = torch.from_numpy(np.stack([logits] * len(params)))
    tokens, finite = sampler.sample(rows, np.arange(len(params), dtype=np.int32), np.zeros(len(params), np.int32))
    assert finite.all()
    assert tokens.tolist() == [int(logits.argmax())] * len(params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1, temperature=1.0),
        SamplingParams(1, temperature=0.7, top_k=6),
        SamplingParams(1, temperature=1.4, top_p=0.8),
        SamplingParams(1, temperature=1.0, min_p=0.1),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    vocab, draws = 12, 4000
    logits = np.random.default_rng(3).normal(0, 1.5, vocab).astype(np.float32)
    sampler = Drawing(draws, vocab)
    sampler.gumbel = reference.keyed_gumbel
    for slot in range(draws):
        sampler.start(slot, params, 0x1234_5678_9ABC_DEF0 + slot, 0)
    tokens, _ = sampler.sample(
        torch.from_numpy(np.tile(logits, (draws, 1))), np.arange(draws, dtype=np.int32), np.zeros(draws, np.int32)
    )
    probabilities = np.exp(logits / params.temperature)
    order = np.argsort(-probabilities)
    probabilities /= probabilities.sum()
    kept = order[: params.top_k]
    if params.top_p < 1:
        kept = kept[np.concatenate([[0], np.cumsum(probabilities[kept])[:-1]]) < params.top_p]
    kept = kept[probabilities[kept] >= params.min_p * probabilities.max()]
    expected = np.zeros(vocab)
    expected[kept] = probabilities[kept] / probabilities[kept].sum() * draws
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    freedom = len(kept) - 1
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom), "less likely than one in ten thousand"


def test_positions_samples_and_keys_give_other_draws() -> None:
    sampler = make([SamplingParams(1, temperature=1.0)] * 3, 50, [7, 7, 8], [0, 1, 0])
    flat = torch.zeros(3, 50)
    draws = [
        sampler.sample(flat, np.arange(3, dtype=np.int32), np.full(3, position, np.int32))[0].tolist()
        for position in range(30)
    ]
    by_slot = list(zip(*draws, strict=True))
    assert len(set(by_slot)) == 3 and all(len(set(one)) > 10 for one in by_slot)


def test_ties_go_to_the_lowest_id_and_padded_ids_never_come_out() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 99.0, 99.0]] * 3)
    params = [SamplingParams(1), SamplingParams(1, temperature=1.0, top_k=1), SamplingParams(1, temperature=5.0)]
    sampler = make(params, 4, [1, 2, 3])
    for position in range(50):
        tokens, _ = sampler.sample(logits, np.arange(3, dtype=np.int32), np.full(3, position, np.int32))
        assert tokens.tolist()[:2] == [1, 1] and int(tokens[2]) < 4
    tokens, _ = sampler.sample(logits[:1], np.zeros(1, np.int32), np.zeros(1, np.int32))
    assert tokens.tolist() == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[1], PARAMS[2]])
def test_nonfinite_rows_are_told_and_leave_the_others_alone(bad: float, params: SamplingParams) -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(0, 2, (3, 300)).astype(np.float32))
    sampler = make([params] * 3, 300, [1, 2, 3])
    slots, positions = np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
    clean, _ = sampler.sample(logits, slots, positions)
    logits[1, 77] = bad
    tokens, finite = sampler.sample(logits, slots, positions)
    assert finite.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert 0 <= int(tokens[1]) < 300


def test_only_allowed_tokens_are_drawn() -> None:
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 2, (len(PARAMS), 40)).astype(np.float32))
    allowed = torch.tensor([[1 << 3 | 1 << 17 | -(1 << 31), 1 << 7]], dtype=torch.int32).expand(len(PARAMS), 2)
    sampler = make(PARAMS, 40, list(range(len(PARAMS))))
    for position in range(20):
        slots = np.arange(len(PARAMS), dtype=np.int32)
        tokens, finite = sampler.sample(logits, slots, np.full(len(PARAMS), position, np.int32), allowed)
        assert finite.all() and set(tokens.tolist()) <= {3, 17, 31, 39}
