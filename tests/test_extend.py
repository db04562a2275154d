"""New input files for a run, and the order in which files are a run's."""

from __future__ import annotations

import contextlib
import json

import pytest
from faulty import FAULTS, Died, FaultyStore
from scripted_job import FILES, MORE_FILES, Job, Witness, arguments, counters, fresh_memory, inputs, start

from batchgen.errors import ConfigError, Interrupted, StorageError
from batchgen.jobrecord import arrange, check_same, extend_inputs, read_job
from batchgen.runfolder import INPUTS, SUCCESS, inputs_name, part_name
from batchgen.runstatus import peek, read_success

ALL = len(MORE_FILES)
SECOND = inputs_name(2)


pytestmark = pytest.mark.usefixtures("every_heartbeat")


def more():
    return {"inputs": inputs(ALL), "extend": True}


def same(store, given, **changed):
    """Whether a finished run has nothing to do."""
    own = arguments()
    return check_same(store, fingerprint=own["fingerprint"], inputs=given, prove=own["prove"], **changed)


@pytest.mark.parametrize("part_format", ["parquet", "jsonl"])
@pytest.mark.parametrize("at", ["the end", "the middle"])
def test_new_files_come_after_those_of_the_run(memory, part_format, at):
    witness = Witness(part_format)
    if at == "the end":
        Job(memory, witness).run()
    else:
        with contextlib.suppress(Died):
            Job(FaultyStore(memory.url, 14, FAULTS["dies after a write"][0], ("write",)), witness).run()
    witness.look(memory)
    digest, listed = read_job(memory)["digest"], memory.read(INPUTS)
    witness.num_files = ALL
    summary = Job(memory, witness).run(**more())
    witness.look(memory)
    assert summary == read_success(memory) and summary["counters"] == counters(ALL)
    assert summary["files"] == ALL and summary["lists"] == 2 and summary["digest"] == digest
    assert memory.read(INPUTS) == listed
    assert [file["path"] for file in json.loads(memory.read(SECOND))["files"]] == ["in/3.jsonl"]
    assert memory.exists(part_name(len(FILES), 1, part_format))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_anywhere_in_an_extension_is_repaired_by_the_same_command(fault):
    meet, kinds = FAULTS[fault]
    Job(store := fresh_memory(), Witness()).run()
    finished = {name: store.read(name) for name in store.list()}
    for at in range(1, 1000):
        store, witness = fresh_memory(), Witness()
        for name, data in finished.items():
            store.replace(name, data)
        witness.look(store)
        witness.num_files = ALL
        faulty = FaultyStore(store.url, at, meet, kinds)
        with contextlib.suppress(Died, StorageError):
            Job(faulty, witness).run(**more())
        stands = json.loads(store.read(SUCCESS)) if store.exists(SUCCESS) else None
        if stands is not None and stands["lists"] == 1:
            assert not store.exists(SECOND)  # never beside a list that it does not count
        else:
            witness.look(store)
        if stands is None or not same(store, inputs(ALL), extend=True):
            Job(store, witness).run(**more())
        witness.look(store)
        assert peek(store).state == "finished" and read_success(store)["files"] == ALL
        if faulty.count < at:
            assert at > 20
            return


def test_nothing_new_leaves_a_finished_run_alone(memory):
    Job(memory, Witness()).run()
    before = {name: memory.read(name) for name in memory.list()}
    assert same(memory, inputs(), extend=True)
    assert {name: memory.read(name) for name in memory.list()} == before
    assert not same(memory, inputs(ALL), extend=True)
    with pytest.raises(ConfigError, match=r"added: in/3\.jsonl\nUse --extend to take the new files into this run"):
        same(memory, inputs(ALL))


@pytest.mark.parametrize("finished", [True, False])
def test_only_new_files_are_let_in(memory, finished):
    if finished:
        Job(memory, Witness()).run()
    else:
        start(memory).close()
    with pytest.raises(ConfigError, match=r"added: in/3\.jsonl\nUse --extend"):
        start(memory, inputs=inputs(ALL))
    changed = inputs(ALL)
    changed[1] = changed[1] | {"size": 11}
    for given, said in ((changed, r"changed: in/1\.jsonl"), (inputs(ALL)[1:], r"removed: in/0\.jsonl")):
        with pytest.raises(ConfigError, match=said) as caught:
            start(memory, inputs=given, extend=True, prove=lambda i, given=given: f"proof of {given[i]['path'][3]}")
        assert "--extend takes new files only while all the run's own are there" in str(caught.value)
    assert memory.exists(SUCCESS) == finished and not memory.exists(SECOND)


def test_a_run_can_be_extended_again_and_again(memory):
    start(memory, inputs=inputs(1)).close()
    for count in (2, 3, 4):
        ledger = start(memory, inputs=inputs(count), extend=True)
        ledger.close()
        start(memory, inputs=inputs(count)).close()
        start(memory, inputs=inputs(count), extend=True).close()
    assert memory.list("_batchgen/inputs") == [inputs_name(number) for number in (1, 2, 3, 4)]
    assert peek(memory).files == 4
    with pytest.raises(ConfigError, match=r"removed: in/3\.jsonl"):
        start(memory, inputs=inputs(3))


def test_a_new_run_with_extend_is_just_a_new_run(memory):
    witness = Witness()
    witness.num_files = ALL
    Job(memory, witness).run(**more())
    witness.look(memory)
    assert not memory.exists(SECOND)


def test_a_locked_out_start_extends_nothing(memory):
    ledger = start(memory)
    before = memory.list()
    with pytest.raises(Interrupted, match="is at work on this run"):
        start(memory, inputs=inputs(ALL), extend=True, dead_after=30.0)
    assert memory.list() == before
    ledger.close()


def test_a_worker_of_fewer_files_writes_no_success(memory):
    """It did not notice that the run was extended by a worker of another slot."""
    witness = Witness()

    class Extending(Job):
        def step(self, fresh):
            super().step(fresh)
            if not memory.exists(SECOND):
                start(memory, slot=1, inputs=inputs(ALL), extend=True).close()

    with pytest.raises(Interrupted, match="input files were added to this run while it was at work"):
        Extending(memory, witness).run()
    assert not memory.exists(SUCCESS)
    witness.num_files = ALL
    Job(memory, witness).run(inputs=inputs(ALL))
    witness.look(memory)


def test_a_success_written_too_late_is_none(memory):
    """A worker stands still between its last question and _SUCCESS; meanwhile another start extends the run."""
    witness = Witness()

    class Late(FaultyStore):
        def create(self, name, data):
            if name == SUCCESS and not self.exists(SECOND):
                with contextlib.suppress(Died):
                    other = FaultyStore(self.url, 4, FAULTS["dies after a write"][0], ("write",))
                    Job(other, Witness()).run(**more())
                assert self.exists(SECOND)
            return super().create(name, data)

    Job(Late(memory.url, 0, None, ()), witness).run()
    assert memory.exists(SUCCESS) and read_success(memory) is None and peek(memory).state == "stopped"
    witness.num_files = ALL
    Job(memory, witness).run(**more())
    witness.look(memory)
    assert read_success(memory)["files"] == ALL


def test_two_extensions_at_the_same_moment(memory):
    ledger = start(memory)
    with pytest.raises(Interrupted, match="another start is extending this run"):
        added = [file | {"proof": "x"} for file in inputs(ALL)[3:]]
        job = ledger._job.__class__(**{**_fields(ledger._job), "added": added})
        memory.create(SECOND, b'{"files": []}')
        extend_inputs(memory, job, lambda: None)


def _fields(record):
    return {name: getattr(record, name) for name in record.__slots__}


# -- damaged lists -----------------------------------------------------------------------------------------------------


def test_a_damaged_first_list_of_an_extended_run_is_written_again(memory, caplog):
    witness = Witness()
    witness.num_files = ALL
    Job(memory, Witness()).run()
    Job(memory, witness).run(**more())
    memory.delete(SUCCESS)
    whole = memory.read(INPUTS)
    memory.replace(INPUTS, whole[:40])
    given = inputs(ALL)
    order = arrange(memory, given[3:] + given[:3])
    assert [(given[3:] + given[:3])[i]["path"] for i in order] == [file["path"] for file in given]
    Job(memory, witness).run(inputs=given)
    witness.look(memory)
    assert "damaged" in caplog.text and json.loads(memory.read(INPUTS)) == json.loads(whole)


def test_a_damaged_second_list_is_refused_once_parts_depend_on_it(memory, caplog):
    start(memory).close()
    start(memory, **more()).close()
    memory.replace(SECOND, b"{")
    for changed in ({"inputs": inputs(ALL)}, {}, {"extend": True}):
        with pytest.raises(ConfigError, match=f"{SECOND}: this list of input files is missing or damaged"):
            start(memory, **changed)
    start(memory, **more()).close()
    assert "it is made anew" in caplog.text and len(json.loads(memory.read(SECOND))["files"]) == 1
    witness = Witness()
    witness.num_files = ALL
    Job(memory, witness).run(**more())
    witness.look(memory)
    memory.replace(SECOND, b"{")
    with pytest.raises(ConfigError, match=r"000002\.json is gone or damaged"):
        same(memory, inputs(ALL), extend=True)
    memory.delete(SUCCESS)
    with pytest.raises(ConfigError, match=f"{SECOND}: this list of input files is missing or damaged"):
        start(memory, **more())


# -- order -------------------------------------------------------------------------------------------------------------


def named(*names, size=10):
    return [{"path": name, "size": size, "mtime": 1.0, "etag": None} for name in names]


def begun(store, given, proofs=None):
    start(store, inputs=given, prove=lambda i: (proofs or "".join(file["path"][-1] for file in given))[i]).close()


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (("b", "d"), ("b", "d")),
        (("d", "b"), ("b", "d")),  # the pattern sorts otherwise
        (("a", "b", "c", "d", "e"), ("b", "d", "a", "c", "e")),
        (("a", "d"), ("a", "d")),  # b is gone: who opens the run says so
        (("x/b", "x/d"), ("x/b", "x/d")),  # moved
        (("x/a", "x/d", "x/b"), ("x/b", "x/d", "x/a")),
        ((), ()),
    ],
)
def test_files_of_the_run_come_first_as_it_numbered_them(memory, now, expected):
    begun(memory, named("b", "d"))
    given = named(*now)
    order = arrange(memory, given, lambda i: given[i]["path"][-1])
    assert sorted(order) == list(range(len(now)))
    assert tuple(given[i]["path"] for i in order) == expected


def test_moved_and_renamed_files_are_known_by_their_content(memory, caplog):
    begun(memory, named("b", "d"))
    given = named("x/1", "x/2", "x/3")
    proofs = "dzb"
    order = arrange(memory, given, lambda i: proofs[i])
    assert order == [2, 0, 1]
    ordered = [given[i] for i in order]
    ledger = start(memory, inputs=ordered, prove=lambda i: proofs[order[i]], extend=True)
    ledger.close()
    assert "2 input files have moved, the first from b to x/3" in caplog.text


def test_an_order_without_a_run_is_the_given_one(memory):
    assert arrange(memory, named("c", "a")) == [0, 1]
