"""What is expected of a sample, against what its like really gave."""

from __future__ import annotations

import numpy as np
import pytest

from batchgen.engine.forecast import MEAN_UNTIL_KNOWN, MEMORY, LengthForecast, geometric

ANY = 100_000


def learned(lengths: list[int], **kinds: bool) -> LengthForecast:
    forecast = LengthForecast(8192)
    for length in lengths:
        forecast.learn(100, length, **kinds)
    return forecast


def left(forecast: LengthForecast, *produced: int, room: int = ANY) -> list[float]:
    return forecast.remaining(np.array(produced), np.full(len(produced), room)).tolist()


def test_bins_grow_with_what_they_hold() -> None:
    edges = geometric(1000, 8)
    assert edges[:17].tolist() == list(range(17)) and edges[-1] >= 1000
    assert (np.diff(edges)[16:] / edges[16:-1] <= 1 / 8).all()
    assert geometric(1, 8).tolist() == list(range(16))


def test_nothing_known() -> None:
    at_start, later, much_later = left(LengthForecast(8192), 0, 100, 1000)
    assert at_start == pytest.approx(MEAN_UNTIL_KNOWN, rel=0.1)
    assert later == pytest.approx(at_start - 100)
    assert much_later > 500
    assert left(LengthForecast(8192), 0, room=20) == [20]


@pytest.mark.parametrize("draw", ["uniform", "long tail", "two kinds"])
def test_what_is_left_follows_from_what_was_given(draw: str) -> None:
    rng = np.random.default_rng(0)
    lengths = {
        "uniform": rng.integers(100, 1025, 4000),
        "long tail": np.clip((rng.pareto(1.2, 4000) + 1) * 16, 8, 4000).astype(int),
        "two kinds": np.where(rng.random(4000) < 0.5, 10, 300),
    }[draw]
    forecast = learned(lengths.tolist())
    for produced in (0, 8, 50, 250, 700):
        longer = lengths[lengths > produced]
        if len(longer) > 30:
            for room in (40, ANY):
                truth = np.minimum(longer - produced, room).mean()
                assert left(forecast, produced, room=room)[0] == pytest.approx(truth, rel=0.1, abs=1.5 + produced / 16)
    (chance,) = forecast.survival(np.array([50]), np.array([100]))
    assert chance == pytest.approx((lengths > 150).sum() / (lengths > 50).sum(), abs=0.03)


def test_the_first_to_finish_do_not_make_all_look_short() -> None:
    forecast = learned([100] * 16)
    assert left(forecast, 0)[0] < 130
    forecast.watch(np.full(400, 100))
    assert left(forecast, 0)[0] > 200


def test_nobody_ends_much_sooner_just_because_nobody_has_come_further() -> None:
    forecast = learned([150] * 10)
    forecast.watch(np.repeat([50, 150, 200], 200))
    (chance,) = forecast.survival(np.array([200]), np.array([50]))
    assert chance > 0.9  # of 410 at 150 tokens, 10 have ended there and none since
    (chance,) = forecast.survival(np.array([200]), np.array([1000]))
    assert chance < 0.1


def test_a_limit_tells_nothing_of_what_lies_beyond() -> None:
    forecast = learned([64] * 500, stopped=False)
    assert left(forecast, 0, room=64) == [pytest.approx(64, rel=0.05)]
    assert left(forecast, 0)[0] > 200


def test_prompt_lengths_that_tell_the_output() -> None:
    forecast = LengthForecast(8192)
    for _ in range(200):
        forecast.learn(100, 10)
        forecast.learn(1000, 100)
    assert forecast.expected(110, ANY) < 20
    assert forecast.expected(900, ANY) > 80
    assert forecast.expected(900, 30) <= 30
    assert forecast.expected(10, ANY) == pytest.approx(55, rel=0.1)


def test_older_samples_fade() -> None:
    forecast = learned([20] * MEMORY + [200] * 3 * MEMORY)
    assert left(forecast, 0)[0] > 150
