"""The benchmark of the data plane: a job of its own is run, watched, killed and started again."""

from __future__ import annotations

from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from batchgen import bench_data
from batchgen.bench_data import Workload, measure
from batchgen.errors import BatchgenError, ConfigError


@pytest.mark.parametrize(("read", "write"), [("parquet", "jsonl"), ("jsonl", "parquet")])
def test_every_row_goes_through_and_is_counted(tmp_path: Path, read: str, write: str) -> None:
    folder = tmp_path / "bench"
    workload = Workload(
        rows=3001,
        prompt_tokens=60,
        answer_tokens=5,
        files=2,
        input_format=read,
        output_format=write,
        carried_bytes=11,
        folder=str(folder),
    )
    found = measure(workload)
    assert (found["rows"], found["rows_of_this_start"], found["files"]) == (3001, 3001, 2)
    assert 0.9 < found["prompt_tokens_per_row"] / 60 < 1.1
    assert found["output_tokens_per_row"] <= 5
    assert 0 < found["ready_s"] < found["seconds"]
    assert found["objects"]["parts"] == 2 and found["objects"]["records"] >= 5  # job, inputs, epoch, two indexes
    assert found["peak_rss_mib"]["main"] > found["libraries_mib"]["main"] > 10
    assert all(0 < files <= 64 for files in found["peak_open_files"].values())
    output = folder / "output"
    assert (output / "_SUCCESS").exists()
    if write == "parquet":
        rows = [row for part in sorted(output.glob("part-*")) for row in pq.read_table(part).to_pylist()]
    else:
        rows = [orjson.loads(line) for part in sorted(output.glob("part-*")) for line in part.open("rb")]
    assert [int(row["id"]) for row in rows] == list(range(3001))
    assert {len(row["carried"].strip('"')) for row in rows} <= {11, 12, 13}  # JSON text where the input is JSON Lines
    assert all(row["text"] for row in rows)

    with pytest.raises(ConfigError, match="is not empty"):
        measure(workload)


def test_a_killed_job_goes_on_behind_its_parts() -> None:
    found = measure(Workload(rows=20_000, prompt_tokens=5, answer_tokens=2), resume=True)
    assert found["resumed"] and found["rows_of_this_start"] == 20_000 - 2 * 8192  # two parts were committed
    assert found["objects"]["parts"] == 1
    assert 0 < found["ready_s"] < found["seconds"]


def test_a_job_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_data, "_job", lambda *args: {"name": "no job at all"})
    with pytest.raises(BatchgenError, match="ended with exit code 1"):
        measure(Workload(rows=10))
