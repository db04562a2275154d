"""Whole jobs over OpenAI batch files and over rows with parameters of their own, through kill and resume."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import FakeEngine, FakeModel, byte_tokenizer
from faults import WRITES, Call, Died, Fault, MeddledStore

from batchgen import checks, job, spec
from batchgen.errors import ConfigError, DataError, Interrupted
from batchgen.io.stores import Store
from batchgen.preview import preview
from batchgen.types import Request, SamplingParams

CHAT = "/v1/chat/completions"
BAD_LINES = {  # line number from 0: text, error code
    3: ("no JSON at all", "invalid_json"),
    5: ('{"custom_id": "twice", "custom_id": "twice", "body": {}}', "invalid_json"),
    7: (json.dumps({"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "a"}}), "invalid_parameter"),
    11: (json.dumps({"custom_id": "stream", "body": {"prompt": "a", "stream": True}}), "invalid_parameter"),
    13: (json.dumps({"body": {"prompt": "nameless"}}), "invalid_row"),
    15: (json.dumps({"custom_id": "long", "body": {"prompt": "x" * 5000}}), "prompt_too_long"),
    17: (json.dumps({"custom_id": "stop", "body": {"prompt": "a", "stop_token_ids": [300]}}), "invalid_parameter"),
    19: ('{"custom_id": "half", "body": {"prompt": "\\ud83d"}}', "invalid_unicode"),
}
COUNT = 48


class Watched(FakeEngine):
    """Remembers the requests."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self.requests[request.key.row] = request
        super().add(request)


def body_of(number: int) -> dict[str, Any]:
    if number % 3 == 0:
        return {"prompt": f"text {number}", "max_tokens": 1 + number % 7, "model": "old"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"row {number}"}], "model": "gpt"}
    if number % 4 == 1:
        body |= {"max_completion_tokens": 6, "temperature": 0.5, "stop": ["END"], "n": 2, "seed": number}
    return body


def write_batch(folder: Path) -> Path:
    lines = []
    for number in range(COUNT):
        line = {"custom_id": f"r{number}", "method": "POST", "body": body_of(number)}
        line["url"] = "/v1/completions" if "prompt" in line["body"] else CHAT
        lines.append(BAD_LINES[number][0] if number in BAD_LINES else json.dumps(line))
    path = folder / "batch.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def job_of(tmp_path: Path, inputs: Path, **sections: Any) -> spec.JobSpec:
    data = {
        "model": {"path": "fake"},
        "input": {"path": str(inputs), "format": "openai"},
        "sampling": {"max_tokens": None, "temperature": 0.25},
        "output": {"path": str(tmp_path / "out"), "format": "openai", "shard_rows": 16},
        "checkpoint": {"interval": 0.001},
        "errors": {"max_failed": 100},
    }
    return spec.parse({**data, **sections})


def start(
    a_job: spec.JobSpec, model: FakeModel, options: job.RunOptions | None = None, fault: Fault | None = None
) -> dict[str, Any]:
    def opener(url: str, extra: Any, retries: int) -> Store:
        return MeddledStore(url, extra, meet=fault) if fault else Store(url, extra, retries=retries)

    return job.run(a_job, options, model_opener=lambda _: model, store_opener=opener)


def is_write(call: Call) -> bool:
    return call.operation in WRITES


def strict(line: str) -> dict[str, Any]:
    """One line as any JSON reader takes it: no NaN, no key twice."""

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(line, parse_constant=no_constant, object_pairs_hook=once)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a run shows, less the time in batch.json."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "_SUCCESS"}
    batch = json.loads(found.pop("batch.json"))
    assert batch.pop("created_at") <= batch.pop("completed_at")
    return {**found, "batch": json.dumps(batch).encode()}


def check(folder: Path) -> None:
    """Every request has its line, in order; the right ones are in the right file."""
    parts = sorted(folder.glob("part-*.jsonl"))
    lines = [strict(line) for part in parts for line in part.read_text().split("\n")[:-1]]
    assert len(lines) == COUNT
    for number, line in enumerate(lines):
        assert list(line) == ["id", "custom_id", "response", "error"]
        body = line["response"]["body"]
        if number in BAD_LINES:
            assert line["error"]["code"] == BAD_LINES[number][1], line
            assert line["response"]["status_code"] == 400 and body["error"]["code"] == line["error"]["code"]
            continue
        asked = body_of(number)
        assert line["custom_id"] == f"r{number}" and line["error"] is None and line["response"]["status_code"] == 200
        assert body["model"] == asked["model"] and body["created"] == 0
        assert len(body["choices"]) == asked.get("n", 1)
        assert {choice["finish_reason"] for choice in body["choices"]} <= {"stop", "length"}
        if "prompt" in asked:
            assert body["object"] == "text_completion" and isinstance(body["choices"][0]["text"], str)
            assert body["usage"]["prompt_tokens"] == len(asked["prompt"])  # no chat template around it
            assert body["usage"]["completion_tokens"] <= asked["max_tokens"]
        else:
            assert body["object"] == "chat.completion"
            assert all(choice["message"]["role"] == "assistant" for choice in body["choices"])
    names = [line["id"] for line in lines]
    assert len(set(names)) == COUNT
    output, errors = ([strict(x)["id"] for x in (folder / f"{n}.jsonl").open()] for n in ("output", "errors"))
    assert output == [line["id"] for line in lines if line["error"] is None]
    assert errors == [line["id"] for line in lines if line["error"] is not None]
    batch = json.loads((folder / "batch.json").read_text())
    failed = len(BAD_LINES)
    assert batch["request_counts"] == {"total": COUNT, "completed": COUNT - failed, "failed": failed}


def test_a_batch_file_becomes_answers(tmp_path: Path, model_folder: Path) -> None:
    engine = Watched()
    summary = start(job_of(tmp_path, write_batch(tmp_path)), FakeModel(model_folder, engine))
    assert summary["failed"] == Counter(code for _, code in BAD_LINES.values())
    check(tmp_path / "out")
    params = {row: request.sampling for row, request in engine.requests.items()}
    assert params[1] == SamplingParams(max_tokens=6, temperature=0.5, stop=("END",), n=2, seed=1)
    assert params[2] == SamplingParams(max_tokens=None, temperature=0.25)
    assert params[6] == SamplingParams(max_tokens=7, temperature=0.25)
    keys = {row: request.noise_key for row, request in engine.requests.items()}
    assert keys[1] == job_noise(1, "r1") and keys[2] == job_noise(0, "r2")
    before = files_of(tmp_path / "out")
    again = start(job_of(tmp_path, tmp_path / "batch.jsonl"), FakeModel(model_folder))
    assert again["rows"] == COUNT and files_of(tmp_path / "out") == before


def job_noise(seed: int, name: str) -> int:
    from batchgen.loop import noise_key

    return noise_key(seed, name)


@pytest.mark.parametrize("how", ["dies before", "dies after"])
def test_dying_at_any_storage_operation(
    tmp_path: Path, model_folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that died at its 1st, then 2nd, 3rd ... writing operation of a start ends as one that did not."""
    monkeypatch.setattr("batchgen.lease.process_runs", lambda pid, started: False)  # the "dead" ones were this one
    inputs = write_batch(tmp_path)
    whole = job_of(tmp_path / "whole", inputs)
    summary = start(whole, FakeModel(model_folder))
    a_job = job_of(tmp_path, inputs)
    for at in range(1, 200):
        try:
            start(a_job, FakeModel(model_folder, FakeEngine(running=8, pace=5)), fault=Fault(how, at, is_write))
            break
        except Died:
            if (tmp_path / "out/_SUCCESS").exists():
                check(tmp_path / "out")
    else:
        raise AssertionError("never got through")
    assert at > 8
    check(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole/out")
    counters = json.loads((tmp_path / "out/_SUCCESS").read_text())["counters"]
    assert counters == {key: summary[key] for key in counters}


@pytest.mark.parametrize("how", ["dies before", "dies after"])
def test_dying_while_the_files_are_made(
    tmp_path: Path, model_folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts stand; a start dies at its 1st, 2nd, 3rd ... writing operation, with old or half the files there."""
    monkeypatch.setattr("batchgen.lease.process_runs", lambda pid, started: False)
    a_job = job_of(tmp_path, write_batch(tmp_path))
    start(a_job, FakeModel(model_folder))
    out = tmp_path / "out"
    whole, missing = files_of(out), set()
    for at in range(1, 50):
        for name in ("_SUCCESS", "output.jsonl", "errors.jsonl", "batch.json"):
            (out / name).unlink(missing_ok=True)
        try:
            start(a_job, FakeModel(model_folder), fault=Fault(how, at, is_write))
            break
        except Died:
            there = {path.name for path in out.iterdir()}
            missing.add(frozenset({"output.jsonl", "errors.jsonl", "batch.json"} - there))
            if "_SUCCESS" in there:
                check(out)
        start(a_job, FakeModel(model_folder))
        assert files_of(out) == whole
    else:
        raise AssertionError("never got through")
    assert {len(names) for names in missing} == {0, 1, 2, 3}


def test_parts_without_their_proofs_are_counted_again(tmp_path: Path, model_folder: Path) -> None:
    a_job = job_of(tmp_path, write_batch(tmp_path))
    start(a_job, FakeModel(model_folder))
    before = json.loads((tmp_path / "out/_SUCCESS").read_text())["counters"]
    for path in [tmp_path / "out/_SUCCESS", *(tmp_path / "out/_batchgen/proofs").iterdir()]:
        path.unlink()
    start(a_job, FakeModel(model_folder))
    assert json.loads((tmp_path / "out/_SUCCESS").read_text())["counters"] == before


def test_a_signal_while_the_files_are_made_ends_the_start(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job = job_of(tmp_path, write_batch(tmp_path))
    monkeypatch.setattr(job._Start, "_stop_if_asked", lambda self: (_ for _ in ()).throw(Interrupted("x", "signal")))
    with pytest.raises(Interrupted):
        start(a_job, FakeModel(model_folder))
    assert not (tmp_path / "out/_SUCCESS").exists()
    monkeypatch.undo()
    start(a_job, FakeModel(model_folder))
    check(tmp_path / "out")


def test_overwrite_deletes_the_files_made_of_parts(tmp_path: Path, model_folder: Path) -> None:
    start(job_of(tmp_path, write_batch(tmp_path)), FakeModel(model_folder))
    other = job_of(tmp_path, tmp_path / "batch.jsonl", output={"path": str(tmp_path / "out"), "format": "parquet"})
    start(other, FakeModel(model_folder), job.RunOptions(overwrite=True))
    assert not [name for name in ("output.jsonl", "errors.jsonl", "batch.json") if (tmp_path / "out" / name).exists()]


def test_a_trial_makes_no_files_of_the_whole(tmp_path: Path, model_folder: Path) -> None:
    start(job_of(tmp_path, write_batch(tmp_path)), FakeModel(model_folder), job.RunOptions(limit=20))
    shown = [path.name for path in (tmp_path / "out").iterdir()]
    assert "output.jsonl" not in shown and "batch.json" not in shown and "part-00000-00000.jsonl" in shown


def test_requests_into_rows(tmp_path: Path, model_folder: Path) -> None:
    output = {"path": str(tmp_path / "out"), "columns": ["method", "body"]}
    start(job_of(tmp_path, write_batch(tmp_path), output=output), FakeModel(model_folder))
    rows = pq.read_table(tmp_path / "out/part-00000-00000.parquet").to_pylist()
    expected = [
        (f"r{n}", sample) for n in range(COUNT) if n not in BAD_LINES for sample in range(body_of(n).get("n", 1))
    ]
    assert [(row["id"], row["sample"]) for row in rows if row["error"] is None] == expected
    assert [row["id"] for row in rows if row["error"] is not None] == [
        None, None, "vector", "stream", None, "long", "stop", "half",
    ]  # fmt: skip
    assert json.loads(rows[0]["body"]) == body_of(0)


def test_rows_into_answers(tmp_path: Path, model_folder: Path) -> None:
    pq.write_table(pa.table({"key": [7, 8], "text": ["a", None]}), tmp_path / "rows.parquet")
    source = {"path": str(tmp_path / "rows.parquet"), "id": "key"}
    start(job_of(tmp_path, tmp_path, input=source, sampling={"max_tokens": 4}), FakeModel(model_folder))
    lines = [strict(line) for line in (tmp_path / "out/part-00000-00000.jsonl").open()]
    assert [line["custom_id"] for line in lines] == ["7", "8"]
    assert lines[0]["response"]["body"]["model"] == "fake" and lines[1]["error"]["code"] == "invalid_row"


def test_ids_that_repeat_are_warned_of(tmp_path: Path, model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps({"custom_id": "same", "body": {"prompt": "a", "max_tokens": 2}})
    (tmp_path / "in.jsonl").write_text(f"{line}\n{line}\n")
    with caplog.at_level(logging.WARNING):
        assert start(job_of(tmp_path, tmp_path / "in.jsonl"), FakeModel(model_folder))["rows"] == 2
    assert "ids repeat in column custom_id" in caplog.text


def test_a_chat_needs_a_chat_template(tmp_path: Path) -> None:
    plain = byte_tokenizer(tmp_path / "plain")
    start(job_of(tmp_path, write_batch(tmp_path)), FakeModel(plain))
    lines = [strict(line) for part in sorted((tmp_path / "out").glob("part-*")) for line in part.open()]
    for number, line in enumerate(lines):
        if number not in BAD_LINES:
            assert (line["error"] is None) == ("prompt" in body_of(number))
    assert "needs a chat template" in lines[1]["error"]["message"]


def test_a_longer_answer_leaves_less_room_for_the_prompt(tmp_path: Path, model_folder: Path) -> None:
    model = FakeModel(model_folder, engine := Watched())
    model.max_model_len = 100
    rows = [{"custom_id": str(n), "body": {"prompt": "x" * 200, "max_tokens": n}} for n in (10, 60)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start(job_of(tmp_path, tmp_path / "in.jsonl", prompt={"too_long": "truncate_left"}), model)
    assert {row: len(request.prompt_token_ids) for row, request in engine.requests.items()} == {0: 90, 1: 40}
    lines = [strict(line) for line in (tmp_path / "out/part-00000-00000.jsonl").open()]
    assert all(line["response"]["body"]["truncated"] is True for line in lines)


def test_tools_reach_the_chat_template(tmp_path: Path) -> None:
    template = "{% if tools %}[{{ tools[0].name }}]{% endif %}{{ messages[0].content }}"
    model = FakeModel(byte_tokenizer(tmp_path / "tools", chat_template=template), engine := Watched())
    messages = [{"role": "user", "content": "hi"}]
    bodies = [{}, {"tools": [{"name": "own"}]}, {"tools": []}, {"tool_choice": "none"}]
    rows = [{"custom_id": str(n), "body": {"messages": messages, **body}} for n, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start(job_of(tmp_path, tmp_path / "in.jsonl", prompt={"tools": [{"name": "job"}]}), model)
    prompts = [model.tokenizer.decode_batch([engine.requests[n].prompt_token_ids], skip_special_tokens=False)[0]
               for n in range(4)]  # fmt: skip
    assert prompts == ["[job]hi", "[own]hi", "hi", "hi"]


# -- hints -------------------------------------------------------------------------------------------------------------


def test_requests_that_are_not_declared_get_a_hint(tmp_path: Path, model_folder: Path) -> None:
    source = {"path": str(write_batch(tmp_path))}
    output = {"path": str(tmp_path / "out")}
    a_job = job_of(tmp_path, tmp_path, input=source, output=output, errors={"max_failed": 0.1})
    with pytest.raises(DataError, match=r"OpenAI batch lines need input\.format: openai"):
        start(a_job, FakeModel(model_folder))


def check_job(tmp_path: Path, **sections: Any) -> str:
    a_job = job_of(tmp_path, tmp_path / "in.jsonl", model={"path": "org/model"}, **sections)
    return checks.check(a_job, "job.yaml")


def test_validate_looks_at_requests(tmp_path: Path) -> None:
    good = json.dumps({"custom_id": "a", "body": {"prompt": "a"}})
    bad = json.dumps({"custom_id": "a", "body": {"prompt": "a", "stream": True}})
    (tmp_path / "in.jsonl").write_text(f"{bad}\n{good}\n")
    assert "1 input file" in check_job(tmp_path)
    undeclared = {"path": str(tmp_path / "in.jsonl")}
    with pytest.raises(ConfigError, match=r"input.format`: .* holds OpenAI batch requests; set it to openai"):
        check_job(tmp_path, input=undeclared)
    (tmp_path / "in.jsonl").write_text(f"{bad}\n")
    with pytest.raises(ConfigError, match=r"none of the first 1 lines .*body.stream: true given"):
        check_job(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"`sampling\.column`: none of the first 1 rows has a column params"):
        check_job(tmp_path, input=undeclared, sampling={"max_tokens": 1, "column": "params"})


# -- sampling.column ---------------------------------------------------------------------------------------------------


def rows_with_params(folder: Path, kind: str) -> Path:
    given: list[Any] = [
        {"temperature": 1.0, "n": 3},
        None,
        {"max_tokens": 2, "stop": ["x"], "seed": 5},
        {"top_k": -1},
        {"include_stop": True},
    ]
    texts = [f"row {n}" for n in range(len(given))]
    if kind == "jsonl":
        lines = [{"text": text, "params": one} for text, one in zip(texts, given, strict=True)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder / "rows.jsonl"
    params = [None if one is None else json.dumps(one) for one in given] if kind == "text" else given
    pq.write_table(pa.table({"text": texts, "params": params}), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize("kind", ["jsonl", "text", "struct"])
@pytest.mark.parametrize("output", ["parquet", "jsonl"])
def test_parameters_of_each_row(tmp_path: Path, model_folder: Path, kind: str, output: str) -> None:
    a_job = job_of(
        tmp_path,
        tmp_path,
        input={"path": str(rows_with_params(tmp_path, kind))},
        sampling={"max_tokens": 9, "n": 2, "column": "params"},
        output={"path": str(tmp_path / "out"), "format": output},
    )
    engine = Watched()
    summary = start(a_job, FakeModel(model_folder, engine))
    params = {row: request.sampling for row, request in engine.requests.items()}
    assert params == {
        0: SamplingParams(max_tokens=9, temperature=1.0, n=3),
        1: SamplingParams(max_tokens=9, n=2),
        2: SamplingParams(max_tokens=2, stop=("x",), seed=5, n=2),
        4: SamplingParams(max_tokens=9, include_stop=True, n=2),
    }
    (part,) = (tmp_path / "out").glob("part-*")
    rows = pq.read_table(part).to_pylist() if output == "parquet" else [strict(line) for line in part.open()]
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)]
    assert [(row["id"], row["sample"]) for row in rows] == [(f"0:{row}", sample) for row, sample in places]
    message = "column `params`: top_k: -1 given, expected an integer >= 1, or null"
    assert rows[7]["error"] == {"code": "invalid_parameter", "message": message}
    assert summary["results"] == len(places) and summary["failed"] == {"invalid_parameter": 2}
    for path in [tmp_path / "out/_SUCCESS", *(tmp_path / "out/_batchgen").glob("proofs/*")]:
        path.unlink()
    assert {key: start(a_job, FakeModel(model_folder))[key] for key in ("results", "failed")} == {
        key: summary[key] for key in ("results", "failed")
    }


def test_preview_shows_each_rows_answers(tmp_path: Path, model_folder: Path) -> None:
    source = {"path": str(rows_with_params(tmp_path, "jsonl"))}
    a_job = job_of(
        tmp_path, tmp_path, input=source, sampling={"max_tokens": 9, "column": "params"}, output={"path": "out"}
    )
    shown = list(preview(a_job, 5, model_opener=lambda _: FakeModel(model_folder)))
    assert Counter(one["id"] for one in shown) == {"0:0": 3, "0:1": 1, "0:2": 1, "0:3": 1, "0:4": 1}


def test_what_the_model_recommends_is_under_what_a_row_gives(tmp_path: Path, model_folder: Path) -> None:
    model = FakeModel(model_folder, engine := Watched())
    model.generation_config = {"do_sample": True, "temperature": 0.75, "top_p": 0.5}
    source = {"path": str(rows_with_params(tmp_path, "jsonl"))}
    sampling = {"max_tokens": 9, "defaults": "model", "column": "params"}
    a_job = job_of(tmp_path, tmp_path, input=source, sampling=sampling, output={"path": str(tmp_path / "out")})
    start(a_job, model)
    params = {row: request.sampling for row, request in engine.requests.items()}
    assert (params[0].temperature, params[0].top_p) == (1.0, 0.5)
    assert (params[1].temperature, params[2].temperature) == (0.75, 0.75)
    assert start(a_job, model)["rows"] == 5
