"""Answers in OpenAI's form: lines, counting them again, and the files made of a whole run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchgen.errors import StorageError
from batchgen.io import answers
from batchgen.io.files import expand
from batchgen.io.sinks import ShardResults, build_part, count_jsonl, result_schema
from batchgen.io.stores import Store
from batchgen.runfolder import Counters, part_name
from batchgen.types import Completion, RowError, RowKey, ShardRange

CHAT, COMPLETIONS = answers.CHAT, answers.COMPLETIONS
BAD = RowError("invalid_parameter", "body.n: 0 given \ud83d")
BROKEN = RowError("nonfinite_logits", "not a number")


def sample(row: int, number: int = 0, tokens: int = 3, error: RowError | None = None, prompt: int = 5) -> Completion:
    reason = "stop" if error is None else "error"
    return Completion(RowKey(0, row), number, np.arange(tokens, dtype=np.int32), reason, None, prompt, error)


def results(rows: list[list[Completion]], requests: list[tuple[Any, ...]], truncated: set[int] = frozenset()) -> Any:
    """`requests`: (custom_id, endpoint, model) or (id,) of each row."""
    names = ["id", "endpoint", "model"][: len(requests[0])] if requests else []
    batch = pa.table({name: [row[i] for row in requests] for i, name in enumerate(names)}).to_batches()
    flat = [one for row in rows for one in row]
    return ShardResults(
        shard=ShardRange(0, 0, 0, len(rows), 0, 0),
        rows=np.arange(len(rows)),
        samples=np.array([len(row) for row in rows]),
        inputs=batch,
        completions=flat,
        texts=[f"text {one.key.row}.{one.sample} \u2028é" for one in flat],
        truncated=np.array([row in truncated for row in range(len(rows))], np.bool_),
    )


SCHEMA = result_schema(id_field=pa.field("id", pa.string()), carried=[], token_ids=False).with_metadata(
    {answers.MODEL: "jobs/model"}
)


def lines_of(given: ShardResults, digest: str = "d" * 64) -> list[dict[str, Any]]:
    data = build_part("openai", SCHEMA, given, {"fingerprint": digest})
    assert data.endswith(b"\n") and data.count(b"\n") == len(given.rows)
    return [json.loads(line) for line in data.decode().split("\n")[:-1]]


MIXED = results(
    [
        [sample(0), sample(0, 1, tokens=2)],
        [sample(1)],
        [sample(2, tokens=0, prompt=0, error=BAD)],
        [sample(3), sample(3, 1, tokens=1, error=BROKEN)],
        [sample(4, tokens=0, prompt=0, error=BAD), sample(4, 1, tokens=0, prompt=0, error=BAD)],
        [sample(5, tokens=0, prompt=0, error=BROKEN)],
    ],
    [("a", CHAT, "gpt"), ("b", COMPLETIONS, None), (None, None, None), ("c", CHAT, "gpt")] + [("e", CHAT, "g")] * 2,
    truncated={1, 5},
)


def test_an_answered_chat() -> None:
    line = lines_of(MIXED)[0]
    assert line["custom_id"] == "a" and line["error"] is None
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": "text 0.1 \u2028é", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert body["object"] == "chat.completion" and body["model"] == "gpt" and "truncated" not in body
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    ids = (line["id"], line["response"]["request_id"], body["id"])
    assert [one.rpartition("_")[0] or one.partition("-")[0] for one in ids] == ["batch_req", "req", "chatcmpl"]


def test_an_answered_completion() -> None:
    body = lines_of(MIXED)[1]["response"]["body"]
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["model"] == "jobs/model"  # the request names none
    assert body["choices"] == [{"index": 0, "text": "text 1.0 \u2028é", "logprobs": None, "finish_reason": "stop"}]
    assert body["truncated"] is True


def test_a_bad_request() -> None:
    line = lines_of(MIXED)[2]
    message = "body.n: 0 given \\ud83d"
    assert line["custom_id"] is None
    assert line["error"] == {"code": "invalid_parameter", "message": message}
    error = {"code": "invalid_parameter", "message": message, "type": "invalid_request_error", "param": None}
    assert line["response"]["status_code"] == 400 and line["response"]["body"] == {"error": error}


def test_a_request_of_which_one_sample_failed_keeps_the_others_text() -> None:
    line = lines_of(MIXED)[3]
    assert line["error"]["code"] == "nonfinite_logits" and line["response"]["status_code"] == 500
    body = line["response"]["body"]
    assert body["error"]["type"] == "server_error"
    assert body["choices"][0]["message"]["content"].startswith("text 3.0")
    assert body["choices"][1]["finish_reason"] == "error" and "message" not in body["choices"][1]
    assert body["usage"]["completion_tokens"] == 4


def test_names_follow_from_run_and_row_alone() -> None:
    first, again, other = lines_of(MIXED), lines_of(MIXED), lines_of(MIXED, "e" * 64)
    assert first == again
    names = [line["id"] for line in (*first, *other)]
    assert len(set(names)) == len(names)


def test_lines_count_as_their_rows() -> None:
    data = build_part("openai", SCHEMA, MIXED, {"fingerprint": "d"})
    assert count_jsonl(data, "part", MIXED.shard, part_format="openai") == MIXED.counters()


@pytest.mark.parametrize("line", [b"{}\n", b'{"response": null, "error": null}\n', b"[]\n", b"5\n", b"x\n"])
def test_a_line_that_is_none_is_found(line: bytes) -> None:
    with pytest.raises(StorageError, match="line 1 is not a result"):
        count_jsonl(line, "part", ShardRange(0, 0, 0, 1, 0, 0), part_format="openai")


def test_a_missing_line_is_found() -> None:
    data = build_part("openai", SCHEMA, MIXED, {"fingerprint": "d"})
    with pytest.raises(StorageError, match="holds 5 rows where the input has 6"):
        count_jsonl(data[: data[:-1].rindex(b"\n") + 1], "part", MIXED.shard, part_format="openai")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["k", None], ["k", None]),
        ([3, 10**15], ["3", str(10**15)]),
        ([[1], [2]], ["[1]", "[2]"]),
    ],
)
def test_ids_of_any_input_are_text(values: list[Any], names: list[str]) -> None:
    given = results([[sample(row)] for row in range(2)], [(value,) for value in values])
    assert [line["custom_id"] for line in lines_of(given)] == names


def test_rows_without_an_id_are_named_by_their_place() -> None:
    given = results([[sample(row)] for row in range(2)], [])
    lines = lines_of(given)
    assert [line["custom_id"] for line in lines] == ["0:0", "0:1"]
    assert lines[0]["response"]["body"]["model"] == "jobs/model"


# -- the files of a whole run ------------------------------------------------------------------------------------------


def published(store: Store, pulse: Any = lambda: None, **changed: Any) -> Counters:
    counters = Counters()
    names = []
    for shard in range(2):
        names.append(part_name(0, shard, "openai"))
        store.replace(names[-1], build_part("openai", SCHEMA, MIXED, {"fingerprint": f"{shard}"}))
        counters.add(MIXED.counters())
    given = {"digest": "d" * 64, "inputs": ["in/requests.jsonl"], "created": 5, "completed": 9, "pulse": pulse}
    answers.publish(store, names, counters, **(given | changed))
    return counters


def read_lines(store: Store, name: str) -> list[Any]:
    return [json.loads(line) for line in store.read(name).splitlines()]


def test_answers_and_errors_are_sorted_out(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    counters = published(store)
    good, bad = read_lines(store, "output.jsonl"), read_lines(store, "errors.jsonl")
    assert [line["custom_id"] for line in good] == ["a", "b"] * 2
    assert [line["custom_id"] for line in bad] == [None, "c", "e", "e"] * 2
    assert all(line["error"] is None and line["response"]["status_code"] == 200 for line in good)
    assert all(line["error"] is not None and line["response"]["status_code"] != 200 for line in bad)
    batch = json.loads(store.read("batch.json"))
    assert batch["request_counts"] == {"total": 12, "completed": 4, "failed": 8}
    assert batch["usage"]["total_tokens"] == counters.prompt_tokens + counters.output_tokens
    used = [line["response"]["body"].get("usage", {"total_tokens": 0})["total_tokens"] for line in (*good, *bad)]
    assert sum(used) == batch["usage"]["total_tokens"]
    assert (batch["object"], batch["status"], batch["endpoint"]) == ("batch", "completed", CHAT)
    assert (batch["input_file_id"], batch["output_file_id"]) == ("requests.jsonl", "output.jsonl")
    assert (batch["error_file_id"], batch["created_at"], batch["completed_at"]) == ("errors.jsonl", 5, 9)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    published(store)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_text_that_looks_like_the_end_of_an_answer(tmp_path: Path) -> None:
    error = RowError("invalid_row", '"error":null}\n')
    given = results([[sample(0, tokens=0, prompt=0, error=error)], [sample(1)]], [('"error":{}}', CHAT, "m")] * 2)
    store = Store(str(tmp_path))
    store.replace("part-00000-00000.jsonl", build_part("openai", SCHEMA, given, {"fingerprint": "d"}))
    answers.publish(
        store, ["part-00000-00000.jsonl"], given.counters(), digest="d", inputs=[], created=1, completed=1,
        pulse=lambda: None,
    )  # fmt: skip
    assert len(read_lines(store, "output.jsonl")) == len(read_lines(store, "errors.jsonl")) == 1
    assert json.loads(store.read("batch.json"))["input_file_id"] is None


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}")


def test_large_files_are_written_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    published(store)
    whole = {name: store.read(name) for name in store.list()}
    monkeypatch.setattr(answers, "_BLOCK_BYTES", 100)
    held, replace = [], store.replace
    monkeypatch.setattr(store, "replace", lambda name, data: (held.append(name), replace(name, data)))
    published(store)
    assert {name: store.read(name) for name in store.list()} == whole
    assert "output.jsonl" not in held and "errors.jsonl" not in held and "batch.json" in held


def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.replace("output.jsonl", b"before\n")

    def chunks() -> Iterator[bytes]:
        yield b"x" * 100
        raise StorageError("a part is gone")

    with pytest.raises(StorageError, match="a part is gone"):
        store.replace_from("output.jsonl", chunks())
    assert [path.name for path in tmp_path.iterdir()] == ["output.jsonl"]
    assert store.read("output.jsonl") == b"before\n"


def test_a_run_folder_as_input_is_its_parts(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    published(store)
    store.replace("_batchgen/job.json", b"{}")
    names = [os.path.basename(file.path) for file in expand([f"{store.url}/"], {})]
    assert names == ["part-00000-00000.jsonl", "part-00000-00001.jsonl"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "output.jsonl").write_text("{}\n")
    assert len(expand([str(other)], {})) == 1
