"""The KV tokens that running samples will hold in the steps ahead: what admission decides by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchgen.engine.forecast import LengthForecast, geometric
from batchgen.engine.step import IntArray

PER_OCTAVE = 4  # of steps ahead, and of tokens produced: the next 8 steps are exact
DEVIATIONS = 1.0  # standard deviations above what is expected that must fit too: samples end when they like


class KVCurve:
    """Expected KV tokens at some moments ahead, if nobody else is let in. Each sample grows by a token a step until it
    ends: at its limit where that is certain, otherwise with the chances of `forecast`.

    Samples of one kind (about as many tokens produced, about as many to go at most) are counted together, so that the
    cost for a thousand of them is that of a few array operations. The last kind is of those whose end is certain.
    """

    def __init__(self, forecast: LengthForecast, longest: int) -> None:
        self._forecast = forecast
        self._ahead = geometric(longest, PER_OCTAVE)  # (num_moments,) steps from now
        self._kind_of = np.repeat(np.arange(len(self._ahead) - 1), np.diff(self._ahead))  # tokens produced -> kind
        self._last_of = np.searchsorted(self._ahead, np.arange(longest + 1))  # tokens to go -> last moment it may see
        self._alive = np.ones((len(self._ahead), len(self._ahead)))  # (num_kinds, num_moments) chance to run then
        self._most = self._ahead.astype(float)  # (num_kinds,) tokens that one may be expected to grow by
        self._tokens = np.zeros(len(self._ahead))  # (num_moments,) what may well be held then

    def learn(self, produced: IntArray) -> None:
        """Take over what the forecast knows; `produced` are the output tokens of the samples whose end is open."""
        self._forecast.watch(produced)
        middles = (self._ahead[:-1] + self._ahead[1:] - 1) / 2
        self._alive[:-1] = self._forecast.survival(middles[:, None], self._ahead[None, :])
        self._most = (self._alive * self._ahead).max(1)

    def start(self, produced: IntArray, room: IntArray, own: IntArray, certain: npt.NDArray[np.bool_]) -> None:
        """The curve of these samples: output tokens, tokens to go at most, KV tokens they hold alone, whether they
        are certain to go that far; all (num_rows,)."""
        num_moments = len(self._ahead)
        kinds = np.where(certain, num_moments - 1, self._kind_of[produced])
        cells = kinds * num_moments + self._last_of[room]
        shape = (num_moments, num_moments)
        held = np.bincount(cells, own, minlength=num_moments**2).reshape(shape)
        count = np.bincount(cells, minlength=num_moments**2).reshape(shape)
        grown = np.bincount(cells, room, minlength=num_moments**2).reshape(shape) - count * self._ahead
        held = held[:, ::-1].cumsum(1)[:, ::-1]  # of samples that may see this moment
        count = count[:, ::-1].cumsum(1)[:, ::-1]
        tokens = (held + count * self._ahead + grown) * self._alive  # those that end by then have grown by their room
        variance = (tokens * tokens * (1 / np.maximum(self._alive, 1e-9) - 1) / np.maximum(count, 1)).sum(0)
        self._tokens = tokens.sum(0) + DEVIATIONS * np.sqrt(variance)

    @property
    def peak(self) -> float:
        """Tokens that may well be held at most."""
        return float(self._tokens.max())

    def most(self, produced: int, room: int, own: int, certain: bool) -> float:
        """Tokens, from above, by which a sample raises the peak."""
        return own + (room if certain else min(room, self._most.item(self._kind_of.item(produced))))

    def admit(self, produced: int, room: int, own: int, certain: bool, free: float) -> bool:
        """Whether what is held rises by no more than `free` tokens with this sample; then it is part of the curve."""
        seen = self._last_of[room] + 1
        tokens = self._tokens.copy()
        kind = -1 if certain else self._kind_of[produced]
        tokens[:seen] += (np.minimum(self._ahead[:seen], room) + own) * self._alive[kind, :seen]
        if tokens.max() - tokens[0] > free:
            return False
        self._tokens = tokens
        return True
