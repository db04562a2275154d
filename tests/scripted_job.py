"""A small job that drives the ledger as the real one does, and a witness of what it was promised."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq

from batchgen.errors import Interrupted, StorageError
from batchgen.io.sinks import ShardResults, build_part, result_schema
from batchgen.io.stores import Store
from batchgen.ledger import Ledger, Written
from batchgen.runfolder import SUCCESS, Counters, parse_part
from batchgen.runstatus import read_success
from batchgen.types import Completion, InFlight, RowError, RowKey, ShardRange

FILES = ((3, 2), (2,), ())  # rows of each shard of each input file
MORE_FILES = (*FILES, (2, 2))  # once the run was extended
SAMPLES = 2
FAILED_ROW = RowKey(0, 3)  # a row that fails when it is read
PACE = 4
OPEN_SHARDS = 2

Sample = tuple[RowKey, int]


def shards(file: int) -> list[ShardRange]:
    first, found = 0, []
    for shard, rows in enumerate(MORE_FILES[file]):
        found.append(ShardRange(file, shard, first, rows, first * 10, (first + rows) * 10))
        first += rows
    return found


def length(key: RowKey, sample: int) -> int:
    return 2 + (7 * key.row + 3 * key.file + 5 * sample) % 9


def inputs(count: int = len(FILES)) -> list[dict[str, Any]]:
    return [{"path": f"in/{i}.jsonl", "size": 10, "mtime": 1.0, "etag": None} for i in range(count)]


def counters(count: int = len(FILES)) -> dict[str, Any]:
    """What a run over this many files counts in the end, however often it was interrupted."""
    keys = [RowKey(file, row) for file in range(count) for row in range(sum(MORE_FILES[file]))]
    tokens = sum(length(key, sample) for key in keys for sample in range(SAMPLES) if key != FAILED_ROW)
    return {
        "rows": len(keys),
        "rows_failed": 1,
        "results": len(keys) * SAMPLES,
        "truncated": sum(key.row % 2 for key in keys),
        "prompt_tokens": sum(key.row + 1 for key in keys if key != FAILED_ROW),
        "output_tokens": tokens,
        "failed": {"invalid_row": SAMPLES},
        "finish_reasons": {"error": SAMPLES, "stop": (len(keys) - 1) * SAMPLES},
    }


def arguments(part_format: str = "parquet", **changed: Any) -> dict[str, Any]:
    """What `Ledger.open` is called with."""
    return {
        "spec": {"name": "scripted", "output": {"format": part_format}},
        "fingerprint": {"sampling": {"temperature": 0.0, "seed": 0}, "prompt": {"messages": [{"content": "a"}]}},
        "inputs": inputs(),
        "shape": {"format": part_format, "shard_rows": 4},
        "must_be_new": False,
        "info": {"version": "0.1.0", "device": "cpu"},
        "prove": lambda i: f"proof of {i}",
        "dead_after": 0.0,
    } | changed


def commit_part(ledger: Ledger, shard: ShardRange, data: bytes, counters: Counters) -> bool:
    """Write a part and count it: False where another worker's stands in its place."""
    return ledger.acknowledge(ledger.write_part(shard, data, counters))


def start(store: Store, **changed: Any) -> Ledger:
    return Ledger.open(store, **arguments(**changed))


def fresh_memory() -> Store:
    """A run folder in memory: a store, not a disk."""
    fsspec.filesystem("memory").store.clear()  # its listings pass over all that was ever written
    return Store("memory://run")


class Witness:
    """Outlives the job's starts and remembers what was acknowledged to them."""

    def __init__(self, part_format: str = "parquet") -> None:
        self.format = part_format
        self.num_files = len(FILES)
        self.saved: dict[Sample, tuple[bool, list[int]]] = {}  # (finished, token ids), as of the last checkpoint
        self.parts: dict[str, bytes] = {}

    def checkpointed(self, finished: list[Completion], in_flight: list[InFlight]) -> None:
        for flying in in_flight:
            self.saved[flying.key, flying.sample] = (False, flying.token_ids.tolist())
        for done in finished:
            self.saved[done.key, done.sample] = (True, done.token_ids.tolist())

    def restored(self, key: RowKey, sample: int, got: Completion | InFlight | None) -> None:
        finished, tokens = self.saved.get((key, sample), (False, []))
        have = [] if got is None else got.token_ids.tolist()
        assert have[: len(tokens)] == tokens, f"{key} {sample}: {tokens} was saved, {have} came back"
        assert not finished or (isinstance(got, Completion) and have == tokens)

    def look(self, store: Store) -> None:
        """Whatever happened: parts do not change, and a run that says it is complete is."""
        there = {name: store.read(name) for name in store.list() if parse_part(name, self.format)}
        for name, data in self.parts.items():
            assert there.get(name) == data, f"{name} changed"
        self.parts |= there
        if store.exists(SUCCESS):
            self.complete(store)

    def complete(self, store: Store) -> None:
        """Every row once, in order, and with the tokens that were saved at any time."""
        expected = [
            (RowKey(file, row), sample)
            for file in range(self.num_files)
            for row in range(sum(MORE_FILES[file]))
            for sample in range(SAMPLES)
        ]
        rows = [row for name in store.list() if parse_part(name, self.format) for row in self.rows(store.read(name))]
        keys = [(RowKey(*map(int, row["id"].split(":"))), row["sample"]) for row in rows]
        assert keys == expected
        for key, row in zip(keys, rows, strict=True):
            tokens = row["token_ids"]
            assert len(tokens) == (0 if key[0] == FAILED_ROW else length(*key))
            assert (row["error"] is None) == (key[0] != FAILED_ROW)
            saved = self.saved.get(key, (False, []))[1]
            assert tokens[: len(saved)] == saved, f"{key}: {saved} was saved, {tokens} was written"
            assert [token % 1000 for token in tokens] == list(range(len(tokens)))
        success = read_success(store)
        assert success is not None and success["counters"] == counters(self.num_files)
        assert sum(part["rows"] for part in success["parts"]) * SAMPLES == len(expected)
        assert all(part["bytes"] == store.size(part["name"]) for part in success["parts"])

    def rows(self, data: bytes) -> list[dict[str, Any]]:
        if self.format == "parquet":
            return pq.read_table(io.BytesIO(data)).to_pylist()
        return [json.loads(line) for line in data.splitlines()]


class Job:
    """One start. Every token carries slot and epoch that made it, so that a text stitched wrongly shows.

    As the real job does, it keeps only samples in memory that are in no piece.
    """

    def __init__(self, store: Store, witness: Witness, think: Callable[[], None] = lambda: None) -> None:
        self.store, self.witness, self.think = store, witness, think
        self.schema = result_schema(id_field=None, carried=[], token_ids=True)
        self.computed = 0
        self.zombie = False  # another start has taken over: nothing is promised to this one any more

    def run(self, **changed: Any) -> dict[str, Any]:
        given = arguments(self.witness.format, **changed)
        ledger = self.again(lambda: Ledger.open(self.store, **given))
        self.ledger, self.maker = ledger, given.get("slot", 0) * 100 + ledger.epoch
        waiting = []
        for file in range(len(given["inputs"])):
            done = ledger.done.get(file, {})
            waiting += [(shard, False) for shard in shards(file) if shard.shard not in done]
            if not waiting or waiting[-1][0].file != file:
                self.again(lambda file=file: ledger.commit_index(file, shards(file)))
            else:
                waiting[-1] = (waiting[-1][0], True)
        self.results: dict[Sample, Completion | None] = {}  # None: in a piece
        self.flying: dict[Sample, list[int]] = {}
        fresh: list[Completion] = []
        is_open: list[ShardRange] = []
        while waiting or is_open:
            while waiting and len(is_open) < OPEN_SHARDS:
                shard, last = waiting.pop(0)
                is_open.append(shard)
                self.read(shard, fresh)
                if last:
                    self.again(lambda shard=shard: ledger.commit_index(shard.file, shards(shard.file)))
            self.step(fresh)
            in_flight = [InFlight(key, n, np.array(ids, np.int32)) for (key, n), ids in self.flying.items() if ids]
            self.again(lambda flying=in_flight: ledger.checkpoint(flying))
            if not self.zombie:
                self.witness.checkpointed(fresh, in_flight)
            fresh.clear()
            self.results = dict.fromkeys(self.results)
            for shard in [shard for shard in is_open if self.is_complete(shard)]:
                is_open.remove(shard)
                names = ledger.pieces_of(shard)
                done = {sample: self.results.pop(sample) for sample in self.samples(shard)}
                ledger.acknowledge(
                    self.again(lambda shard=shard, done=done, names=names: self.write(shard, done, names))
                )
            self.again(ledger.heartbeat)
            self.think()
        summary = self.again(lambda: ledger.finish({"seconds": 1.5}))
        ledger.close()
        return summary

    def read(self, shard: ShardRange, fresh: list[Completion]) -> None:
        for key, sample in self.samples(shard):
            got = self.again(lambda key=key, sample=sample: self.ledger.take(key, sample))
            if not self.zombie:
                self.witness.restored(key, sample, got)
            if isinstance(got, Completion):
                self.results[key, sample] = got
            elif key == FAILED_ROW:
                error = RowError("invalid_row", "not a row \ud83d")
                self.finish(Completion(key, sample, np.empty(0, np.int32), "error", None, 0, error), fresh)
            else:
                self.flying[key, sample] = [] if got is None else got.token_ids.tolist()

    def step(self, fresh: list[Completion]) -> None:
        for (key, sample), ids in list(self.flying.items()):
            end = min(len(ids) + PACE, length(key, sample))
            self.computed += end - len(ids)
            ids += [self.maker * 1000 + i for i in range(len(ids), end)]
            if end == length(key, sample):
                del self.flying[key, sample]
                stop = (None, "END", 7)[key.row % 3]
                self.finish(Completion(key, sample, np.array(ids, np.int32), "stop", stop, key.row + 1), fresh)

    def finish(self, completion: Completion, fresh: list[Completion]) -> None:
        self.results[completion.key, completion.sample] = completion
        self.ledger.record(completion)
        fresh.append(completion)

    @staticmethod
    def samples(shard: ShardRange) -> list[Sample]:
        rows = range(shard.first_row, shard.first_row + shard.num_rows)
        return [(RowKey(shard.file, row), sample) for row in rows for sample in range(SAMPLES)]

    def is_complete(self, shard: ShardRange) -> bool:
        return all(sample in self.results for sample in self.samples(shard))

    def write(self, shard: ShardRange, memory: dict[Sample, Completion | None], names: list[str]) -> Written:
        try:
            saved = self.ledger.read_back(shard, names)
        except StorageError:
            standing = self.ledger.standing(shard)
            if standing is None:
                raise
            return standing
        done = [one or saved[key.row, sample] for (key, sample), one in memory.items()]
        texts = [f"text {one.key.row}" for one in done]
        rows = np.arange(shard.first_row, shard.first_row + shard.num_rows)
        results = ShardResults(shard, rows, np.full(len(rows), SAMPLES), [], done, texts, rows % 2 == 1)
        counters = results.counters()
        metadata = self.ledger.part_metadata(shard, counters)
        data = build_part(self.witness.format, self.schema, results, metadata)
        return self.ledger.write_part(shard, data, counters)

    @staticmethod
    def again(operation: Callable[[], Any]) -> Any:
        """An operation with the job's retries."""
        for attempt in range(3):
            try:
                return operation()
            except StorageError:
                if attempt == 2:
                    raise


def main() -> None:
    """A process to be killed: folder, format, seconds a step, slot, after how many seconds others are dead.

    Says that it runs, then works through the job, and says how that ended.
    """
    store, part_format, pause, slot, dead_after = Store(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:6])
    print("ready", flush=True)
    job = Job(store, Witness(part_format), lambda: (print("step", flush=True), time.sleep(pause))[1])
    job.zombie = True  # its witness saw no other start
    try:
        job.run(slot=int(slot), dead_after=dead_after)
    except Interrupted as error:
        print(error.reason, error, flush=True)
        sys.exit(75)
    print("done", flush=True)


if __name__ == "__main__":
    main()
