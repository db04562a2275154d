"""The KV curve against the same sum made row by row and step by step."""

from __future__ import annotations

import numpy as np
import pytest

from batchgen.engine.curve import KVCurve
from batchgen.engine.forecast import LengthForecast

LONGEST = 2000


def highest_free(curve: KVCurve, *sample: int, certain: bool) -> int:
    """The least free tokens with which this sample is let in."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        kept = curve._tokens
        fits = curve.admit(*sample, certain, middle)  # type: ignore[call-arg, misc]
        curve._tokens = kept
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


@pytest.mark.parametrize("longest_left", [7, 100, 1500])
def test_certain_ends_are_summed_exactly_near_by_and_from_above_far_ahead(longest_left: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        count = int(rng.integers(2, 60))
        room, own = rng.integers(0, longest_left, count), rng.integers(1, 500, count)
        curve = KVCurve(LengthForecast(LONGEST), LONGEST)
        running = np.zeros(count - 1, np.int32), room[:-1].astype(np.int32), own[:-1], np.ones(count - 1, np.bool_)
        curve.start(*running)
        need = highest_free(curve, 0, int(room[-1]), int(own[-1]), certain=True)
        held = [(own + step)[room >= step].sum() for step in range(longest_left)]
        assert max(held) - held[0] <= need
        assert need <= max(held) - held[0] + (0.15 * max(held) if longest_left > 8 else 0)


@pytest.mark.parametrize("room", [3, 100, 520, 1500])
def test_certain_ends_that_fall_together_are_summed_exactly(room: int) -> None:
    curve = KVCurve(LengthForecast(LONGEST), LONGEST)
    curve.start(np.zeros(9, np.int32), np.full(9, room, np.int32), np.full(9, 40), np.ones(9, np.bool_))
    assert highest_free(curve, 0, room, 40, certain=True) == 10 * room


def test_open_ends_count_by_their_chance_with_some_doubt() -> None:
    forecast = LengthForecast(LONGEST)
    for length in np.random.default_rng(0).integers(1, 401, 4000).tolist():
        forecast.learn(10, length)
    curve = KVCurve(forecast, LONGEST)
    curve.learn(np.zeros(0, np.int32))
    count = 400
    produced = np.arange(count, dtype=np.int32)
    curve.start(produced, np.full(count, 900, np.int32), np.full(count, 100), np.zeros(count, np.bool_))
    for index in (7, 12, 16):
        step = int(curve._ahead[index])
        expected = sum((100 + step) * max(0, 400 - p - step) / (400 - p) for p in produced.tolist())
        assert expected < curve._tokens[index] < 1.2 * expected
    assert curve.admit(0, 900, 100, False, 100 * count)
    assert not curve.admit(0, 900, 100, True, 100)
