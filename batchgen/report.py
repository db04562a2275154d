"""What a person sees of a run: a live line or plain log lines while it goes, a short table when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

from batchgen.metrics import Meter

WORTH_TELLING = 0.05, 1.0  # idle time: a share of the loop's time, and seconds


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42s, 3m05s, 2h07m."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Shows a Meter: one tqdm line on a terminal, a plain line every `interval` seconds elsewhere."""

    def __init__(self, meter: Meter, *, stream: TextIO | None = None, interval: float = 10.0) -> None:
        self._meter = meter
        self._stream = stream or sys.stderr
        self._interval = interval
        self._next = time.monotonic() + min(interval, 2.0)
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=meter.total_rows,
                initial=meter.rows_done,
                unit="row",
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows {postfix}",
            )

    def update(self, kv_share: float, running: int) -> None:
        """Draw the present state; cheap to call often. `kv_share` is the used share of KV blocks, 0 to 1."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (1.0 if self._bar is not None else self._interval)
        text = self._text(kv_share, running)
        if self._bar is None:
            about = "~" if self._meter.exact_total is None else ""
            total = "?" if self._meter.total_rows is None else f"{about}{self._meter.total_rows:,}"
            print(f"{self._meter.rows_done:,}/{total} rows{text}", file=self._stream, flush=True)
            return
        self._bar.total = self._meter.total_rows
        self._bar.n = self._meter.rows_done
        self._bar.set_postfix_str(text.removeprefix(", "))

    def _text(self, kv_share: float, running: int) -> str:
        prompt, output = self._meter.rates()
        parts = [f"{prompt:,.0f} tok/s in", f"{output:,.0f} tok/s out", f"{running} running", f"KV {kv_share:.0%}"]
        if failed := sum(self._meter.failed.values()):
            parts.append(f"{failed:,} failed")
        if (left := self._meter.seconds_left()) is not None:
            about = "about " if self._meter.exact_total is None else ""
            parts.append(f"{about}{duration(left)} left")
        return ", " + ", ".join(parts)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def table(summary: Mapping[str, Any]) -> str:
    """The end of a run as a few aligned lines."""
    failed: Mapping[str, int] = summary["failed"]
    rows = [
        ("rows", f"{summary['rows']:,}"),
        ("ok", f"{summary['rows'] - summary['rows_failed']:,}"),
        *([("results", f"{summary['results']:,}")] if summary["results"] != summary["rows"] else []),
        *((f"failed: {code}", f"{count:,}") for code, count in sorted(failed.items())),
        *((f"finish: {reason}", f"{count:,}") for reason, count in sorted(summary["finish_reasons"].items())),
        ("prompt tokens", f"{summary['prompt_tokens']:,}"),
        ("output tokens", f"{summary['output_tokens']:,}"),
    ]
    if summary.get("copied"):
        rows.append(("copied", f"{summary['copied']:,} results, from equal prompts that were run once"))
    if "seconds" in summary:
        rows.append(("time", duration(summary["seconds"])))
    if summary.get("tokens_per_second"):
        rows.append(("tokens/s", f"{summary['tokens_per_second']:,.0f} in and out, once loaded"))
    idle = summary.get("waiting_share", 0.0)
    if idle >= WORTH_TELLING[0] and idle * summary["seconds"] >= WORTH_TELLING[1]:
        rows.append(("idle", f"{idle:.0%} of the time: reading and encoding the input was slower than the model"))
    rows.append(("output", summary["output"]))
    if "trial" in summary:
        rows.append(("to look at", summary["trial"]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
