"""The planner: what runs at all, in which order, and that every sample comes out as if it had run by itself."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import simulated
from fakes import FakeEngine, FakeModel, byte_tokenizer, fake_tokens
from simulated import check, expected, make
from simulated import run as simulated_run
from test_engine import VOCAB, Model
from test_job import job_of, results, start

from batchgen import planner
from batchgen.engine.step import EngineSettings
from batchgen.metrics import Meter
from batchgen.planner import Planner, by_length, neighbours
from batchgen.types import Completion, Request, RowError, RowKey, SamplingParams

GREEDY = SamplingParams(max_tokens=20)
SAMPLED = replace(GREEDY, temperature=1.0)


class Engine(FakeEngine):
    """Knows what it was given, and the most that ever waited in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.given: list[Request] = []
        self.most_waiting = 0

    def add(self, request: Request) -> None:
        self.given.append(request)
        super().add(request)
        self.most_waiting = max(self.most_waiting, self.num_waiting)

    @property
    def rows(self) -> list[int]:
        return [request.key.row for request in self.given]


def request(row: int, prompt: list[int], sampling: SamplingParams = GREEDY, **resume: list[int] | None) -> Request:
    """`resume` by "s0", "s1" ..."""
    kept = {int(name[1:]): None if ids is None else np.array(ids, np.int32) for name, ids in resume.items()}
    return Request(RowKey(0, row), np.array(prompt, np.int32), sampling, row, kept)


def run(one: Planner, *, more: bool = False) -> list[Completion]:
    done = []
    while one.has_work:
        done += one.step(more)
    return done


# -- neighbours --------------------------------------------------------------------------------------------------------


def test_prompts_that_share_blocks_stand_together_at_every_depth() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        size = int(rng.integers(1, 4))
        prompts = [
            rng.integers(0, 2, rng.integers(0, 10)).astype(np.int32)
            if rng.random() < 0.7
            else np.ones(int(rng.integers(0, 12)), np.int32)
            for _ in range(int(rng.integers(0, 30)))
        ]
        order = neighbours(prompts, size)
        assert sorted(order) == list(range(len(prompts)))
        for depth in range(1, 12 // size):
            shared = [prompts[i][: depth * size].tobytes() if len(prompts[i]) >= depth * size else i for i in order]
            groups = [(key, [order[j] for j, _ in found]) for key, found in groupby(enumerate(shared), lambda x: x[1])]
            assert len({key for key, _ in groups}) == len(groups), "a group is torn"
        tops = [prompts[i][:size].tobytes() if len(prompts[i]) >= size else i for i in order]
        firsts = [min(order[j] for j, _ in found) for _, found in groupby(enumerate(tops), lambda x: x[1])]
        assert firsts == sorted(firsts), "a group does not stand where its first member stood"


def test_what_all_prompts_share_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    template = list(range(100))
    prompts = [np.array([*template, row, *rng.integers(0, 9, 20)], np.int32) for row in rng.permutation(500)]
    assert neighbours(prompts, 16) == list(range(500))
    assert neighbours([prompt[100:] for prompt in prompts], 16) == list(range(500))


def test_documents_below_a_common_template() -> None:
    document = {name: [ord(name)] * 40 for name in "ab"}
    asked = ["a", "b", "c", "b", "a", "c"]
    prompts = [np.array([*range(32), *document.get(name, [200 + i] * 40), i], np.int32) for i, name in enumerate(asked)]
    assert neighbours(prompts, 16) == [0, 4, 1, 3, 2, 5]


def test_thousands_of_prompts_each_the_beginning_of_the_next() -> None:
    prompts = [np.zeros(length, np.int32) for length in range(3000, 0, -1)]
    assert sorted(neighbours(prompts, 4)) == list(range(3000))


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_longest_go_first_when_all_rows_are_known() -> None:
    engine = Engine(running=2)
    plan = Planner(engine)
    lengths = [3, 11, 7, 19, 2, 13, 5]
    for row, length in enumerate(lengths):
        plan.add(request(row, [row], replace(GREEDY, max_tokens=length, ignore_eos=True)))
    run(plan)
    assert [lengths[row] for row in engine.rows] == sorted(lengths, reverse=True)


def test_expected_work_is_learned_and_counts_what_is_done() -> None:
    long, short = [1] * 200, [1] * 20
    seen = [(200, 90, True), (20, 10, True)] * 100
    params = SamplingParams(max_tokens=100)
    by_chance = [request(row, long if row % 3 == 1 else short, params) for row in range(6)]
    assert [one.key.row for one in by_length(by_chance, seen, 1000)] == [1, 4, 0, 2, 3, 5]
    certain = replace(params, max_tokens=50, ignore_eos=True)
    stopped = replace(certain, stop_token_ids=(7,))
    rows = [
        request(0, short, certain),
        request(1, short, stopped),  # about 10
        request(2, short, certain, s0=[1] * 45),
        request(3, [1] * 980, replace(certain, max_tokens=None)),  # room for 20
        request(4, short, replace(certain, n=2), s0=[1] * 45),  # its other sample has begun nothing
        request(5, short, replace(certain, n=2), s0=[1] * 20, s1=None),
    ]
    assert [one.key.row for one in by_length(rows, seen, 1000)][:3] == [0, 4, 5]
    assert [one.key.row for one in by_length(rows, seen, 1000)][-1] == 2


def test_the_order_at_the_end_is_learned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are read before the first has ended: what is learned from the first ones orders the others."""
    engine = Engine(running=4, pace=100)
    plan = Planner(engine)
    answers = {row: 90 if row % 2 else 5 for row in range(200)}
    monkeypatch.setattr(
        FakeEngine, "answer", lambda self, one, sample: np.full(answers[one.key.row], 70, np.int32), raising=True
    )
    for row in range(200):
        plan.add(request(row, [row] * (300 if row % 2 else 20), SamplingParams(max_tokens=None)))
    run(plan)
    late = engine.rows[40:]
    assert all(row % 2 for row in late[:60]) and not any(row % 2 for row in late[100:])


@pytest.mark.parametrize("shares", [False, True])
def test_no_row_is_passed_over_for_long(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_WAITING", 50)
    engine = Engine(running=4)
    plan = Planner(engine)
    for row in range(1000):
        plan.add(request(row, [row % 3 if shares else row] * 8 + [row], SAMPLED))
        while plan.full:
            plan.step(more=True)
    assert engine.most_waiting <= 4
    run(plan, more=True)
    assert sorted(engine.rows) == list(range(1000))
    places = np.argsort(engine.rows)
    assert (places - np.arange(1000)).max() < 50
    assert (engine.rows == sorted(engine.rows)) is not shares


def test_questions_about_a_document_find_it_in_the_cache() -> None:
    """Each document is asked about once in every round, and the pool holds two of ten."""
    settings = EngineSettings(max_num_seqs=4, max_batch_tokens=64, num_blocks=40, block_size=4, max_model_len=128)
    documents = np.random.default_rng(0).integers(1, 9, (10, 64)).astype(np.int32)
    cached = {}
    for more in (None, True, False):
        engine, _ = make(settings)
        plan = Planner(engine)
        for row in range(50):
            prompt = np.append(documents[row % 10], row // 10).astype(np.int32)
            one = Request(RowKey(0, row), prompt, replace(GREEDY, max_tokens=3), row)
            (engine if more is None else plan).add(one)
        done = simulated_run(engine) if more is None else run(plan, more=more)
        assert len(done) == 50
        cached[more] = engine.stats().cached_tokens
    assert cached == {None: 0, True: 40 * 64, False: 40 * 64}


def test_without_a_prefix_cache_nobody_needs_neighbours() -> None:
    engine = Engine(running=1)
    engine.settings = replace(engine.settings, prefix_cache=False)
    plan = Planner(engine)
    for row in range(20):
        plan.add(request(row, [row % 2] * 8 + [row]))
    run(plan, more=True)
    assert engine.rows == list(range(20))


# -- equal samples -----------------------------------------------------------------------------------------------------

SAME = {"temperature": 1e-9, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "n": 2, "seed": 5, "include_stop": True}
OTHER = {"max_tokens": 21, "stop": ("x",), "stop_token_ids": (3,), "ignore_eos": True}


def test_every_parameter_is_known_to_matter_or_not() -> None:
    assert {field.name for field in fields(SamplingParams)} == SAME.keys() | OTHER.keys()


@pytest.mark.parametrize(("name", "value"), [*SAME.items(), *OTHER.items()])
@pytest.mark.parametrize("late", [False, True])
def test_what_makes_greedy_samples_equal(name: str, value: object, late: bool) -> None:
    engine = Engine()
    plan = Planner(engine)
    plan.add(request(0, [1, 2, 3]))
    done = run(plan) if late else []
    plan.add(request(1, [1, 2, 3], replace(GREEDY, **{name: value})))  # type: ignore[arg-type]
    done += run(plan)
    assert len(engine.given) == (1 if name in SAME else 2)
    assert len(done) == (3 if name == "n" else 2)
    assert plan.num_copied == len(done) - len(engine.given)


def test_equal_samples_run_once_and_each_gets_the_result() -> None:
    engine = Engine(running=3)
    plan = Planner(engine)
    prompts = [[row % 5, 9] for row in range(40)]
    for row, prompt in enumerate(prompts):
        plan.add(request(row, prompt, replace(GREEDY, n=1 + row % 3)))
    done = run(plan)
    assert len(engine.given) == 5 and plan.num_copied == len(done) - 5
    assert sorted((one.key.row, one.sample) for one in done) == [(r, s) for r in range(40) for s in range(1 + r % 3)]
    for one in done:
        prompt = np.array(prompts[one.key.row], np.int32)
        assert one.token_ids.tolist() == fake_tokens(prompt, 0, 20).tolist() and one.prompt_tokens == 2
    plan.add(request(40, [9], SAMPLED))
    plan.add(request(41, [9], SAMPLED))
    run(plan)
    assert len(engine.given) == 7, "rows with random draws are none of another's"


def test_without_dedupe_all_run() -> None:
    engine = Engine()
    plan = Planner(engine, dedupe=False)
    for row in range(3):
        plan.add(request(row, [1, 2], replace(GREEDY, n=2)))
    assert len(run(plan)) == 6 and len(engine.given) == 3 and plan.num_copied == 0


def test_tokens_of_an_earlier_start_are_kept_and_may_lead() -> None:
    engine = Engine(voice=3)
    plan = Planner(engine)
    mine, whole = [64, 65], fake_tokens(np.array([1, 2], np.int32), 0, 20)
    assert len(whole) > 4
    plan.add(request(0, [1, 2], replace(GREEDY, n=3), s1=mine, s2=None))  # its first sample follows its second
    plan.add(request(1, [1, 2], s0=[66, 67, 68]))
    plan.add(request(2, [1, 2]))
    plan.add(request(3, [1, 2], s0=[]))
    kept = {(one.key.row, one.sample): one.token_ids.tolist() for one in plan.snapshot()}
    assert kept == {(0, 1): mine, (1, 0): [66, 67, 68]}
    done = {(one.key.row, one.sample): one.token_ids.tolist() for one in run(plan)}
    assert done.keys() == {(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)}
    assert done[0, 1][:2] == mine and done[1, 0][:3] == [66, 67, 68]
    assert done[0, 0] == done[2, 0] == done[3, 0] and done[2, 0] in (done[0, 1], done[1, 0])
    assert [(one.key.row, [s for s in range(one.sampling.n) if one.resume.get(s, ()) is not None]) for one in
            sorted(engine.given, key=lambda one: one.key.row)] == [(0, [1]), (1, [0])]  # fmt: skip


class Failing(Engine):
    """Fails with `code` what it is given first, as often as `times`."""

    code, times = "nonfinite_logits", 1

    def step(self) -> list[Completion]:
        done = super().step()
        for index, one in enumerate(done):
            if self.times:
                self.times -= 1
                done[index] = replace(one, finish_reason="error", error=RowError(self.code, "why"))
        return done


@pytest.mark.parametrize("code", ["nonfinite_logits", "out_of_memory", "timeout"])
def test_only_errors_of_the_row_itself_are_shared(code: str) -> None:
    engine = Failing()
    engine.code, engine.times = code, 2
    plan = Planner(engine)
    for row in range(6):
        plan.add(request(row, [1, 2]))
    done = run(plan)
    plan.add(request(6, [1, 2]))
    done += run(plan)
    failed = [one.key.row for one in done if one.error is not None]
    assert sorted(one.key.row for one in done) == list(range(7))
    assert sorted(failed) == ([*range(7)] if code == "nonfinite_logits" else [0, 1])
    assert len(engine.given) == (1 if code == "nonfinite_logits" else 3)


def test_equal_rows_that_outgrow_the_pool_fail_together() -> None:
    engine = Failing()
    engine.code, engine.times = "out_of_memory", 3
    plan = Planner(engine)
    most = engine.settings.num_blocks * engine.settings.block_size
    for row in range(4):
        plan.add(request(row, [1] * most))
    done = run(plan)
    assert [one.error is not None for one in done] == [True] * 4 and len(engine.given) == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_REMEMBERED_BYTES", 20 * planner.REMEMBERED_BYTES)
    engine = Engine()
    plan = Planner(engine)
    for row in range(150):
        plan.add(request(row, [row]))
        plan.add(request(5000 + row, [7777]))  # always fresh in memory
        run(plan)
        assert plan._remembered_bytes <= planner.MAX_REMEMBERED_BYTES
        kept = plan._remembered.values()
        assert plan._remembered_bytes == sum(planner.REMEMBERED_BYTES + len(tokens) for tokens, *_ in kept)
    assert 10 < len(plan._remembered) <= 20 and len(engine.given) == 151
    assert not plan._running and not plan._followers
    plan.add(request(2000, [0]))
    run(plan)
    assert len(engine.given) == 152


def test_followers_and_waiting_samples_fill_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_WAITING", 10)
    monkeypatch.setattr(planner, "MAX_FOLLOWING", 20)
    plan = Planner(Engine())
    for row in range(20):
        plan.add(request(row, [1]))
        assert not plan.full
    plan.add(request(20, [1]))
    assert plan.full
    run(plan)
    assert not plan.full and plan._num_following == 0 and plan._num_waiting == 0
    plan.add(request(21, [2], replace(SAMPLED, n=10), s3=None))
    assert not plan.full
    plan.add(request(22, [3], SAMPLED))
    assert plan.full


def test_over_the_real_scheduler_every_sample_comes_out_as_if_it_ran_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks, preemptions, rows that fail, tokens of earlier starts, equal rows of every kind."""
    # What the simulated model answers depends on noise key and sample; greedy rows here have key 0 and draw nothing.
    drawn = simulated.answer
    monkeypatch.setattr(simulated, "answer", lambda history, key, sample: drawn(history, key, sample if key else 0))
    rng = np.random.default_rng(3)
    copied = 0
    for _ in range(40):
        settings = EngineSettings(
            max_num_seqs=int(rng.integers(1, 6)),
            max_batch_tokens=int(rng.integers(1, 24)),
            num_blocks=int(rng.integers(8, 24)),
            block_size=int(rng.choice([1, 2, 4])),
            max_model_len=int(rng.integers(8, 40)),
        )
        engine, _ = make(settings, depth=int(rng.integers(1, 3)))
        requests = []
        for row in range(30):
            n, temperature = int(rng.choice([1, 1, 2])), float(rng.choice([0.0, 0.0, 1.0]))
            params = SamplingParams(max_tokens=int(rng.choice([6, 12])), n=n, temperature=temperature)
            prompt = np.repeat(rng.integers(1, 4, int(rng.integers(0, 3))), 4).astype(np.int32)
            one = Request(RowKey(0, row), prompt, params, int(temperature > 0))
            sample = int(rng.integers(n))
            whole = expected(one, sample, settings)
            if whole is not None and rng.random() < 0.2 and whole.error is None:
                kept = whole.token_ids[: int(rng.integers(0, len(whole.token_ids) + 1))]
                one = replace(one, resume={sample: kept if rng.random() < 0.7 else None})
            requests.append(one)
        plan = Planner(engine)
        done: list[Completion] = []
        for one in requests:
            plan.add(one)
            if rng.random() < 0.3:
                done += plan.step(more=True)
        check(done + run(plan), requests, settings)
        copied += plan.num_copied
    assert copied > 100


# -- in a job ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("model") / "bytes")


def write_texts(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps({"key": f"k{i}", "text": text}) + b"\n" for i, text in enumerate(texts)))


def test_equal_prompts_of_all_shards_and_files_run_once(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in range(3):
        write_texts(tmp_path / f"in/{file}.jsonl", [f"text {i % 7}" for i in range(100)])
    a_job = job_of(tmp_path, tmp_path / "in", sampling__n=2)
    engine = Engine(running=2)
    summary = start(a_job, FakeModel(model_folder, engine))
    assert len(engine.given) == 7
    assert (
        summary["results"] == 600 and summary["copied"] == 593 and "593 results, from equal" in capsys.readouterr().err
    )
    found = results(a_job)
    assert len({row["text"] for row in found}) == 7 and len(found) == 600
    for row in found:
        assert row["text"] == next(one["text"] for one in found if one["input_text"] == row["input_text"])
    assert summary["output_tokens"] == sum(row["output_tokens"] for row in found) > engine.output_tokens


def test_a_real_model_answers_as_without_dedupe(tmp_path: Path) -> None:
    """Whatever shares steps with what."""
    model = Model(tmp_path)
    rng = np.random.default_rng(0)
    heads = [rng.integers(3, VOCAB, 20).tolist() for _ in range(3)]
    prompts = [heads[int(rng.integers(3))] + [3 + int(rng.integers(8))] for _ in range(60)]
    answers = []
    for dedupe in (False, True):
        plan = Planner(model.engine(max_num_seqs=4)[0], dedupe=dedupe)
        for row, prompt in enumerate(prompts):
            plan.add(request(row, prompt, SamplingParams(max_tokens=12, n=1 + row % 2)))
        answers.append({(one.key, one.sample): (one.token_ids.tolist(), one.finish_reason) for one in run(plan)})
        assert (plan.num_copied > 60) is dedupe
    assert answers[0] == answers[1]


def test_the_time_left_is_that_of_what_is_computed() -> None:
    """Half of the results are copies, and so will be those to come."""
    now = 0.0
    meter = Meter(exact_total=200, clock=lambda: now)
    for row in range(100):
        meter.finish_sample(Completion(RowKey(0, row), 0, np.zeros(10, np.int32), "stop", None, 10))
        meter.finish_row(None)
    meter.copied, now = 50, 10.0
    meter.tick(500, 500)
    assert meter.seconds_left() == pytest.approx(10.0)
