"""What a run counts while it goes: rows, tokens, failures, rates, and when it will end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from batchgen.types import Completion

ROWS_BEFORE_FORECAST = 20  # the first rows to end are the short ones


@dataclass(slots=True)
class Meter:
    """Counts of one start of a job, and of the starts before it where the run folder knows them.

    `prompt_tokens` and `output_tokens` are those of results; what is computed, `tick` is told.
    Rates are over the last `window` seconds, so that a job that changes its pace is judged by the pace it has now.
    """

    exact_total: int | None = None  # of rows, once all are read
    sizes: dict[int, int] = field(default_factory=dict)  # of the files to be read, in bytes
    rows_elsewhere: int = 0  # of files that need not be read any more
    rows_before: int = 0  # committed by earlier starts
    rows_failed_before: int = 0  # of these
    rows: int = 0  # finished by this start
    failed: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    copied: int = 0  # samples that were not computed, because an equal one was
    window: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _shares: dict[int, tuple[int, float]] = field(default_factory=dict)
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)  # (time, prompt tokens, output tokens)

    def __post_init__(self) -> None:
        self._samples.append((self.clock(), 0, 0))

    def finish_sample(self, completion: Completion) -> None:
        """Count one finished sample of a row."""
        self.finish_reasons[completion.finish_reason] += 1
        if completion.error is None:
            self.prompt_tokens += completion.prompt_tokens
            self.output_tokens += len(completion.token_ids)

    def finish_row(self, code: str | None) -> None:
        """Count one row whose samples are all finished; `code` is its error."""
        self.rows += 1
        if code is not None:
            self.failed[code] += 1

    @property
    def rows_done(self) -> int:
        return self.rows_before + self.rows

    def note_share(self, file: int, rows: int, share: float) -> None:
        """A file is read up to its row `rows`, which is this share of it."""
        if share > 0:
            self._shares[file] = (rows, share)

    @property
    def total_rows(self) -> int | None:
        """Exact, or estimated from the part that is read: files not begun count by their size. None before that."""
        if self.exact_total is not None:
            return self.exact_total
        rows = sum(seen / share for seen, share in self._shares.values())
        size = sum(self.sizes[file] for file in self._shares)
        return self.rows_elsewhere + round(rows * sum(self.sizes.values()) / size) if size else None

    def tick(self, computed_prompt_tokens: int, computed_output_tokens: int) -> None:
        """Note the engine's running totals of computed tokens; call about once a second."""
        now = self.clock()
        self._samples.append((now, computed_prompt_tokens, computed_output_tokens))
        while len(self._samples) > 2 and now - self._samples[0][0] > self.window:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt and output tokens per second over the window."""
        (start, prompt_then, output_then), (end, prompt_now, output_now) = self._samples[0], self._samples[-1]
        seconds = max(end - start, 1e-9)
        return (prompt_now - prompt_then) / seconds, (output_now - output_then) / seconds

    def seconds_left(self) -> float | None:
        """Time to the end: rows left, at the mean length of rows finished here, at the present pace; as many of them
        as till now are copies."""
        rows_ok = self.rows - sum(self.failed.values())
        if self.total_rows is None or rows_ok < ROWS_BEFORE_FORECAST:
            return None
        rate = sum(self.rates())
        if rate <= 0:
            return None
        computed = 1 - self.copied / sum(self.finish_reasons.values())
        tokens_per_row = computed * (self.prompt_tokens + self.output_tokens) / rows_ok
        return max(self.total_rows - self.rows_done, 0) * tokens_per_row / rate
