"""Triton's keyed noise and sampling, in its interpreter, against their twins."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from batchgen_kernels import reference, sampling, tuning
from batchgen_kernels.draws import Bias, Penalties, SamplingRows, pack

OFF = {"temperature": 1.0, "top_k": None, "top_p": np.inf, "min_p": 0.0}
KINDS: list[dict[str, float]] = [  # no top_p that tied tokens could reach exactly, where a rounding would decide
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9071},
    {"temperature": 1.3, "top_k": 5},
    {"top_k": 1},
    {"temperature": 2.0, "top_k": 150, "top_p": 0.9531},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8123, "min_p": 0.05},
    {"temperature": 3.0, "top_p": 0.999},
    {"top_p": 1e-4},
    {"temperature": 1e-4},
    {"temperature": 5.0, "top_k": 500},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.5531},
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts, blocks and what is kept of a search are so small that a few hundred tokens need several."""
    sizes = {"SPLIT": 256, "BLOCK": 128, "KEPT": 16, "PART": 128}
    for kernel in ("scan", "limit", "draw", "likeliest", "penalise", "bias"):
        key = f"sample/{kernel}", ("", (3, 6))
        blocks = tuning.TABLE[key[0]][key[1]].blocks
        smaller = tuning.Config({name: sizes[name] for name in blocks})
        monkeypatch.setitem(tuning.TABLE, key[0], {key[1]: smaller})
    tuning._choose.cache_clear()
    yield
    monkeypatch.undo()
    tuning._choose.cache_clear()


def make_rows(kinds: list[dict[str, float]], vocab: int, seed: int) -> SamplingRows:
    rng, size = np.random.default_rng(seed), len(kinds)
    fields = {name: [kind.get(name, OFF[name]) for kind in kinds] for name in OFF}
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.array(fields["min_p"], np.float32))
    packed = pack(
        rng.integers(-(2**63), 2**63 - 1, size),
        rng.integers(0, 1000, size).astype(np.int32),
        rng.integers(0, 4, size).astype(np.int32),
        np.array(fields["temperature"], np.float32),
        np.array([vocab if k is None else k for k in fields["top_k"]], np.int32),
        np.array(fields["top_p"], np.float32),
        log_min_p,
    )
    return SamplingRows.unpack(torch.from_numpy(packed))


def make_logits(size: int, vocab: int, seed: int, spread: float = 2.5) -> torch.Tensor:
    """Rows longer than the vocabulary, what lies behind it larger than all."""
    logits = np.random.default_rng(seed).normal(0, spread, (size, vocab + 5)).astype(np.float32)
    logits[:, vocab:] = 1e6
    return torch.from_numpy(logits)


def check(logits: torch.Tensor, rows: SamplingRows, vocab: int, **options: object) -> torch.Tensor:
    """Both forms draw the same; -> the tokens."""
    given = logits.clone()
    got = sampling.sample(given, rows, vocab, **options)  # type: ignore[arg-type]
    changed = logits.clone()
    wanted = reference.sample(changed, rows, vocab, **options)  # type: ignore[arg-type]
    assert got.tokens.dtype == torch.int64 and got.tokens.tolist() == wanted.tokens.tolist()
    assert got.finite.dtype == torch.bool and torch.equal(got.finite, wanted.finite)
    torch.testing.assert_close(given, changed, rtol=1e-6, atol=1e-6)
    if wanted.logprobs is not None:
        assert got.logprobs is not None and torch.equal(got.logprobs.ids, wanted.logprobs.ids)
        torch.testing.assert_close(got.logprobs.drawn, wanted.logprobs.drawn, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.logprobs.values, wanted.logprobs.values, rtol=1e-5, atol=1e-5)
    return got.tokens


@triton.jit
def _words_kernel(keys, positions, samples, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    words = sampling._philox(tl.load(keys + row), tl.load(positions + row), tl.load(samples + row), first, BLOCK)
    tl.store(out + row * tl.num_programs(1) * BLOCK + first + tl.arange(0, BLOCK), words.to(tl.int64))


def test_the_words_are_the_twins() -> None:
    keys = torch.tensor([0, -1, 2**62 + 12345, -(2**63), 0x299F31D0A4093822])
    positions = torch.tensor([0, 1, 2**31 - 1, -1, 5], dtype=torch.int32)
    samples = torch.tensor([0, 3, 1, -7, 2**31 - 1], dtype=torch.int32)
    out = torch.empty(5, 96, dtype=torch.int64)
    _words_kernel[(5, 3)](keys, positions, samples, out, BLOCK=32)
    mask = 0xFFFFFFFF
    counter = torch.zeros(5, 24, 4, dtype=torch.int64)
    counter[:, :, 0] = torch.arange(24)
    counter[:, :, 1], counter[:, :, 2] = (positions.long() & mask)[:, None], (samples.long() & mask)[:, None]
    key = torch.stack((keys & mask, (keys >> 32) & mask), dim=-1)[:, None]
    assert torch.equal(out, reference.philox4x32(counter, key).flatten(1))


@pytest.mark.parametrize("vocab", [1, 5, 64, 4999])
def test_keyed_gumbel(vocab: int) -> None:
    rows = make_rows([{}] * 3, vocab, seed=vocab)
    noise = (rows.keys, rows.positions, rows.samples, vocab)
    torch.testing.assert_close(
        sampling.keyed_gumbel(*noise), reference.keyed_gumbel(*noise), rtol=1e-6, atol=1e-6
    )  # the rounding of two logarithms


@pytest.mark.parametrize(("vocab", "step"), [(1, 0.0), (37, 1.0), (37, 8.0), (500, 0.0), (500, 1.0)])
@pytest.mark.usefixtures("small_blocks")
def test_every_kind_of_row_is_drawn_as_by_the_twin(vocab: int, step: float) -> None:
    logits = make_logits(len(KINDS), vocab, seed=vocab)
    if step:
        logits = torch.round(logits / step) * step  # many ties
    check(logits, make_rows(KINDS, vocab, seed=round(step)), vocab)


@pytest.mark.usefixtures("small_blocks")
def test_with_mask_bias_penalties_and_logprobs() -> None:
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.9071}, {"top_k": 400}]
    vocab, size, rng = 501, len(kinds), np.random.default_rng(7)
    logits, rows = make_logits(size, vocab, seed=8), make_rows(kinds, vocab, seed=9)
    allowed = torch.from_numpy(rng.integers(-(2**31), 2**31, (size, 16)).astype(np.int32))
    bias = Bias(
        torch.from_numpy(np.stack([rng.choice(vocab, 200, replace=False) for _ in range(size)]).astype(np.int32)),
        torch.from_numpy(rng.normal(0, 3, (size, 200)).astype(np.float32)),
    )
    bias.ids[:, 150:] = -1
    history = torch.from_numpy(rng.integers(0, 60, (2 * size, 300)).astype(np.int32))
    history[:, ::50] = vocab + 3  # an id that is never drawn
    penalties = Penalties(
        *(torch.from_numpy(rng.uniform(low, 2, size).astype(np.float32)) for low in (1, -2, -2)),
        history=history,
        slots=torch.from_numpy(rng.permutation(2 * size)[:size].astype(np.int32)),
        num_prompt=torch.from_numpy(rng.integers(0, 150, size).astype(np.int32)),
        num_tokens=torch.from_numpy(rng.integers(150, 301, size).astype(np.int32)),
    )
    check(logits, rows, vocab, allowed=allowed)
    check(logits, rows, vocab, bias=bias)
    check(logits, rows, vocab, penalties=penalties)
    check(logits, rows, vocab, num_logprobs=5)
    check(logits.round(), rows, vocab, num_logprobs=20)
    check(logits, rows, vocab, num_logprobs=0)
    check(logits, rows, vocab, allowed=allowed, bias=bias, penalties=penalties, num_logprobs=3)


def test_penalties_are_as_defined() -> None:
    logits = torch.tensor([[2.0, -2.0, 4.0, -4.0, 1.0]])
    ones = torch.ones(1, dtype=torch.int32)
    history = torch.tensor([[9, 9, 9, 9, 9, 9], [0, 1, 2, 2, 3, 4]], dtype=torch.int32)
    penalties = Penalties(
        *(torch.tensor([value]) for value in (2.0, 0.5, 0.25)), history, slots=ones, num_prompt=2 * ones,
        num_tokens=5 * ones,
    )  # fmt: skip
    for ops in (reference, sampling):
        changed = logits.clone()
        ops.sample(changed, make_rows([{}], 5, seed=0), 5, penalties=penalties)
        assert changed.tolist() == [[1.0, -4.0, 2.0 - 2 * 0.5 - 0.25, -8.0 - 0.5 - 0.25, 1.0]]


@pytest.mark.usefixtures("small_blocks")
def test_few_tokens_are_allowed() -> None:
    vocab = 330
    allowed = torch.zeros(len(KINDS), 11, dtype=torch.int32)
    allowed[:, 0], allowed[:, 3], allowed[:, 10] = 1 << 5, -(1 << 31), 1 << 9
    tokens = check(make_logits(len(KINDS), vocab, 1), make_rows(KINDS, vocab, 2), vocab, allowed=allowed)
    assert set(tokens.tolist()) <= {5, 127, 329}


@pytest.mark.parametrize(
    "values",
    [
        [0.0],  # all tied
        [0.0, -0.0],  # the zeros are one value
        [1e35, -1e35, 1e-45, -1e-45, 0.0],
        [1.0, 1.0 + 2**-23, 1.0 + 2**-22, -5.0],
        [-1e-30, -1e-38, -7e4],
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_the_cut_is_found_whatever_the_logits_are(values: list[float]) -> None:
    vocab = 300
    logits = torch.from_numpy(np.random.default_rng(3).choice(np.array(values, np.float32), (8, vocab)))
    kinds: list[dict[str, float]] = [{"top_k": k} for k in (1, 2, 17, 150, 299)]
    kinds += [{"top_p": 0.3331}, {"top_k": 151, "top_p": 0.4999}, {"top_k": 10, "top_p": 0.2501}]
    check(logits, make_rows(kinds, vocab, seed=2), vocab)


def test_ties_go_to_the_lowest_id_and_padded_ids_never_come_out() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 99.0, 99.0]] * 3)
    for seed in range(3):
        rows = make_rows([{"temperature": 0.0}, {"top_k": 1}, {"temperature": 5.0}], 4, seed)
        tokens = check(logits, rows, 4).tolist()
        assert tokens[:2] == [1, 1] and tokens[2] < 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.usefixtures("small_blocks")
def test_nonfinite_rows_are_told_and_leave_the_others_alone(bad: float) -> None:
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 30}, {"top_p": 0.9}]
    logits, rows = make_logits(5, 300, seed=4), make_rows(kinds, 300, seed=5)
    clean = sampling.sample(logits, rows, 300).tokens
    logits[:4, 277] = bad
    tokens, finite, _ = sampling.sample(logits, rows, 300)
    assert finite.tolist() == [False] * 4 + [True]
    assert int(tokens[4]) == int(clean[4]) and 0 <= int(tokens.min()) <= int(tokens.max()) < 300
    hidden = torch.full((5, 10), -1, dtype=torch.int32)
    hidden[:, 277 // 32] = 0  # a masked logit counts too
    assert sampling.sample(logits, rows, 300, allowed=hidden).finite.tolist() == finite.tolist()


@pytest.mark.usefixtures("small_blocks")
def test_a_row_is_drawn_the_same_beside_any_others() -> None:
    logits, rows = make_logits(len(KINDS), 300, seed=6), make_rows(KINDS, 300, seed=7)
    together = sampling.sample(logits, rows, 300, num_logprobs=2)
    backwards = SamplingRows(*(field.flip(0).contiguous() for field in rows))
    flipped = sampling.sample(logits.flip(0), backwards, 300, num_logprobs=2)
    assert torch.equal(together.tokens, flipped.tokens.flip(0))
    assert together.logprobs is not None and flipped.logprobs is not None
    assert torch.equal(together.logprobs.drawn, flipped.logprobs.drawn.flip(0))


def test_a_large_vocabulary() -> None:
    vocab = 151_936
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {"top_k": 20, "top_p": 0.95}]
    logits = make_logits(len(kinds), vocab, seed=1, spread=3.0)
    check(logits, make_rows(kinds, vocab, seed=2), vocab, num_logprobs=4)


def test_no_rows() -> None:
    tokens, finite, _ = sampling.sample(torch.empty(0, 8), make_rows([], 8, seed=0), 8)
    assert tokens.shape == finite.shape == (0,)
    assert sampling.keyed_gumbel(*make_rows([], 8, seed=0)[:3], 8).shape == (0, 8)


def test_wrong_tensors_are_refused() -> None:
    rows = make_rows([{}], 8, seed=0)
    with pytest.raises(ValueError, match="logits: expected rows of 9"):
        sampling.sample(torch.zeros(1, 8), rows, 9)
    with pytest.raises(ValueError, match=r"logits: .* got torch.float16"):
        sampling.sample(torch.zeros(1, 8).half(), rows, 8)
    with pytest.raises(ValueError, match="allowed: expected rows of 2 int32"):
        sampling.sample(torch.zeros(1, 40), rows, 40, allowed=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="num_logprobs 9: expected at most 8"):
        sampling.sample(torch.zeros(1, 8), rows, 8, num_logprobs=9)
