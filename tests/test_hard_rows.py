"""Rows that are hard on an engine, through a whole job with a real, tiny model: too long, empty, out of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes import byte_tokenizer
from tiny import tiny_model

from batchgen import job, spec
from batchgen.engine.curve import KVCurve
from batchgen.engine.scheduler import Scheduler
from batchgen.models.decoder import Decoder

CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = byte_tokenizer(tmp_path_factory.mktemp("model") / "tiny")
    tiny_model(path, vocab_size=259, max_position_embeddings=CONTEXT, eos_token_id=256)
    return path


def run(folder: Path, tmp_path: Path, rows: list[Any], **changes: dict[str, Any]) -> tuple[dict, list[dict]]:
    """The summary and the result rows of a job over these rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    a_job = spec.parse(
        {
            "model": {"path": str(folder)},
            "input": {"path": str(path)},
            "prompt": {"column": "text", "chat": False, **changes.get("prompt", {})},
            "sampling": {"max_tokens": 10, "ignore_eos": True, **changes.get("sampling", {})},
            "output": {"path": str(tmp_path / "out"), "format": "jsonl", "token_ids": True},
            "engine": {"kv_memory": "8MiB", "max_num_seqs": 16, **changes.get("engine", {})},
            "errors": {"max_failed": 0.6},
        }
    )
    summary = job.run(a_job)
    return summary, [
        json.loads(line) for part in sorted((tmp_path / "out").glob("part-*.jsonl")) for line in part.open()
    ]


def test_one_row_too_long_one_null_one_list_among_a_thousand(folder: Path, tmp_path: Path) -> None:
    """E2: 997 answers and 3 errors, each in its place."""
    rows: list[Any] = [{"text": f"row {i}"} for i in range(1000)]
    rows[10], rows[500], rows[999] = {"text": "x" * 5000}, {"text": None}, {"text": ["a", "list"]}
    summary, found = run(folder, tmp_path, rows, sampling={"max_tokens": 2})
    codes = {place: row["error"]["code"] for place, row in enumerate(found) if row["error"]}
    assert codes == {10: "prompt_too_long", 500: "invalid_row", 999: "invalid_row"}
    assert len(found) == 1000 and summary["rows_failed"] == 3 and summary["complete"]
    assert all(row["output_tokens"] == 2 for place, row in enumerate(found) if place not in codes)


def test_prompts_around_the_length_of_the_context(folder: Path, tmp_path: Path) -> None:
    """E3: L-2 has room for two tokens, L-1 for one; L and L+1 are errors."""
    _, found = run(folder, tmp_path, [{"text": "x" * (CONTEXT + extra)} for extra in (-2, -1, 0, 1)])
    assert [(row["output_tokens"], row["finish_reason"]) for row in found] == [
        (2, "length"),
        (1, "length"),
        (0, "error"),
        (0, "error"),
    ]
    assert [row["error"] and row["error"]["code"] for row in found] == [None, None, *["prompt_too_long"] * 2]


def test_empty_prompts_in_a_job(folder: Path, tmp_path: Path) -> None:
    """E5: without BOS an empty text has no tokens; white space is a prompt."""
    texts = ["", " ", "\n", "x"]
    _, found = run(folder, tmp_path, [{"text": text} for text in texts] * 60, prompt={"allow_empty": True})
    assert [row["error"] and row["error"]["code"] for row in found] == ["empty_prompt", None, None, None] * 60


def test_running_out_of_memory_in_the_middle_of_a_job(folder: Path, tmp_path: Path) -> None:
    """E6: the step is halved and goes on; only what does not fit alone is an error; shards before are untouched."""
    rows = [{"text": f"row {i} " + "y" * (50 if i % 40 == 7 else 0)} for i in range(200)]
    (tmp_path / "calm").mkdir()
    (tmp_path / "tight").mkdir()
    _, calm = run(folder, tmp_path / "calm", rows)
    forward, calls = Decoder.forward, iter(range(10**6))

    def limited(self: Decoder, token_ids: torch.Tensor, *rest: Any) -> Any:
        if next(calls) == 12 or len(token_ids) > 48:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, token_ids, *rest)

    with patch.object(Decoder, "forward", limited):
        summary, found = run(folder, tmp_path / "tight", rows)
    assert summary["complete"] and [row["token_ids"] for row in found] == [row["token_ids"] for row in calm]


def test_a_pool_for_a_third_of_the_sequences_that_run(folder: Path, tmp_path: Path) -> None:
    """E7: what has no room is computed again later, and all finish."""
    rows = [{"text": f"row {i:02d}"} for i in range(50)]
    (tmp_path / "wide").mkdir()
    _, wide = run(folder, tmp_path / "wide", rows, sampling={"max_tokens": 50})
    engine = {"kv_memory": "1MiB", "prefix_cache": False, "max_num_seqs": 50}  # 1,024 tokens for 50 times 56
    preempts = patch.object(Scheduler, "_preempt", autospec=True, side_effect=Scheduler._preempt)
    with patch.object(KVCurve, "admit", return_value=True), preempts as preempted:  # no forecast holds anyone back
        summary, found = run(folder, tmp_path, rows, sampling={"max_tokens": 50}, engine=engine)
    assert preempted.called
    assert summary["complete"] and [row["token_ids"] for row in found] == [row["token_ids"] for row in wide]
