"""Puts finished samples back in input order and turns full shards into parts, detokenised in bulk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from batchgen.feeder import RowBatch
from batchgen.io.sinks import ShardResults
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, RowKey, ShardRange


@dataclass(slots=True)
class OpenShard:
    """A shard whose rows are still arriving or running."""

    samples_per_row: int
    batches: list[RowBatch] = field(default_factory=list)
    results: dict[tuple[int, int], Completion] = field(default_factory=dict)  # by (row, sample)
    rows: int = 0

    @property
    def end(self) -> ShardRange | None:
        """Where the shard ends; None while rows of it are still to come."""
        return self.batches[-1].end

    @property
    def cut_off(self) -> bool:
        """A row limit ended it early: its rows are kept for a later start, it is no shard of the whole input."""
        return self.batches[-1].cut_off

    @property
    def complete(self) -> bool:
        return self.end is not None and len(self.results) == self.rows * self.samples_per_row

    def finish(self, completion: Completion) -> bool:
        """Keep one sample's end. True where it is the last one of its row."""
        row = completion.key.row
        self.results[row, completion.sample] = completion
        return all((row, sample) in self.results for sample in range(self.samples_per_row))

    def error_of(self, row: int) -> str | None:
        """The error code of a finished row; None when all its samples are fine."""
        errors = (self.results[row, sample].error for sample in range(self.samples_per_row))
        return next((error.code for error in errors if error is not None), None)

    def in_order(self) -> Iterator[Completion]:
        for batch in self.batches:
            for row in range(batch.first_row, batch.first_row + batch.num_rows):
                for sample in range(self.samples_per_row):
                    yield self.results[row, sample]


class Collector:
    """All open shards. Its size is bounded by the caller, who reads no further when too much is open."""

    def __init__(self, samples_per_row: int) -> None:
        self._samples = samples_per_row
        self._open: dict[tuple[int, int], OpenShard] = {}
        self._shard_of: dict[RowKey, OpenShard] = {}  # unfinished rows
        self.read_rows = 0  # in open shards
        self.read_tokens = 0  # of their prompts

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_rows(self) -> int:
        """Rows that have been read and are not finished."""
        return len(self._shard_of)

    def add(self, batch: RowBatch) -> None:
        """Take rows that have just been read; each of their samples is to be finished after this."""
        shard = self._open.setdefault((batch.file, batch.shard), OpenShard(self._samples))
        shard.batches.append(batch)
        shard.rows += batch.num_rows
        self.read_rows += batch.num_rows
        self.read_tokens += len(batch.token_ids)
        for row in range(batch.first_row, batch.first_row + batch.num_rows):
            self._shard_of[RowKey(batch.file, row)] = shard

    def finish(self, completion: Completion) -> tuple[bool, str | None]:
        """Keep one sample's end: (whether it is the last one of its row, the row's error code)."""
        shard = self._shard_of[completion.key]
        if not shard.finish(completion):
            return False, None
        del self._shard_of[completion.key]
        return True, shard.error_of(completion.key.row)

    def pop_complete(self) -> list[OpenShard]:
        """Shards of which every sample is finished, taken out."""
        ready = [key for key, shard in self._open.items() if shard.complete]
        shards = [self._open.pop(key) for key in ready]
        self.read_rows -= sum(shard.rows for shard in shards)
        self.read_tokens -= sum(len(batch.token_ids) for shard in shards for batch in shard.batches)
        return shards


def results_of(shard: OpenShard, tokenizer: Tokenizer, *, include_stop: bool, skip_special: bool) -> ShardResults:
    """A complete shard's result rows, ready for a sink."""
    assert shard.end is not None
    completions = list(shard.in_order())
    return ShardResults(
        shard=shard.end,
        samples=shard.samples_per_row,
        inputs=[batch.carried for batch in shard.batches if batch.num_rows],
        completions=completions,
        texts=texts(completions, tokenizer, include_stop=include_stop, skip_special=skip_special),
        truncated=np.concatenate([batch.truncated for batch in shard.batches]),
    )


def texts(completions: list[Completion], tokenizer: Tokenizer, *, include_stop: bool, skip_special: bool) -> list[str]:
    """The completions' texts: without the token that stopped them, cut before (or after) a stop string."""
    kept = []
    for completion in completions:
        by_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        kept.append(completion.token_ids[:-1] if by_token and not include_stop else completion.token_ids)
    decoded = tokenizer.decode_batch(kept, skip_special_tokens=skip_special)
    return [
        _cut(text, completion.stop_reason, include_stop) if isinstance(completion.stop_reason, str) else text
        for text, completion in zip(decoded, completions, strict=True)
    ]


def _cut(text: str, stop: str, include_stop: bool) -> str:
    at = text.find(stop)
    if at < 0:  # bytes that are no character by themselves can decode differently in the whole text
        return text
    return text[: at + len(stop)] if include_stop else text[:at]
