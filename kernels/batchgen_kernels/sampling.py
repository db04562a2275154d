"""Triton: keyed noise, and the drawing of tokens without a full sort. What each computes is said at its twin.

A row is read by a few programs, each a part of the vocabulary: once for the largest logit, which is all that greedy
rows need, and once for the best score. Between the two, rows with a top_k or top_p are searched, by a program each, for
the cut: the logit of the last token that both leave, and among its equals the last id. Nothing depends on which rows
are drawn together: a row's sums are always made up in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchgen_kernels import tuning
from batchgen_kernels.draws import Bias, Drawn, Logprobs, Penalties, SamplingRows
from batchgen_kernels.penalties import add_bias, penalise

FLOOR = tl.constexpr(-0x7F800001)  # the rank of minus infinity: of tokens that are not drawn
LINEAR_PASSES = tl.constexpr(6)  # of a search, before it goes on by ranks, which ends whatever the logits are
MAX_LOGPROBS = 64


@triton.jit
def _philox(key, position, sample, first, BLOCK: tl.constexpr):
    """The words of tokens first .. first + BLOCK - 1; `first` is a multiple of 4."""
    quads = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    key0, key1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    word0, word1 = quads, tl.zeros_like(quads) + position.to(tl.uint32)
    word2, word3 = tl.zeros_like(quads) + sample.to(tl.uint32), tl.zeros_like(quads)
    factor0, factor2 = tl.full((BLOCK // 4,), 0xD2511F53, tl.uint32), tl.full((BLOCK // 4,), 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(word0, factor0), word0 * factor0
        high2, low2 = tl.umulhi(word2, factor2), word2 * factor2
        word0, word1, word2, word3 = high2 ^ word1 ^ key0, low2, high0 ^ word3 ^ key1, low0
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def _gumbel(key, position, sample, first, BLOCK: tl.constexpr):
    words = _philox(key, position, sample, first, BLOCK)
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


def keyed_gumbel(
    keys: torch.Tensor,  # (num_rows,) int64
    positions: torch.Tensor,  # (num_rows,) int32
    samples: torch.Tensor,  # (num_rows,) int32
    vocab: int,
) -> torch.Tensor:  # (num_rows, vocab) float32
    out = torch.empty(len(keys), vocab, dtype=torch.float32, device=keys.device)
    config = tuning.choose("keyed_gumbel")
    if out.numel():
        _keyed_gumbel_kernel[(len(keys), triton.cdiv(vocab, config.blocks["BLOCK"]))](
            keys, positions, samples, out, vocab, **config.blocks, num_warps=config.num_warps
        )
    return out


@triton.jit
def _keyed_gumbel_kernel(keys, positions, samples, out, vocab, BLOCK: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * BLOCK
    noise = _gumbel(tl.load(keys + row), tl.load(positions + row), tl.load(samples + row), first, BLOCK)
    tokens = first + tl.arange(0, BLOCK)
    tl.store(out + row.to(tl.int64) * vocab + tokens, noise, mask=tokens < vocab)


def sample(
    logits: torch.Tensor,  # (num_rows, at least vocab) float32; penalties and bias change it in place
    rows: SamplingRows,
    vocab: int,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    allowed: torch.Tensor | None = None,  # (num_rows, ceil(vocab / 32)) int32: bit j of word i lets token 32 i + j pass
    num_logprobs: int | None = None,
) -> Drawn:
    num_rows, device = len(logits), logits.device
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not 0 < vocab <= logits.shape[1]:
        raise ValueError(f"logits: expected rows of {vocab} float32 or more, got {logits.dtype} {tuple(logits.shape)}")
    if allowed is not None and (allowed.dtype != torch.int32 or allowed.shape[1] * 32 < vocab):
        raise ValueError(f"allowed: expected rows of {(vocab + 31) // 32} int32, got {tuple(allowed.shape)}")
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return Drawn(tokens, finite, None)
    if penalties is not None:
        penalise(logits, penalties, vocab)
    if bias is not None:
        add_bias(logits, bias)

    scan, draw, limit = (tuning.choose(f"sample/{kernel}") for kernel in ("scan", "draw", "limit"))
    assert scan.blocks["SPLIT"] == draw.blocks["SPLIT"]
    num_splits = triton.cdiv(vocab, scan.blocks["SPLIT"])
    splits = triton.next_power_of_2(num_splits)
    masked = (logits, logits.stride(0), allowed, 0 if allowed is None else allowed.stride(0), vocab)
    # What a part of a row has found: the largest logit, the best score, whose they are, whether all was finite
    values = torch.empty(2, num_rows, num_splits, dtype=torch.float32, device=device)
    ids = torch.empty(3, num_rows, num_splits, dtype=torch.int32, device=device)
    cuts = torch.empty(2, num_rows, dtype=torch.int32, device=device)  # rank and id of the last token that is left
    kept = torch.empty(num_rows, limit.blocks["KEPT"], dtype=torch.int32, device=device)
    _scan_kernel[(num_rows, num_splits)](
        *masked, values, ids, num_splits, **scan.blocks, num_warps=scan.num_warps, num_stages=scan.num_stages
    )
    _limit_kernel[(num_rows,)](
        *masked,
        *(rows.temperature, rows.top_k, rows.top_p),
        *(values, ids, num_splits, cuts, kept),
        SPLITS=splits,
        **limit.blocks,
        num_warps=limit.num_warps,
        num_stages=limit.num_stages,
    )
    _draw_kernel[(num_rows, num_splits)](
        *masked,
        *(rows.keys, rows.positions, rows.samples, rows.temperature, rows.log_min_p),
        *(values, ids, num_splits, cuts),
        SPLITS=splits,
        **draw.blocks,
        num_warps=draw.num_warps,
        num_stages=draw.num_stages,
    )
    _finish_kernel[(num_rows,)](rows.temperature, values, ids, num_splits, tokens, finite, SPLITS=splits, num_warps=1)
    if num_logprobs is None:
        return Drawn(tokens, finite, None)
    return Drawn(tokens, finite, _logprobs(masked, values, num_splits, tokens, num_logprobs))


@triton.jit
def _load(logits, stride, allowed, allowed_stride, vocab, row, tokens):
    """Logits of a row, minus infinity where they are NaN, not allowed or past the vocabulary."""
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=tokens < vocab, other=float("-inf"))
    return _let_pass(x, allowed, allowed_stride, vocab, row, tokens)


@triton.jit
def _let_pass(x, allowed, allowed_stride, vocab, row, tokens):
    if allowed is not None:
        words = tl.load(allowed + row.to(tl.int64) * allowed_stride + tokens // 32, mask=tokens < vocab, other=0)
        x = tl.where((words >> (tokens % 32)) & 1 != 0, x, float("-inf"))
    return tl.where(x > float("-inf"), x, float("-inf"))


@triton.jit
def _rank(x):
    """int32 in the order of the float32; equal for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(rank):
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(values, ids):
    """The largest value, and the lowest of its ids."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def _best_of_row(values, ids, row, num_splits, SPLITS: tl.constexpr):
    """The same over what the row's parts have found."""
    split = tl.arange(0, SPLITS)
    found = row * num_splits + split
    value = tl.load(values + found, mask=split < num_splits, other=float("-inf"))
    return _best(value, tl.load(ids + found, mask=split < num_splits, other=0x7FFFFFFF))


@triton.jit
def _largest_of_row(values, row, num_splits, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(values + row * num_splits + split, mask=split < num_splits, other=float("-inf")), axis=0)


@triton.jit
def _scan_kernel(
    logits,  # (num_rows, at least vocab) float32
    stride,
    allowed,  # (num_rows, ceil(vocab / 32)) int32 or None
    allowed_stride,
    vocab,
    values,  # (2, num_rows, num_splits) float32
    ids,  # (3, num_rows, num_splits) int32
    num_splits,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_ids = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, vocab), BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=tokens < vocab, other=float("-inf"))
        bad |= tl.where((tl.abs(x) < float("inf")) | (tokens >= vocab), 0, 1)
        x = _let_pass(x, allowed, allowed_stride, vocab, row, tokens)
        best_ids = tl.where(x > best, tokens, best_ids)
        best = tl.maximum(best, x)
    top, top_id = _best(best, best_ids)
    found = row * num_splits + split
    tl.store(values + found, top)
    tl.store(ids + found, top_id)
    tl.store(ids + 2 * tl.num_programs(0) * num_splits + found, tl.max(bad, axis=0))


@triton.jit(do_not_specialize_on_alignment=["top_k", "top_p"])  # which depends on the number of rows
def _limit_kernel(
    logits,  # (num_rows, at least vocab) float32
    stride,
    allowed,  # (num_rows, ceil(vocab / 32)) int32 or None
    allowed_stride,
    vocab,
    temperature,  # (num_rows,) float32
    top_k,  # (num_rows,) int32
    top_p,  # (num_rows,) float32
    values,  # (2, num_rows, num_splits) float32
    ids,  # (3, num_rows, num_splits) int32
    num_splits,
    cuts,  # (2, num_rows) int32
    kept,  # (num_rows, KEPT) int32
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The rank and the id of the last token that top_k and top_p leave."""
    row = tl.program_id(0)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    rank, last = tl.full((), FLOOR, tl.int32), vocab
    if (heat > 0.0) & ((k < vocab) | (p < 1.0)):
        largest = _largest_of_row(values, row, num_splits, SPLITS)
        inverse = 1.0 / heat
        kept += row.to(tl.int64) * KEPT
        low, high = rank, _rank(largest)
        reach = vocab  # at least the number of tokens above `low`
        if allowed is not None:
            reach, mass = _above(logits, stride, allowed, allowed_stride, vocab, row, low, largest, inverse, BLOCK)
        equals, wanted = vocab, vocab  # how many tokens are as likely as the cut, and how many of them are left
        if k < reach:
            rank, above, equals = _search(
                logits, stride, allowed, allowed_stride, vocab, row, kept, k.to(tl.float32), low, high, reach, largest,
                inverse, False, BLOCK, KEPT,
            )  # fmt: skip
            low, reach = rank - 1, above.to(tl.int32) + equals
            wanted = k - above.to(tl.int32)
        if p < 1.0:
            _number, mass = _above(logits, stride, allowed, allowed_stride, vocab, row, low, largest, inverse, BLOCK)
            if rank > FLOOR:  # less those of the last rank that top_k did not leave
                mass -= (equals - wanted).to(tl.float32) * tl.exp((_value(rank) - largest) * inverse)
            cut, above, equals = _search(
                logits, stride, allowed, allowed_stride, vocab, row, kept, p * mass, low, high, reach, largest,
                inverse, True, BLOCK, KEPT,
            )  # fmt: skip
            each = tl.exp((_value(cut) - largest) * inverse)
            wanted_p = tl.minimum(tl.ceil((p * mass - above) / each), vocab * 1.0).to(tl.int32)
            wanted = tl.minimum(wanted_p, tl.where(cut == rank, wanted, vocab))
            rank = cut
        if wanted < equals:
            last = _nth_id(logits, stride, allowed, allowed_stride, vocab, row, rank, wanted, BLOCK)
    tl.store(cuts + row, rank)
    tl.store(cuts + tl.num_programs(0) + row, last)


@triton.jit
def _search(
    logits,
    stride,
    allowed,
    allowed_stride,
    vocab,
    row,
    kept,  # (KEPT,) int32, to be written over
    target,
    low,
    high,
    reach,
    largest,
    inverse,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """The lowest rank so that the tokens above it weigh less than `target`; what they weigh; how many tokens have it.

    A token weighs 1 or, by mass, exp of its scaled logit. The rank lies in (low, high], above `low` are `reach` tokens
    at most, above `high` none. The range is cut in four until it holds few tokens, whose ranks are then kept at hand,
    and halved.
    """
    above = 0.0  # weight of the ranks above `high`
    past = 0  # and their number
    passes = 0
    while (reach - past > KEPT) & (high - 1 > low):
        if passes < LINEAR_PASSES:
            top = _value(high)
            if low > FLOOR:
                bottom = _value(low)
                value1, value3 = bottom * 0.75 + top * 0.25, bottom * 0.25 + top * 0.75
                value2 = bottom * 0.5 + top * 0.5
            else:
                value1, value2, value3 = top - 16.0 / inverse, top - 8.0 / inverse, top - 3.0 / inverse
            # A rounded value, or one of infinities, may lie outside
            rank1 = tl.minimum(tl.maximum(_rank(value1), low), high)
            rank2 = tl.minimum(tl.maximum(_rank(value2), rank1), high)
            rank3 = tl.minimum(tl.maximum(_rank(value3), rank2), high)
        else:
            width = high.to(tl.int64) - low
            rank1, rank2, rank3 = (
                (low + width // 4).to(tl.int32),
                (low + width // 2).to(tl.int32),
                (low + width * 3 // 4).to(tl.int32),
            )
        passes += 1
        weight1 = tl.zeros((BLOCK,), tl.float32)
        weight2, weight3 = weight1, weight1
        number1 = tl.zeros((BLOCK,), tl.int32)
        number2, number3 = number1, number1
        for first in range(0, vocab, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            x = _load(logits, stride, allowed, allowed_stride, vocab, row, tokens)
            rank = _rank(x)
            over1, over2, over3 = rank > rank1, rank > rank2, rank > rank3
            number1, number2, number3 = number1 + over1, number2 + over2, number3 + over3
            if BY_MASS:
                weight = tl.exp((x - largest) * inverse)
                weight1 += tl.where(over1, weight, 0.0)
                weight2 += tl.where(over2, weight, 0.0)
                weight3 += tl.where(over3, weight, 0.0)
        count1, count2, count3 = tl.sum(number1, axis=0), tl.sum(number2, axis=0), tl.sum(number3, axis=0)
        if BY_MASS:
            sum1, sum2, sum3 = tl.sum(weight1, axis=0), tl.sum(weight2, axis=0), tl.sum(weight3, axis=0)
        else:
            sum1, sum2, sum3 = count1.to(tl.float32), count2.to(tl.float32), count3.to(tl.float32)
        if sum1 < target:
            high, above, past = rank1, sum1, count1
        elif sum2 < target:
            low, reach, high, above, past = rank1, count1, rank2, sum2, count2
        elif sum3 < target:
            low, reach, high, above, past = rank2, count2, rank3, sum3, count3
        else:
            low, reach = rank3, count3
    equals = reach - past
    if high - 1 > low:
        place = 0
        for first in range(0, vocab, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            rank = _rank(_load(logits, stride, allowed, allowed_stride, vocab, row, tokens))
            between = ((rank > low) & (rank <= high)).to(tl.int32)
            places = place + tl.cumsum(between, axis=0) - 1
            tl.store(kept + places, rank, mask=(between != 0) & (places < KEPT))
            place += tl.sum(between, axis=0)
        tl.debug_barrier()
        entry = tl.arange(0, KEPT)
        ranks = tl.load(kept + entry, mask=entry < place, other=0)
        weights = tl.exp((_value(ranks) - largest) * inverse) if BY_MASS else tl.full((KEPT,), 1.0, tl.float32)
        weights = tl.where(entry < place, weights, 0.0)
        base = above
        while high - 1 > low:
            middle = (low + (high.to(tl.int64) - low) // 2).to(tl.int32)
            total = base + tl.sum(tl.where(ranks > middle, weights, 0.0), axis=0)
            if total < target:
                high, above = middle, total
            else:
                low = middle
        equals = tl.sum(((ranks == high) & (entry < place)).to(tl.int32), axis=0)
        tl.debug_barrier()
    return high, above, equals


@triton.jit
def _above(logits, stride, allowed, allowed_stride, vocab, row, low, largest, inverse, BLOCK: tl.constexpr):
    """How many tokens are of ranks above `low`, and the sum of exp of their scaled logits."""
    number = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        x = _load(logits, stride, allowed, allowed_stride, vocab, row, first + tl.arange(0, BLOCK))
        over = _rank(x) > low
        number += over
        mass += tl.where(over, tl.exp((x - largest) * inverse), 0.0)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _nth_id(logits, stride, allowed, allowed_stride, vocab, row, rank, nth, BLOCK: tl.constexpr):
    """The id of the nth token of this rank, from 1."""
    seen, found = 0, vocab
    for first in range(0, vocab, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        x = _load(logits, stride, allowed, allowed_stride, vocab, row, tokens)
        equal = (_rank(x) == rank).to(tl.int32)
        places = seen + tl.cumsum(equal, axis=0)
        found = tl.minimum(found, tl.min(tl.where((equal != 0) & (places == nth), tokens, vocab), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


@triton.jit(do_not_specialize_on_alignment=["positions", "samples", "log_min_p"])  # as above
def _draw_kernel(
    logits,  # (num_rows, at least vocab) float32
    stride,
    allowed,  # (num_rows, ceil(vocab / 32)) int32 or None
    allowed_stride,
    vocab,
    keys,  # (num_rows,) int64
    positions,  # (num_rows,) int32
    samples,  # (num_rows,) int32
    temperature,  # (num_rows,) float32
    log_min_p,  # (num_rows,) float32
    values,  # (2, num_rows, num_splits) float32
    ids,  # (3, num_rows, num_splits) int32
    num_splits,
    cuts,  # (2, num_rows) int32
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        largest = _largest_of_row(values, row, num_splits, SPLITS)
        key, position, sample = tl.load(keys + row), tl.load(positions + row), tl.load(samples + row)
        cut, last = tl.load(cuts + row), tl.load(cuts + tl.num_programs(0) + row)
        inverse, least = 1.0 / heat, tl.load(log_min_p + row)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_ids = tl.zeros((BLOCK,), tl.int32)
        for first in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, vocab), BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            x = _load(logits, stride, allowed, allowed_stride, vocab, row, tokens)
            rank, scaled = _rank(x), (x - largest) * inverse
            left = ((rank > cut) | ((rank == cut) & (tokens <= last))) & (scaled >= least) & (rank > FLOOR)
            if tl.max(left.to(tl.int32), axis=0) != 0:
                score = tl.where(left, scaled + _gumbel(key, position, sample, first, BLOCK), float("-inf"))
                best_ids = tl.where(score > best, tokens, best_ids)
                best = tl.where(score > best, score, best)
        top, top_id = _best(best, best_ids)
        found = (tl.num_programs(0) + row) * num_splits + split
        tl.store(values + found, top)
        tl.store(ids + found, top_id)


@triton.jit
def _finish_kernel(
    temperature,  # (num_rows,) float32
    values,  # (2, num_rows, num_splits) float32
    ids,  # (3, num_rows, num_splits) int32
    num_splits,
    tokens,  # (num_rows,) int64
    finite,  # (num_rows,) bool
    SPLITS: tl.constexpr,
):
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    drawn = tl.where(tl.load(temperature + row) > 0.0, num_rows, 0)
    _score, token = _best_of_row(values, ids, row + drawn, num_splits, SPLITS)
    tl.store(tokens + row, token.to(tl.int64))
    split = tl.arange(0, SPLITS)
    bad = tl.load(ids + (2 * num_rows + row) * num_splits + split, mask=split < num_splits, other=0)
    tl.store(finite + row, tl.max(bad, axis=0) == 0)


def _logprobs(
    masked: tuple[torch.Tensor, int, torch.Tensor | None, int, int],  # what every kernel starts with
    values: torch.Tensor,  # (2, num_rows, num_splits)
    num_splits: int,
    tokens: torch.Tensor,  # (num_rows,)
    number: int,
) -> Logprobs:
    vocab, num_rows, device = masked[-1], len(tokens), tokens.device
    if not 0 <= number <= min(MAX_LOGPROBS, vocab):
        raise ValueError(f"num_logprobs {number}: expected at most {min(MAX_LOGPROBS, vocab)}")
    config = tuning.choose("sample/likeliest")
    num_parts = triton.cdiv(vocab, config.blocks["PART"])
    likeliest = torch.empty(num_rows, num_parts, number, dtype=torch.int64, device=device)
    sums = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    drawn = torch.empty(num_rows, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, number, dtype=torch.int64, device=device)
    top = torch.empty(num_rows, number, dtype=torch.float32, device=device)
    splits = triton.next_power_of_2(num_splits)
    _likeliest_kernel[(num_rows, num_parts)](
        *masked,
        *(values, num_splits, likeliest, sums, number),
        SPLITS=splits,
        **config.blocks,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    _logprobs_kernel[(num_rows,)](
        *masked[:2],
        *(values, num_splits, likeliest, sums, num_parts, number, tokens, drawn, ids, top),
        SPLITS=splits,
        PARTS=triton.next_power_of_2(num_parts),
        FOUND=triton.next_power_of_2(max(1, num_parts * number)),
    )
    return Logprobs(drawn, ids, top)


@triton.jit
def _likeliest_kernel(
    logits,  # (num_rows, at least vocab) float32
    stride,
    allowed,  # (num_rows, ceil(vocab / 32)) int32 or None
    allowed_stride,
    vocab,
    values,  # (2, num_rows, num_splits) float32
    num_splits,
    likeliest,  # (num_rows, num_parts, number) int64
    sums,  # (num_rows, num_parts) float32
    number,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
):
    """The likeliest tokens of a part of a row: rank in the high word, what ids lack to the highest one in the low."""
    row, part = tl.program_id(0), tl.program_id(1)
    tokens = part * PART + tl.arange(0, PART)
    x = _load(logits, stride, allowed, allowed_stride, vocab, row, tokens)
    largest = _largest_of_row(values, row, num_splits, SPLITS)
    place = row * tl.num_programs(1) + part
    tl.store(sums + place, tl.sum(tl.exp(x - largest), axis=0))
    entry = (_rank(x).to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)
    entry = tl.where(tokens < vocab, entry, -(1 << 63))
    for index in range(0, number):
        best = tl.max(entry, axis=0)
        tl.store(likeliest + place.to(tl.int64) * number + index, best)
        entry = tl.where(entry == best, -(1 << 63), entry)


@triton.jit
def _logprobs_kernel(
    logits,  # (num_rows, at least vocab) float32
    stride,
    values,  # (2, num_rows, num_splits) float32
    num_splits,
    likeliest,  # (num_rows, num_parts, number) int64
    sums,  # (num_rows, num_parts) float32
    num_parts,
    number,
    tokens,  # (num_rows,) int64
    drawn,  # (num_rows,) float32
    ids,  # (num_rows, number) int64
    top,  # (num_rows, number) float32
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    FOUND: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums + row * num_parts + part, mask=part < num_parts, other=0.0), axis=0)
    total = _largest_of_row(values, row, num_splits, SPLITS) + tl.log(total)
    tl.store(drawn + row, tl.load(logits + row.to(tl.int64) * stride + tl.load(tokens + row)) - total)
    found = tl.arange(0, FOUND)
    entry = tl.load(
        likeliest + row.to(tl.int64) * num_parts * number + found, mask=found < num_parts * number, other=-(1 << 63)
    )
    for index in range(0, number):
        best = tl.max(entry, axis=0)
        tl.store(ids + row * number + index, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        tl.store(top + row * number + index, _value((best >> 32).to(tl.int32)) - total)
        entry = tl.where(entry == best, -(1 << 63), entry)
