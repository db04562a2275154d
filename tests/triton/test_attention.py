"""Ragged paged attention, in the interpreter, against its plain-torch twin; and how a step is cut into items."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from batchgen_kernels import attention, reference
from batchgen_kernels.work import MIN_SPLIT, Plan, Work, pack, plan, room_of, unpack

FP8 = torch.float8_e4m3fn
MAX_PARTS = 128


@dataclass
class Layer:
    num_heads: int = 6
    num_kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    window: int | None = None
    soft_cap: float | None = None
    with_sinks: bool = False
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32


@dataclass
class Step:
    """Sequences of (new tokens, keys), rows of padding, and how their block tables begin alike."""

    chunks: list[tuple[int, int]]
    padding: int = 0
    shared: list[tuple[int, int, int]] = field(default_factory=list)  # sequence has (keys) of (another)

    def arrays(self, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
        """query_starts, context_lens, slots and block table, and how many blocks there are."""
        lengths, contexts = np.array(self.chunks, np.int32).reshape(-1, 2).T
        num_blocks = [-(-int(c) // block_size) for c in contexts]
        slots = np.random.default_rng(1).permutation(len(contexts) + 2)[: len(contexts)].astype(np.int32)
        table = np.full((len(contexts) + 2, max(num_blocks, default=0) + 1), -1, np.int32)
        ids = np.random.default_rng(2).permutation(sum(num_blocks)).astype(np.int32)
        for slot, number, end in zip(slots, num_blocks, np.cumsum(num_blocks), strict=True):
            table[slot, :number] = ids[end - number : end]
        for sequence, keys, other in self.shared:
            table[slots[sequence], : keys // block_size] = table[slots[other], : keys // block_size]
        return np.cumsum([0, *lengths], dtype=np.int32), contexts, slots, table, sum(num_blocks)

    @property
    def num_tokens(self) -> int:
        return sum(length for length, _ in self.chunks) + self.padding


def planned(layer: Layer, step: Step, *, decode: bool = False, capacity: int | None = None, **options: int) -> Plan:
    starts, contexts, slots, table, _ = step.arrays(layer.block_size)
    config = launch(layer, decode)
    target = options.pop("target_items", 1)
    return plan(
        starts,
        contexts,
        slots,
        table,
        step.num_tokens,
        group=layer.num_heads // layer.num_kv_heads,
        window=layer.window,
        small=config.blocks["small"],
        large=config.blocks["large"],
        block_size=layer.block_size,
        target_items=target,
        max_parts=MAX_PARTS,
        max_items=None if capacity is None else room_of(capacity, target).items,
        **options,
    )


def launch(layer: Layer, decode: bool) -> attention.Config:
    shape = (layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim)
    return attention.launch_config(*shape, layer.kv_dtype, decode=decode)


def has_large(layer: Layer, decode: bool) -> bool:
    blocks = launch(layer, decode).blocks
    return blocks["large"] > blocks["small"]


def attend(
    layer: Layer, step: Step, *, decode: bool = False, capacity: int | None = None, **options: int
) -> tuple[torch.Tensor, torch.Tensor, Plan]:
    """The kernel's output and the twin's."""
    starts, contexts, slots, table, num_blocks = step.arrays(layer.block_size)
    generator = torch.Generator().manual_seed(3)
    shape = (num_blocks, layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.block_size)
    pool = torch.randn(attention.pool_shape(*shape), generator=generator).to(layer.kv_dtype)
    sinks = torch.randn(layer.num_heads, generator=generator)
    fused = torch.randn(100, layer.num_heads + 1, layer.key_dim, generator=generator).to(layer.dtype)
    query = fused[: step.num_tokens, 1:]
    made = planned(layer, step, decode=decode, capacity=capacity, **options)
    room = made.room if capacity is None else room_of(capacity, options.get("target_items", 1))
    ((items, entries, merged),) = unpack(torch.from_numpy(pack([made], [room])), [room])
    nothing = torch.full((MAX_PARTS * layer.num_heads * (layer.value_dim + 1),), torch.nan)
    parts, lses = nothing.split((MAX_PARTS * layer.num_heads * layer.value_dim, MAX_PARTS * layer.num_heads))
    programs = 3 if capacity or len(made.merged) else 0
    given = {
        "block_size": layer.block_size,
        "value_dim": layer.value_dim,
        "scale": layer.key_dim**-0.5,
        "window": layer.window,
        "soft_cap": layer.soft_cap,
        "sinks": sinks if layer.with_sinks else None,
        "key_scale": 0.5 if layer.kv_dtype == FP8 else 1.0,
        "value_scale": 2.0 if layer.kv_dtype == FP8 else 1.0,
    }
    work = Work(items, entries, merged, parts, lses, made.with_large or capacity is not None, programs)
    device_table = torch.from_numpy(table)
    out = attention.paged_attention(query, pool, device_table, work, config=launch(layer, decode), **given)
    rows = list(itertools.pairwise(starts.tolist()))
    reads = [(a, b, c) for (a, b), c in zip(rows, contexts.tolist(), strict=True)]
    return out, reference.paged_attention(query, pool, device_table[slots], reads, **given), made


def assert_equal(layer: Layer, out: torch.Tensor, wanted: torch.Tensor, padding: int = 0) -> None:
    # What the scores are made of is rounded to the smaller type; weights of 16 bits are rounded as well.
    tolerance = 1e-5 if layer.dtype == layer.kv_dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    assert not out[len(out) - padding :].any() and out.dtype == layer.dtype


RAGGED = Step([(1, 1), (1, 44), (13, 13), (1, 33), (40, 57), (3, 64)], padding=2)
LAYERS = [
    Layer(),
    Layer(9, 3, 64, 64, dtype=torch.float16, kv_dtype=torch.float16),
    Layer(4, 4, 128, 128, block_size=32),
    Layer(7, 1, 80, 80, block_size=64, window=20),
    Layer(20, 1, 16, 48, soft_cap=3.0, block_size=128),
    Layer(4, 2, 192, 128, dtype=torch.float16, kv_dtype=torch.float16),
    Layer(2, 1, 256, 256, with_sinks=True, block_size=64, dtype=torch.float16, kv_dtype=torch.float16),
    Layer(8, 1, 48, 96, window=1, with_sinks=True),
    Layer(3, 1, 32, 32, window=33, soft_cap=20.0, with_sinks=True, dtype=torch.float16, kv_dtype=torch.float16),
    Layer(dtype=torch.float16, kv_dtype=torch.float32),
    Layer(dtype=torch.float32, kv_dtype=FP8),
    Layer(6, 2, 48, 32, dtype=torch.float16, kv_dtype=FP8, block_size=32),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_ragged_batch_equals_twin(layer: Layer) -> None:
    out, wanted, made = attend(layer, RAGGED)
    assert made.with_large == has_large(layer, False) and not len(made.merged)
    assert_equal(layer, out, wanted, RAGGED.padding)


LONG = Step([(1, 300), (2, 129), (1, 5), (20, 260)], padding=1)


@pytest.mark.parametrize("layer", [LAYERS[5], LAYERS[8], LAYERS[10]], ids=str)
def test_split_ranges_of_keys_equal_twin(layer: Layer) -> None:
    out, wanted, made = attend(layer, LONG, split_tokens=128)
    assert len(made.merged) and made.entries[:, 3].max() == (3 if layer.window is None else 2)
    assert_equal(layer, out, wanted, LONG.padding)


def test_few_items_are_split_for_a_large_device() -> None:
    step = Step([(1, 700), (1, 20)], padding=1)
    assert len(planned(Layer(), step, target_items=1).items) == 3
    out, wanted, made = attend(Layer(3, 1), step, target_items=64)
    assert sorted((made.items[:, 4] - made.items[:, 3]).tolist()) == [0, 20, 188, 256, 256]
    assert_equal(Layer(), out, wanted, padding=1)


# Three behind one system prompt, two of them behind a question as well; two behind another, one alone, a chunk.
FAMILY = Step(
    [(1, 270), (1, 265), (3, 150), (1, 140), (1, 135), (1, 130), (20, 30)] + [(1, 140 + n) for n in range(4)],
    padding=2,
    shared=[(1, 256, 0), (2, 128, 0), (4, 128, 3), *((n, 128, 3) for n in range(7, 11))],
)


@pytest.mark.parametrize("layer", [Layer(3, 1, with_sinks=True, soft_cap=5.0), Layer(5, 1, 24, 40)], ids=str)
def test_shared_prefixes_equal_twin(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen_kernels.work.MIN_TILES_SAVED", 1)
    out, wanted, made = attend(layer, FAMILY)
    assert made.entries[:, 3].max() == 3  # system prompt, question, own
    assert_equal(layer, out, wanted, FAMILY.padding)
    alone = planned(layer, FAMILY, share=False)
    assert not len(alone.merged) and read(made) < read(alone)


def read(made: Plan) -> int:
    """Keys that a KV head reads."""
    return int((made.items[:, 4] - made.items[:, 3]).sum())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layer", [Layer(12), Layer(12, window=50, with_sinks=True)], ids=str)
def test_a_capacity_changes_nothing(layer: Layer, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen_kernels.work.MIN_TILES_SAVED", 1)
    step = Step([(1, 300), (1, 290), (1, 7), (1, 265)], shared=[(1, 256, 0), (3, 128, 0)] if shared else [])
    plain, wanted, made = attend(layer, step, decode=True, target_items=3)
    assert made.with_large == (shared and layer.window is None and has_large(layer, True))
    step.padding = 4
    out, _, padded = attend(layer, step, decode=True, capacity=8, target_items=3)
    assert_equal(layer, out[:4], wanted)
    assert_equal(layer, out[:4], plain)
    assert not out[4:].any()
    assert len(padded.items) <= room_of(8, 3).items


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("split_tokens", [None, 128])
@pytest.mark.parametrize("target_items", [1, 7, 500])
def test_every_token_goes_over_its_keys_once(window: int | None, split_tokens: int | None, target_items: int) -> None:
    """Whatever is shared or cut; its parts are numbered through and have places of their own."""
    layer = Layer(9, 3, window=window)
    for step in (RAGGED, LONG, FAMILY, Step([]), Step([], padding=3), Step([(1, 1)])):
        made = planned(layer, step, target_items=target_items, split_tokens=split_tokens)  # type: ignore[arg-type]
        starts, contexts, slots, table, _ = step.arrays(layer.block_size)
        pasts = contexts - np.diff(starts)
        owners = np.repeat(np.arange(len(contexts)), np.diff(starts))
        assert sorted(made.entries[:, 0].tolist()) == list(range(step.num_tokens))
        ranges: list[list[tuple[int, int, int]]] = [[] for _ in made.entries]
        for slot, first, count, begin, end, part in made.items.tolist():
            assert 0 < count * 3 <= launch(layer, False).blocks["large"]
            for entry in range(first, first + count):
                ranges[entry].append((part, begin, end))
                token = made.entries[entry, 0]
                if token < starts[-1]:
                    blocks = slice(begin // layer.block_size, -(-end // layer.block_size))
                    assert (table[slot, blocks] == table[slots[owners[token]], blocks]).all()
        places = []
        for (token, seen, place, parts), parts_of in zip(made.entries.tolist(), ranges, strict=True):
            if token >= starts[-1]:
                assert seen == 0 and parts_of == [(0, 0, 0)]
                continue
            owner = owners[token]
            assert seen == pasts[owner] + token - starts[owner] + 1
            parts_of.sort()
            assert [part for part, _, _ in parts_of] == list(range(max(parts, 1)))
            places += range(place, place + parts)
            bounds = [begin for _, begin, _ in parts_of] + [parts_of[-1][2]]
            assert bounds[1:] == [end for _, _, end in parts_of]
            assert bounds[0] <= (0 if window is None else max(0, seen - window)) and bounds[-1] >= seen
        assert sorted(places) == list(range(len(places)))
        assert made.merged.tolist() == np.flatnonzero(made.entries[:, 3]).tolist()


def test_splits_at_fixed_keys_ignore_the_rest_of_the_step() -> None:
    def cuts(step: Step) -> list[list[int]]:
        items = planned(Layer(), step, split_tokens=128, target_items=50).items
        slot = step.arrays(16)[2][0]
        return sorted(items[items[:, 0] == slot, 3:].tolist())

    assert cuts(Step([(1, 300)])) == cuts(Step([(1, 300), *[(1, 290)] * 9])) == cuts(FAMILY_LIKE)
    with pytest.raises(ValueError, match="split_tokens 128: the step has"):
        planned(Layer(), Step([(1, 20_000)]), split_tokens=128)


FAMILY_LIKE = Step([(1, 300), (1, 310), (1, 330), (64, 64)], shared=[(1, 256, 0), (2, 256, 0)])


def test_what_does_not_fit_is_cut_less_and_shared_less(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([(1, 2000)] * 20, shared=[(n, 1024, 0) for n in range(1, 20)])
    made = planned(Layer(), step, target_items=1000)
    assert 20 * 2 < made.entries[:, 3].sum() <= MAX_PARTS  # not in parts of MIN_SPLIT keys
    monkeypatch.setattr(f"{__name__}.MAX_PARTS", 39)
    made = planned(Layer(), step, target_items=1000)
    assert not made.entries[:, 3].any() and len(made.items) == 20
    assert MIN_SPLIT == 256


def test_sizes_that_no_kernel_has_are_refused() -> None:
    for key_dim, value_dim, block_size in [(12, 16, 16), (16, 264, 16), (16, 16, 48)]:
        with pytest.raises(ValueError, match=r"expected (a multiple of 8|one of 16)"):
            attention.pool_shape(1, 1, key_dim, value_dim, block_size)


def test_merged_parts_equal_twin() -> None:
    torch.manual_seed(0)
    parts, lses, sinks = torch.randn(20, 3, 24), 5 * torch.randn(20, 3), torch.randn(3)
    entries = torch.tensor([[1, 0, 3, 10], [0, 0, 0, 0], [2, 0, 13, 1], [0, 0, 14, 2]], dtype=torch.int32)
    merged = torch.tensor([3, 0, 2, 3, 1, 1], dtype=torch.int32)
    for given in (None, sinks):
        out = torch.full((3, 3, 24), torch.nan)
        work = Work(entries, entries, merged, parts.flatten(), lses.flatten(), False, 2)
        attention.merge_parts(out, work, given)
        for token, _, base, count in entries[merged[1:4]].tolist():
            wanted = reference.merge_parts(parts[base : base + count], lses[base : base + count], given)
            torch.testing.assert_close(out[token], wanted)
