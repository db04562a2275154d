"""What stands in a run folder: many parts read quickly, proofs in few records, damaged and vanished things."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from faulty import FaultyStore, fails_before
from scripted_job import Job, Witness, commit_part, counters, shards, start

from batchgen import ledger as ledgers
from batchgen import pieces
from batchgen.errors import StorageError
from batchgen.io.sinks import ShardResults, build_part, result_schema
from batchgen.io.stores import Store
from batchgen.runfolder import INDEX, PROOFS, SUCCESS, encode, index_name, part_name, piece_folder
from batchgen.runstatus import peek, read_success
from batchgen.types import Completion, InFlight, RowKey, ShardRange

FORMATS = ["parquet", "jsonl"]


pytestmark = pytest.mark.usefixtures("every_heartbeat")


def part_of(ledger, shard, part_format, text="t"):
    rows = range(shard.first_row, shard.first_row + shard.num_rows)
    completions = [Completion(RowKey(shard.file, row), 0, np.array([row], np.int32), "stop", None, 2) for row in rows]
    made = ShardResults(
        shard, np.array(rows), np.ones(len(rows), int), [], completions, [text] * len(rows), np.zeros(len(rows), bool)
    )
    schema = result_schema(id_field=None, carried=[], token_ids=True)
    return build_part(part_format, schema, made, ledger.part_metadata(shard, made.counters())), made.counters()


def commit(ledger, shard, part_format, text="t"):
    return commit_part(ledger, shard, *part_of(ledger, shard, part_format, text))


class CountingStore(Store):
    """Knows how many requests were made, and how many at most at the same time."""

    def __init__(self, url, seconds):
        super().__init__(url)
        self.seconds, self.now, self.most, self.made = seconds, 0, 0, []
        self.lock = threading.Lock()

    def _request(self, name, operation):
        with self.lock:
            self.made.append(name)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        try:
            return operation()
        finally:
            with self.lock:
                self.now -= 1

    def read(self, name):
        return self._request(name, lambda: Store.read(self, name))

    def open(self, name):
        return self._request(name, lambda: Store.open(self, name))

    def size(self, name):
        return self._request(name, lambda: Store.size(self, name))


@pytest.mark.parametrize("part_format", FORMATS)
def test_many_parts_are_read_many_at_a_time(tmp_path, part_format):
    """On a store every request waits; not more of them than files may be open."""
    store = Store(str(tmp_path))
    ledger = start(store, part_format=part_format)
    many = [ShardRange(0, number, number, 1, number * 10, number * 10 + 10) for number in range(200)]
    for shard in many:
        commit(ledger, shard, part_format)
    ledger.commit_index(0, many)
    ledger.close()
    slow = CountingStore(str(tmp_path), 0.005)
    again = start(slow, part_format=part_format)
    assert again.is_done(0) and again.totals().rows == 200
    assert 20 <= slow.most <= 64 and len(slow.made) <= 200 + 30
    records = [name for name in slow.made if not name.startswith("part-")]
    assert len(records) <= 30


def test_a_checkpoint_is_one_object_and_keeps_the_proofs_too(memory):
    """A JSONL part's proof rides in the next piece; all of them get a record at the end of the start."""
    ledger = start(memory, part_format="jsonl")
    many = [ShardRange(0, number, number, 1, number * 10, number * 10 + 10) for number in range(200)]
    slow, before = RowKey(0, 999), len(memory.list())
    for number, shard in enumerate(many):
        commit(ledger, shard, "jsonl")
        assert ledger.checkpoint([InFlight(slow, 0, np.arange(number + 1, dtype=np.int32))])
        assert len(memory.list()) <= before + (number + 1) + (pieces.MANY_PIECES + 1)  # parts, pieces that count
    made = int(max(memory.list(piece_folder(0))).split("-")[1])
    assert made == 200 and memory.list(PROOFS) == []
    again = start(memory, part_format="jsonl")  # after a kill
    assert again.totals() == ledger.totals() and again.done == ledger.done
    again.close()
    (name,) = memory.list(PROOFS)
    assert len(json.loads(memory.read(name))["proofs"]) == 200
    third = start(memory, part_format="jsonl")
    assert third.totals() == ledger.totals() and third.done == ledger.done
    third.checkpoint([])
    third.close()
    assert memory.list(PROOFS) == [name]  # nothing new, nothing written
    assert len(memory.list(piece_folder(0))) <= pieces.MANY_PIECES + 1  # for the slow row


def test_proofs_without_a_piece_to_ride_in_are_one_record_a_checkpoint(memory, monkeypatch):
    ledger = start(memory, part_format="jsonl")
    many = [ShardRange(0, number, number, 1, number * 10, number * 10 + 10) for number in range(30)]
    for number, shard in enumerate(many):
        commit(ledger, shard, "jsonl")
        if number % 10 == 9:
            assert not ledger.checkpoint([])
    assert len(memory.list(PROOFS)) == 3 and memory.list(piece_folder(0)) == []
    monkeypatch.setattr(ledgers, "MANY_PROOFS", 4)
    for shard in [ShardRange(1, number, number, 1, 0, 0) for number in range(4)]:
        commit(ledger, shard, "jsonl")
    ledger.checkpoint([InFlight(RowKey(0, 999), 0, np.arange(3, dtype=np.int32))])
    assert len(memory.list(PROOFS)) == 4 and start(memory, part_format="jsonl").totals().rows == 34


def test_a_failed_checkpoint_keeps_its_proofs_for_the_next(memory):
    ledger = start(store := FaultyStore(memory.url, 10**6, fails_before, ("write",)), part_format="jsonl")
    commit(ledger, shards(0)[0], "jsonl")
    store.at = store.count + 1
    in_flight = [InFlight(RowKey(0, 4), 0, np.arange(3, dtype=np.int32))]
    with pytest.raises(StorageError):
        ledger.checkpoint(in_flight)
    ledger.checkpoint(in_flight)
    assert start(memory, part_format="jsonl").totals().rows == 3


def test_a_part_that_is_gone_is_computed_anew_and_not_judged_by_its_old_proof(memory, caplog):
    """The new part differs in size, and a kill comes before its own proof is written down."""
    shard, name = shards(0)[0], part_name(0, 0, "jsonl")
    ledger = start(memory, part_format="jsonl")
    commit(ledger, shard, "jsonl")
    ledger.close()
    memory.delete(name)
    again = start(memory, part_format="jsonl")
    assert f"1 parts are gone that were committed, first memory://run/{name}" in caplog.text
    assert again.done == {} and again.totals().rows == 0
    commit(again, shard, "jsonl", text="a longer text than before")
    third = start(memory, part_format="jsonl")
    assert third.done == {0: {0: None}}
    third.commit_index(0, shards(0))
    third.close()
    fourth = start(memory, part_format="jsonl")
    assert fourth.done == {0: {0: shard}} and fourth.totals().rows == 3
    memory.replace(name, memory.read(name)[:-5])
    with pytest.raises(StorageError, match=f"{name}: this part is corrupt: it has"):
        start(memory, part_format="jsonl")


@pytest.mark.parametrize("part_format", FORMATS)
@pytest.mark.parametrize(
    "damage", [b"", b'{"file": 0', b"[]", {"shards": [[1, 2]]}, {"shards": [["a", 1, 2, 3]]}, {"digest": "other"}]
)
def test_a_damaged_index_is_made_again_from_the_file(memory, part_format, damage, caplog):
    Job(memory, witness := Witness(part_format)).run()
    name, whole = index_name(0), memory.read(index_name(0))
    for finished in (True, False):
        if not finished:
            memory.delete(SUCCESS)
        memory.replace(name, damage if isinstance(damage, bytes) else encode(json.loads(whole) | damage))
        status = peek(memory)
        assert status.state == ("finished" if finished else "stopped")
    assert status.shards_total is None and status.shards_done == 3
    ledger = start(memory, part_format=part_format)
    assert not ledger.is_done(0) and ledger.is_done(1)
    ledger.close()
    assert ("damaged" in caplog.text) == (damage != {"digest": "other"})
    Job(memory, witness).run()
    witness.look(memory)
    assert memory.read(name) == whole


@pytest.mark.parametrize("part_format", FORMATS)
def test_everything_but_parts_and_job_can_be_lost(memory, part_format):
    """Counters, too, are those of a run that nothing happened to."""
    Job(memory, witness := Witness(part_format)).run()
    witness.look(memory)
    for name in memory.list("_batchgen"):
        if not name.endswith("job.json"):
            memory.delete(name)
    memory.delete(SUCCESS)
    assert peek(memory).state == "stopped"
    Job(memory, witness).run()
    witness.look(memory)
    assert read_success(memory)["counters"] == counters()
    assert memory.list(INDEX) == [index_name(file) for file in range(3)]


def test_status_knows_the_tokens_of_parts_before_their_proofs_are_written_down(memory):
    ledger = start(memory, part_format="jsonl")
    commit(ledger, shards(0)[0], "jsonl")
    assert memory.list(PROOFS) == [] and peek(memory).prompt_tokens == 0
    ledger.show_progress(rows_done=4, rows_failed=1)
    ledger.heartbeat()
    status = peek(memory)
    assert (status.rows_done, status.rows_failed, status.prompt_tokens, status.output_tokens) == (4, 1, 6, 3)
