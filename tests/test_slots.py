"""Several workers on one run folder: slots, taking over from the dead, and what one that stood still can do."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import scripted_job
from faulty import Died, FaultyStore, dies_after, fails_before
from scripted_job import (
    MORE_FILES,
    SAMPLES,
    Job,
    Witness,
    commit_part,
    counters,
    fresh_memory,
    shards,
    start,
)

from batchgen import lease as leases
from batchgen.errors import ConfigError, Interrupted, StorageError
from batchgen.io.sinks import ShardResults, build_part, result_schema
from batchgen.io.stores import Store
from batchgen.runfolder import (
    SUCCESS,
    encode,
    epoch_name,
    lease_name,
    parse_part,
    part_name,
    piece_folder,
    proofs_name,
)
from batchgen.runstatus import overwrite, peek, read_success
from batchgen.types import Completion, InFlight, RowKey

ROOT = Path(__file__).parent.parent
FORMATS = ["parquet", "jsonl"]


pytestmark = pytest.mark.usefixtures("every_heartbeat")


def ids(*numbers):
    return np.array(numbers, np.int32)


def flying(row, *numbers):
    return InFlight(RowKey(0, row), 0, ids(*numbers))


def done(row, *numbers):
    return Completion(RowKey(0, row), 0, ids(*numbers), "stop", None, 9)


def part_of(ledger, shard, text="t", part_format="parquet"):
    rows = range(shard.first_row, shard.first_row + shard.num_rows)
    completions = [Completion(RowKey(shard.file, row), 0, ids(row), "stop", None, 2) for row in rows]
    made = ShardResults(
        shard, np.array(rows), np.ones(len(rows), int), [], completions, [text] * len(rows), np.zeros(len(rows), bool)
    )
    schema = result_schema(id_field=None, carried=[], token_ids=True)
    return build_part(part_format, schema, made, ledger.part_metadata(shard, made.counters())), made.counters()


# -- standing still anywhere -------------------------------------------------------------------------------------------


def stands_still(part_format, meanwhile, store_class=FaultyStore):
    """For every n: a worker stops at its n-th operation (as by SIGSTOP), `meanwhile` happens, it goes on.

    Yields what is left: the store, the witness, and how the worker ended (None: well).
    """
    for at in range(1, 1000):
        witness = Witness(part_format)

        def stop(store, operation, witness=witness):
            store.job.zombie = True
            meanwhile(Store(store.url), witness)
            return operation()

        store = store_class(fresh_memory().url, at, stop, ("write", "read"))
        store.job = Job(store, witness)
        ended = None
        try:
            store.job.run()
        except Interrupted as error:
            ended = error
        if store.count < at:
            assert at > 50
            return
        yield Store(store.url), witness, ended


def finishes(slot=0):
    def run(store, witness):
        Job(store, witness).run(slot=slot)
        witness.look(store)

    return run


def dies_on_its_way(write, slot=0):
    def run(store, witness):
        with contextlib.suppress(Died):
            Job(FaultyStore(store.url, write, dies_after, ("write",)), witness).run(slot=slot)
        witness.look(store)
        if slot:  # what it saved is for starts after its death; the other worker was never told of it and lives
            witness.saved.clear()

    return run


@pytest.mark.parametrize(
    ("part_format", "meanwhile"),
    [("jsonl", finishes()), ("parquet", dies_on_its_way(7)), ("jsonl", dies_on_its_way(14))],
)
def test_a_superseded_worker_changes_nothing_wherever_it_stopped(part_format, meanwhile):
    """A third start finds what the second was promised, whatever the first one still wrote."""
    fenced = 0
    for store, witness, ended in stands_still(part_format, meanwhile):
        if ended is not None:
            assert ended.reason == "fenced"
            assert f"taken over by process {os.getpid()} on " in str(ended) and "at work since 20" in str(ended)
            fenced += 1
        witness.look(store)
        if ended is not None:  # else it stopped before it had the slot: its own start was the later one
            Job(store, witness).run()
        witness.look(store)
        assert peek(store).state == "finished"
    assert fenced > 20


@pytest.mark.parametrize(
    ("part_format", "meanwhile"),
    [("parquet", finishes(1)), ("jsonl", dies_on_its_way(8, 1)), ("parquet", dies_on_its_way(16, 1))],
)
def test_a_worker_whose_shards_were_taken_over_by_another_slot_goes_on(part_format, meanwhile):
    for store, witness, ended in stands_still(part_format, meanwhile):
        assert ended is None
        witness.look(store)
        assert peek(store).state == "finished"
        before = {name: store.read(name) for name in store.list()}
        Job(store, witness).run(slot=2)
        assert all(store.read(name) == data for name, data in before.items() if parse_part(name, part_format))
        assert store.read(SUCCESS) == before[SUCCESS]


class LeaseOnlyStore(FaultyStore):
    """Looks whether a name is free, then writes: what a generic store does. It may stop between the two."""

    def create(self, name, data):
        if Store.exists(self, name):
            return False
        self._meet("write", lambda: Store.replace(self, name, data))
        return True


def test_without_atomic_creation_every_row_is_still_there_once():
    """There a worker that stood still may put its valid rows over those of the one that followed it."""
    part_format = "jsonl"
    for store, witness, _ended in stands_still(part_format, finishes(), LeaseOnlyStore):
        names = [name for name in store.list() if parse_part(name, part_format)]
        rows = [(row["id"], row["sample"]) for name in names for row in witness.rows(store.read(name))]
        keys = [(file, row) for file in range(witness.num_files) for row in range(sum(MORE_FILES[file]))]
        assert rows == [(f"{file}:{row}", sample) for file, row in keys for sample in range(SAMPLES)]
        summary = Job(store, Witness(part_format)).run()
        assert summary["counters"] == counters() and read_success(store) is not None


def test_stopped_and_continued_as_the_system_does_it(tmp_path):
    """Two real processes on one slot of a local folder."""
    store = Store(str(tmp_path / "run"))
    with work(store, pause=0.02) as first:
        assert [first.stdout.readline() for _ in range(2)] == ["ready\n", "step\n"]
        first.send_signal(signal.SIGSTOP)
        with work(store, pause=0.02) as second:
            assert second.stdout.read().endswith("done\n")
        before = {name: store.read(name) for name in store.list()}
        first.send_signal(signal.SIGCONT)
        said = first.stdout.read()
        assert first.wait() == 75 and f"fenced this run was taken over by process {second.pid} on " in said
    assert {name: store.read(name) for name in store.list()} == before


def work(store, *, pause, slot=0, dead_after=0.0):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, scripted_job.__file__, store.url, "jsonl", str(pause), str(slot), str(dead_after)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_two_slots_killed_again_and_again(tmp_path):
    store, chance, witness = Store(str(tmp_path / "run")), random.Random(1), Witness("jsonl")
    for starts in range(100):
        with work(store, pause=0.05, slot=0) as first, work(store, pause=0.05, slot=1) as second:
            for process in (first, second):
                for _ in range(chance.randint(1, 2)):  # ready, then a line for each step
                    process.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.05))
            for process in (first, second):
                process.send_signal(signal.SIGKILL)
        witness.look(store)
        if store.exists(SUCCESS):
            assert starts > 0
            return
    raise AssertionError("it never ended")


# -- what a worker that stood still wakes up to ------------------------------------------------------------------------


def test_of_a_run_that_was_deleted_and_begun_anew_nothing_is_touched(memory, monkeypatch):
    """Numbers of epochs begin at 1 again, so that nothing but the attempt tells two starts apart."""
    first = start(memory, part_format="jsonl")
    first.record(done(0, 1))
    first.checkpoint([flying(1, 1)])
    shard = shards(0)[0]
    data, counted = part_of(first, shard, part_format="jsonl")
    first.acknowledge(first.write_part(shard, data, counted))
    overwrite(memory, dead_after=0.0)
    other = {"part_format": "jsonl", "fingerprint": {"another": "job"}}
    second = start(memory, **other)
    second.checkpoint([flying(3, 5)])
    kept = {name: memory.read(name) for name in memory.list()}
    for operation in (lambda: first.checkpoint([flying(3, 1, 2)]), lambda: first.write_part(shard, data, counted)):
        with pytest.raises(Interrupted, match="taken over by process") as caught:
            operation()
        assert caught.value.reason == "fenced"
    monkeypatch.setattr(leases.Lease, "check", lambda self: None)  # it stopped right after it had asked
    first.checkpoint([flying(3, 1, 2)])
    first.commit_index(1, shards(1))
    first.close()
    monkeypatch.undo()
    assert all(memory.read(name) == data for name, data in kept.items() if name != lease_name(0))
    second.heartbeat()
    second.commit_index(1, shards(1)[:0])  # another input
    assert memory.exists(proofs_name(1, 0, 1))
    second.close()
    third = start(memory, **other)
    assert third.done == {} and third.take(RowKey(0, 3), 0).token_ids.tolist() == [5]
    assert third.take(RowKey(0, 0), 0) is None and third.is_done(1)


def test_a_success_of_another_run_or_of_fewer_files_counts_for_nothing(memory, caplog):
    Job(memory, witness := Witness()).run()
    whole = json.loads(memory.read(SUCCESS))
    for stale in ({"digest": "0" * 64}, {"lists": 0}):
        memory.replace(SUCCESS, encode(whole | stale))
        assert read_success(memory) is None and peek(memory).state == "stopped"
        assert "of an earlier state of this run" in caplog.text
        caplog.clear()
        Job(memory, witness).run()
        witness.look(memory)
        assert read_success(memory)["digest"] == whole["digest"]


def test_a_success_of_parts_that_were_made_anew_since_is_replaced(memory):
    Job(memory, Witness()).run()
    whole = json.loads(memory.read(SUCCESS))
    sizes = [part | {"bytes": 1} for part in whole["parts"]]
    for stale in ({"parts": sizes}, {"counters": whole["counters"] | {"rows_failed": 5}}):
        memory.replace(SUCCESS, encode(whole | stale))
        ledger = start(memory)
        assert ledger.finish({})["parts"] == whole["parts"]
        ledger.close()
        assert {name: read_success(memory)[name] for name in stale} == {name: whole[name] for name in stale}


def test_an_end_that_was_overruled_is_not_read(memory):
    """A superseded worker saves a sample as finished after its successor went on with it: the successor's counts."""
    first = start(memory)
    first.checkpoint([flying(0, 1, 2), flying(1, 1)])
    first.record(done(1, 1, 2))
    second = start(memory)
    assert second.take(RowKey(0, 0), 0).token_ids.tolist() == [1, 2]
    second.checkpoint([flying(0, 1, 2, 30)])
    first.record(done(0, 1, 2, 3, 4))
    first._lease.check = lambda: None
    first.checkpoint([flying(2, 9, 9)])
    third = start(memory)
    got = third.take(RowKey(0, 0), 0)
    assert isinstance(got, InFlight) and got.token_ids.tolist() == [1, 2, 30]
    assert isinstance(third.take(RowKey(0, 1), 0), Completion)  # the successor knew no better


# -- whether a worker lives --------------------------------------------------------------------------------------------


def lease_of(store, slot=0):
    return json.loads(store.read(lease_name(slot)))


def elsewhere(store, slot):
    """Make the slot's worker one of another machine."""
    for name in (lease_name(slot), epoch_name(slot, 1)):
        store.replace(name, encode(json.loads(store.read(name)) | {"machine": "other", "host": f"far{slot}"}))


def test_a_living_worker_keeps_its_slot_and_leaves_others_free(memory):
    first = start(memory, slot=3)
    begin = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        start(memory, slot=3, dead_after=30.0)
    assert caught.value.reason == "locked"
    second = start(memory, slot=0, dead_after=30.0)
    assert time.monotonic() - begin < 5 and second.epoch == 1
    first.heartbeat()
    second.heartbeat()
    with pytest.raises(Interrupted, match="is at work on this run"):
        overwrite(memory)
    second.close()
    assert peek(memory).state == "running"
    first.close()
    assert peek(memory).state == "stopped"


def test_workers_of_other_machines_are_watched_at_the_same_time(memory):
    for slot in (1, 2, 3):
        start(memory, slot=slot)
        elsewhere(memory, slot)
    begin = time.monotonic()
    start(memory, slot=0, dead_after=1.0)
    assert 0.9 < time.monotonic() - begin < 2.5


def test_a_locked_slot_is_said_before_other_slots_are_watched(memory):
    start(memory, slot=1)
    elsewhere(memory, 1)
    start(memory, slot=0)
    begin = time.monotonic()
    with pytest.raises(Interrupted, match="is at work on this run"):
        start(memory, slot=0, dead_after=20.0)
    assert time.monotonic() - begin < 5


def test_a_slow_clock_elsewhere_does_not_matter(memory):
    """A living worker whose time of day is a year behind, and a dead one whose is a year ahead."""
    start(memory, slot=1)
    start(memory, slot=2)
    for slot, day in ((1, "2025-01-01T00:00:00+00:00"), (2, "2099-01-01T00:00:00+00:00")):
        elsewhere(memory, slot)
        memory.replace(lease_name(slot), encode(lease_of(memory, slot) | {"time": day, "monotonic": 0.0}))
    watch = leases.Watch(memory, [1, 2], 0.5)
    memory.replace(lease_name(1), encode(lease_of(memory, 1) | {"counter": 99}))
    assert watch.lives(1) and not watch.lives(2)


def test_a_lease_that_an_older_worker_wrote_over_does_not_make_a_living_one_look_dead(memory, monkeypatch):
    """Until the next heartbeat its epoch's record is all there is, and says only when it began."""
    first = start(memory)
    older = lease_of(memory)
    second = start(memory)
    record = json.loads(memory.read(epoch_name(0, 2)))
    memory.replace(epoch_name(0, 2), encode(record | {"monotonic": time.monotonic() - 3600}))
    memory.replace(lease_name(0), encode(older | {"counter": 50}))
    naps = []

    def nap(seconds):
        naps.append(seconds)
        second.heartbeat()

    monkeypatch.setattr(time, "sleep", nap)
    with pytest.raises(Interrupted, match="is at work on this run"):
        start(memory, dead_after=30.0)
    assert naps
    with pytest.raises(Interrupted, match="taken over"):
        first.heartbeat()


def test_a_lease_that_cannot_be_written_locks_nobody_out(memory, caplog):
    def only_leases(store, operation):
        store.at += 1
        return operation()

    store = FaultyStore(memory.url, 1, only_leases, ("write",))
    store.replace = lambda name, data: fails_before(store, None)
    ledger = start(store)
    assert "the heartbeat could not be written" in caplog.text and not memory.exists(lease_name(0))
    del store.replace
    ledger.heartbeat()
    ledger.close()
    assert start(memory, dead_after=30.0).epoch == 2


@pytest.mark.parametrize("damage", [b"", b'{"epoch": 1}', b"[]"])
def test_damaged_records_of_a_worker(memory, damage, caplog):
    ledger = start(memory)
    memory.replace(lease_name(0), damage)
    with pytest.raises(Interrupted, match="is at work on this run"):  # its epoch's record stands for the lease
        start(memory, dead_after=30.0)
    assert "damaged" in caplog.text
    ledger.heartbeat()
    memory.replace(epoch_name(0, 1), damage)
    with pytest.raises(Interrupted, match="is at work on this run"):
        start(memory, dead_after=30.0)
    memory.replace(lease_name(0), damage)
    begin = time.monotonic()
    assert start(memory, dead_after=0.5).epoch == 2  # nothing is known of it: watched as one of another machine
    assert time.monotonic() - begin >= 0.4
    with pytest.raises(Interrupted, match="taken over"):
        ledger.heartbeat()


# -- slots -------------------------------------------------------------------------------------------------------------


def test_a_dead_slot_is_taken_over_and_a_living_one_left_alone(memory):
    dead, living = start(memory, slot=1), start(memory, slot=2)
    dead.record(done(0, 1, 2))
    dead.checkpoint([flying(1, 7, 8, 9)])
    dead.close()
    living.record(done(3, 5))
    living.checkpoint([])
    ledger = start(memory, slot=0, dead_after=30.0)
    ended, begun = ledger.take(RowKey(0, 0), 0), ledger.take(RowKey(0, 1), 0)
    assert isinstance(ended, Completion) and ended.token_ids.tolist() == [1, 2]
    assert isinstance(begun, InFlight) and begun.token_ids.tolist() == [7, 8, 9]
    assert ledger.take(RowKey(0, 3), 0) is None
    assert ledger.pieces_of(shards(0)[0]) == [] and ledger.pending_bytes > 0
    ledger.checkpoint([flying(1, 7, 8, 9, 10)])
    assert len(ledger.pieces_of(shards(0)[0])) == 1 and len(memory.list(piece_folder(1))) == 1
    for name in memory.list(piece_folder(1)):
        memory.delete(name)  # what was taken over stands on its own now
    again = start(memory, slot=0)
    assert again.take(RowKey(0, 0), 0).token_ids.tolist() == [1, 2]
    assert again.take(RowKey(0, 1), 0).token_ids.tolist() == [7, 8, 9, 10]


def test_pieces_of_a_dead_slot_go_when_all_their_rows_are_in_parts(memory):
    dead = start(memory, slot=1)
    dead.record(done(0, 1))
    dead.checkpoint([])
    dead.checkpoint([flying(1, 1), flying(4, 1)])
    dead.close()
    ledger = start(memory)
    assert len(memory.list(piece_folder(1))) == 2
    shard = shards(0)[0]
    data, counted = part_of(ledger, shard)
    commit_part(ledger, shard, data, counted)
    ledger.checkpoint([])
    assert len(memory.list(piece_folder(1))) == 1


def test_the_longest_in_flight_counts_of_several_slots(memory):
    for slot, tokens in ((1, (1, 2)), (2, (5, 6, 7)), (3, (9,))):
        ledger = start(memory, slot=slot, dead_after=30.0)
        ledger.checkpoint([flying(0, *tokens)])
    for slot in (1, 2, 3):
        memory.replace(lease_name(slot), encode(lease_of(memory, slot) | {"released": True}))
    ledger = start(memory, slot=1)
    assert ledger.take(RowKey(0, 0), 0).token_ids.tolist() == [5, 6, 7]
    ledger.checkpoint([flying(0, 5, 6, 7)])  # its own slot had other tokens
    memory.delete(memory.list(piece_folder(2))[0])
    assert start(memory, slot=1).take(RowKey(0, 0), 0).token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("part_format", FORMATS)
def test_whoever_has_all_parts_finishes_once(memory, part_format):
    first = start(memory, part_format=part_format, slot=0, dead_after=30.0)
    second = start(memory, part_format=part_format, slot=1, dead_after=30.0)
    ledgers = [first, second]
    for i, shard in enumerate([*shards(0), *shards(1)]):
        data, counted = part_of(ledgers[i % 2], shard, part_format=part_format)
        assert commit_part(ledgers[i % 2], shard, data, counted)
    first.commit_index(0, shards(0))
    second.commit_index(1, shards(1))
    second.commit_index(2, [])
    summary = first.finish({})
    assert summary["counters"]["rows"] == 7 == second.finish({})["counters"]["rows"]
    assert second.finish({}) == summary == read_success(memory)
    first.close()
    second.close()
    assert peek(memory).state == "finished" and memory.list("_batchgen/pieces") == []


def test_one_part_at_the_same_time_from_two_slots(memory):
    """Both create it beside their main threads; each acknowledges the one that stands."""
    shard = shards(0)[0]
    ledgers = [start(memory, slot=slot, dead_after=30.0) for slot in (0, 1)]
    made = [part_of(ledger, shard, text) for ledger, text in zip(ledgers, ("a", "another"), strict=True)]
    barrier, written = threading.Barrier(2), [None, None]

    def write(i):
        barrier.wait()
        written[i] = ledgers[i].write_part(shard, *made[i])

    threads = [threading.Thread(target=write, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for i in (0, 1):
        ledgers[i].record(done(4, i))
        ledgers[i].checkpoint([flying(3, i)])
        ledgers[i].heartbeat()
    for thread in threads:
        thread.join()
    assert sorted(one.ours for one in written) == [False, True] and written[0].proof == written[1].proof
    winner = next(i for i in (0, 1) if written[i].ours)
    assert memory.read(part_name(0, 0, "parquet")) == made[winner][0]
    assert [ledger.acknowledge(one) for ledger, one in zip(ledgers, written, strict=True)] == [
        one.ours for one in written
    ]
    assert ledgers[0].totals() == ledgers[1].totals() and ledgers[0].totals().rows == 3


def test_what_is_written_is_counted_only_when_it_is_acknowledged(memory):
    ledger, shard = start(memory), shards(0)[0]
    ledger.record(done(0, 1))
    data, counted = part_of(ledger, shard)
    written = ledger.write_part(shard, data, counted)
    assert written.ours and ledger.totals().rows == 0 and ledger.done == {} and ledger.pending_bytes > 0
    assert ledger.standing(shard) is not None and ledger.standing(shards(0)[1]) is None
    assert ledger.acknowledge(written) and ledger.acknowledge(written)
    assert ledger.totals().rows == 3 and ledger.done == {0: {0: shard}} and ledger.pending_bytes == 0


def test_a_part_of_a_run_with_another_identity_is_not_taken_for_ours(memory):
    ledger, shard = start(memory), shards(0)[0]
    data, counted = part_of(ledger, shard)
    other = start(Store("memory://other"), fingerprint={"x": 1})
    foreign, _ = part_of(other, shard)
    memory.create(part_name(0, 0, "parquet"), foreign)
    with pytest.raises(ConfigError, match="made by another run"):
        commit_part(ledger, shard, data, counted)


def test_a_store_that_fails_before_the_part_leaves_nothing_behind(memory):
    store = FaultyStore(memory.url, 10**6, fails_before, ("write",))
    ledger, shard = start(store), shards(0)[0]
    data, counted = part_of(ledger, shard)
    store.at = store.count + 1
    with pytest.raises(StorageError):
        ledger.write_part(shard, data, counted)
    assert ledger.standing(shard) is None
    assert commit_part(ledger, shard, data, counted)
