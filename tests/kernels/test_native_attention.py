"""Native paged attention and rope_and_write against their plain-torch twins, at every instruction set."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from batchgen_kernels import cpu, reference
from batchgen_kernels.cpu.items import MIN_TILES_SAVED
from batchgen_kernels.prefixes import find_prefixes

OPS = cpu.load()
pytestmark = pytest.mark.skipif(OPS is None, reason="the native ops were not built")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass
class Model:
    """One layer: its shape, and how far rotary embedding reaches."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    sinks: tuple[float, ...] | None = None  # of the heads
    rotary_dim: int | None = None
    interleaved: bool = False
    window: int | None = None
    soft_cap: float | None = None
    block_size: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None


class Cache:
    """A pool with sequences whose blocks lie scattered in it; feeds tokens that depend on (sequence, position) only."""

    def __init__(self, ops: cpu.Ops | ModuleType, model: Model, lengths: list[int], fill: float = 0.0) -> None:
        self.ops, self.model = ops, model
        blocks = [-(-n // model.block_size) for n in lengths]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3)).int()
        self.table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, ids in zip(self.table, order.split(blocks), strict=True):
            row[: len(ids)] = ids
        shape = ops.pool_shape(sum(blocks), model.num_kv_heads, model.head_dim, model.block_size, model.value_dim)
        self.pool = torch.full(shape, fill, dtype=model.kv_dtype or model.dtype)
        self.states = (model.num_heads + model.num_kv_heads) * model.head_dim  # of queries and keys
        width = self.states + model.num_kv_heads * (model.value_dim or model.head_dim)
        generator = torch.Generator().manual_seed(5)
        self.tokens = [torch.randn(n, width, generator=generator).to(model.dtype) for n in lengths]

    def step(
        self, chunks: list[tuple[int, int, int]], padding: int = 0, share: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed (sequence, first, end) of some sequences -> rotated queries and keys, and the attention's output."""
        model = self.model
        fused = torch.cat([self.tokens[s][a:b] for s, a, b in chunks] + [torch.ones(padding, self.tokens[0].shape[1])])
        fused = fused.to(model.dtype)
        heads = fused[:, : self.states].unflatten(1, (-1, model.head_dim))
        query, key = heads.split((model.num_heads, model.num_kv_heads), dim=1)
        value = fused[:, self.states :].unflatten(1, (model.num_kv_heads, -1))
        positions = torch.cat([torch.arange(a, b) for _, a, b in chunks] + [torch.zeros(padding, dtype=torch.long)])
        owners = torch.cat([torch.full((b - a,), s) for s, a, b in chunks])
        live = positions[: len(owners)]
        slots = self.table[owners, live // model.block_size].long() * model.block_size + live % model.block_size
        slots = torch.cat([slots, torch.full((padding,), -1)])
        half = (model.rotary_dim or model.head_dim) // 2
        angles = positions[:, None] * torch.logspace(0, -3, half)
        cos, sin = angles.cos(), angles.sin()
        size = model.block_size
        self.ops.rope_and_write(
            query, key, value, cos, sin, slots, self.pool, block_size=size, interleaved=model.interleaved
        )
        starts = torch.tensor([0] + [b - a for _, a, b in chunks]).cumsum(0).int()
        context = torch.tensor([b for _, _, b in chunks], dtype=torch.int32)
        table = self.table[[s for s, _, _ in chunks]]
        items = self.ops.attention_items(
            starts,
            context,
            table if share else None,
            model.num_heads,
            model.num_kv_heads,
            block_size=size,
            window=model.window,
        )
        out = self.ops.paged_attention(
            query,
            self.pool,
            table,
            items,
            block_size=size,
            scale=model.head_dim**-0.5,
            window=model.window,
            soft_cap=model.soft_cap,
            value_dim=model.value_dim,
            sinks=None if model.sinks is None else torch.tensor(model.sinks),
        )
        return heads, out


MODELS = [
    Model(),
    Model(num_heads=9, num_kv_heads=3, head_dim=64),
    Model(num_heads=4, num_kv_heads=4, head_dim=128, block_size=16),
    Model(num_heads=7, num_kv_heads=1, head_dim=80, rotary_dim=32),
    Model(num_heads=2, num_kv_heads=1, head_dim=256, block_size=64),
    Model(num_heads=50, num_kv_heads=1, head_dim=6, rotary_dim=4, interleaved=True, block_size=128),
    Model(num_heads=8, num_kv_heads=2, head_dim=24, interleaved=True, window=37),
    Model(window=1, soft_cap=3.0),
    Model(num_heads=5, num_kv_heads=1, window=130, soft_cap=20.0, block_size=16),
    Model(num_heads=3, num_kv_heads=3, head_dim=192, value_dim=128, rotary_dim=64, interleaved=True),
    Model(num_heads=4, num_kv_heads=2, head_dim=24, value_dim=16, rotary_dim=8, block_size=16),
    Model(num_heads=4, num_kv_heads=1, head_dim=16, value_dim=41, window=50, sinks=(0.3, -2.0, 4.0, 1.0)),
    Model(num_heads=8, num_kv_heads=2, head_dim=64, window=128, sinks=(1.0, 0.0, -1.0, 2.5, 5.0, -60.0, 90.0, 0.5)),
    Model(sinks=(0.1, 3.0, -0.5, 1.5, 2.0, -9.0), soft_cap=4.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_ragged_batch_equals_twin(ops: cpu.Ops, model: Model, dtype: torch.dtype) -> None:
    model = Model(**{**vars(model), "dtype": dtype})
    lengths = [1, 45, 33, 290, 128, 64]
    fast, plain = Cache(ops, model, lengths), Cache(reference, model, lengths)
    steps = [
        [(1, 0, 44), (3, 0, 130), (4, 0, 127), (5, 0, 5)],
        [(3, 130, 289), (0, 0, 1), (1, 44, 45), (2, 0, 33), (4, 127, 128), (5, 5, 64)],
        [(3, 289, 290)],
    ]
    for chunks in steps:
        (states, out), (wanted_states, wanted) = fast.step(chunks, padding=3), plain.step(chunks, padding=3)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(states, wanted_states, atol=tolerance, rtol=tolerance / 2)
        torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
        assert not out[-3:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [MODELS[1], MODELS[3], MODELS[5], MODELS[8]], ids=str)
def test_pool_of_another_dtype_than_the_model(ops: cpu.Ops, model: Model, dtype: torch.dtype) -> None:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    model = Model(**{**vars(model), "dtype": dtype, "kv_dtype": other})
    fast, plain = family(ops, model), family(reference, model)
    for chunks in (decodes(30), [(s, end - 4, end) for s, _, end in decodes(20)]):
        (states, out), (wanted_states, wanted) = fast.step(chunks, padding=2), plain.step(chunks, padding=2)
        assert states.dtype == out.dtype == dtype and fast.pool.dtype == other
        torch.testing.assert_close(states, wanted_states, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] / 2)
        # the widest rounding is that of queries to the pool's dtype, where it has a dot product of its own
        tolerance = 3e-2 if dtype == torch.bfloat16 or ops.isa == "avx512_bf16" else 2e-5
        torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
        assert not out[-2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"window": 100}, {"value_dim": 40, "sinks": (1.0, 0.0, -1.0, 2.5, 5.0, -6.0, 9.0, 0.5, 0.2)}]
)
def test_a_row_has_the_same_bits_alone_in_a_batch_in_chunks_and_decoded(
    ops: cpu.Ops, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    model = Model(num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype, **changes)
    lengths = [205, 70, 131]
    alone = Cache(ops, model, lengths).step([(0, 0, 205)])[1]
    batched = Cache(ops, model, lengths).step([(1, 0, 70), (0, 0, 205), (2, 0, 131)])[1][70:275]
    chunked = Cache(ops, model, lengths)
    parts = [chunked.step([(0, a, b), (1, a // 3, b // 3)])[1][: b - a] for a, b in [(0, 7), (7, 120), (120, 129)]]
    parts += [chunked.step([(2, p - 129, p - 128), (0, p, p + 1)])[1][1:] for p in range(129, 205)]
    assert torch.equal(alone, batched)
    assert torch.equal(alone, torch.cat(parts))


# Sequences behind each other's prefixes: (length, whose prefix, tokens of it), some one inside the other.
FAMILY = [
    *((700, None, 0), (650, 0, 560), (663, 0, 600), (850, 1, 576), (700, 1, 576), (870, 3, 800), (699, 0, 384)),
    *((300, None, 0), (300, 7, 256), (290, 7, 256), (270, 7, 100), (190, None, 0), (180, 11, 128), (170, 11, 128)),
]


def family(ops: cpu.Ops | ModuleType, model: Model) -> Cache:
    """A cache of FAMILY in which all but the last 30 tokens of each sequence are written."""
    cache = Cache(ops, model, [length for length, _, _ in FAMILY])
    for sequence, (length, parent, shared) in enumerate(FAMILY):
        blocks = shared // model.block_size
        if parent is not None:
            cache.table[sequence, :blocks] = cache.table[parent, :blocks]
        cache.step([(sequence, blocks * model.block_size, length - 30)])
    return cache


def decodes(back: int) -> list[tuple[int, int, int]]:
    """Chunks of one token of each of FAMILY, `back` tokens before its end, out of order."""
    return [(s, FAMILY[s][0] - back, FAMILY[s][0] - back + 1) for s in (3, 7, 0, 9, 1, 13, 4, 8, 2, 5, 10, 12, 6, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [m for m in MODELS if m.head_dim < 200 and m.window != 1], ids=str)
def test_shared_prefixes_equal_the_twin_and_change_no_bit(ops: cpu.Ops, model: Model, dtype: torch.dtype) -> None:
    model = Model(**{**vars(model), "dtype": dtype})
    fast, plain = family(ops, model), family(reference, model)
    ragged = [(s, end - 1 - s % 4 - 50 * (s == 6), end) for s, _, end in decodes(20)]
    for chunks in (decodes(30), ragged, decodes(1)):
        (_, out), (_, wanted) = fast.step(chunks, padding=2), plain.step(chunks, padding=2)
        torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(out, fast.step(chunks, padding=2, share=False)[1])


def test_shared_prefixes_are_read_once(ops: cpu.Ops) -> None:
    cache = family(ops, Model(num_heads=6, num_kv_heads=2))
    chunks = decodes(1)
    table = cache.table[[s for s, _, _ in chunks]]
    starts, context = torch.arange(len(chunks) + 1).int(), torch.tensor([end for _, _, end in chunks]).int()

    def read(block_table: torch.Tensor | None) -> dict[int, list[tuple[int, int]]]:
        """For each sequence the ranges of keys that its one row goes over, in order; once in each range."""
        items = ops.attention_items(starts, context, block_table, 6, 2, block_size=32)
        ranges: dict[int, list[tuple[int, int]]] = {s: [] for s, _, _ in chunks}
        for p in range(len(items.phases) - 1):
            for _, head, first, rows, begin, end in items.rows[items.phases[p] : items.phases[p + 1]].tolist():
                for row in range(first, first + rows):
                    token, keys = items.tokens[row // 3].tolist()
                    if head == 1 and row % 3 == 2:
                        ranges[chunks[token][0]].append((begin, end or keys))
        return ranges

    assert read(None) == {s: [(0, end)] for s, _, end in chunks}
    together = read(table)
    for s, _, end in chunks:
        bounds = [0, *(b for _, b in together[s])]
        assert together[s] == list(itertools.pairwise(bounds)) and bounds[-1] == end
    assert together[5] == [(0, 384), (384, 512), (512, 768), (768, 870)]
    assert together[6] == [(0, 384), (384, 699)]
    assert together[10] == [(0, 270)]
    assert together[8] == [(0, 256), (256, 300)]


def test_what_a_row_reads_alone_is_not_shared(ops: cpu.Ops) -> None:
    """Keys of the chunk itself are not, nor what lies behind a window, nor chunks that fill a tile by themselves."""

    def phases(past: int, length: int, window: int | None = None) -> int:
        table = torch.zeros(3, 20, dtype=torch.int32)
        table[:, 10:] = 1 + torch.arange(30).view(3, 10)
        starts, context = (length * torch.arange(4)).int(), torch.full((3,), past + length, dtype=torch.int32)
        return len(ops.attention_items(starts, context, table, 6, 2, block_size=32, window=window).phases) - 1

    assert phases(300, 1) == phases(128, 15) == 2
    assert phases(127, 1) == phases(300, 16) == phases(300, 1, window=1000) == 1


def test_a_block_in_common_behind_others_is_no_prefix() -> None:
    """As where equal prefixes were computed twice, and one copy of a block was given up for the other."""
    alike = [[1, 2, 3, 4], [5, 2, 3, 4]]
    given = {"min_saved": MIN_TILES_SAVED}
    sharing, _, prefixes = find_prefixes(np.array(alike, np.int32), np.array([2, 2]), 2, slots=np.arange(2), **given)
    assert len(sharing) == len(prefixes) == 0

    table = np.array([*alike, [6, 2, 8, 9], [6, 2, 8, 9], [6, 2, 8, 7], [1, 3, 3, 4]], np.int32)
    sharing, done, prefixes = find_prefixes(table, np.full(6, 2), 2, slots=np.arange(6), **given)
    together = {int(row): (tiles, phase) for row, (tiles, phase) in zip(sharing, done.tolist(), strict=True)}
    assert {row for row, kept in together.items() if kept != (0, 0)} == {2, 3, 4}
    ((first, end, *rest),) = prefixes.tolist()
    assert sorted(sharing[first:end].tolist()) == [2, 3, 4] and rest == [0, 1, 0]


def test_threads_change_nothing(ops: cpu.Ops) -> None:
    model = Model(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    chunks = [(s, 0, n) for s, n in enumerate([50, 3, 140])]
    single = Cache(ops, model, [50, 3, 140]).step(chunks)[1]
    torch.set_num_threads(3)
    several = Cache(ops, model, [50, 3, 140]).step(chunks)[1]
    assert torch.equal(single, several)
    behind = family(ops, model)
    alone = behind.step(decodes(1), share=False)[1]
    assert all(torch.equal(alone, behind.step(decodes(1))[1]) for _ in range(20))  # phases wait for each other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 129])
def test_what_an_earlier_owner_left_in_a_block_does_not_matter(ops: cpu.Ops, dtype: torch.dtype, length: int) -> None:
    model = Model(dtype=dtype)
    clean, stale = Cache(ops, model, [length]), Cache(ops, model, [length], fill=float("nan"))
    assert torch.equal(clean.step([(0, 0, length)])[1], stale.step([(0, 0, length)])[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_sequence_and_is_not_hidden(ops: cpu.Ops, dtype: torch.dtype) -> None:
    model = Model(dtype=dtype)
    cache, clean = Cache(ops, model, [40, 40]), Cache(ops, model, [40, 40])
    cache.tokens[0][20] = float("nan")
    broken, right = cache.step([(0, 0, 40), (1, 0, 40)])[1], clean.step([(0, 0, 40), (1, 0, 40)])[1]
    assert broken[20:40].isnan().all()
    assert torch.equal(broken[40:], right[40:])


@pytest.mark.parametrize("sinks", [None, (9000.0, 3000.0, 1000.0, 0.0, -1000.0, 2000.0)])
def test_large_scores_do_not_overflow(ops: cpu.Ops, sinks: tuple[float, ...] | None) -> None:
    model = Model(sinks=sinks)
    fast, plain = Cache(ops, model, [150]), Cache(reference, model, [150])
    for cache in (fast, plain):
        cache.tokens[0] *= 60
    chunk = [(0, 0, 150)]
    torch.testing.assert_close(fast.step(chunk)[1], plain.step(chunk)[1], atol=0.3, rtol=1e-2)


@pytest.mark.parametrize("sink", [-1e38, -1e4, 1e4, 1e38])
def test_sinks_far_from_the_scores_neither_overflow_nor_vanish(ops: cpu.Ops, sink: float) -> None:
    """One takes nothing or everything."""
    chunk = [(0, 0, 150)]
    plain = Cache(ops, Model(), [150]).step(chunk)[1]
    out = Cache(ops, Model(sinks=(sink,) * 6), [150]).step(chunk)[1]
    assert torch.equal(out, plain if sink < 0 else torch.zeros_like(plain))


def test_items_cover_every_row_once(ops: cpu.Ops) -> None:
    starts = torch.tensor([0, 1, 1, 300, 307], dtype=torch.int32)
    context = torch.tensor([90, 5, 310, 7], dtype=torch.int32)
    items = ops.attention_items(starts, context, None, 10, 2, block_size=32, window=16)
    seen = [(s, h, row) for s, h, first, rows, _, _ in items.rows.tolist() for row in range(first, first + rows)]
    owners = [0] + [2] * 299 + [3] * 7
    assert sorted(seen) == sorted((owners[row // 5], h, row) for row in range(307 * 5) for h in range(2))
    assert items.tokens.tolist() == [
        [0, 90],
        *([1 + t, 12 + t] for t in range(299)),
        *([300 + t, 1 + t] for t in range(7)),
    ]
    assert items.rows[:, 3].max() <= 48


def test_empty_batch(ops: cpu.Ops) -> None:
    starts = torch.zeros(1, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    items = ops.attention_items(starts, none, none.view(0, 1), 6, 2, block_size=32)
    pool = torch.zeros(ops.pool_shape(1, 2, 32, 32))
    out = ops.paged_attention(torch.ones(4, 6, 32), pool, none.view(0, 1), items, block_size=32, scale=1.0)
    assert out.shape == (4, 6, 32) and not out.any()


def test_wrong_tensors_are_named(ops: cpu.Ops) -> None:
    with pytest.raises(ValueError, match="head_dim 33: expected an even number up to 256"):
        ops.pool_shape(1, 1, 33, 32)
    with pytest.raises(ValueError, match="value_dim 257: expected a number up to 256"):
        ops.pool_shape(1, 1, 32, 32, 257)
    with pytest.raises(ValueError, match="block_size 48: expected one of 16, 32, 64, 128"):
        ops.pool_shape(1, 1, 32, 48)
    pool = torch.zeros(ops.pool_shape(2, 2, 32, 32))
    starts, context = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    items = ops.attention_items(starts, context, table, 6, 2, block_size=32)
    query = torch.ones(2, 6, 32)

    def attend(**changes: object) -> None:
        given = {"query": query, "pool": pool, "block_table": table}
        ops.paged_attention(**{**given, "items": items, "block_size": 32, "scale": 1.0, **changes})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="query: expected float32 or bfloat16"):
        attend(query=query.half())
    with pytest.raises(ValueError, match=r"pool: expected torch.float32 \(2, 2, 2048\)"):
        attend(pool=pool[:, :, :-1])
    with pytest.raises(ValueError, match=r"pool: expected torch.float32 \(2, 2, 1536\)"):
        attend(value_dim=16)
    with pytest.raises(ValueError, match=r"sinks: expected torch.float32 \(6,\) on the CPU, got torch.float32 \(2,\)"):
        attend(sinks=torch.zeros(2))
    with pytest.raises(ValueError, match=r"query: expected a contiguous last dimension"):
        attend(query=torch.ones(2, 32, 6).transpose(1, 2))
    with pytest.raises(ValueError, match=r"block_table: expected torch.int32 \(1, 1\) on the CPU, got torch.int64"):
        attend(block_table=table.long())
    with pytest.raises(ValueError, match="query: expected at least the 2 tokens of the items, got 1"):
        attend(query=query[:1])
    with pytest.raises(ValueError, match="num_heads 7: expected a multiple of the 2 KV heads"):
        attend(query=torch.ones(2, 7, 32))
    with pytest.raises(ValueError, match="window 0"):
        attend(window=0)
    with pytest.raises(ValueError, match="cos: expected at most 16 columns for head_dim 32, got 20"):
        key, angles, slots = torch.ones(2, 2, 32), torch.ones(2, 20), torch.zeros(2, dtype=torch.int64)
        ops.rope_and_write(query, key, key, angles, angles, slots, pool, block_size=32)


def test_unknown_isa_is_refused() -> None:
    assert OPS is not None
    with pytest.raises(ValueError, match="instruction set 'sse2': this machine has portable"):
        OPS.with_isa("sse2")
