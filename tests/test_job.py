"""The orchestrator with a fake engine: rows in = rows out, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModel, fake_tokens

from batchgen import job, spec
from batchgen.errors import ConfigError, DataError, Interrupted, NoInputError, StorageError
from batchgen.feeder import Feeder
from batchgen.io.files import expand
from batchgen.io.stores import Store
from batchgen.lease import Heart
from batchgen.metrics import Meter
from batchgen.runstatus import peek


def write_rows(folder: Path, count: int, name: str = "rows.parquet", start: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"row {i} " + "x" * (i % 7) for i in range(start, start + count)]
    table = pa.table({"key": [f"k{i}" for i in range(start, start + count)], "text": texts})
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=10)
    else:
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in table.to_pylist()))
    return path


def job_of(tmp_path: Path, inputs: Path, **changes: object) -> spec.JobSpec:
    data: dict = {
        "model": {"path": "fake"},
        "input": {"path": str(inputs), "id": "key"},
        "prompt": {"column": "text", "chat": False},
        "sampling": {"max_tokens": 100},
        "output": {"path": str(tmp_path / "out"), "columns": ["text"], "shard_rows": 16, "token_ids": True},
        "checkpoint": {"interval": 0.001},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data.setdefault(section, {})[name] = value
        else:
            data[section] = value
    return spec.parse(data)


def start(a_job: spec.JobSpec, model: FakeModel, options: job.RunOptions | None = None) -> dict:
    return job.run(a_job, options, model_opener=lambda _: model)


def results(a_job: spec.JobSpec) -> list[dict]:
    folder = Path(a_job.output.path)
    if a_job.output.format == "parquet":
        parts = sorted(folder.glob("part-*.parquet"))
        return [row for part in parts for row in pq.read_table(part).to_pylist()]
    return [orjson.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.open("rb")]


def expected_tokens(text: str, sample: int = 0, max_tokens: int = 100) -> list[int]:
    prompt = np.array([ord(c) - 33 if c != " " else SPACE for c in text], np.int32)
    return fake_tokens(prompt, sample, max_tokens).tolist()


# The byte-level alphabet sorted by code point: 33..126 first, so "a" is 64; space is U+0120, after all of Latin-1
SPACE = 188 + 32


def test_space_is_where_the_tests_think(model_folder: Path) -> None:
    assert FakeModel(model_folder).tokenizer.encode(" ", add_special_tokens=False).tolist() == [SPACE]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("source", ["rows.parquet", "rows.jsonl"])
def test_every_row_once_in_input_order(tmp_path: Path, model_folder: Path, kind: str, source: str) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 100, source), output__format=kind)
    summary = start(a_job, FakeModel(model_folder))
    found = results(a_job)
    assert [row["id"] for row in found] == [f"k{i}" for i in range(100)]
    for row in found:
        text = row["text"]
        as_json = source.endswith("jsonl") and kind == "parquet"
        carried = json.loads(row["input_text"]) if as_json else row["input_text"]
        assert row["token_ids"] == expected_tokens(carried)
        assert text == "".join(chr(t + 33) for t in row["token_ids"][: -1 if row["finish_reason"] == "stop" else None])
        assert row["prompt_tokens"] == len(carried) and row["error"] is None
    assert summary["rows"] == 100 and summary["complete"] and not summary["failed"]
    assert len(list((tmp_path / "out").glob("part-*"))) == 7
    assert json.loads((tmp_path / "out/_SUCCESS").read_bytes())["counters"]["rows"] == 100


def test_a_finished_job_runs_again_without_a_model(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 20))
    first = start(a_job, FakeModel(model_folder))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}

    def no_model(_: spec.JobSpec) -> FakeModel:
        raise AssertionError("a finished job needs no model")

    again = job.run(a_job, model_opener=no_model)
    assert again["rows"] == first["rows"] == 20 and again["status"] == "done"
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"sampling\.temperature: 0\.0 then, 0\.5 now"):
        job.run(job_of(tmp_path, tmp_path / "rows.parquet", sampling__temperature=0.5), model_opener=no_model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling__temperature": 0.7}, "sampling.temperature"),
        ({"prompt": {"template": "{{ text }}!", "chat": False}}, "prompt.template"),
        ({"output__columns": []}, "output.columns"),
        ({"output__skip_special_tokens": False}, "output.skip_special_tokens"),
    ],
)
def test_another_job_in_the_folder_is_refused_by_name(
    tmp_path: Path, model_folder: Path, changes: dict, named: str
) -> None:
    """F18."""
    rows = write_rows(tmp_path, 20)
    with pytest.raises(Interrupted):
        start(job_of(tmp_path, rows), FakeModel(model_folder), job.RunOptions(max_runtime=0.0))
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        start(job_of(tmp_path, rows, **changes), FakeModel(model_folder))
    # what does not change the results does not matter
    summary = start(job_of(tmp_path, rows, engine__max_num_seqs=3, errors__max_failed=5), FakeModel(model_folder))
    assert summary["rows"] == 20


@pytest.mark.parametrize("names", [["a.parquet", "b.parquet"], ["a.jsonl", "b.jsonl"]])
def test_the_number_of_rows_is_estimated_from_what_is_read(tmp_path: Path, model_folder: Path, names: list) -> None:
    for place, name in enumerate(names):
        write_rows(tmp_path / "in", 3000, name, start=10_000 + place * 3000)
    a_job = job_of(tmp_path, tmp_path / "in", checkpoint__interval=60)
    files = expand(a_job.input.path, {})
    meter = Meter(sizes={file.number: file.size for file in files})
    assert meter.total_rows is None
    with Feeder(a_job, files, [names[0].rpartition(".")[2]] * 2, str(model_folder), 4096, {}, None) as feeder:
        estimates = []
        while not feeder.finished:
            if (batch := feeder.get(timeout=1.0)) is not None:
                meter.note_share(batch.file, batch.next_row, batch.share)
                estimates.append(meter.total_rows)
    assert all(5000 < estimate < 7000 for estimate in estimates[4:]) and estimates[-1] == 6000


def test_a_changed_input_is_refused(tmp_path: Path, model_folder: Path) -> None:
    rows = write_rows(tmp_path, 40)
    with pytest.raises(Interrupted):
        start(job_of(tmp_path, rows), FakeModel(model_folder), job.RunOptions(max_runtime=0.0))
    write_rows(tmp_path, 40, start=3)
    with pytest.raises(ConfigError, match=r"changed: .*rows\.parquet"):
        start(job_of(tmp_path, rows), FakeModel(model_folder))


def test_samples_of_a_row_stand_together(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 30), sampling__n=3, sampling__temperature=1.0)
    summary = start(a_job, FakeModel(model_folder))
    found = results(a_job)
    assert [(row["id"], row["sample"]) for row in found] == [(f"k{i}", s) for i in range(30) for s in range(3)]
    for row in found:
        assert row["token_ids"] == expected_tokens(row["input_text"], row["sample"])
    assert summary["rows"] == 30 and summary["results"] == 90


def test_bad_rows_are_rows_with_an_error(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "text": "fine"}\n{"key": "b"}\n{broken\n{"key": "d", "text": ""}\n' * 5)
    a_job = job_of(tmp_path, path, sampling__n=2, errors__max_failed=15)
    summary = start(a_job, FakeModel(model_folder))
    found = results(a_job)
    assert len(found) == 40
    codes = [row["error"] and row["error"]["code"] for row in found[:8]]
    assert codes == [None, None] + ["missing_column"] * 2 + ["invalid_json"] * 2 + ["empty_prompt"] * 2
    assert [row["id"] for row in found[:8:2]] == ["a", "b", None, "d"]
    assert found[2]["text"] is None and found[2]["finish_reason"] == "error"
    assert summary["rows_failed"] == 15


def test_too_many_bad_rows_end_the_job(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "text": "fine"}\n{"key": "b"}\n' * 10)
    with pytest.raises(DataError, match=r"10 of 20 rows failed.*max_failed allows: missing_column 10"):
        start(job_of(tmp_path, path), FakeModel(model_folder))
    assert not (tmp_path / "out/_SUCCESS").exists()
    with pytest.raises(DataError, match=r"10 of 20 rows failed(.|\n)*missing_column"):  # however often it is tried
        start(job_of(tmp_path, path), FakeModel(model_folder))
    with pytest.raises(DataError, match="10 of 20 rows failed"):
        start(job_of(tmp_path, path), FakeModel(model_folder))
    status = peek(Store(str(tmp_path / "out")))
    assert status.state == "failed" and status.error is not None and "10 of 20 rows failed" in status.error
    # the work is kept: only what was in flight is still to be done
    engine = FakeEngine()
    assert start(job_of(tmp_path, path, errors__max_failed=0.5), FakeModel(model_folder, engine))["rows"] == 20
    assert engine.output_tokens < sum(row["output_tokens"] for row in results(job_of(tmp_path, path))) / 2


def test_a_trial_in_which_nothing_works_is_no_success(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "b"}\n' * 30)
    told = r"10 of 10 rows failed.*missing_column 10(.|\n)*rows\.jsonl row 0: missing_column"
    with pytest.raises(DataError, match=told):
        start(job_of(tmp_path, path), FakeModel(model_folder), job.RunOptions(limit=10))


def test_results_among_the_input_are_refused(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "in", 5)
    with pytest.raises(ConfigError, match="is inside the input"):
        start(job_of(tmp_path, tmp_path / "in", output__path=str(tmp_path / "in/")), FakeModel(model_folder))


@pytest.mark.parametrize("pattern", ["in/**/*.jsonl", "in/*", "in"])
def test_results_below_the_input_are_refused_at_the_first_start(
    tmp_path: Path, model_folder: Path, pattern: str
) -> None:
    write_rows(tmp_path / "in", 5, "rows.jsonl")
    inside = job_of(tmp_path, tmp_path / pattern, output__path=f"{tmp_path}/in/day=1")
    with pytest.raises(ConfigError, match="is inside the input"):
        start(inside, FakeModel(model_folder))
    beside = job_of(tmp_path, tmp_path / "in/*.jsonl", output__path=f"{tmp_path}/in/out")
    assert start(beside, FakeModel(model_folder))["rows"] == 5
    assert start(beside, FakeModel(model_folder))["rows"] == 5


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("gone", ["_batchgen", "_batchgen/job.json"])
def test_parts_of_an_unknown_run_are_nobodys(tmp_path: Path, model_folder: Path, gone: str, kind: str) -> None:
    rows = write_rows(tmp_path, 40)
    start(job_of(tmp_path, rows, output__format=kind), FakeModel(model_folder))
    lost = tmp_path / "out" / gone
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    other = job_of(tmp_path, rows, output__format=kind, sampling__temperature=1.0)
    with pytest.raises(ConfigError, match="nobody can tell"):
        start(other, FakeModel(model_folder))
    with pytest.raises(ConfigError, match=r"nobody can tell|another run"):
        start(other, FakeModel(model_folder), job.RunOptions(overwrite=True))


@pytest.mark.parametrize("name", ["job.json", "inputs/000001.json", "index/00000.json"])
def test_a_record_that_lost_its_keys_is_written_again(tmp_path: Path, model_folder: Path, name: str) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 40))
    read = tmp_path / "out/_batchgen/index/00000.json"
    engine = FakeEngine(running=4, think=lambda: time.sleep(0 if read.exists() else 0.05))
    with pytest.raises(Interrupted):
        start(a_job, FakeModel(model_folder, engine), job.RunOptions(max_output_tokens=200))
    assert (tmp_path / "out/_batchgen" / name).exists()
    (tmp_path / "out/_batchgen" / name).write_text("{}")
    assert peek(Store(a_job.output.path)).state in ("stopped", "empty")
    assert start(a_job, FakeModel(model_folder))["rows"] == 40


def test_ids_of_any_type_and_bytes_that_are_no_text(tmp_path: Path, model_folder: Path) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xffc")]
    )
    columns = {
        "key": pa.array([[1], [1], [2]]),
        "text": pa.array(["one", "two", "three"]),
        "note": bad,
        "view": pa.array(["x", None, "z"], pa.string_view()),
        "at": pa.array([1, 2, 3], pa.timestamp("ns")),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    for kind in ("parquet", "jsonl"):
        a_job = job_of(
            tmp_path,
            tmp_path / "rows.parquet",
            output={"path": f"{tmp_path}/{kind}", "format": kind, "columns": ["note", "view"]},
            sampling__n=2,
            errors__max_failed=1,
        )
        start(a_job, FakeModel(model_folder))
        found = results(a_job)
        assert [row["id"] for row in found] == [[1]] * 4 + [[2]] * 2
        assert [row["error"] and row["error"]["code"] for row in found[::2]] == [None, "invalid_unicode", None]
        assert [row["note"] for row in found[::2]] == ["a", None, "c"]
        assert [row["view"] for row in found[::2]] == ["x", None, "z"]
    by_time = job_of(tmp_path, tmp_path / "rows.parquet", input__id="at", output__path=f"{tmp_path}/at")
    assert start(by_time, FakeModel(model_folder))["rows"] == 3


def test_stop_ids_that_no_token_has(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids: 1000000, but the model's ids are 0 to 258"):
        start(job_of(tmp_path, write_rows(tmp_path, 3), sampling__stop_token_ids=[10**6]), FakeModel(model_folder))


def test_work_is_saved_when_the_feeder_is_killed(tmp_path: Path, model_folder: Path) -> None:
    import psutil

    a_job = job_of(tmp_path, write_rows(tmp_path, 9000, "rows.jsonl"), checkpoint__interval=60, output__shard_rows=9000)
    steps = iter(range(10**6))

    def think() -> None:
        if next(steps) == 10:
            for child in psutil.Process().children():
                child.kill()

    with pytest.raises(Interrupted, match="killed by signal 9") as interrupted:
        start(a_job, FakeModel(model_folder, FakeEngine(running=16, pace=4, think=think)))
    assert interrupted.value.reason == "feeder"
    assert list((tmp_path / "out/_batchgen/pieces/0").glob("*.arrow"))


def test_a_finished_run_whose_input_is_gone_is_still_finished(tmp_path: Path, model_folder: Path) -> None:
    rows = write_rows(tmp_path, 20)
    a_job = job_of(tmp_path, rows)
    start(a_job, FakeModel(model_folder))
    rows.unlink()
    assert start(a_job, FakeModel(model_folder))["rows"] == 20
    with pytest.raises(ConfigError, match="temperature"):
        start(job_of(tmp_path, rows, sampling__temperature=0.5), FakeModel(model_folder))


def test_a_finished_run_that_lost_a_part_says_so(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 40))
    start(a_job, FakeModel(model_folder))
    (tmp_path / "out/part-00000-00001.parquet").unlink()
    with pytest.raises(StorageError, match=r"1 of its files are gone, first part-00000-00001\.parquet"):
        start(a_job, FakeModel(model_folder))
    (tmp_path / "out/_SUCCESS").unlink()
    assert start(a_job, FakeModel(model_folder))["rows"] == 40
    assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in range(40)]


def test_status_knows_rows_that_are_not_committed(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 12), output__shard_rows=100)
    steps = iter(range(10**6))
    engine = FakeEngine(running=4, think=lambda: time.sleep(1.05 if next(steps) == 6 else 0))
    with pytest.raises(Interrupted):
        start(a_job, FakeModel(model_folder, engine), job.RunOptions(max_output_tokens=100))
    assert peek(Store(a_job.output.path)).rows_done > 0


def test_few_bad_rows_among_slow_good_ones_are_no_reason_to_end(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(("".join(f'{{"key": "{i}", "text": "fine {i}"}}\n' for i in range(199)) + '{"key": "b"}\n') * 15)
    a_job = job_of(tmp_path, path, checkpoint__interval=60, output__shard_rows=500)
    assert start(a_job, FakeModel(model_folder, FakeEngine(running=256, pace=1)))["rows_failed"] == 15


def test_overwrite_keeps_the_old_run_when_the_new_job_is_wrong(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 20))
    start(a_job, FakeModel(model_folder))
    with pytest.raises(NoInputError):
        start(job_of(tmp_path, tmp_path / "typo*.parquet"), FakeModel(model_folder), job.RunOptions(overwrite=True))
    assert (tmp_path / "out/_SUCCESS").exists() and len(results(a_job)) == 20


def test_a_broken_heart_ends_the_start(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beat(self: object) -> None:
        raise Interrupted("taken over", reason="fenced")

    monkeypatch.setattr("batchgen.ledger.Ledger.heartbeat", beat)
    monkeypatch.setattr("batchgen.job.Heart", lambda beat: Heart(beat, 0.01))
    engine = FakeEngine(running=1, pace=1, think=lambda: time.sleep(0.005))
    with pytest.raises(Interrupted, match="taken over"):
        start(job_of(tmp_path, write_rows(tmp_path, 50)), FakeModel(model_folder, engine))


def test_finished_files_are_not_read_again(tmp_path: Path, model_folder: Path) -> None:
    inputs = tmp_path / "in"
    for place, name in enumerate(["a.jsonl", "b.jsonl"]):
        write_rows(inputs, 60, name, start=place * 60)
    a_job = job_of(tmp_path, inputs)
    with pytest.raises(Interrupted):
        start(a_job, FakeModel(model_folder, FakeEngine(running=4)), job.RunOptions(max_output_tokens=1000))
    assert (tmp_path / "out/_batchgen/index/00000.json").exists()
    assert start(a_job, FakeModel(model_folder))["rows"] == 120
    assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in range(120)]


def test_a_limit_shows_rows_and_is_no_end(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 50))
    summary = start(a_job, FakeModel(model_folder), job.RunOptions(limit=20))
    assert summary["rows"] == 20 and not summary["complete"]
    assert not (tmp_path / "out/_SUCCESS").exists()
    assert len(results(a_job)) == 16  # one whole shard
    trial = pq.read_table(tmp_path / "out/_batchgen/trial/part-00000-00001.parquet")
    assert trial["id"].to_pylist() == [f"k{i}" for i in range(16, 20)]
    engine = FakeEngine()
    assert start(a_job, FakeModel(model_folder, engine))["rows"] == 50
    assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in range(50)]
    # the four rows of the cut-off shard were kept and not computed again
    again = sum(len(row["token_ids"]) for row in results(a_job)[20:])
    assert engine.output_tokens == again


def test_signal_drains_and_tokens_in_flight_are_kept(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 60))
    steps = iter(range(10**6))
    engine = FakeEngine(
        running=20, pace=2, think=lambda: os.kill(os.getpid(), signal.SIGTERM) if next(steps) == 4 else None
    )
    with pytest.raises(Interrupted, match="SIGTERM received") as interrupted:
        start(a_job, FakeModel(model_folder, engine))
    assert interrupted.value.reason == "signal"
    kept = {(one.key, one.sample): one.token_ids for one in engine.snapshot()}
    assert kept and peek(Store(a_job.output.path)).state == "stopped"
    second = FakeEngine()
    start(a_job, FakeModel(model_folder, second))
    assert set(second.resumed) == set(kept)
    assert all(np.array_equal(second.resumed[key], kept[key]) for key in kept)
    assert [row["token_ids"] for row in results(a_job)] == [expected_tokens(r["input_text"]) for r in results(a_job)]


@pytest.mark.parametrize("option", [{"max_runtime": 0.0}, {"max_output_tokens": 30}])
def test_limits_of_a_start(tmp_path: Path, model_folder: Path, option: dict) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 60))
    with pytest.raises(Interrupted) as interrupted:
        start(a_job, FakeModel(model_folder, FakeEngine(running=4, pace=3)), job.RunOptions(**option))
    assert interrupted.value.reason == "limit"
    assert start(a_job, FakeModel(model_folder))["rows"] == 60


def test_overwrite_and_must_be_new(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 20))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    start(a_job, FakeModel(model_folder), job.RunOptions(must_be_new=True))
    with pytest.raises(ConfigError, match="must-be-new"):
        start(a_job, FakeModel(model_folder), job.RunOptions(must_be_new=True))
    other = job_of(tmp_path, tmp_path / "rows.parquet", sampling__temperature=1.0)
    assert start(other, FakeModel(model_folder), job.RunOptions(overwrite=True))["rows"] == 20
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


def test_second_start_of_a_living_run_is_locked_out(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_rows(tmp_path, 20))
    tried = []

    def second_start() -> None:
        if not tried:
            tried.append(True)
            with pytest.raises(Interrupted, match="is at work on this run") as locked:
                start(a_job, FakeModel(model_folder))
            assert locked.value.reason == "locked"

    assert start(a_job, FakeModel(model_folder, FakeEngine(think=second_start)))["rows"] == 20
    assert tried


def test_new_files_extend_a_finished_run(tmp_path: Path, model_folder: Path) -> None:
    """F1: new rows come in new files, with --extend; inserted rows are refused with the difference."""
    inputs = tmp_path / "in"
    write_rows(inputs, 20, "b.parquet")
    a_job = job_of(tmp_path, inputs)
    start(a_job, FakeModel(model_folder))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("part-*")}
    write_rows(inputs, 30, "a.parquet", start=100)  # sorts before the file that the run has
    with pytest.raises(ConfigError, match=r"added: .*a\.parquet(.|\n)*--extend"):
        start(a_job, FakeModel(model_folder))
    summary = start(a_job, FakeModel(model_folder), job.RunOptions(extend=True))
    assert summary["rows"] == 50 and summary["complete"]
    assert {name: (tmp_path / "out" / name).read_bytes() for name in before} == before
    keys = [row["id"] for row in results(a_job)]
    assert keys == [f"k{i}" for i in [*range(20), *range(100, 130)]]
    stand = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for options in (job.RunOptions(), job.RunOptions(extend=True)):
        assert start(a_job, FakeModel(model_folder), options)["rows"] == 50
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == stand
    pq.write_table(pa.table({"key": ["x", "y"], "text": [1, 2]}), inputs / "c.parquet")
    with pytest.raises(ConfigError, match=r'columns\.input_text: "string" then, "JSON text" now'):
        start(a_job, FakeModel(model_folder), job.RunOptions(extend=True))
    (inputs / "c.parquet").unlink()
    write_rows(inputs, 23, "b.parquet", start=-3)  # three rows more at the top
    with pytest.raises(ConfigError, match=r"changed: .*b\.parquet"):
        start(a_job, FakeModel(model_folder), job.RunOptions(extend=True))
