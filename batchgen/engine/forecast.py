"""How many tokens a sample will still give, learned from the job's own samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MEAN_UNTIL_KNOWN = 256  # expected output tokens before samples have shown anything else
OCTAVE = 16  # bins for each doubling of the length
PRIOR = 1.0  # weight of what is assumed beforehand, in samples seen in each bin
MEMORY = 8192  # finished samples after which older ones count half
SOME = 16  # finished samples of a prompt length that weigh as much as all other samples together


def geometric(top: int, per_octave: int) -> npt.NDArray[np.int64]:
    """0, 1, 2, ... and from 2 * `per_octave` on that many numbers for each doubling; the last one is `top` or more."""
    numbers = list(range(2 * per_octave))
    while numbers[-1] < top:
        step = 1 << max(0, (numbers[-1] // per_octave).bit_length() - 1)
        numbers.append(numbers[-1] + step)
    return np.array(numbers)


class LengthForecast:
    """Output lengths, learned from the job's own finished samples.

    Keeps, for each bin of output lengths, how many samples came to it and how many of these ended there. Samples that
    still run, or were cut off by their limit, count as far as they came; without them the first samples to finish,
    which are the short ones, would make all look short. Nothing is assumed to end before half of
    `MEAN_UNTIL_KNOWN`; from there on, where nothing was seen, samples are expected to end as often as they did on the
    way there from half that length, or, where that is unknown too, to last as long again as they have.
    """

    def __init__(self, longest: int) -> None:
        self.edges = geometric(longest, OCTAVE)  # (num_bins + 1,) output tokens
        num_bins = len(self.edges) - 1
        self._bin_of = np.repeat(np.arange(num_bins), np.diff(self.edges))  # tokens -> bin
        self._stopped = np.zeros(num_bins)  # samples that ended by themselves, by their last token
        self._cut = np.zeros((2, num_bins))  # samples cut off by their limit, and their tokens within the last bin
        self._running = np.zeros((2, num_bins))  # the same for those that run
        self._by_octave = np.zeros((64, 2))  # for each octave of prompt lengths: samples, output tokens
        self._num_learned = 0.0
        self._num_in_table = -1.0
        self._rate = np.zeros(num_bins)  # of ending, for each token
        self._hazard = np.zeros(num_bins + 1)  # (num_bins + 1,) the rate summed up to the edges
        self._mean_left = np.zeros(num_bins + 1)  # (num_bins + 1,) expected tokens to come, at the edges

    def learn(self, num_prompt: int, num_output: int, *, stopped: bool = True) -> None:
        """A sample that ended; `stopped` is false where its limit ended it."""
        last = self._bin_of[min(max(num_output - 1, 0), len(self._bin_of) - 1)]
        if stopped:
            self._stopped[last] += 1
        else:
            self._cut[0, last] += 1
            self._cut[1, last] += num_output - self.edges[last]
        octave = self._by_octave[num_prompt.bit_length()]
        octave[0] += 1
        octave[1] += num_output
        self._num_learned += 1
        if self._num_learned >= MEMORY:
            self._stopped /= 2
            self._cut /= 2
            self._by_octave /= 2
            self._num_learned /= 2
            self._num_in_table = -1.0

    def watch(self, produced: npt.NDArray[np.integer]) -> None:
        """What the samples that run now have given without ending."""
        bins = self._bins(produced)
        num_bins = len(self._stopped)
        self._running[0] = np.bincount(bins, minlength=num_bins)
        self._running[1] = np.bincount(bins, produced - self.edges[bins], minlength=num_bins)
        self._num_in_table = -1.0

    def expected(self, num_prompt: int, room: int) -> float:
        """Output tokens of a sample that has not started and may give `room`.

        Where prompts of about this length gave more or less than others, so is it expected of this one.
        """
        mean = float(self.remaining(np.zeros(1, np.int64), np.array([room]))[0])
        count, tokens = self._by_octave[num_prompt.bit_length()]
        all_count, all_tokens = self._by_octave.sum(0)
        if all_tokens:
            overall = all_tokens / all_count
            mean *= (tokens + SOME * overall) / (count + SOME) / overall
        return min(mean, float(room))

    def remaining(self, produced: npt.NDArray[np.integer], room: npt.NDArray[np.integer]) -> FloatArray:
        """(num_rows,) tokens that samples are expected to give still, after `produced`, where they may give `room`."""
        self._refresh()
        expected: FloatArray = self._left(produced) - self.survival(produced, room) * self._left(produced + room)
        return np.clip(expected, 0.0, room)

    def survival(self, produced: npt.NDArray[Any], more: npt.NDArray[np.integer]) -> FloatArray:
        """The chance that a sample gives `more` tokens and goes on, after `produced`; the shapes broadcast."""
        self._refresh()
        before = np.interp(produced, self.edges, self._hazard)
        chance: FloatArray = np.exp(before - np.interp(produced + more, self.edges, self._hazard))
        return chance

    def _left(self, produced: npt.NDArray[np.integer]) -> FloatArray:
        """(num_rows,) tokens expected still, without a limit: what comes within the bin, then what comes after it."""
        bins = self._bins(produced)
        widths = np.maximum(self.edges[bins + 1] - produced, 0)
        ended = -np.expm1(-self._rate[bins] * widths)
        left: FloatArray = ended / self._rate[bins] + (1 - ended) * self._mean_left[bins + 1]
        return left

    def _bins(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        return self._bin_of[np.clip(tokens, 0, len(self._bin_of) - 1)]

    def _refresh(self) -> None:
        """Make the tables anew when a sixteenth more is known."""
        if self._num_in_table >= 0 and self._num_learned <= self._num_in_table * 17 / 16:
            return
        self._num_in_table = self._num_learned
        starts, widths = self.edges[:-1], np.diff(self.edges)
        cut, within = self._cut + self._running
        last = cut + self._stopped
        came = last.sum() - np.cumsum(last) + self._stopped + within / widths  # samples, those cut off as a part
        seen = np.cumsum(came * widths)  # tokens given
        ends = np.cumsum(self._stopped)
        seen[OCTAVE:] -= seen[:-OCTAVE].copy()
        ends[OCTAVE:] -= ends[:-OCTAVE].copy()
        unseen = np.where(starts >= MEAN_UNTIL_KNOWN // 2, 2.0 / np.maximum(starts, 2), 0.0)  # ends for each token
        assumed = unseen * (ends + 1) / (unseen * seen + 1)  # where little was seen, go on as in the octave before
        assumed = -np.expm1(-np.minimum(assumed, 1.0) * widths)
        ended = (self._stopped + PRIOR * assumed) / (came + PRIOR)
        self._rate = np.maximum(-np.log1p(-ended) / widths, 1e-9)
        np.cumsum(self._rate * widths, out=self._hazard[1:])
        inside = -np.expm1(-self._rate * widths) / self._rate  # tokens expected within the bin
        left = self._mean_left
        left[-1] = self.edges[-1] / 2
        for index in range(len(widths) - 1, -1, -1):
            left[index] = inside[index] + (1 - ended[index]) * left[index + 1]
