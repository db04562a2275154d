"""The run folder: crash safety above all, then leases, fingerprints, pieces, status and overwriting."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scripted_job
from faulty import FAULTS, Died, FaultyStore, fails_after, fails_before, goes_away
from scripted_job import Job, Witness, arguments, commit_part, fresh_memory, shards, start

from batchgen import lease as leases
from batchgen import parts
from batchgen.errors import ConfigError, Interrupted, StorageError
from batchgen.io.sinks import ShardResults, build_part, result_schema
from batchgen.io.stores import Store
from batchgen.jobrecord import check_same, read_job
from batchgen.runfolder import INPUTS, JOB, PROOFS, SUCCESS, encode, lease_name, part_name, piece_folder, put_new
from batchgen.runstatus import overwrite, peek, read_success
from batchgen.types import Completion, InFlight, RowKey, ShardRange

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("every_heartbeat")


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_loses_and_doubles_nothing(part_format, fault):
    meet, kinds = FAULTS[fault]
    for at in range(1, 1000):
        store = FaultyStore(fresh_memory().url, at, meet, kinds)
        witness = Witness(part_format)
        with contextlib.suppress(Died, StorageError):
            Job(store, witness).run()
        met = store.count >= at
        clean = Store(store.url)
        witness.look(clean)
        Job(clean, witness).run()
        witness.look(clean)
        assert peek(clean).state == "finished" and not clean.list(piece_folder(0))
        if not met:
            assert at > 20
            return
    raise AssertionError("the job never ended")


@pytest.mark.parametrize("seed", range(8))
def test_many_faults_one_after_another(memory, seed):
    """A fault may hit what an earlier one left behind."""
    chance = random.Random(seed)
    witness = Witness(chance.choice(["parquet", "jsonl"]))
    for _ in range(40):
        meet, kinds = chance.choice(list(FAULTS.values()))
        with contextlib.suppress(Died, StorageError):
            Job(FaultyStore(memory.url, chance.randrange(1, 40), meet, kinds), witness).run()
        witness.look(memory)
    Job(memory, witness).run()
    witness.look(memory)


def test_kill_minus_nine_again_and_again(tmp_path):
    part_format = "jsonl"  # the one with more places to be killed at
    witness, chance, starts = Witness(part_format), random.Random(0), 0
    store = Store(str(tmp_path / "run"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, scripted_job.__file__, store.url, part_format, "0.05", "0", "0"]
    while not store.exists(SUCCESS):
        starts += 1
        assert starts < 100
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for _ in range(chance.randint(1, 3)):  # ready, then a line for each step
                process.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.05))
            process.send_signal(signal.SIGKILL)
        witness.look(store)
    assert starts > 1
    assert peek(store).epoch >= 1


# -- what a run is -----------------------------------------------------------------------------------------------------


def begun(store, **changed):
    start(store, **changed).close()


def test_job_json_says_what_the_run_is(memory):
    begun(memory)
    job = read_job(memory)
    assert job["format_version"] == 1 and job["batchgen"] == "0.1.0" and len(job["digest"]) == 64
    assert job["spec"]["name"] == "scripted" and job["shape"] == {"format": "parquet", "shard_rows": 4}
    before = memory.read(JOB), memory.read(INPUTS)
    begun(memory)
    assert (memory.read(JOB), memory.read(INPUTS)) == before
    assert read_job(Store("memory://elsewhere")) is None


def test_another_job_is_refused_by_every_changed_leaf(memory):
    begun(memory)
    changed = {
        "sampling": {"temperature": 0.7, "seed": 0},
        "prompt": {"messages": [{"content": "b"}, {"content": "a"}]},
        "model": {"content": "m" * 200},
    }
    with pytest.raises(ConfigError) as caught:
        start(memory, fingerprint=changed, shape={"format": "parquet", "shard_rows": 8})
    lines = str(caught.value).splitlines()
    assert lines[0] == "memory://run: this folder holds a run of another job:"
    assert lines[1:-1] == [
        '  prompt.messages[0].content: "a" then, "b" now',
        '  prompt.messages[1]: absent then, {"content":"a"} now',
        "  sampling.temperature: 0.0 then, 0.7 now",
        '  model: absent then, {"content":"' + "m" * 48 + "... (214 characters) now",
        "  shape.shard_rows: 4 then, 8 now",
    ]
    assert "--overwrite" in lines[-1] and "output.path" in lines[-1]
    assert peek(memory).epoch == 1


@pytest.mark.parametrize(("then", "now"), [(1, True), (None, 0), ([1, 2], [1]), ({"a": 1}, {}), ("1", 1)])
def test_values_that_look_alike_differ(memory, then, now):
    begun(memory, fingerprint={"x": then})
    with pytest.raises(ConfigError, match="x"):
        start(memory, fingerprint={"x": now})


def test_tuples_and_whole_floats_are_what_json_makes_of_them(memory):
    begun(memory, fingerprint={"x": (1, 2), "y": 1.0})
    begun(memory, fingerprint={"y": 1, "x": [1, 2]})


def test_must_be_new(memory):
    memory.create("notes.txt", b"not ours")
    begun(memory, must_be_new=True)
    with pytest.raises(ConfigError, match="--must-be-new"):
        start(memory, must_be_new=True)


def test_a_newer_run_folder_is_refused(memory):
    memory.create(JOB, encode({"format_version": 2, "batchgen": "9.0"}))
    with pytest.raises(
        ConfigError, match=r"made by batchgen 9\.0 in run folder format 2; this batchgen reads format 1"
    ):
        start(memory)


@pytest.mark.parametrize("torn", [JOB, INPUTS])
def test_a_torn_record_is_written_again_when_the_run_is_the_same(memory, torn, caplog):
    Job(memory, witness := Witness()).run()
    memory.delete(SUCCESS)
    memory.replace(torn, memory.read(torn)[:50])
    Job(memory, witness).run()
    witness.look(memory)
    assert "damaged" in caplog.text and read_job(memory)["digest"]


def test_a_torn_job_record_does_not_let_another_job_in(memory):
    Job(memory, Witness()).run()
    memory.replace(JOB, b"{")
    with pytest.raises(ConfigError, match=r"part-00000-00000\.parquet: this part was made by another run"):
        start(memory, fingerprint={"sampling": "other"})
    memory.delete(JOB)
    memory.delete(INPUTS)
    with pytest.raises(ConfigError, match="made by another run"):
        start(memory, prove=lambda i: "other content")


def files(*names, mtime=1.0, size=10):
    return [{"path": name, "size": size, "mtime": mtime, "etag": None} for name in names]


@pytest.mark.parametrize(
    ("now", "proofs", "said"),
    [
        (files("a", "b", "c"), "ABC", ["added: c"]),
        (files("a"), "A", ["removed: b"]),
        (files("a", "b", mtime=2.0), "AX", ["changed: b (10 bytes then, 10 now)"]),
        (files("a", "b", size=11), "AB", ["changed: a (10 bytes then, 11 now)", "changed: b (10 bytes then, 11 now)"]),
        (files("a", "c"), "AC", ["added: c", "removed: b"]),
        (files("b", "a"), "BA", ["the files are the same, in another order"]),
        (files(*(f"n{i}" for i in range(13))), "N" * 13, ["removed: b", "added: 3 more"]),
    ],
)
def test_changed_input_is_refused_with_the_difference(memory, now, proofs, said):
    begun(memory, inputs=files("a", "b"), prove=lambda i: "AB"[i])
    with pytest.raises(ConfigError, match="the input is not the one this run was started with") as caught:
        start(memory, inputs=now, prove=lambda i: proofs[i])
    for line in said:
        assert f"\n  {line}\n" in str(caught.value)


def test_moved_input_only_warns_and_plainly_equal_input_is_not_read(memory, caplog):
    def unwanted(i):
        raise AssertionError("read for nothing")

    begun(memory, inputs=files("a", "b"), prove=lambda i: "AB"[i])
    begun(memory, inputs=files("a", "b"), prove=unwanted)
    begun(memory, inputs=files("a", "b", mtime=9.0), prove=lambda i: "AB"[i])
    assert "moved" not in caplog.text
    begun(memory, inputs=files("new/a", "new/b"), prove=lambda i: "AB"[i])
    assert "2 input files have moved, the first from a to new/a" in caplog.text
    etags = [{**file, "mtime": None, "etag": "e"} for file in files("x")]
    other = Store("memory://other")
    begun(other, inputs=etags, prove=lambda i: "X")
    begun(other, inputs=etags, prove=unwanted)
    with pytest.raises(ConfigError, match="changed: x"):
        start(other, inputs=[{**etags[0], "etag": "f"}], prove=lambda i: "Y")


def test_check_same_compares_the_sections_it_is_given(memory):
    same = {key: arguments()[key] for key in ("fingerprint", "inputs", "prove")}
    with pytest.raises(ConfigError, match=r"job\.json is gone or damaged, so that nobody can tell"):
        check_same(memory, **same)
    begun(memory)
    check_same(memory, **same)
    check_same(memory, **same | {"fingerprint": {"sampling": {"temperature": 0.0, "seed": 0}}})
    with pytest.raises(ConfigError, match=r"sampling\.seed: 0 then, 1 now"):
        check_same(memory, **same | {"fingerprint": {"sampling": {"temperature": 0.0, "seed": 1}}})
    with pytest.raises(ConfigError, match="removed"):
        check_same(memory, **same | {"inputs": same["inputs"][:1]})


# -- leases ------------------------------------------------------------------------------------------------------------


def lease_of(store):
    return json.loads(store.read(lease_name(0)))


def test_a_living_worker_keeps_a_second_start_out_at_once(memory):
    ledger = start(memory)
    begin = time.monotonic()
    with pytest.raises(Interrupted, match=f"process {os.getpid()} on ") as caught:
        start(memory, dead_after=30.0)
    assert caught.value.reason == "locked" and time.monotonic() - begin < 5
    assert peek(memory).state == "running" and peek(memory).pid == os.getpid()
    ledger.close()
    assert peek(memory).state == "stopped"
    begun(memory, dead_after=30.0)
    assert peek(memory).epoch == 2


@pytest.fixture
def dead_pid():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_a_dead_process_of_this_machine_is_dead_at_once(memory, dead_pid):
    start(memory)
    memory.replace(lease_name(0), encode(lease_of(memory) | {"pid": dead_pid}))
    assert peek(memory).state == "stopped"
    begun(memory, dead_after=30.0)


def test_a_process_number_used_again_is_not_the_worker(memory):
    start(memory)
    memory.replace(lease_name(0), encode(lease_of(memory) | {"process_started": 12345.0}))
    begun(memory, dead_after=30.0)


def test_a_worker_that_stood_still_too_long_is_taken_over(memory):
    first = start(memory)
    memory.replace(lease_name(0), encode(lease_of(memory) | {"monotonic": time.monotonic() - 31}))
    second = start(memory, dead_after=30.0)
    for operation in (first.heartbeat, lambda: first.commit_index(2, [])):
        with pytest.raises(Interrupted) as caught:
            operation()
        assert caught.value.reason == "fenced" and f"process {os.getpid()}" in str(caught.value)
    second.heartbeat()
    first.close()  # does not release what is not its own
    assert lease_of(memory)["epoch"] == 2 and not lease_of(memory)["released"]
    assert not memory.exists("_batchgen/index/00002.json")


def elsewhere(store):
    """Make the slot's worker one of another machine."""
    for name in (lease_name(0), "_batchgen/epoch/0/000001.json"):
        store.replace(name, encode(json.loads(store.read(name)) | {"machine": "other", "host": "far"}))


@pytest.mark.parametrize("what", ["moves", "stands still", "releases", "loses its lease"])
def test_a_worker_of_another_machine_is_watched(memory, what, monkeypatch):
    start(memory)
    elsewhere(memory)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        lease = lease_of(memory) if memory.exists(lease_name(0)) else {}
        if what == "loses its lease":
            memory.delete(lease_name(0))
        elif what != "stands still" and len(naps) == 2:
            memory.replace(lease_name(0), encode(lease | {"counter": 7, "released": what == "releases"}))
        real_sleep(0.05)

    real_sleep = time.sleep
    monkeypatch.setattr(time, "sleep", nap)
    if what == "moves":
        with pytest.raises(Interrupted, match="on far") as caught:
            start(memory, dead_after=0.3)
        assert caught.value.reason == "locked"
    else:
        assert start(memory, dead_after=0.3).epoch == 2
    assert len(naps) == 2 if what in {"moves", "releases"} else len(naps) > 3


def test_a_crash_between_epoch_and_lease_does_not_look_free(memory):
    """The epoch's own record stands for the lease that was not written."""
    start(memory)
    memory.delete(lease_name(0))
    with pytest.raises(Interrupted):
        start(memory, dead_after=30.0)


def test_a_lost_lease_is_written_again_by_its_owner_alone(memory):
    ledger = start(memory)
    memory.delete(lease_name(0))
    ledger.heartbeat()
    assert lease_of(memory)["epoch"] == 1


def test_a_lost_lease_is_not_written_by_a_worker_that_was_superseded(memory):
    first, second = start(memory), start(memory)
    memory.delete(lease_name(0))
    with pytest.raises(Interrupted, match="taken over"):
        first.heartbeat()
    assert not memory.exists(lease_name(0))
    second.heartbeat()
    assert lease_of(memory)["epoch"] == 2


def test_two_starts_at_once_get_two_epochs(memory, monkeypatch):
    """Both see no worker; the name of the epoch decides."""
    real = leases.put_new

    def late(store, name, data):
        monkeypatch.setattr(leases, "put_new", real)
        first.append(start(store))
        return real(store, name, data)

    first = []
    monkeypatch.setattr(leases, "put_new", late)
    second = start(memory)
    assert (first[0].epoch, second.epoch) == (1, 2)
    with pytest.raises(Interrupted):
        first[0].heartbeat()


def test_a_heartbeat_survives_a_store_that_is_away(memory, caplog):
    ledger = start(store := FaultyStore(memory.url, 10**6, goes_away, ("write", "read")))
    store.at = store.count + 1
    ledger.heartbeat()
    assert "the heartbeat could not be written" in caplog.text
    store.at = 10**6
    ledger.heartbeat()
    store.at = store.count + 1
    ledger.close()
    assert "the lease stays behind" in caplog.text


def test_heartbeats_are_rare(memory, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 5.0)
    ledger = start(store := FaultyStore(memory.url, 10**6, goes_away, ("write", "read")))
    count = store.count
    for _ in range(1000):
        ledger.heartbeat()
    assert store.count == count


# -- parts and the end -------------------------------------------------------------------------------------------------


def ids(*numbers):
    return np.array(numbers, np.int32)


def flying(row, *numbers, sample=0):
    return InFlight(RowKey(0, row), sample, ids(*numbers))


def commit(ledger, shard, part_format="parquet", text="t", results=None):
    rows = range(shard.first_row, shard.first_row + shard.num_rows)
    completions = [Completion(RowKey(shard.file, row), 0, ids(row), "stop", None, 2) for row in rows]
    made = ShardResults(
        shard, np.array(rows), np.ones(len(rows), int), [], completions, [text] * len(rows), np.zeros(len(rows), bool)
    )
    schema = result_schema(id_field=None, carried=[], token_ids=True)
    metadata = ledger.part_metadata(shard, made.counters())
    data = build_part(part_format, schema, made, metadata)
    return commit_part(ledger, shard, data, made.counters())


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
def test_losing_a_part_to_another_worker(memory, part_format, monkeypatch):
    shard = shards(0)[0]
    first = start(memory, part_format=part_format)
    second = start(memory, part_format=part_format)
    assert commit(second, shard, part_format, "theirs")
    monkeypatch.setattr(leases.Lease, "check", lambda self: None)  # fenced too late
    name = part_name(0, 0, part_format)
    theirs = memory.read(name)
    assert not commit(first, shard, part_format, "a text of ours")
    assert memory.read(name) == theirs and first.done == second.done == {0: {0: shard}}
    assert first.totals() == second.totals() and first.totals().rows == 3
    assert commit(second, shard, part_format, "theirs") and second.totals().rows == 3  # the same again is no loss
    memory.replace(name, theirs[:-20] + b"x" * 20)
    with pytest.raises(StorageError, match=f"{name}: this part is corrupt"):
        commit(first, shard, part_format, "a text of ours")


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
def test_a_corrupt_part_stops_the_start_and_is_named(memory, part_format):
    Job(memory, Witness(part_format)).run()
    name = part_name(0, 1, part_format)
    memory.replace(name, b"garbage")
    with pytest.raises(StorageError, match=f"memory://run/{name}: this part is corrupt"):
        start(memory, part_format=part_format)
    assert peek(memory).state == "finished" and lease_of(memory)["released"]
    memory.delete(name)  # what the message says to do
    memory.delete(SUCCESS)
    Job(memory, witness := Witness(part_format)).run()
    witness.look(memory)


def test_a_part_in_the_wrong_place_is_corrupt(memory):
    ledger = start(memory)
    commit(ledger, shards(0)[0])
    memory.create(part_name(0, 1, "parquet"), memory.read(part_name(0, 0, "parquet")))
    with pytest.raises(StorageError, match=r"part-00000-00001\.parquet: this part is corrupt: it holds ShardRange"):
        start(memory)


def test_files_that_only_look_like_parts_are_not_parts(memory):
    for name in (
        "part-0-0.parquet",
        "part-00000-00000.parquet.bak",
        "part-00000-00000.jsonl",
        "sub/part-00000-00000.parquet",
    ):
        memory.create(name, b"not ours")
    assert start(memory).done == {}


def proofs_of(store):
    """What the records say of JSONL parts, by the parts' places."""
    return parts.read_recorded(store, read_job(store)["digest"]).proofs


@pytest.mark.parametrize("proofs", [None, b"{", b'{"digest": "x"}', {"proofs": [{"size": 1}]}, {"digest": "other"}])
def test_a_jsonl_part_without_a_proof_is_done_and_counted_when_its_rows_are_known(memory, proofs, caplog):
    shard = shards(0)[0]
    ledger = start(memory, part_format="jsonl")
    ledger.checkpoint([flying(1, 1)])  # cannot be told from an open row until the part's rows are known
    commit(ledger, shard, "jsonl")
    totals = ledger.totals()
    ledger.close()
    (name,), whole = memory.list(PROOFS), proofs_of(memory)
    if proofs is None:
        memory.delete(name)
    elif isinstance(proofs, bytes):
        memory.replace(name, proofs)
    else:
        memory.replace(name, encode(json.loads(memory.read(name)) | proofs))
    again = start(memory, part_format="jsonl")
    assert again.done == {0: {0: None}} and again.totals().rows == 0
    assert ("damaged" in caplog.text) == (proofs is not None and proofs != {"digest": "other"})
    assert peek(memory).shards_done == 1 and peek(memory).rows_done == 0
    again.commit_index(0, shards(0))
    assert again.done == {0: {0: shard}} and again.totals() == totals
    again.checkpoint([])
    assert memory.list(piece_folder(0)) == []
    again.close()
    assert proofs_of(memory)[0, 0].checksum == whole[0, 0].checksum
    for name in memory.list(PROOFS):
        memory.delete(name)  # with the index there, the next start knows the rows at once
    assert start(memory, part_format="jsonl").done == {0: {0: shard}}


def test_a_file_that_changed_between_two_readings_is_refused(memory):
    ledger = start(memory)
    ledger.commit_index(0, shards(0))
    ledger.commit_index(0, shards(0))
    assert not ledger.is_done(0)
    with pytest.raises(
        ConfigError, match="had 5 rows in 2 shards when it was first read to its end, and has 3 rows in 1"
    ):
        ledger.commit_index(0, shards(0)[:1])


def test_no_success_before_everything_is_there(memory):
    ledger = start(memory)
    everything = [(0, shards(0)), (1, shards(1)), (2, [])]
    for file, own in everything:
        for shard in own:
            with pytest.raises(StorageError, match="not complete"):
                ledger.finish({})
            commit(ledger, shard)
        with pytest.raises(StorageError, match=rf"files not read to their end \[{file}"):
            ledger.finish({})
        ledger.commit_index(file, own)
    part = part_name(1, 0, "parquet")
    data = memory.read(part)
    memory.delete(part)
    with pytest.raises(StorageError, match=r"parts missing \['part-00001-00000"):
        ledger.finish({})
    memory.create(part, data)
    commit(ledger, ShardRange(1, 1, 2, 1, 20, 30))
    with pytest.raises(StorageError, match=r"parts that no input has \['part-00001-00001"):
        ledger.finish({})
    memory.delete(part_name(1, 1, "parquet"))
    assert not memory.exists(SUCCESS)
    summary = ledger.finish({"seconds": 2.5})
    assert summary == read_success(memory) == ledger.finish({"seconds": 9.9})
    assert summary["seconds"] == 2.5 and summary["files"] == 3 and len(summary["parts"]) == 3


@pytest.mark.parametrize("torn", [b"", b'{"name": "scr', b"{}", b"[]"])
def test_a_torn_success_is_no_success_and_is_replaced(memory, torn):
    Job(memory, witness := Witness()).run()
    memory.replace(SUCCESS, torn)
    assert read_success(memory) is None and peek(memory).state == "stopped"
    Job(memory, witness).run()
    witness.complete(memory)


def test_an_empty_input_can_be_finished(memory):
    ledger = start(memory, inputs=[])
    summary = ledger.finish({})
    assert summary["parts"] == [] and peek(memory).rows_total == 0


def test_peek_through_a_life(memory):
    assert peek(memory).state == "empty"
    memory.create("notes.txt", b"not ours")
    assert peek(memory).state == "empty"
    ledger = start(memory)
    commit(ledger, shards(0)[0])
    ledger.commit_index(0, shards(0))
    status = peek(memory)
    assert (status.state, status.name, status.files, status.epoch) == ("running", "scripted", 3, 1)
    assert (status.shards_done, status.shards_total, status.rows_done, status.rows_total) == (1, None, 3, None)
    assert (status.prompt_tokens, status.output_tokens, status.rows_failed) == (6, 3, 0)
    assert status.started and status.updated and status.host
    ledger.commit_index(1, shards(1))
    ledger.commit_index(2, [])
    ledger.close()
    status = peek(memory)
    assert (status.state, status.shards_total, status.rows_total) == ("stopped", 3, 7)
    Job(memory, Witness()).run()
    status = peek(memory)
    assert (status.state, status.shards_done, status.shards_total, status.rows_done) == ("finished", 3, 3, 7)
    assert status.updated and status.epoch == 2


def test_status_of_a_finished_run_does_without_heavy_imports(tmp_path):
    Job(Store(str(tmp_path)), Witness()).run()
    code = (
        "import sys; from batchgen.io.stores import Store; from batchgen.runstatus import peek; "
        "print(peek(Store(sys.argv[1])).state, sorted({'pyarrow', 'torch', 'fsspec'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout == "finished []\n"


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
def test_overwrite_deletes_this_run_and_nothing_else(memory, part_format):
    foreign = ["notes.txt", "part-1.parquet", "sub/_SUCCESS", "part-00000-00000.csv"]
    for name in foreign:
        memory.create(name, b"not ours")
    overwrite(memory)
    Job(memory, Witness(part_format)).run()
    ledger = start(memory, part_format=part_format)
    with pytest.raises(Interrupted, match="is at work on this run"):
        overwrite(memory)
    ledger.close()
    deleted = []

    def note(store, operation):
        deleted.append(set(memory.list()))
        store.at += 1
        return operation()

    overwrite(FaultyStore(memory.url, 1, note, ("write",)))
    assert memory.list() == sorted(foreign)
    assert SUCCESS not in deleted[1] and JOB in deleted[-1]
    Job(memory, Witness(part_format)).run(fingerprint={"another": "job"})


def test_a_run_deleted_under_a_worker_fences_it(memory):
    first = start(memory)
    memory.replace(lease_name(0), encode(lease_of(memory) | {"monotonic": 0.0}))
    overwrite(memory)
    with pytest.raises(Interrupted, match="this run was deleted"):
        first.heartbeat()
    start(memory, fingerprint={"another": "job"})  # epoch 1 again
    with pytest.raises(Interrupted, match="taken over") as caught:
        commit(first, shards(0)[0])
    assert caught.value.reason == "fenced" and first.epoch == 1


def test_an_unknown_outcome_is_read_back(memory):
    for fault, made in ((fails_after, True), (fails_before, None)):
        store = FaultyStore(memory.url, 1, fault, ("write",))
        if made is None:
            with pytest.raises(StorageError):
                put_new(store, f"x{made}", b"ours")
        else:
            assert put_new(store, f"x{made}", b"ours") is made
    assert put_new(memory, "xTrue", b"ours") and not put_new(memory, "xTrue", b"theirs")
