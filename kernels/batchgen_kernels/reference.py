"""The plain-torch twin of every op: what the fast ones are tested against, and what serves where none was built.

The module has the methods of `cpu.Ops` as functions, so that either can stand for the other. Its KV pool has the
shape of theirs but a plain layout inside (keys, then values, one token after the other): a pool is only ever read by
the ops that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from batchgen_kernels.draws import Bias, Drawn, Logprobs, Penalties, SamplingRows

GROUP = 64  # inputs of an 8-bit matmul that share a scale in a row of activations
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of `clamped_swiglu_mul`
TILES = (16, 64, 128)  # assignments of a tile of `grouped_linear`
PANEL = 16  # output channels that a weight keeps together
CHUNK_ELEMENTS = 1 << 22  # logits that are drawn from at once: bounds what softmax, noise and sort take beside them
WIDTHS = (64, 1024)  # most likely tokens looked at before the whole vocabulary is sorted

Gumbel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]  # as `keyed_gumbel`


def pool_shape(
    num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int, value_dim: int | None = None
) -> tuple[int, int, int]:
    """The shape of a layer's KV pool, which must be zero before its first use. Values have `value_dim` or, if it is
    None, `head_dim` numbers."""
    value_dim = head_dim if value_dim is None else value_dim
    return num_blocks, num_kv_heads, block_size * (head_dim + (value_dim + 15) // 16 * 16)


def _keys_and_values(
    pool: torch.Tensor, block_size: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (num_blocks, num_kv_heads, block_size, key_dim) and (..., value_dim) of the pool."""
    keys, values = pool[:, :, : block_size * (key_dim + value_dim)].split(
        (block_size * key_dim, block_size * value_dim), dim=2
    )
    return keys.unflatten(2, (block_size, key_dim)), values.unflatten(2, (block_size, value_dim))


def _stored(states: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """States in the pool's dtype; what 8 bits cannot hold becomes the largest that they can."""
    if dtype.itemsize > 1:
        return states.to(dtype)
    largest = torch.finfo(dtype).max
    return (states.float() / scale).clamp(-largest, largest).to(dtype)


def rope_and_write(
    query: torch.Tensor,  # (num_tokens, num_heads, head_dim), rotated in place
    key: torch.Tensor,  # (num_tokens, num_kv_heads, head_dim), rotated in place
    value: torch.Tensor,  # (num_tokens, num_kv_heads, value_dim)
    cos: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
    sin: torch.Tensor,  # (num_tokens, rotary_dim / 2) float32
    slot_mapping: torch.Tensor,  # (num_tokens,) int64; -1 writes nothing
    pool: torch.Tensor,
    *,
    block_size: int,
    interleaved: bool = False,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Rotate query and key in place, in float32, and write key and value to their slots, in the pool's dtype.

    A pool of 8 bits holds them divided by their scales.
    """
    for states in (query, key):
        rotary = states[..., : 2 * cos.shape[1]]
        if interleaved:
            first, second = rotary[..., 0::2], rotary[..., 1::2]
        else:
            first, second = rotary.chunk(2, dim=-1)
        x, y = first.float(), second.float()
        c, s = cos[:, None], sin[:, None]
        rotated = x * c - y * s, y * c + x * s  # both before either is written: in float32, x and y are the states
        first.copy_(rotated[0])
        second.copy_(rotated[1])
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks, offsets = slots // block_size, slots % block_size
    keys, values = _keys_and_values(pool, block_size, key.shape[2], value.shape[2])
    keys[blocks, :, offsets] = _stored(key[written], key_scale, pool.dtype)
    values[blocks, :, offsets] = _stored(value[written], value_scale, pool.dtype)


def attention_items(
    query_starts: torch.Tensor,  # (num_seqs + 1,) int32
    context_lens: torch.Tensor,  # (num_seqs,) int32
    block_table: torch.Tensor | None,  # (num_seqs, max_blocks) int32
    num_heads: int,
    num_kv_heads: int,
    *,
    block_size: int,
    window: int | None = None,
) -> list[tuple[int, int, int]]:
    """How attention over a step is cut up, to be computed once for all layers alike; what it holds is the business of
    the ops that it was made by. The twin takes a sequence whole: (first token, end, keys of the last one).
    """
    starts = query_starts.tolist()
    return list(zip(starts, starts[1:], context_lens.tolist(), strict=False))


def paged_attention(
    query: torch.Tensor,  # (num_tokens, num_heads, head_dim)
    pool: torch.Tensor,
    block_table: torch.Tensor,  # (num_seqs, max_blocks) int32
    items: list[tuple[int, int, int]],
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    value_dim: int | None = None,
    sinks: torch.Tensor | None = None,  # (num_heads,) float32
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention over the pool, softmax in float32 -> (num_tokens, num_heads, value_dim or head_dim).

    A query sees the `window` keys up to its own. Rows behind the items' last token come out zero. The pool may be of
    another dtype than the query, which is also the output's. Each logit of `sinks` takes its share of a head's softmax
    and gives nothing.
    """
    num_heads, head_dim = query.shape[1:]
    group = num_heads // pool.shape[1]
    value_dim = head_dim if value_dim is None else value_dim
    out = query.new_zeros(len(query), num_heads, value_dim)
    all_keys, all_values = _keys_and_values(pool, block_size, head_dim, value_dim)
    for table, (start, end, context) in zip(block_table, items, strict=True):
        blocks = table[: (context + block_size - 1) // block_size].long()
        keys, values = (
            (pages[blocks].transpose(0, 1).flatten(1, 2)[:, :context].float() * by).repeat_interleave(group, dim=0)
            for pages, by in ((all_keys, key_scale), (all_values, value_scale))
        )  # (num_heads, context, head_dim), (num_heads, context, value_dim)
        scores = query[start:end].float().transpose(0, 1) @ keys.mT * scale  # (num_heads, tokens, context)
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        positions = torch.arange(context, device=query.device)
        behind = positions[context - (end - start) :, None] - positions
        hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, end - start, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :context]
        out[start:end] = (weights @ values).transpose(0, 1).to(query.dtype)
    return out


def merge_parts(
    parts: torch.Tensor,  # (num_parts, num_heads, value_dim) float32, of one token
    part_lses: torch.Tensor,  # (num_parts, num_heads) float32, to base 2
    sinks: torch.Tensor | None = None,  # (num_heads,) float32
) -> torch.Tensor:  # (num_heads, value_dim)
    """The softmax over all keys from those over some of them, each with the logarithm of its denominator."""
    scores = part_lses * math.log(2.0)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None]))
    return (scores.softmax(dim=0)[: len(parts), :, None] * parts).sum(dim=0)


def rms_norm(
    x: torch.Tensor,  # (num_tokens, dim) or (num_tokens, num_heads, dim)
    weight: torch.Tensor,  # (dim,) float32
    eps: float,
    residual: torch.Tensor | None = None,  # (num_tokens, dim)
) -> torch.Tensor:
    """x / rms(x) * weight, normalised in float32 and rounded to x's dtype before the weight.

    With a residual, x is first added to it in place, and it is the sum that is normalised.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (weight * normalised.to(x.dtype)).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
    """silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
    """gelu(first half), in its tanh form, * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu_mul(gate_up: torch.Tensor) -> torch.Tensor:  # (num_tokens, 2 * dim) -> (num_tokens, dim)
    """gate * sigmoid(SWIGLU_ALPHA * gate) * (up + 1), in float32, of halves cut off at SWIGLU_LIMIT: GPT-OSS's."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1.0) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))).to(gate_up.dtype)


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: counters (..., 4) and keys (..., 2) -> (..., 4), 32-bit words held in int64."""
    words = list(counter.unbind(-1))
    key0, key1 = key.unbind(-1)
    mask = 0xFFFFFFFF
    for _ in range(10):
        high0, low0 = _multiply(words[0], 0xD2511F53)
        high1, low1 = _multiply(words[2], 0xCD9E8D57)
        words = [high1 ^ words[1] ^ key0, low1, high0 ^ words[3] ^ key1, low0]
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def _multiply(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of x * factor; in two steps, as int64 cannot hold the product."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def keyed_gumbel(
    keys: torch.Tensor,  # (num_rows,) int64
    positions: torch.Tensor,  # (num_rows,) int32
    samples: torch.Tensor,  # (num_rows,) int32
    vocab: int,
) -> torch.Tensor:
    """Gumbel noise (num_rows, vocab) float32 that depends on a row's key, position and sample and on the token alone.

    Token 4 q + j gets word j of Philox4x32-10 at counter (q, position, sample, 0).
    """
    rows = keys.shape[0]
    counter = torch.zeros(rows, (vocab + 3) // 4, 4, dtype=torch.int64, device=keys.device)
    counter[:, :, 0] = torch.arange(counter.shape[1], device=keys.device)
    counter[:, :, 1] = (positions.long() & 0xFFFFFFFF)[:, None]
    counter[:, :, 2] = (samples.long() & 0xFFFFFFFF)[:, None]
    key = torch.stack((keys & 0xFFFFFFFF, (keys >> 32) & 0xFFFFFFFF), dim=-1)[:, None]
    words = philox4x32(counter, key).reshape(rows, -1)[:, :vocab]
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def sample(
    logits: torch.Tensor,  # (num_rows, at least vocab) float32; penalties and bias change it in place
    rows: SamplingRows,
    vocab: int,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    allowed: torch.Tensor | None = None,  # (num_rows, ceil(vocab / 32)) int32: bit j of word i lets token 32 i + j pass
    num_logprobs: int | None = None,
    gumbel: Gumbel = keyed_gumbel,
) -> Drawn:
    """Draw a token below `vocab` for each row.

    It is the argmax of (logit - largest logit) * (1 / temperature) + noise over the allowed tokens that top_k, then
    top_p, then min_p leave. Tokens are ranked by logit, among equals by id: top_k leaves the first of them, top_p those
    before which comes less than that share of the mass that top_k left, min_p those of at least that share of the
    likeliest one's probability. Nothing depends on which rows are drawn together.

    A row whose logits are not all finite gets some token.
    """
    logits = logits[:, :vocab]
    finite = logits.sum(dim=1).isfinite()  # one infinity or NaN is enough to show in the sum
    if penalties is not None:
        _penalise(logits, penalties)
    if bias is not None:
        row, entry = (bias.ids >= 0).nonzero(as_tuple=True)
        logits.index_put_((row, bias.ids[row, entry].long()), bias.values[row, entry], accumulate=True)
    if allowed is not None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        passes = (allowed[:, :, None] >> bits & 1).flatten(1)[:, :vocab] != 0
        logits = logits.masked_fill(~passes, -torch.inf)
    tokens = _draw(logits, rows, gumbel)
    if num_logprobs is None:
        return Drawn(tokens, finite, None)
    ids = _likeliest(logits, num_logprobs)
    total = logits.logsumexp(dim=1, keepdim=True)
    drawn = logits.gather(1, tokens[:, None]) - total
    return Drawn(tokens, finite, Logprobs(drawn[:, 0], ids, logits.gather(1, ids) - total))


def _penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """In place, (num_rows, vocab)."""
    for row, (slot, num_prompt, num_tokens) in enumerate(
        zip(penalties.slots.tolist(), penalties.num_prompt.tolist(), penalties.num_tokens.tolist(), strict=True)
    ):
        ids, places = penalties.history[slot, :num_tokens].unique(return_inverse=True)
        count = torch.bincount(places[num_prompt:], minlength=len(ids))[ids < logits.shape[1]]
        ids = ids[ids < logits.shape[1]].long()
        seen, repetition = logits[row, ids], penalties.repetition[row]
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        logits[row, ids] = seen - penalties.frequency[row] * count - penalties.presence[row] * (count > 0)


def _draw(logits: torch.Tensor, rows: SamplingRows, gumbel: Gumbel) -> torch.Tensor:
    """(num_rows, vocab) -> (num_rows,)"""
    vocab = logits.shape[1]
    greedy = rows.temperature == 0.0
    if greedy.all():
        return _argmax(logits)
    tokens = torch.empty(len(greedy), dtype=torch.int64, device=logits.device)
    if greedy.any():
        chosen = greedy.nonzero()[:, 0]
        tokens[chosen] = _argmax(logits[chosen])
    limited = (rows.top_k < vocab) | (rows.top_p < 1.0)
    for kind, draw in ((~greedy & ~limited, _draw_any), (~greedy & limited, _draw_limited)):
        if kind.any():
            for part in kind.nonzero()[:, 0].split(max(1, CHUNK_ELEMENTS // vocab)):
                chunk = SamplingRows(*(field[part] for field in rows))
                noise = gumbel(chunk.keys, chunk.positions, chunk.samples, vocab)
                tokens[part] = draw(logits[part], noise, chunk)
    return tokens


def _draw_any(logits: torch.Tensor, noise: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """From all tokens that min_p leaves -> (num_rows,). The logits are no longer needed."""
    logits -= logits.amax(dim=1, keepdim=True)
    logits *= rows.temperature.reciprocal()[:, None]
    if (rows.log_min_p > -torch.inf).any():
        logits.masked_fill_(logits < rows.log_min_p[:, None], -torch.inf)
    return _argmax(logits.add_(noise))


def _draw_limited(logits: torch.Tensor, noise: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """From the tokens that top_k, top_p and min_p leave -> (num_rows,).

    Only the likeliest tokens are ranked. A row whose limits may lie beyond them, or among tokens as likely as the
    last of them, is ranked again with more.
    """
    num_rows, vocab = logits.shape
    top_k, top_p, log_min_p = rows.top_k[:, None], rows.top_p[:, None], rows.log_min_p[:, None]
    inverse, largest = rows.temperature.reciprocal()[:, None], logits.amax(dim=1, keepdim=True)
    scaled = (logits - largest).mul_(inverse)
    total = scaled.exp_().sum(dim=1, keepdim=True)  # what probabilities are shares of where top_k is off
    del scaled
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    pending = torch.arange(num_rows, device=logits.device)  # rows whose tokens are not drawn yet
    for width in (*(width for width in WIDTHS if width < vocab), vocab):
        values, ids = _rank(logits, width)  # (num_rows, width)
        scaled = (values - largest) * inverse
        kept = torch.arange(width, device=logits.device) < top_k
        mass = scaled.exp() * kept
        share = mass / torch.where(top_k < vocab, mass.sum(dim=1, keepdim=True), total)
        before = share.cumsum(dim=1).roll(1, dims=1)  # the mass of all likelier tokens
        before[:, 0] = 0.0
        kept &= before < top_p
        last = values.gather(1, kept.sum(dim=1, keepdim=True) - 1)
        known = (last > values[:, -1:]) & ((top_k < width) | (top_k >= vocab))
        drawn = known[:, 0] if width < vocab else torch.ones_like(known[:, 0])
        kept &= scaled >= log_min_p
        scores = (scaled + noise.gather(1, ids)).masked_fill(~kept, -torch.inf)
        tokens[pending[drawn]] = ids.gather(1, _argmax(scores)[:, None])[drawn, 0]
        if drawn.all():
            break
        pending, logits, noise, top_k, top_p, log_min_p, inverse, largest, total = (
            x[~drawn] for x in (pending, logits, noise, top_k, top_p, log_min_p, inverse, largest, total)
        )
    return tokens


def _rank(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row, largest first, equals by id -> values and ids, each (num_rows, width).

    Which of the tokens as likely as the last one are among them is not said.
    """
    if width == logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _likeliest(logits: torch.Tensor, width: int) -> torch.Tensor:
    """As `_rank`, but the last ones are those of the lowest ids -> (num_rows, width)."""
    if not width:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, ids = _rank(logits, width)
    tied = (logits >= values[:, -1:]).sum(dim=1) > width
    if tied.any():
        ids[tied] = logits[tied].sort(dim=1, descending=True, stable=True).indices[:, :width]
    return ids


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """(num_rows, n) -> (num_rows,), the lowest index among equals. On a CPU numpy's, which is vectorised: 128 rows of
    49,152 took it 3 ms, torch 14 ms."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(axis=1))
    return x.argmax(dim=1)


class Int8Weight(NamedTuple):
    """A weight (out_features, in_features) in 8 bits as the ops read it, with a scale for each output channel.

    Channels are padded to whole panels of PANEL and inputs to fours, with zeros. `sums` are those of a channel's
    weights in each GROUP of inputs.
    """

    panels: torch.Tensor  # (num_panels, in_features / 4, PANEL, 4) int8
    scales: torch.Tensor  # (num_panels * PANEL,) float32
    sums: torch.Tensor  # (num_groups, num_panels * PANEL) int32
    out_features: int
    in_features: int

    @classmethod
    def pack(cls, quantized: torch.Tensor, scales: torch.Tensor) -> Int8Weight:
        """From int8 (out_features, in_features) and float32 (out_features,)."""
        channels, inputs = quantized.shape
        padded = F.pad(quantized, (0, -inputs % GROUP, 0, -channels % PANEL))
        sums = padded.view(len(padded), -1, GROUP).sum(dim=2, dtype=torch.int32).T.contiguous()
        fours = padded[:, : inputs + -inputs % 4].reshape(-1, PANEL, (inputs + 3) // 4, 4)
        return cls(fours.transpose(1, 2).contiguous(), F.pad(scales, (0, -channels % PANEL)), sums, channels, inputs)

    @classmethod
    def stack(cls, parts: Sequence[Int8Weight], empty: Callable[..., torch.Tensor] = torch.empty) -> Int8Weight:
        """The channels of all parts, each but the last a whole number of panels; `empty` makes room for the panels."""
        num_panels = sum(len(part.panels) for part in parts)
        panels = empty((num_panels, *parts[0].panels.shape[1:]), dtype=torch.int8)
        return cls(
            torch.cat([part.panels for part in parts], out=panels),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.sums for part in parts], dim=1),
            sum(part.out_features for part in parts),
            parts[0].in_features,
        )

    def unpack(self) -> torch.Tensor:
        """int8 (out_features, in_features)"""
        padded = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return padded[: self.out_features, : self.in_features]


class FloatWeight(NamedTuple):
    """A weight (out_features, in_features) in float32 or bfloat16 as the ops read it.

    A lane is one input in float32, two neighbouring ones in bfloat16. Channels are padded to whole panels of PANEL and
    inputs to whole lanes, with zeros.
    """

    panels: torch.Tensor  # (num_panels, num_lanes, PANEL, inputs of a lane) float32 or bfloat16
    out_features: int
    in_features: int

    @classmethod
    def pack(cls, weight: torch.Tensor, empty: Callable[..., torch.Tensor] = torch.empty) -> FloatWeight:
        """`empty` makes room for the panels, the only copy where nothing is to be padded."""
        channels, inputs = weight.shape
        per_lane = lane_inputs(weight.dtype)
        if channels % PANEL or inputs % per_lane:
            weight = F.pad(weight, (0, -inputs % per_lane, 0, -channels % PANEL))
        lanes = weight.unflatten(1, (-1, per_lane)).unflatten(0, (-1, PANEL)).transpose(1, 2)
        return cls(empty(lanes.shape, dtype=weight.dtype).copy_(lanes), channels, inputs)

    def unpack(self) -> torch.Tensor:
        """(out_features, in_features)"""
        padded = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return padded[: self.out_features, : self.in_features]


def lane_inputs(dtype: torch.dtype) -> int:
    """How many inputs of a FloatWeight share a lane of 4 bytes."""
    return 4 // dtype.itemsize


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (..., size) in 8 bits, symmetric: int8 of the same shape and float32 scales (...).

    The largest magnitude of a row becomes 127. A row that holds NaN or infinity has the scale NaN.
    """
    wide = x.float()
    peak = wide.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(peak > 0, torch.tensor(127.0) / peak, torch.zeros(()))
    quantized = (wide * inverse).round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return quantized, peak[..., 0] / 127.0 + (wide * 0.0).sum(dim=-1)


def int8_linear(
    x: torch.Tensor,  # (num_tokens, in_features)
    weight: Int8Weight,
    bias: torch.Tensor | None = None,  # (out_features,) float32
    *,
    wide: bool = False,
) -> torch.Tensor:
    """x W^T + b, with every GROUP of inputs of a row of x quantised -> (num_tokens, out_features), in x's dtype or, if
    `wide`, in float32.

    Groups are summed up in whole numbers, which float32 holds, and added in float32. A row with NaN or infinity in it
    comes out NaN.
    """
    channels, out = weight.unpack().float(), x.new_zeros(x.shape[0], weight.out_features, dtype=torch.float32)
    for inputs, weights in zip(x.split(GROUP, dim=1), channels.split(GROUP, dim=1), strict=True):
        quantized, scales = quantize(inputs)
        out += quantized.float() @ weights.T * scales[:, None]
    out = out * weight.scales[: weight.out_features]
    return (out if bias is None else out + bias).to(torch.float32 if wide else x.dtype)


def float_linear_pays(dtype: torch.dtype) -> bool:
    """Whether `float_linear` is at least as fast as torch's own: here it is that."""
    return False


def float_linear(
    x: torch.Tensor,  # (num_tokens, in_features) float32 or bfloat16
    weight: FloatWeight,
    bias: torch.Tensor | None = None,  # (out_features,)
    *,
    wide: bool = False,
) -> torch.Tensor:
    """x W^T + b -> (num_tokens, out_features), all in one dtype, but the result in float32 if `wide`."""
    if wide:
        return F.linear(x.float(), weight.unpack().float(), None if bias is None else bias.float())
    return F.linear(x, weight.unpack(), bias)


class SortedTokens(NamedTuple):
    """The assignments of tokens to experts, ordered by expert, each expert's padded to whole tiles, then those to none.

    Assignment t * top_k + k is the k-th of token t. There is room for the most tiles there can be.
    """

    order: torch.Tensor  # (num_tiles * tile,) int32: assignments; -1 is padding
    tile_experts: torch.Tensor  # (num_tiles,) int32; -1 for tiles of none, then for those not in use
    num_tokens: int
    top_k: int


def num_tiles(num_assignments: int, num_experts: int, tile: int) -> int:
    """The most tiles that this many assignments can take, however they fall."""
    used = min(num_experts + 1, num_assignments)  # and those to none
    return max((num_assignments + used * (tile - 1)) // tile, 1)


def tile_rows(num_assignments: int, num_experts: int) -> int:
    """The tile for this many assignments: the smallest that holds an expert's, if they come evenly."""
    return next((tile for tile in TILES if tile * num_experts >= num_assignments), TILES[-1])


def grouped_linear_pays() -> bool:
    """Whether `grouped_linear` is better than a product of each expert's own."""
    return False


def sort_tokens(
    expert_ids: torch.Tensor,  # (num_tokens, top_k) int32 or int64; -1 is no assignment
    num_experts: int,
    tile: int,
) -> SortedTokens:
    """Assignments by expert, then those to none, in the order they came, each expert's padded to whole tiles."""
    flat = expert_ids.flatten()
    most = num_tiles(len(flat), num_experts, tile)
    order = torch.full((most, tile), -1, dtype=torch.int32)
    tile_experts = torch.full((most,), -1, dtype=torch.int32)
    end = 0
    for expert in (*range(num_experts), -1):
        for rows in (flat == expert).nonzero()[:, 0].split(tile):
            if len(rows):
                order[end, : len(rows)], tile_experts[end], end = rows.int(), expert, end + 1
    num_tokens, top_k = expert_ids.shape
    return SortedTokens(order.flatten(), tile_experts, num_tokens, top_k)


def grouped_linear(
    x: torch.Tensor,  # (num_tokens, in_features), or (num_tokens * top_k, in_features): a row of each assignment
    weight: torch.Tensor,  # (num_experts, out_features, in_features)
    tokens: SortedTokens,
    bias: torch.Tensor | None = None,  # (num_experts, out_features)
    weights: torch.Tensor | None = None,  # (num_tokens, top_k): what the router gives an assignment
) -> torch.Tensor:
    """x W^T + b by each assignment's expert, in float32, zero where it has none -> (num_tokens * top_k, out_features).

    With `weights`, an assignment's result is multiplied by its weight, and a token's are added up ->
    (num_tokens, out_features).
    """
    order, tile_experts, num_tokens, top_k = tokens
    shared = top_k if len(x) == num_tokens else 1
    out = torch.zeros(num_tokens * top_k, weight.shape[1])
    for expert, padded in zip(tile_experts.tolist(), order.view(len(tile_experts), -1), strict=True):
        if expert >= 0:
            rows = padded[padded >= 0].long()
            out[rows] = F.linear(x[rows // shared].float(), weight[expert].float())
            if bias is not None:
                out[rows] += bias[expert].float()
    if weights is None:
        return out.to(x.dtype)
    return (out.unflatten(0, (num_tokens, top_k)) * weights.float()[:, :, None]).to(x.dtype).sum(dim=1)
