"""Puts finished samples back in input order and turns full shards into parts, detokenised in bulk.

Memory is bounded in bytes. What an open shard holds can be dropped: finished samples are read back from pieces, carried
columns from the input. So a shard that waits long for one row costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import StorageError
from batchgen.feeder import RowBatch
from batchgen.io.sinks import ShardResults
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, RowKey, SamplingParams, ShardRange

SAMPLE_BYTES = 400  # what a finished sample takes beside its tokens, roughly

Sample = tuple[int, int]  # row, sample


@dataclass(slots=True)
class OpenShard:
    """A shard whose rows are still arriving or running."""

    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)  # by batch, as are the four below
    samples: list[npt.NDArray[np.int64]] = field(default_factory=list)  # of each row
    keeps_stop: list[npt.NDArray[np.bool_]] = field(default_factory=list)  # whether their texts keep what stopped them
    truncated: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    carried: list[pa.RecordBatch] | None = field(default_factory=list)  # None: dropped
    results: dict[Sample, Completion] = field(default_factory=dict)  # without dropped ones
    unfinished: dict[int, list[int]] = field(default_factory=dict)  # row: samples to come, prompt tokens
    errors: dict[int, str] = field(default_factory=dict)  # the first error code of an unfinished row
    end: ShardRange | None = None  # None while rows of it are still to come
    cut_off: bool = False  # a row limit ended it early: its rows are for a later start, it is no shard of the input
    size: int = 0  # bytes in memory, roughly

    @property
    def complete(self) -> bool:
        return self.end is not None and not self.unfinished

    @property
    def dropped(self) -> bool:
        return self.carried is None

    def keys(self) -> list[Sample]:
        """Its samples in order."""
        rows, samples = np.concatenate(self.rows).tolist(), np.concatenate(self.samples).tolist()
        return [(row, sample) for row, count in zip(rows, samples, strict=True) for sample in range(count)]


class Collector:
    """All open shards. Its size is bounded by the caller, who has some dropped, or reads no further."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params  # of rows that bring none of their own
        self._open: dict[tuple[int, int], OpenShard] = {}
        self._shard_of: dict[RowKey, OpenShard] = {}  # unfinished rows
        self.size = 0  # bytes of open shards, roughly
        self.open_tokens = 0  # of unfinished rows' prompts

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_rows(self) -> int:
        """Rows that have been read and are not finished."""
        return len(self._shard_of)

    def add(self, batch: RowBatch) -> None:
        """Take rows that have just been read; each of their samples is to be finished after this."""
        shard = self._open.setdefault((batch.file, batch.shard), OpenShard())
        params = batch.params or [self._params] * batch.num_rows
        count = [one.n for one in params]
        shard.rows.append(batch.rows)
        shard.samples.append(np.array(count, np.int64))
        shard.keeps_stop.append(np.array([one.include_stop for one in params], np.bool_))
        shard.truncated.append(batch.truncated)
        if batch.num_rows and shard.carried is not None:
            shard.carried.append(batch.carried)
            self._grow(shard, batch.carried.nbytes)
        shard.end, shard.cut_off = batch.end, batch.cut_off
        for row, samples, tokens in zip(batch.rows.tolist(), count, np.diff(batch.offsets).tolist(), strict=True):
            shard.unfinished[row] = [samples, tokens]
            self._shard_of[RowKey(batch.file, row)] = shard
        self.open_tokens += len(batch.token_ids)

    def finish(self, completion: Completion) -> tuple[bool, str | None]:
        """Keep one sample's end: (whether it is the last one of its row, the row's error code)."""
        key = completion.key
        shard = self._shard_of[key]
        shard.results[key.row, completion.sample] = completion
        self._grow(shard, SAMPLE_BYTES + completion.token_ids.nbytes)
        if completion.error is not None:
            shard.errors.setdefault(key.row, completion.error.code)
        left = shard.unfinished[key.row]
        left[0] -= 1
        if left[0]:
            return False, None
        self.open_tokens -= left[1]
        del shard.unfinished[key.row], self._shard_of[key]
        return True, shard.errors.pop(key.row, None)

    def _grow(self, shard: OpenShard, size: int) -> None:
        shard.size += size
        self.size += size

    def pop_complete(self) -> OpenShard | None:
        """A shard of which every sample is finished, taken out."""
        key = next((key for key, shard in self._open.items() if shard.complete), None)
        if key is None:
            return None
        shard = self._open.pop(key)
        self.size -= shard.size
        return shard

    def drop(self, size: int) -> None:
        """Free memory until `size` bytes are left, as far as that goes; what is finished has to be in pieces.

        Shards that are complete leave soon by themselves.
        """
        shards = [shard for shard in self._open.values() if not shard.complete]
        for shard in sorted(shards, key=lambda shard: -shard.size):
            if self.size <= size:
                return
            self.size -= shard.size
            shard.carried, shard.results, shard.size = None, {}, 0

    @property
    def droppable(self) -> int:
        """Bytes that `drop` could free."""
        return sum(shard.size for shard in self._open.values() if not shard.complete)


def results_of(
    shard: OpenShard,
    tokenizer: Tokenizer,
    *,
    skip_special: bool,
    saved: Mapping[Sample, Completion],
    carried: Sequence[pa.RecordBatch],
) -> ShardResults:
    """A complete shard's result rows, ready for a sink; `saved` and `carried` are what was dropped of it."""
    assert shard.end is not None
    keys = shard.keys()
    if missing := [key for key in keys if key not in shard.results and key not in saved]:
        raise StorageError(
            f"samples of {shard.end} that were saved in pieces cannot be read back, the first of row {missing[0][0]}: "
            "somebody deleted or damaged pieces of this run while it ran; run again"
        )
    samples = np.concatenate(shard.samples)
    keeps_stop = np.repeat(np.concatenate(shard.keeps_stop), samples).tolist()
    completions = [shard.results[key] if key in shard.results else saved[key] for key in keys]
    return ShardResults(
        shard=shard.end,
        rows=np.concatenate(shard.rows),
        samples=samples,
        inputs=carried if shard.carried is None else shard.carried,
        completions=completions,
        texts=texts(completions, tokenizer, keeps_stop=keeps_stop, skip_special=skip_special),
        truncated=np.concatenate(shard.truncated),
    )


def texts(
    completions: Sequence[Completion], tokenizer: Tokenizer, *, keeps_stop: Sequence[bool], skip_special: bool
) -> list[str]:
    """The completions' texts: without the token that stopped them, cut before a stop string (or kept up to its end)."""
    kept = []
    for completion, keeps in zip(completions, keeps_stop, strict=True):
        by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        kept.append(completion.token_ids[:-1] if by_token and not keeps else completion.token_ids)
    decoded = tokenizer.decode_batch(kept, skip_special_tokens=skip_special, answers=True)
    return [
        _cut(text, completion.stop_reason, keeps) if isinstance(completion.stop_reason, str) else text
        for text, completion, keeps in zip(decoded, completions, keeps_stop, strict=True)
    ]


def _cut(text: str, stop: str, include_stop: bool) -> str:
    at = text.find(stop)
    if at < 0:  # bytes that are no character by themselves can decode differently in the whole text
        return text
    return text[: at + len(stop)] if include_stop else text[:at]
