"""What is wrong with a run folder is found and named, and a repair makes the run what it was."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import orjson
import pytest
from click.testing import CliRunner
from fakes import FakeEngine, FakeModel
from faults import WRITES, Died, Fault, MeddledStore
from small_job import FlakyEngine, counters_of, inline, job_of, parts_of, rows_of, start, store_of

from batchgen import cli, job
from batchgen import lease as leases
from batchgen.damage import PLAN, carry_out
from batchgen.errors import ConfigError, Interrupted, NoInputError, StorageError
from batchgen.io.sinks import read_proof
from batchgen.io.stores import Store
from batchgen.ledger import Ledger
from batchgen.repair import repair
from batchgen.retry import retry
from batchgen.runfolder import INPUTS, JOB, SUCCESS, encode, index_name, piece_name, put_new
from batchgen.verify import lines, verify

__all__ = ["inline"]

FAILS = {(3, 0), (20, 0)}


@pytest.fixture(autouse=True)
def one_process(inline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").store.clear()
    monkeypatch.setitem(Ledger.open.__func__.__kwdefaults__, "dead_after", 0.0)  # we die and live on in one process


def repaired(a_job, folder: Path, opener: Callable[..., Store] = Store, dead_after: float = 0.0):
    model = FakeModel(folder, FlakyEngine(FAILS))
    return repair(a_job, model_opener=lambda _: model, store_opener=opener, dead_after=dead_after)


def finished(tmp_path: Path, folder: Path, kind: str, output: str | None = None, **more):
    a_job = job_of(tmp_path, output, output__format=kind, **more)
    start(a_job, folder, FlakyEngine(FAILS))
    return a_job, store_of(a_job)


# -- what can be wrong -------------------------------------------------------------------------------------------------

PART = "part-00000-00001"


def flip(at: Callable[[bytes], int]):
    def damage(store: Store, name: str) -> list[str]:
        data = bytearray(store.read(name))
        data[at(data)] ^= 1
        store.replace(name, bytes(data))
        return [name]

    return damage


def footer(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def truncated(store: Store, name: str) -> list[str]:
    store.replace(name, store.read(name)[:-5])
    return [name]


def emptied(store: Store, name: str) -> list[str]:
    store.replace(name, b"")
    return [name]


def deleted(store: Store, name: str) -> list[str]:
    store.delete(name)
    return [name]


def swapped(store: Store, name: str) -> list[str]:
    other = name.replace("00001.", "00002.")
    one, two = store.read(name), store.read(other)
    store.replace(name, two)
    store.replace(other, one)
    return [name, other]


def doubled(store: Store, name: str) -> list[str]:
    other = name.replace("00001.", "00009.")
    store.create(other, store.read(name))
    return [other]


def line_removed(store: Store, name: str) -> list[str]:
    store.replace(name, b"".join(store.read(name).splitlines(keepends=True)[:-1]))
    return [name]


def line_changed(store: Store, name: str) -> list[str]:
    found = store.read(name).splitlines(keepends=True)
    row = orjson.loads(found[2])
    row["text"] = "x" * len(row["text"])
    store.replace(name, b"".join([*found[:2], orjson.dumps(row) + b"\n", *found[3:]]))
    return [name]


def lines_exchanged(store: Store, name: str) -> list[str]:
    found = store.read(name).splitlines(keepends=True)
    store.replace(name, b"".join([found[1], found[0], *found[2:]]))
    return [name]


def without_proofs(damage: Callable[[Store, str], list[str]]):
    """What a JSONL part holds has to speak for itself."""

    def both(store: Store, name: str) -> list[str]:
        for proof in store.list("_batchgen/proofs"):
            store.delete(proof)
        return damage(store, name)

    return both


def torn(which: str):
    def damage(store: Store, name: str) -> list[str]:
        store.replace(which, store.read(which)[:-10])
        return [which]

    return damage


def edited(which: str, change: Callable[[dict], None]):
    def damage(store: Store, name: str) -> list[str]:
        record = orjson.loads(store.read(which))
        change(record)
        store.replace(which, encode(record))
        return [which]

    return damage


def gone(which: str):
    def damage(store: Store, name: str) -> list[str]:
        store.delete(which)
        return [which]

    return damage


def more_parts(record: dict) -> None:
    record["parts"][0]["bytes"] += 1


def more_rows(record: dict) -> None:
    record["counters"]["rows"] += 1


def shifted(record: dict) -> None:
    record["shards"][0][1] += 1
    record["shards"][1][0] += 1
    record["shards"][1][1] -= 1


RECORDS = {
    "torn job.json": torn(JOB),
    "torn inputs": torn(INPUTS),
    "other inputs": edited(INPUTS, lambda record: record["files"][0].update(size=1)),
    "torn index": torn(index_name(0)),
    "lost index": gone(index_name(0)),
    "index with a gap": edited(index_name(0), lambda record: record["shards"].pop(1)),
    "index of other shards": edited(index_name(0), shifted),
    "torn _SUCCESS": torn(SUCCESS),
    "_SUCCESS of other sizes": edited(SUCCESS, more_parts),
    "_SUCCESS of other counts": edited(SUCCESS, more_rows),
    "_SUCCESS of another run": edited(SUCCESS, lambda record: record.update(digest="0" * 64)),
}
ANY = {"deleted": deleted, "truncated": truncated, "emptied": emptied, "swapped": swapped, "doubled": doubled}
DAMAGES = {
    "parquet": ANY
    | RECORDS
    | {
        "a bit of its data": flip(lambda data: 200),
        "a bit of its footer": flip(lambda data: footer(data) + 40),
        "a bit of its proof": flip(lambda data: data.index(b"batchgen.counters") + 40),
        "a bit at its end": flip(lambda data: len(data) - 6),
    },
    "jsonl": ANY
    | RECORDS
    | {
        "line removed": line_removed,
        "line changed": line_changed,
        "lines exchanged": lines_exchanged,
        "line removed, no proofs": without_proofs(line_removed),
        "lines exchanged, no proofs": without_proofs(lines_exchanged),
        "swapped, no proofs": without_proofs(swapped),
        "truncated, no proofs": without_proofs(truncated),
    },
    "openai": ANY
    | {
        "line removed": line_removed,
        "lines exchanged": lines_exchanged,
        "line removed, no proofs": without_proofs(line_removed),
        "output.jsonl gone": gone("output.jsonl"),
        "output.jsonl torn": torn("output.jsonl"),
        "batch.json gone": gone("batch.json"),
    },
}
CASES = [(kind, name) for kind, damages in DAMAGES.items() for name in damages]


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_damage_is_named_and_repaired(tmp_path, model_folder, kind, what):
    a_job, store = finished(tmp_path, model_folder, kind, f"memory://{kind}")
    rows, counters = rows_of(store), counters_of(store)
    good = verify(store)
    assert good.ok and not good.problems and good.state == "finished" and good.parts == good.parts_expected == 4
    assert good.counters.to_json() == counters
    before = {name: store.read(name) for name in parts_of(store)}
    named = DAMAGES[kind][what](store, f"{PART}.{kind if kind == 'parquet' else 'jsonl'}")
    at_fault = {name for name in before if not store.exists(name) or store.read(name) != before[name]}
    found = verify(store)
    wrong = [problem for problem in found.problems if not problem.is_warning]
    assert {problem.file for problem in wrong} == set(named), wrong
    assert all(problem.what and problem.do for problem in wrong) and not found.ok
    summary = repaired(a_job, model_folder)
    assert rows_of(store) == rows and counters_of(store) == counters and summary["complete"]
    assert verify(store).ok
    assert {name for name in before if store.read(name) != before[name]} <= at_fault  # good parts were not touched
    assert start(a_job, model_folder)["complete"]


def test_every_byte_of_a_part_counts(tmp_path, model_folder):
    _, store = finished(tmp_path, model_folder, "parquet")
    name = f"{PART}.parquet"
    whole = store.read(name)
    path = Path(store.path(name))
    for at in [*range(0, footer(whole), 97), *range(footer(whole), len(whole))]:
        data = bytearray(whole)
        data[at] ^= 4
        if at >= footer(whole):  # what a start reads shows it already
            with pytest.raises(StorageError):
                read_proof(io.BytesIO(data), name)
        if at % 50 == 0:
            path.write_bytes(data)
            assert [problem.file for problem in verify(store).problems] == [name], at
    path.write_bytes(whole)
    assert verify(store).ok


def test_a_part_of_another_run_is_put_aside(tmp_path, model_folder):
    for kind in ("parquet", "jsonl"):
        a_job, store = finished(tmp_path, model_folder, kind, str(tmp_path / kind))
        rows = rows_of(store)
        _, other = finished(tmp_path, model_folder, kind, str(tmp_path / f"other {kind}"), sampling__max_tokens=9)
        name = f"{PART}.{kind}"
        foreign = other.read(name)
        store.replace(name, foreign)
        problem = verify(store).problems[0]
        assert problem.file == name
        assert ("another run" in problem.what) == (kind == "parquet")  # a JSONL part does not say whose it is
        repaired(a_job, model_folder)
        assert rows_of(store) == rows and verify(store).ok
        if kind == "parquet":
            assert store.read(f"_batchgen/aside/{name}") == foreign
        other_format = f"part-00000-00000.{'jsonl' if kind == 'parquet' else 'parquet'}"
        store.create(other_format, b"rows")
        assert [problem.file for problem in verify(store).problems] == [other_format]
        repaired(a_job, model_folder)
        assert verify(store).ok and store.read(f"_batchgen/aside/{other_format}") == b"rows"


def test_a_damaged_piece_is_a_warning(tmp_path, model_folder):
    _, store = finished(tmp_path, model_folder, "parquet")
    put_new(store, piece_name(0, 1, 1, "0" * 32), b"torn")
    found = verify(store)
    assert found.ok and [problem.is_warning for problem in found.problems] == [True]
    assert "warning: _batchgen/pieces/0/" in next(lines(found))


def test_a_running_and_a_stopped_run_are_well(tmp_path, model_folder):
    """At every write of a run, and of a retry: what is there is in order, and looking changes nothing."""
    states = set()

    class Looked(Store):
        def _look(self):
            if self.exists(JOB):
                before = {name: self.read(name) for name in self.list()}
                found = verify(Store(self.url))
                assert found.ok, found.problems
                states.add(found.state)
                assert before == {name: self.read(name) for name in self.list()}

        def create(self, name, data):
            done = super().create(name, data)
            self._look()
            return done

        def replace(self, name, data):
            super().replace(name, data)
            self._look()

        def replace_if(self, name, data, version):
            done = super().replace_if(name, data, version)
            self._look()
            return done

        def delete(self, name):
            super().delete(name)
            self._look()

    for kind in ("parquet", "jsonl", "openai"):
        a_job = job_of(tmp_path, str(tmp_path / kind), output__format=kind)
        model = FakeModel(model_folder, FlakyEngine(FAILS, running=2))
        store_opener = lambda url, options, retries: Looked(url)  # noqa: E731
        job.run(a_job, model_opener=lambda _, m=model: m, store_opener=store_opener)
        model = FakeModel(model_folder, FakeEngine(running=2))
        retry(a_job, model_opener=lambda _, m=model: m, store_opener=store_opener)
        assert counters_of(store_of(a_job))["rows_failed"] == 0
    assert states == {"running", "finished", "stopped"}


def test_no_run(tmp_path):
    with pytest.raises(NoInputError):
        verify(Store(str(tmp_path / "nothing")))


# -- repair ------------------------------------------------------------------------------------------------------------


def test_repair_of_a_run_that_is_well_writes_nothing(tmp_path, model_folder):
    a_job, store = finished(tmp_path, model_folder, "parquet")
    before = {name: store.version(name) for name in store.list()}
    assert repaired(a_job, model_folder)["repaired"] == []
    assert before == {name: store.version(name) for name in store.list()}


def test_repair_with_another_job_changes_nothing(tmp_path, model_folder):
    _, store = finished(tmp_path, model_folder, "parquet")
    for damage in (truncated, torn(JOB)):
        damage(store, f"{PART}.parquet")
        before = {name: store.read(name) for name in store.list()}
        with pytest.raises(ConfigError):
            repaired(job_of(tmp_path, sampling__seed=1), model_folder)
        assert before == {name: store.read(name) for name in store.list()}


def test_repair_on_an_object_store(tmp_path, model_folder, s3):
    a_job, store = finished(tmp_path, model_folder, "parquet", s3.url, output__storage_options=s3.storage_options)
    rows = rows_of(store)
    damaged = [f"part-00000-0000{n}.parquet" for n in (0, 2)]
    for name in damaged:
        truncated(store, name)
    assert [problem.file for problem in verify(store).problems] == damaged
    assert repaired(a_job, model_folder)["repaired"] == damaged
    assert rows_of(store) == rows and verify(store).ok


def test_a_repair_that_somebody_else_has_finished_takes_nothing_away(tmp_path, model_folder):
    """Two starts see the plan; the second one waits until the first has made the run whole again."""
    _, store = finished(tmp_path, model_folder, "parquet")
    before = {name: store.read(name) for name in store.list()}
    assert carry_out(store, lambda: None) == []
    assert {name: store.read(name) for name in store.list()} == before


def test_repair_needs_the_run_for_itself(tmp_path, model_folder):
    a_job, store = finished(tmp_path, model_folder, "parquet")
    truncated(store, f"{PART}.parquet")
    lease = leases.Lease.acquire(store, 2, {}, leases.Watch(store, [2], 0.0))
    with pytest.raises(Interrupted, match="at work on this run") as caught:
        repaired(a_job, model_folder, dead_after=30.0)
    assert caught.value.reason == "locked" and store.exists(SUCCESS)
    lease.release()
    assert repaired(a_job, model_folder)["repaired"] == [f"{PART}.parquet"]
    assert verify(store).ok


def test_a_part_that_was_made_good_meanwhile_is_not_deleted(tmp_path, model_folder, monkeypatch):
    a_job, store = finished(tmp_path, model_folder, "parquet")
    name = f"{PART}.parquet"
    whole = store.read(name)
    truncated(store, name)
    monkeypatch.setattr(
        "batchgen.repair._refuse_other_job", lambda *_: store.replace(name, whole)
    )  # somebody brings it back
    assert repaired(a_job, model_folder)["repaired"] == []
    assert store.read(name) == whole and verify(store).ok


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_dies_at_every_operation_and_is_repeated(tmp_path, model_folder, kind, how, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 100.0)
    monkeypatch.setattr(leases, "process_runs", lambda pid, started: False)  # the "dead" ones were this one
    first, store = finished(tmp_path, model_folder, kind, str(tmp_path / "first"))
    rows, counters = rows_of(store), counters_of(store)
    swapped(store, f"{PART}.{kind}")
    truncated(store, f"part-00000-00000.{kind}")
    for at in range(1, 100):
        a_job = job_of(tmp_path, str(tmp_path / f"out{at}"), output__format=kind)
        shutil.copytree(first.output.path, a_job.output.path)
        end, fault = store_of(a_job), Fault(f"dies {how}", at, lambda call: call.operation in WRITES)

        def failing(url, options, retries, fault=fault):
            return MeddledStore(url, options, meet=fault)

        try:
            repaired(a_job, model_folder, failing)
        except Died:
            if at % 2 or (end.exists(SUCCESS) and not end.exists(PLAN)):
                repaired(a_job, model_folder)
            start(a_job, model_folder, FlakyEngine(FAILS))  # which goes on with what a repair has begun
            assert not end.exists(PLAN)
        assert rows_of(end) == rows and counters_of(end) == counters and verify(end).ok, at
        if not fault.met:
            assert at > 12
            return


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, model_folder, monkeypatch):
    a_job, store = finished(tmp_path, model_folder, "parquet")
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(a_job.to_json()))

    def called(*args: str):
        return CliRunner().invoke(cli.cli, ["verify", *args], obj={"debug": False})

    good = called(store.url)
    assert good.exit_code == 0 and "problems     0" in good.stdout and "4 of 4" in good.stdout
    assert json.loads(called(str(file), "--json").stdout)["ok"] is True
    truncated(store, f"{PART}.parquet")
    bad = called(store.url)
    assert bad.exit_code == 74 and bad.stdout.startswith(f"{PART}.parquet: this part is corrupt")
    told = json.loads(called(store.url, "--json").stdout)
    assert told["ok"] is False and [problem["file"] for problem in told["problems"]] == [f"{PART}.parquet"]
    assert called(store.url, "--repair").exit_code == 2  # click's own code, which `main` turns into 64
    assert "needs the job file" in called(store.url, "--repair").output
    model = FakeModel(model_folder, FlakyEngine(FAILS))
    monkeypatch.setattr(repair, "__kwdefaults__", repair.__kwdefaults__ | {"model_opener": lambda _: model})
    done = called(str(file), "--repair")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["repaired"] == [f"{PART}.parquet"]
    assert called(str(file)).exit_code == 0
