"""The scheduler (through the engine that drives it) over a simulated KV pool that notices every wrong key."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from simulated import EOS, VOCAB, Letters, check, expected, make, run, summary

from batchgen.engine import forecast, scheduler
from batchgen.engine.scheduler import GROW_AFTER, EngineStats
from batchgen.engine.sequence import Sequence, StopStrings
from batchgen.engine.step import EngineSettings, StepPlan
from batchgen.errors import ModelError
from batchgen.types import Completion, Request, RowKey, SamplingParams

SMALL = EngineSettings(max_num_seqs=4, max_batch_tokens=16, num_blocks=64, block_size=4, max_model_len=64)


def request(
    row: int, prompt: list[int], *, noise_key: int | None = None, resume: dict | None = None, **sampling: object
) -> Request:
    return Request(
        RowKey(0, row),
        np.array(prompt, np.int32),
        SamplingParams(**{"max_tokens": 8, **sampling}),  # type: ignore[arg-type]
        row if noise_key is None else noise_key,
        {} if resume is None else {s: None if t is None else np.array(t, np.int32) for s, t in resume.items()},
    )


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[EngineSettings, list[Request]]:
    settings = EngineSettings(
        max_num_seqs=draw(st.integers(1, 6)),
        max_batch_tokens=draw(st.integers(1, 24)),
        num_blocks=draw(st.integers(2, 24)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_model_len=draw(st.integers(4, 40)),
        prefix_cache=draw(st.booleans()),
    )
    tokens = st.integers(0, VOCAB - 1)
    prefixes = draw(st.lists(st.lists(tokens, max_size=16), min_size=1, max_size=3))
    requests = []
    for row in range(draw(st.integers(1, 12))):
        n = draw(st.integers(1, 3))
        sampling = SamplingParams(
            max_tokens=draw(st.none() | st.integers(0, 20)),
            n=n,
            stop=draw(st.sampled_from([(), (), ("bc",), ("d", "de"), ("fgh", "c")])),
            stop_token_ids=draw(st.sampled_from([(), (), (3,), (0, 4)])),
            ignore_eos=draw(st.booleans()),
        )
        prompt = draw(st.sampled_from(prefixes)) + draw(st.lists(tokens, max_size=8))
        resume = draw(st.dictionaries(st.integers(0, n - 1), st.none() | st.lists(tokens, max_size=6), max_size=2))
        if not 0 < len(prompt) < settings.max_model_len:
            resume = {}  # such a row has never run
        requests.append(
            Request(
                RowKey(0, row),
                np.array(prompt, np.int32),
                sampling,
                draw(st.integers(0, 2)),
                {sample: None if ids is None else np.array(ids, np.int32) for sample, ids in resume.items()},
            )
        )
    return settings, requests


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    scenarios(),
    st.integers(1, 3),
    st.frozensets(st.integers(1, 40), max_size=6),
    st.sampled_from([0, 0, 256]),
    st.sampled_from([1, 3, 128]),
)
def test_every_sample_comes_out_as_if_it_ran_alone(
    scenario: tuple[EngineSettings, list[Request]], depth: int, failing: frozenset[int], mean: int, recent: int
) -> None:
    settings, requests = scenario
    # With a mean of 0 too many are let in, and preempted
    with patch.object(forecast, "MEAN_UNTIL_KNOWN", mean), patch.object(scheduler, "RECENT", recent):
        engine, _ = make(settings, depth, fails=lambda call, plan: call in failing and plan.num_tokens > 8)
        for one in requests:
            engine.add(one)
        completions = run(engine)
    stats = engine.stats()
    event(f"preempted: {stats.preemptions > 0}, hits: {stats.cached_tokens > 0}, failed: {bool(failing)}")
    check(completions, requests, settings)
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    resumed = {(r.key, s): len(t) for r in requests for s, t in r.resume.items() if t is not None}
    new_tokens = sum(max(0, len(c.token_ids) - resumed.get((c.key, c.sample), 0)) for c in completions)
    assert stats.output_tokens == new_tokens


def crowd(seed: int) -> tuple[EngineSettings, list[Request]]:
    """Many rows over few prefixes and few blocks: everything that can collide does."""
    rng = np.random.default_rng(seed)
    settings = EngineSettings(
        max_num_seqs=int(rng.integers(2, 9)),
        max_batch_tokens=int(rng.integers(2, 40)),
        num_blocks=int(rng.integers(8, 40)),
        block_size=int(rng.choice([1, 2, 4])),
        max_model_len=40,
        prefix_cache=bool(rng.random() < 0.8),
    )
    prefixes = [rng.integers(1, VOCAB, rng.integers(0, 17)).tolist() for _ in range(3)]
    requests = []
    for row in range(20):
        prompt = prefixes[rng.integers(3)] + rng.integers(1, VOCAB, rng.integers(1, 5)).tolist()
        n = int(rng.integers(1, 4))
        resume = {int(rng.integers(n)): rng.integers(1, VOCAB, rng.integers(1, 8)).tolist()} if row % 5 == 0 else None
        limit = None if row % 7 == 0 else int(rng.integers(1, 24))
        stop = ("bc", "d") if row % 4 == 0 else ()
        ignore_eos = bool(rng.random() < 0.5)
        key = int(rng.integers(3))
        requests.append(
            request(row, prompt, noise_key=key, resume=resume, max_tokens=limit, n=n, stop=stop, ignore_eos=ignore_eos)
        )
    return settings, requests


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_crowd(depth: int) -> None:
    seen = EngineStats()
    for seed in range(40):
        settings, requests = crowd(seed)
        calls = set(np.random.default_rng(seed).integers(1, 60, 4).tolist()) if seed % 2 else set()
        with patch.object(forecast, "MEAN_UNTIL_KNOWN", 0 if seed % 4 < 2 else 256):
            engine, _ = make(
                settings, depth, fails=lambda call, plan, calls=calls: call in calls and plan.num_tokens > 8
            )
            for one in requests:
                engine.add(one)
            check(run(engine), requests, settings)
        stats = engine.stats()
        for name in ("preemptions", "cached_tokens", "recomputed_tokens"):
            setattr(seen, name, getattr(seen, name) + getattr(stats, name))
    assert seen.preemptions > 50 and seen.cached_tokens > 1000 and seen.recomputed_tokens > 100


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), st.integers(1, 2), st.integers(0, 40), st.sampled_from([3, 128]))
def test_a_snapshot_resumes_to_the_same_result(
    scenario: tuple[EngineSettings, list[Request]], depth: int, steps: int, recent: int
) -> None:
    settings, requests = scenario
    with patch.object(scheduler, "RECENT", recent):
        engine, _ = make(settings, depth)
    for one in requests:
        engine.add(one)
    finished: list[Completion] = []
    for _ in range(steps):
        if not engine.has_work:
            break
        finished += engine.step()
    kept = {(f.key, f.sample): f.token_ids for f in engine.snapshot()}
    done = {(c.key, c.sample) for c in finished}
    assert not done & kept.keys()
    again = []
    for one in requests:
        resume = dict(one.resume)
        for sample in range(one.sampling.n):
            if (one.key, sample) in done:
                resume[sample] = None
            elif (one.key, sample) in kept:
                resume[sample] = kept[one.key, sample]
        again.append(Request(one.key, one.prompt_token_ids, one.sampling, one.noise_key, resume))
    second, _ = make(settings, depth)
    for one in again:
        second.add(one)
    check(finished + run(second), requests, settings)


def test_samples_of_a_row_share_its_full_blocks_in_the_same_step() -> None:
    settings = EngineSettings(max_num_seqs=4, max_batch_tokens=64, num_blocks=32, block_size=4, max_model_len=64)
    engine, runner = make(settings)
    engine.add(request(0, list(range(1, 12)), n=3, ignore_eos=True, max_tokens=2))
    done = run(engine)
    first = runner.plans[0]
    assert first.starts.tolist() == [0, 8, 8] and first.lengths.tolist() == [11, 3, 3]
    tables = [block_ids for _, _, block_ids in first.block_appends]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert engine.stats().cached_tokens == 16
    assert [len(c.token_ids) for c in done] == [2, 2, 2]


def test_a_full_hit_computes_the_last_token_into_an_own_block() -> None:
    engine, runner = make(SMALL)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for row in range(2):
        engine.add(request(row, prompt, max_tokens=1))
    run(engine)
    (plan,) = runner.plans
    assert plan.starts.tolist() == [0, 4] and plan.lengths.tolist() == [8, 4]


def test_long_prompts_are_chunked_behind_running_decodes() -> None:
    settings = EngineSettings(max_num_seqs=4, max_batch_tokens=8, num_blocks=64, block_size=4, max_model_len=64)
    engine, runner = make(settings)
    engine.add(request(0, [1, 2, 3], max_tokens=6, ignore_eos=True))
    engine.add(request(1, [(i % 5) + 1 for i in range(20)], max_tokens=2, ignore_eos=True))
    run(engine)
    lengths = [plan.lengths.tolist() for plan in runner.plans]
    assert lengths[:4] == [[3, 5], [1, 7], [1, 7], [1, 1]]
    assert [plan.samples.tolist() for plan in runner.plans[:4]] == [
        [True, False],
        [True, False],
        [True, False],
        [True, True],
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pool_for_three_runs_fifty(depth: int) -> None:
    settings = EngineSettings(max_num_seqs=16, max_batch_tokens=64, num_blocks=30, block_size=4, max_model_len=48)
    engine, runner = make(settings, depth)
    requests = [request(row, [row % 7 + 1, row // 7 + 1, 3], max_tokens=36) for row in range(50)]
    for one in requests:
        engine.add(one)
    done = run(engine)
    check(done, requests, settings)
    needed = sum(c.prompt_tokens + len(c.token_ids) for c in done)
    assert sum(plan.num_tokens for plan in runner.plans) < 1.5 * needed, "much of the work was done over and over"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_row_with_the_least_work_is_preempted_and_keeps_its_tokens(prefix_cache: bool) -> None:
    settings = EngineSettings(
        max_num_seqs=2,
        max_batch_tokens=32,
        num_blocks=6,
        block_size=4,
        max_model_len=64,
        prefix_cache=prefix_cache,
    )
    engine, runner = make(settings)
    requests = [
        request(row, prompt, max_tokens=12, noise_key=runs_to_its_limit(prompt, 12, settings))
        for row, prompt in enumerate([[1] * 9, [2]])
    ]
    for one in requests:
        engine.add(one)
    with patch.object(forecast, "MEAN_UNTIL_KNOWN", 0):  # so that both are let in
        check(run(engine), requests, settings)
    assert engine.stats().preemptions == 1
    again = [start for plan in runner.plans[1:] for start in plan.slot_starts]
    assert len(again) == 1 and again[0].num_prompt_tokens == 1 and len(again[0].token_ids) > 4
    assert (engine.stats().recomputed_tokens <= 4) == prefix_cache  # most of its full blocks were still there


def test_the_first_sample_counts_when_the_second_is_let_in() -> None:
    settings = EngineSettings(max_num_seqs=2, max_batch_tokens=32, num_blocks=10, block_size=4, max_model_len=64)
    engine, runner = make(settings)
    for row in range(2):
        engine.add(request(row, [row + 1] * 4, max_tokens=28, ignore_eos=True))  # 8 blocks each
    run(engine)
    assert engine.stats().preemptions == 0
    assert len(runner.plans[0].slots) == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pool_that_holds_all_at_their_limits_runs_all(depth: int, prefix_cache: bool) -> None:
    """To the last block, whether their ends are certain or not; what they share counts once."""
    common, each = (2, 5) if prefix_cache else (0, 7)
    for num_blocks, together in ((common + 4 * each, 4), (common + 4 * each - 1, 3)):
        settings = EngineSettings(4, 64, num_blocks, block_size=4, max_model_len=64, prefix_cache=prefix_cache)
        engine, runner = make(settings, depth)
        requests = [request(row, [*range(1, 9), row + 1], max_tokens=20, ignore_eos=True) for row in range(4)]
        for one in requests:  # 29 tokens: the last one is never computed
            engine.add(one)
        check(run(engine), requests, settings)
        assert len(runner.plans[0].slots) == together
        assert engine.stats().preemptions == 0


def runs_to_its_limit(prompt: list[int], max_tokens: int, settings: EngineSettings) -> int:
    """A noise key with which this prompt's output holds no EOS."""
    for key in range(1000):
        completion = expected(request(0, prompt, max_tokens=max_tokens, noise_key=key), 0, settings)
        if completion is not None and completion.finish_reason == "length":
            return key
    raise AssertionError("no such key")


def test_a_row_larger_than_the_pool_fails_alone() -> None:
    settings = EngineSettings(max_num_seqs=2, max_batch_tokens=64, num_blocks=3, block_size=4, max_model_len=64)
    engine, _ = make(settings)
    requests = [
        request(0, [1] * 13),
        request(1, [2] * 10, max_tokens=40, ignore_eos=True, noise_key=5),
        request(2, [3], max_tokens=2),
    ]
    for one in requests:
        engine.add(one)
    done = {c.key.row: c for c in run(engine)}
    check(list(done.values()), requests, settings)
    for row in (0, 1):
        error = done[row].error
        assert error is not None and error.code == "out_of_memory"
        assert (
            "13 tokens" in error.message
            and "4 KV blocks of 4" in error.message
            and "has 3 (12 tokens)" in error.message
        )
    assert len(done[1].token_ids) == 3


def test_stop_found_late_is_dropped_from_the_steps_in_flight() -> None:
    settings = EngineSettings(max_num_seqs=1, max_batch_tokens=16, num_blocks=16, block_size=2, max_model_len=32)
    requests = [request(row, [row + 1], max_tokens=20) for row in range(6)]
    for depth in (1, 2, 3):
        engine, _ = make(settings, depth)
        for one in requests:
            engine.add(one)
        check(run(engine), requests, settings)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_limit_is_known_before_the_tokens_are(depth: int) -> None:
    engine, runner = make(SMALL, depth)
    engine.add(request(0, [1, 2, 3], max_tokens=5, ignore_eos=True))
    run(engine)
    assert [plan.starts.tolist() for plan in runner.plans] == [[0], [3], [4], [5], [6]]


def test_max_model_len_bounds_the_output() -> None:
    settings = EngineSettings(max_num_seqs=4, max_batch_tokens=64, num_blocks=64, block_size=4, max_model_len=10)
    engine, _ = make(settings)
    for row, length in enumerate((8, 9, 10, 11)):
        engine.add(request(row, [row + 1] * length, max_tokens=10, ignore_eos=True))
    done = {c.key.row: c for c in run(engine)}
    assert [(done[row].finish_reason, len(done[row].token_ids)) for row in range(4)] == [
        ("length", 2),
        ("length", 1),
        ("error", 0),
        ("error", 0),
    ]
    assert done[2].error is not None and done[2].error.code == "prompt_too_long"


def test_resumed_tokens_that_end_a_sample_end_it_without_running() -> None:
    engine, runner = make(SMALL)
    engine.add(request(0, [1, 2], n=4, stop=("de",), resume={0: [5, 0], 1: [3, 4, 7], 2: [1] * 8, 3: None}))
    done = {c.sample: c for c in engine.step()}
    assert not engine.has_work and not runner.plans
    assert (done[0].finish_reason, done[0].stop_reason) == ("stop", None)
    assert (done[1].finish_reason, done[1].stop_reason, done[1].token_ids.tolist()) == ("stop", "de", [3, 4])
    assert (done[2].finish_reason, len(done[2].token_ids)) == ("length", 8)
    assert 3 not in done


def test_a_stop_string_that_began_before_the_restart_is_found() -> None:
    one = request(0, [1], max_tokens=30, ignore_eos=True)
    tokens = expected(one, 0, SMALL).token_ids  # type: ignore[union-attr]
    text = [Letters().push(int(token)) for token in tokens]
    stop = "".join(text[2:5])
    engine, _ = make(SMALL)
    stopping = Request(
        one.key, one.prompt_token_ids, SamplingParams(30, ignore_eos=True, stop=(stop,)), 0, {0: tokens[:4]}
    )
    engine.add(stopping)
    (done,) = run(engine)
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    check([done], [stopping], SMALL)


def test_nonfinite_logits_end_only_their_row() -> None:
    requests = [request(row, [row % 9 + 1, row // 9 + 1], max_tokens=40, ignore_eos=True) for row in range(60)]
    engine, _ = make(SMALL, depth=2)
    for one in requests:
        engine.add(one)
    done = run(engine)
    check(done, requests, SMALL)
    failed = [c for c in done if c.error is not None]
    assert 0 < len(failed) < 60
    assert all(c.error is not None and "NaN or infinity" in c.error.message for c in failed)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_does_not_fit_is_halved_and_every_row_finishes(depth: int) -> None:
    settings = EngineSettings(max_num_seqs=8, max_batch_tokens=64, num_blocks=64, block_size=4, max_model_len=64)
    requests = [request(row, [row + 1] * 20, max_tokens=30) for row in range(10)]
    engine, runner = make(settings, depth, fails=lambda call, plan: plan.num_tokens > 20)
    for one in requests:
        engine.add(one)
    check(run(engine), requests, settings)
    assert max(plan.num_tokens for plan in runner.plans) <= 20


def test_a_row_that_fails_alone_is_an_error_and_the_others_get_the_full_budget_back() -> None:
    settings = EngineSettings(max_num_seqs=8, max_batch_tokens=64, num_blocks=64, block_size=4, max_model_len=64)

    def fails(call: int, plan: StepPlan) -> bool:
        poison.update(start.slot for start in plan.slot_starts if start.token_ids[0] == 5)
        poison.difference_update(start.slot for start in plan.slot_starts if start.token_ids[0] != 5)
        return bool(poison & set(plan.slots.tolist()))

    poison: set[int] = set()
    requests = [request(row, [row % 8 + 1] * 12, max_tokens=12, ignore_eos=True) for row in range(16)]
    engine, _ = make(settings, fails=fails)
    for one in requests:
        engine.add(one)
    done = {c.key.row: c for c in run(engine)}
    bad = [row for row in done if (error := done[row].error) is not None and error.code == "out_of_memory"]
    assert sorted(bad) == [4, 12]
    assert "alone" in done[4].error.message  # type: ignore[union-attr]
    for row, completion in done.items():
        if row not in bad:
            assert summary(completion) == summary(expected(requests[row], 0, settings))  # type: ignore[arg-type]
    assert engine._scheduler._budget == settings.max_batch_tokens


def test_a_halved_budget_grows_back() -> None:
    settings = EngineSettings(max_num_seqs=2, max_batch_tokens=32, num_blocks=2000, block_size=4, max_model_len=4000)
    engine, runner = make(settings, fails=lambda call, plan: call == 1)
    requests = [request(row, [row + 1] * 30, max_tokens=1, ignore_eos=True) for row in range(GROW_AFTER + 20)]
    for one in requests:
        engine.add(one)
    run(engine)
    assert max(plan.num_tokens for plan in runner.plans[:100]) <= 16
    assert max(plan.num_tokens for plan in runner.plans[-20:]) > 16


def test_the_block_hash_depends_on_everything_before_it() -> None:
    def sequence(tokens: list[int]) -> Sequence:
        return Sequence(request(0, tokens), 0, max_model_len=64, eos_token_ids=EOS, stream_factory=Letters)

    one, two, other = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 9, 9]), sequence([9, 2, 3, 4, 5, 6])
    assert one.block_hash(1, 2) == two.block_hash(1, 2)
    assert one.block_hash(0, 2) != one.block_hash(1, 2)
    assert one.block_hash(2, 2) != two.block_hash(2, 2)
    assert one.block_hash(2, 2) != other.block_hash(2, 2)
    assert len(one.hashes) == 3


class Pieces:
    def __init__(self, *pieces: str) -> None:
        self._pieces = list(pieces)

    def push(self, token_id: int) -> str:
        return self._pieces.pop(0)


@pytest.mark.parametrize(
    ("stops", "pieces", "found"),
    [
        (("DEFGHIJ",), ["abc", "DEF", "G", "HI", "J"], "DEFGHIJ"),
        (("END",), ["x", "E", "", "", "NDless"], "END"),  # ends inside a token, after text was held back
        (("b", "abc"), ["ab", "c"], "b"),  # the first to be complete
        (("bc", "abcd"), ["abcd"], "abcd"),  # leftmost
        (("abc", "ab"), ["abc"], "abc"),  # same start: the order given
        (("ab", "abc"), ["abc"], "ab"),
        (("aaa",), ["a", "a", "ba", "a", "a"], "aaa"),
        (("zz",), ["z", "y", "z"], None),
    ],
)
def test_stop_strings(stops: tuple[str, ...], pieces: list[str], found: str | None) -> None:
    search = StopStrings(stops, Pieces(*pieces))
    results = [search.push(0) for _ in pieces]
    assert results[:-1] == [None] * (len(pieces) - 1) or found == "b"
    assert found in results


def test_a_model_whose_logits_are_never_numbers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while fewer rows than that have shown it: these only fail."""
    monkeypatch.setattr("simulated.answer", lambda history, noise_key, sample: (0, False))
    requests = [request(row, [row + 1, 5], max_tokens=9) for row in range(3)]
    engine, _ = make(SMALL, depth=2)
    for one in requests[:2]:
        engine.add(one)
    assert [done.error.code for done in run(engine) if done.error] == ["nonfinite_logits"] * 2
    engine.add(requests[2])
    with pytest.raises(ModelError, match=r"NaN or infinity for the first 3 rows.*model\.dtype"):
        run(engine)
