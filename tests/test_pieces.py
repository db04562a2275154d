"""Pieces: what a restart finds of samples that ended or were in flight, what is read back, and when a piece goes."""

from __future__ import annotations

import time

import fsspec
import numpy as np
import pytest
from faulty import Died, FaultyStore, dies_after
from scripted_job import commit_part, shards, start

from batchgen import earlier, piecefile, pieces
from batchgen.errors import Interrupted, StorageError
from batchgen.io.sinks import ShardResults, build_part, result_schema
from batchgen.jobrecord import read_job
from batchgen.runfolder import piece_folder
from batchgen.types import Completion, InFlight, RowError, RowKey, ShardRange

pytestmark = pytest.mark.usefixtures("every_heartbeat")


def ids(*numbers):
    return np.array(numbers, np.int32)


def flying(row, *numbers, sample=0):
    return InFlight(RowKey(0, row), sample, ids(*numbers))


def done(row, *numbers, **other):
    return Completion(RowKey(0, row), 0, ids(*numbers), "stop", other.get("stop"), 9, other.get("error"))


def taken(store, row, sample=0):
    """What a new start gets of this row."""
    ledger = start(store)
    got = ledger.take(RowKey(0, row), sample)
    assert ledger.take(RowKey(0, row), sample) is None
    ledger.close()
    return None if got is None else (isinstance(got, Completion), got.token_ids.tolist())


def test_finished_samples_come_back_whole(memory):
    ledger = start(memory)
    error = RowError("internal", "half a pair \ud83d")
    saved = [done(0, 1, 2), done(1, 3, stop="END"), done(2, stop=np.int32(50)), done(3, error=error)]
    for completion in saved:
        ledger.record(completion)
    assert ledger.pending_bytes > 0
    assert ledger.checkpoint([]) and ledger.pending_bytes == 0 and not ledger.checkpoint([])
    again = start(memory)
    for completion in saved:
        got = again.take(completion.key, 0)
        assert isinstance(got, Completion) and got.token_ids.dtype == np.int32
        assert got.token_ids.tolist() == completion.token_ids.tolist()
        assert (got.key, got.sample, got.prompt_tokens) == (completion.key, 0, 9)
        assert got.stop_reason == completion.stop_reason and type(got.stop_reason) in {type(None), str, int}
    assert got.error == RowError("internal", "half a pair \\ud83d")


def test_tokens_in_flight_are_stored_once_each_and_chained_over_starts(memory):
    ledger = start(memory)
    assert ledger.checkpoint([flying(0, 1, 2), flying(0, 7, sample=1), flying(1)])
    assert not ledger.checkpoint([flying(0, 1, 2), flying(0, 7, sample=1)])
    ledger.checkpoint([flying(0, 1, 2, 3)])
    names = memory.list(piece_folder(0))
    rows = [piecefile.decode(memory.read(name), read_job(memory)["digest"]).to_pylist() for name in names]
    assert [(row["start"], row["token_ids"]) for row in rows[0]] == [(0, [1, 2]), (0, [7])]
    assert [(row["start"], row["token_ids"]) for row in rows[1]] == [(2, [3])]
    again = start(memory)
    again.checkpoint([flying(0, 1, 2, 3, 4)])
    again.checkpoint([flying(0, 1, 2, 3, 4, 5)])
    names = memory.list(piece_folder(0))
    rows += [piecefile.decode(memory.read(name), read_job(memory)["digest"]).to_pylist() for name in names[2:]]
    assert [(row["start"], row["token_ids"]) for row in rows[2] + rows[3]] == [(3, [4]), (4, [5])]
    assert taken(memory, 0) == (False, [1, 2, 3, 4, 5])
    assert taken(memory, 0, sample=1) == (False, [7])
    assert taken(memory, 1) is None


def test_a_lost_piece_cuts_the_chain_and_mixes_nothing_up(memory, caplog):
    ledger = start(memory)
    for count in (2, 4, 6):
        ledger.checkpoint([flying(0, *range(count))])
    middle = memory.list(piece_folder(0))[1]
    whole = memory.read(middle)
    for damage in (b"", whole[:20], whole[:-1], whole[:100] + b"\xff" + whole[101:]):
        memory.replace(middle, damage)
        assert taken(memory, 0) == (False, [0, 1])
        assert f"{middle} is left out" in caplog.text
    again = start(memory)
    again.take(RowKey(0, 0), 0)
    again.checkpoint([flying(0, 0, 1, 90, 91, 92)])
    memory.replace(middle, whole)  # readable again: the later start's chain counts
    assert taken(memory, 0) == (False, [0, 1, 90, 91, 92])


def test_a_sample_begun_anew_replaces_what_was_stored(memory):
    ledger = start(memory)
    ledger.checkpoint([flying(0, 1, 2, 3)])
    ledger.checkpoint([flying(0, 9)])
    assert taken(memory, 0) == (False, [1, 2, 3])
    ledger = start(memory)
    ledger.checkpoint([flying(0, 9, 8, 7, 6)])
    assert taken(memory, 0) == (False, [9, 8, 7, 6])


def test_pieces_of_another_run_are_left_alone(memory, caplog):
    start(memory).close()
    name = f"{piece_folder(0)}000001-000001.arrow"
    memory.create(name, piecefile.encode([piecefile.Entry((0, 0, 0), 0, 0, ids(5))], "other digest"))
    assert taken(memory, 0) is None
    assert "belongs to another run" in caplog.text and memory.exists(name)


def test_large_checkpoints_are_split(memory, monkeypatch):
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 1000)
    ledger = start(memory)
    for row in range(40):
        ledger.record(done(row, *range(10)))
    ledger.record(done(40, *range(2000)))
    ledger.checkpoint([flying(41, *range(10))])
    names = memory.list(piece_folder(0))
    assert len(names) == 5 + 1 + 1  # nine small rows a piece, the large one alone, the rest
    counts = [piecefile.decode(memory.read(name), read_job(memory)["digest"]).num_rows for name in names]
    assert sum(counts) == 42 and max(counts) <= 1000 // 104 + 1
    assert [taken(memory, row) for row in (0, 39, 41)] == [(True, [*range(10)])] * 2 + [(False, [*range(10)])]


def test_a_piece_goes_when_all_its_rows_are_in_parts(memory):
    first, second = shards(0)
    ledger = start(memory)
    ledger.record(done(0, 1))
    ledger.checkpoint([flying(1, 1)])
    ledger.record(done(1, 1, 2))
    ledger.checkpoint([flying(4, 5)])
    ledger.record(done(2, 3))  # in no piece yet when its part is committed
    assert len(memory.list(piece_folder(0))) == 2
    commit_part(ledger, first, *part_of(ledger, first))
    assert ledger.pending_bytes == 0 and not ledger.checkpoint([flying(4, 5)])
    assert len(memory.list(piece_folder(0))) == 1
    assert taken(memory, 1) is None and taken(memory, 4) == (False, [5])
    ledger = start(memory)
    commit_part(ledger, second, *part_of(ledger, second))
    ledger.checkpoint([])
    assert memory.list(piece_folder(0)) == []


def test_pieces_left_by_a_crash_after_a_commit_go_at_the_next_start(memory):
    ledger = start(memory)
    ledger.checkpoint([flying(1, 1)])
    (name,) = memory.list(piece_folder(0))
    piece = memory.read(name)
    commit_part(ledger, shards(0)[0], *part_of(ledger, shards(0)[0]))
    memory.create(name, piece)
    assert taken(memory, 1) is None and not memory.exists(name)


# -- reading back ------------------------------------------------------------------------------------------------------


def test_what_is_saved_can_be_dropped_and_read_back(memory):
    first, second = shards(0)
    ledger = start(memory)
    error = RowError("internal", "no")
    ledger.record(done(0, 1, 2, stop="END"))
    ledger.record(done(3, 9))  # of the second shard
    assert ledger.pieces_of(first) == []
    ledger.checkpoint([flying(1, 5)])
    assert set(ledger.read_back(first, ledger.pieces_of(first))) == {(0, 0)}
    ledger.record(done(1, 5, 6))
    ledger.checkpoint([flying(2, 7)])
    ledger.record(done(2, error=error))  # in memory only
    names = ledger.pieces_of(first)
    assert names == memory.list(piece_folder(0))
    back = ledger.read_back(first, names)
    assert {key: one.token_ids.tolist() for key, one in back.items()} == {(0, 0): [1, 2], (1, 0): [5, 6]}
    assert back[0, 0].stop_reason == "END" and back[0, 0].key == RowKey(0, 0)
    assert set(ledger.read_back(second, ledger.pieces_of(second))) == {(3, 0)}
    assert ledger.pieces_of(ShardRange(1, 0, 0, 2, 0, 0)) == []


def test_what_an_earlier_start_saved_is_read_back_too(memory):
    ledger = start(memory)
    ledger.record(done(0, 1))
    ledger.checkpoint([])
    again = start(memory)
    assert again.take(RowKey(0, 0), 0) is not None
    again.record(done(1, 2))
    again.checkpoint([])
    back = again.read_back(shards(0)[0], again.pieces_of(shards(0)[0]))
    assert {key: one.token_ids.tolist() for key, one in back.items()} == {(0, 0): [1], (1, 0): [2]}


@pytest.mark.parametrize("damage", [None, b"", b"torn"])
def test_a_piece_that_went_bad_ends_the_start_and_the_next_one_computes_anew(memory, damage):
    ledger = start(memory)
    ledger.record(done(0, 1))
    ledger.checkpoint([])
    (name,) = names = ledger.pieces_of(shards(0)[0])
    memory.delete(name) if damage is None else memory.replace(name, damage)
    with pytest.raises(StorageError, match=name):
        ledger.read_back(shards(0)[0], names)
    again = start(memory)
    assert again.take(RowKey(0, 0), 0) is None and again.pieces_of(shards(0)[0]) == []
    with pytest.raises(Interrupted, match="taken over"):  # the first one learns why its piece may be gone
        ledger.read_back(shards(0)[0], names)


# -- memory and time ---------------------------------------------------------------------------------------------------


def finish_many(store, rows, a_piece):
    """Rows that end in about the order of the input, a few of them much later."""
    ledger = start(store)
    for number, row in enumerate(sorted(range(rows), key=lambda row: row + 7 * (row % 5) + 100 * (row % 50 == 7))):
        ledger.record(done(row, row, row, row, row))
        if number % a_piece == a_piece - 1:
            ledger.checkpoint([])
    ledger.checkpoint([])


def test_what_ended_is_in_memory_when_its_rows_come_by_and_not_before(memory, monkeypatch):
    monkeypatch.setattr(earlier, "MAX_AHEAD_BYTES", 80 * 50)  # 50 samples
    finish_many(memory, 500, 25)
    ledger = start(store := FaultyStore(memory.url, 10**6, dies_after, ("read",)))
    ended, count = ledger._pieces._ended, store.count
    assert ledger.saved == 500 and not ended._ahead
    for row in range(500):
        assert ledger.take(RowKey(0, row), 0).token_ids.tolist() == [row] * 4
        assert len(ended._ahead) < 50
    assert ledger.saved == 0 and store.count - count < 10 * 10  # ten times fifty samples, of a few pieces each


@pytest.mark.parametrize("damage", [None, b"", b"torn"])
def test_a_piece_that_goes_bad_before_its_rows_come_by_is_computed_anew(memory, damage, caplog):
    ledger = start(memory)
    for row in range(3):
        ledger.record(done(row, row))
        ledger.checkpoint([])
    again = start(memory)
    name = memory.list(piece_folder(0))[1]
    memory.delete(name) if damage is None else memory.replace(name, damage)
    assert [again.take(RowKey(0, row), 0) is None for row in range(3)] == [False, True, False]
    assert (f"{name} is left out" in caplog.text) == (damage is not None)
    again.record(done(1, 7))
    again.checkpoint([])
    back = again.read_back(shards(0)[0], again.pieces_of(shards(0)[0]))
    assert {row: one.token_ids.tolist() for (row, _), one in back.items()} == {0: [0], 1: [7], 2: [2]}


def test_a_commit_costs_what_its_shard_has(memory):
    """And not what all open shards have."""
    finish_many(memory, 60_000, 10_000)
    ledger = start(memory)
    began = time.process_time()
    for number in range(1000):
        ledger._pieces.committed(ShardRange(0, number, number, 1, 0, 0))
    assert time.process_time() - began < 2.0
    assert ledger.saved == 59_000


# -- merging -----------------------------------------------------------------------------------------------------------

MANY_ROWS = ShardRange(0, 0, 0, 1000, 0, 0)


def hours(ledger, first, last):
    """One slow sample, and beside it a row an interval that ends."""
    for row in range(first, last):
        ledger.record(done(row, row, row))
        ledger.checkpoint([flying(999, *range(row + 1))])


def test_one_slow_row_does_not_keep_pieces_alive_for_ever(memory):
    ledger = start(memory)
    for number in range(300):
        ledger.checkpoint([flying(999, *range(number + 1))])
        assert len(memory.list(piece_folder(0))) <= pieces.MANY_PIECES + 1
    assert taken(memory, 999) == (False, [*range(300)])


def test_merging_keeps_everything_that_counts(memory):
    ledger = start(memory)
    hours(ledger, 0, 150)
    assert len(memory.list(piece_folder(0))) <= pieces.MANY_PIECES + 1
    back = ledger.read_back(MANY_ROWS, ledger.pieces_of(MANY_ROWS))
    assert {row: one.token_ids.tolist() for (row, _), one in back.items()} == {row: [row] * 2 for row in range(150)}
    again = start(memory)
    assert again.saved == 151
    hours(again, 150, 200)  # what it took over is merged too, taken or not
    assert len(memory.list(piece_folder(0))) <= pieces.MANY_PIECES + 1
    assert all(again.take(RowKey(0, row), 0).token_ids.tolist() == [row, row] for row in range(150))
    third = start(memory)
    for row in range(200):
        assert third.take(RowKey(0, row), 0).token_ids.tolist() == [row, row]
    assert third.take(RowKey(0, 999), 0).token_ids.tolist() == [*range(200)]


def test_a_checkpoint_that_is_told_of_no_sample_in_flight_merges_nothing_and_spoils_nothing(memory):
    """As before a trial: what is in flight goes on afterwards, and its pieces are merged then."""
    ledger = start(memory)
    hours(ledger, 0, pieces.MANY_PIECES + 1)
    names = memory.list(piece_folder(0))
    ledger.record(done(500, 1))
    ledger.checkpoint([])
    assert set(names) < set(memory.list(piece_folder(0)))
    hours(ledger, pieces.MANY_PIECES + 1, 100)
    assert len(memory.list(piece_folder(0))) <= pieces.MANY_PIECES + 1
    assert taken(memory, 500) == (True, [1]) and taken(memory, 999) == (False, [*range(100)])


def test_merging_does_not_bring_back_an_end_that_was_overruled(memory):
    first = start(memory)
    first.checkpoint([flying(0, 1)])
    second = start(memory)
    second.checkpoint([flying(0, 1, 20)])
    first._lease.check = lambda: None
    first.record(done(0, 1, 2))
    first.checkpoint([])
    third = start(memory)
    assert third.take(RowKey(0, 0), 0).token_ids.tolist() == [1, 20]
    hours(third, 1, pieces.MANY_PIECES - 4)
    third.record(done(0, 1, 20, 30))  # in a piece that is not merged together with the overruled one
    hours(third, pieces.MANY_PIECES - 4, pieces.MANY_PIECES + 2)
    assert len(memory.list(piece_folder(0))) < pieces.MANY_PIECES
    assert third.read_back(MANY_ROWS, third.pieces_of(MANY_ROWS))[0, 0].token_ids.tolist() == [1, 20, 30]
    assert taken(memory, 0) == (True, [1, 20, 30])


def test_pieces_being_read_back_are_not_merged(memory):
    ledger = start(memory)
    hours(ledger, 0, 20)
    early = ShardRange(0, 0, 0, 10, 0, 0)
    names = ledger.pieces_of(early)
    hours(ledger, 20, 120)
    assert set(names) <= set(memory.list(piece_folder(0)))
    assert sorted(ledger.read_back(early, names)) == [(row, 0) for row in range(10)]
    ledger.acknowledge(ledger.write_part(early, *part_of(ledger, early)))
    hours(ledger, 120, 160)
    assert not set(names) & set(memory.list(piece_folder(0)))


def test_the_last_checkpoint_only_saves(memory):
    ledger = start(store := FaultyStore(memory.url, 10**6, dies_after, ("read", "write")))
    hours(ledger, 0, pieces.MANY_PIECES)
    names, count = memory.list(piece_folder(0)), store.count
    ledger.record(done(500, 1))
    ledger.checkpoint([flying(999, *range(500))], last=True)
    assert len(memory.list(piece_folder(0))) == len(names) + 1
    assert store.count - count == 3  # who has the slot (two reads), the piece


def test_a_death_anywhere_in_merging_loses_nothing(memory):
    for at in range(1, 100):
        fsspec.filesystem("memory").store.clear()
        hours(start(memory), 0, pieces.MANY_PIECES)
        ledger = start(store := FaultyStore(memory.url, 10**6, dies_after, ("write",)))
        store.at = store.count + at
        try:
            hours(ledger, pieces.MANY_PIECES, pieces.MANY_PIECES + 3)
        except Died:
            died = True
        else:
            died = False
        again = start(memory)
        for row in range(pieces.MANY_PIECES):
            assert again.take(RowKey(0, row), 0).token_ids.tolist() == [row, row]
        got = again.take(RowKey(0, 999), 0).token_ids.tolist()
        assert got == [*range(len(got))] and len(got) >= pieces.MANY_PIECES
        if not died:
            assert at > 16
            return


def test_pieces_full_of_rows_that_count_are_left_as_they_are(memory):
    """Copying them again and again would be all that a checkpoint does."""
    ledger = start(store := FaultyStore(memory.url, 10**6, dies_after, ("read",)))
    for number in range(pieces.MANY_PIECES + 8):
        for row in range(300):
            ledger.record(done(number * 300 + row, 1))
        ledger.checkpoint([])
    assert len(memory.list(piece_folder(0))) == pieces.MANY_PIECES + 8
    count = store.count
    ledger.record(done(99_999, 1))
    ledger.checkpoint([])
    assert store.count - count == 2  # who has the slot


def part_of(ledger, shard):
    rows = range(shard.first_row, shard.first_row + shard.num_rows)
    completions = [Completion(RowKey(shard.file, row), 0, ids(row), "stop", None, 2) for row in rows]
    made = ShardResults(
        shard, np.array(rows), np.ones(len(rows), int), [], completions, ["t"] * len(rows), np.zeros(len(rows), bool)
    )
    schema = result_schema(id_field=None, carried=[], token_ids=True)
    return build_part("parquet", schema, made, ledger.part_metadata(shard, made.counters())), made.counters()
