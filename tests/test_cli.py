"""The command line: every command, every exit code, what goes to which stream, and how fast it answers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen import __version__, bench_data, cli, errors
from batchgen.io.stores import Store
from batchgen.ledger import Ledger
from batchgen.runfolder import Counters
from batchgen.types import ShardRange
from batchgen.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*args: str | Path) -> Result:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *cli.STOP_SIGNALS)}
        try:
            with pytest.raises(SystemExit) as end:
                cli.main([str(arg) for arg in args])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        captured = capsys.readouterr()
        return Result(int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that validates: a model folder, a Parquet file, an output folder that is not there yet."""
    (tmp_path / "model").mkdir()
    rows = {"id": [1, 2], "text": ["a", "b"], "messages": [None, None]}
    pq.write_table(pa.table(rows), tmp_path / "in.parquet")
    path = tmp_path / "reviews.yaml"
    path.write_text(
        f"""\
model: {{path: {tmp_path}/model}}
input: {{path: {tmp_path}/in.parquet, id: id}}
prompt:
  template: "Summarise:\\n{{{{ text }}}}"
sampling: {{max_tokens: 16}}
output: {{path: {tmp_path}/out, columns: [text]}}
"""
    )
    return path


class Jobs(types.ModuleType):
    """Stands for batchgen.job: notes what it is asked for and does what the test says."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__("batchgen.job")
        self.act = act
        self.calls: list[tuple[Any, ...]] = []

    def RunOptions(self, **options: Any) -> dict[str, Any]:
        return options

    def run(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.act()

    preview = run


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Jobs]:
    def install(act: Callable[[], Any]) -> Jobs:
        fake = Jobs(act)
        monkeypatch.setitem(sys.modules, "batchgen.job", fake)
        monkeypatch.setattr(batchgen, "job", fake, raising=False)
        monkeypatch.setitem(sys.modules, "batchgen.preview", fake)
        return fake

    return install


def fail(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_prints_the_summary_as_one_json_line(call: Any, jobs: Any, job: Path) -> None:
    fake = jobs(lambda: {"status": "done", "rows": 2})
    result = call("run", job)
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out) == {"status": "done", "rows": 2} and result.out.count("\n") == 1
    ((spec, options),) = fake.calls
    assert spec.name == "reviews"
    assert options == {
        "limit": None,
        "extend": False,
        "must_be_new": False,
        "overwrite": False,
        "max_runtime": None,
        "max_output_tokens": None,
        "spot": None,
    }


def test_run_hands_its_options_on(call: Any, jobs: Any, job: Path) -> None:
    job.write_text(job.read_text() + "checkpoint: {interval: '${EVERY}'}\n")
    fake = jobs(dict)
    options = ["--limit", "5", "--overwrite", "--yes", "--max-runtime", "1h30m", "--max-output-tokens", "7"]
    options += ["--spot", "auto"]
    assert call("run", job, *options, "--param", "EVERY=5m", "--set", "sampling.temperature=0.5").code == 0
    ((spec, options),) = fake.calls
    assert (spec.checkpoint.interval, spec.sampling.temperature) == (300.0, 0.5)
    assert options == {
        "limit": 5,
        "extend": False,
        "must_be_new": False,
        "overwrite": True,
        "max_runtime": 5400.0,
        "max_output_tokens": 7,
        "spot": "auto",
    }


TOO_LITTLE_MEMORY = (
    "batchgen: there is too little memory even to begin (a limit of the process, as ulimit -v, counts): give it more"
)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.UsageError("wrong"), 64, "batchgen: wrong"),
        (errors.DataError("torn"), 65, "batchgen: torn"),
        (errors.NoInputError("none"), 66, "batchgen: none"),
        (errors.ModelError("odd"), 69, "batchgen: odd"),
        (errors.StorageError("away"), 74, "batchgen: away"),
        (errors.PermissionDenied("shut"), 77, "batchgen: shut"),
        (MemoryError(), 78, TOO_LITTLE_MEMORY),
        (OSError(12, "Cannot allocate memory"), 78, TOO_LITTLE_MEMORY),
        (ImportError("libx.so: failed to map segment from shared object"), 78, TOO_LITTLE_MEMORY),
        (errors.ConfigError("a\nb"), 78, "batchgen: a\nbatchgen: b"),
        (OSError(28, "No space left on device", "x"), 74, "batchgen: [Errno 28] No space left on device: 'x'"),
        (PermissionError(13, "Permission denied", "x"), 77, "batchgen: [Errno 13] Permission denied: 'x'"),
        (ZeroDivisionError("by zero"), 70, "batchgen: our bug: ZeroDivisionError: by zero"),
    ],
)
def test_every_end_has_its_exit_code_and_no_traceback(
    call: Any, jobs: Any, job: Path, error: Exception, code: int, message: str
) -> None:
    jobs(fail(error))
    result = call("run", job)
    assert result.code == code
    if code == 64:  # nothing was begun
        assert result.out == ""
    else:
        end = json.loads(result.out)
        assert (end["status"], end["exit_code"]) == ("failed", code) and end["error"]
    assert result.err.startswith(message + "\n")
    assert "Traceback" not in result.err


def test_debug_shows_the_traceback(call: Any, jobs: Any, job: Path) -> None:
    jobs(fail(ZeroDivisionError("by zero")))
    result = call("run", job, "--debug")
    assert result.code == 70
    assert result.err.startswith("Traceback") and result.err.endswith("batchgen: our bug: ZeroDivisionError: by zero\n")


def test_an_interrupted_run_says_why_in_json_too(call: Any, jobs: Any, job: Path) -> None:
    jobs(fail(errors.Interrupted("the time is up; run again", reason="limit")))
    result = call("run", job)
    assert result.code == 75
    assert json.loads(result.out) == {
        "status": "interrupted",
        "reason": "limit",
        "exit_code": 75,
        "error": "the time is up; run again",
    }
    assert result.err == "batchgen: the time is up; run again\n"


def test_the_keyboard_interrupts(call: Any, jobs: Any, job: Path) -> None:
    jobs(fail(KeyboardInterrupt()))
    result = call("run", job)
    assert result.code == 75
    assert json.loads(result.out) | {"error": ""} == {
        "status": "interrupted",
        "reason": "signal",
        "exit_code": 75,
        "error": "",
    }
    assert "Traceback" not in result.err
    result = call("preview", job)
    assert (result.code, result.out) == (75, "")


@pytest.mark.parametrize(
    "args",
    [
        ["run"],
        ["run", "JOB", "--no-such-option"],
        ["run", "JOB", "--limit", "0"],
        ["run", "JOB", "--limit", "many"],
        ["run", "JOB", "--max-runtime", "soon"],
        ["run", "JOB", "--max-runtime", "0"],
        ["run", "JOB", "--param", "A"],
        ["run", "JOB", "--param", "=1"],
        ["run", "JOB", "--param", "A=1", "--param", "A=2"],
        ["run", "JOB", "--set", "sampling.temperature"],
        ["run", "JOB", "--must-be-new", "--overwrite", "--yes"],
        ["run", "JOB", "--yes"],
        ["preview", "JOB", "-n", "0"],
        ["no-such-command"],
        ["bench", "no-such-bench"],
        ["bench", "engine"],
        ["bench", "engine", "--model", "PATH", "--config", "qwen3-0.6b", "--random-weights"],
        ["bench", "engine", "--config", "qwen3-0.6b"],
        ["bench", "engine", "--model", "PATH", "--random-weights"],
        ["bench", "engine", "--random-weights"],
        ["status", "FOLDER", "--param", "A=1"],
    ],
)
def test_what_was_typed_wrong_ends_with_64(call: Any, jobs: Any, job: Path, args: list[str]) -> None:
    fake = jobs(dict)
    places = {"JOB": job, "FOLDER": job.parent}
    result = call(*[places.get(arg, arg) for arg in args])
    assert result.code == 64
    assert result.out == "" and result.err
    assert fake.calls == []


def test_a_job_file_that_is_not_there_is_no_input(call: Any, tmp_path: Path) -> None:
    for command in ("run", "preview", "validate", "status"):
        result = call(command, tmp_path / "nothing.yaml")
        assert result.code == 66
        assert result.err == f"batchgen: {tmp_path}/nothing.yaml: no such job file\n"


def test_a_wrong_job_file_is_a_configuration_error(call: Any, jobs: Any, job: Path) -> None:
    jobs(dict)
    result = call("run", job, "--set", "sampling.temprature=1", "--set", "structured.regex=a", "--param", "X=1")
    assert result.code == 78
    assert "--param X: " in result.err
    result = call("run", job, "--set", "sampling.temprature=1", "--set", "structured.regex=a")
    assert result.code == 78
    assert [line.rpartition(": ")[2] for line in result.err.splitlines()] == [
        "unknown key; did you mean temperature?",
        "not supported yet in this version",
    ]


# -- overwrite ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_overwrite_asks_on_a_terminal(call: Any, jobs: Any, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = jobs(dict)
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    result = call("run", job, "--overwrite")
    assert result.code == 0
    assert f"Delete the run in {job.parent}/out? [y/N]" in result.err
    assert fake.calls[0][1]["overwrite"] is True


@pytest.mark.parametrize(("answer", "code"), [("n\n", 64), ("\n", 64), ("", 75)])
def test_overwrite_does_nothing_without_a_yes(
    call: Any, jobs: Any, job: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    fake = jobs(dict)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert call("run", job, "--overwrite").code == code
    assert fake.calls == []


def test_overwrite_without_a_terminal_needs_yes(
    call: Any, jobs: Any, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = jobs(dict)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    result = call("run", job, "--overwrite")
    assert result.code == 64 and "add --yes" in result.err
    assert fake.calls == []


# -- preview -----------------------------------------------------------------------------------------------------------

ANSWERS = [
    {"id": "a", "prompt": "<user>Hi ✓", "prompt_tokens": 1200, "text": "Hello", "finish_reason": "stop", "error": None},
    {
        "id": 7,
        "prompt": None,
        "prompt_tokens": None,
        "text": None,
        "finish_reason": "error",
        "error": {"code": "empty_prompt", "message": "the prompt is empty"},
    },
]


def test_preview_is_readable(call: Any, jobs: Any, job: Path) -> None:
    fake = jobs(lambda: iter(ANSWERS))
    result = call("preview", job)
    assert result.code == 0
    assert fake.calls[0][1] == 5
    assert result.out == (
        "── a · 1,200 prompt tokens \n<user>Hi ✓\n── answer \nHello\n[stop]\n\n"
        "── 7 \nerror empty_prompt: the prompt is empty\n\n"
    )


def test_preview_as_json_lines(call: Any, jobs: Any, job: Path) -> None:
    fake = jobs(lambda: iter(ANSWERS))
    result = call("preview", job, "-n", "2", "--json")
    assert [json.loads(line) for line in result.out.splitlines()] == ANSWERS
    assert fake.calls[0][1] == 2


def test_preview_shows_answers_as_they_come_and_the_error_after_them(call: Any, jobs: Any, job: Path) -> None:
    def answers() -> Iterator[dict[str, Any]]:
        yield ANSWERS[0]
        raise errors.ModelError("broken")

    jobs(answers)
    result = call("preview", job, "--json")
    assert result.code == 69
    assert json.loads(result.out) == ANSWERS[0]


# -- validate ----------------------------------------------------------------------------------------------------------


def test_validate_says_in_a_line_that_all_is_well(call: Any, job: Path) -> None:
    result = call("validate", job)
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(rf"{job}: ok: 1 input file \(0\.0 MB\) into {job.parent}/out\n", result.out)
    assert not (job.parent / "out").exists()


def test_validate_refuses_results_among_the_input(call: Any, job: Path) -> None:
    result = call("validate", job, "--set", f"input.path={job.parent}", "--set", f"output.path={job.parent}/out")
    assert result.code == 78 and f"{job.parent}/out is inside the input" in result.err


def test_validate_finds_input_that_matches_nothing(call: Any, job: Path) -> None:
    result = call("validate", job, "--set", f"input.path={job.parent}/none-*.parquet")
    assert result.code == 66 and "none-*.parquet" in result.err
    settings = ["--set", f"input.path={job.parent}/none-*.parquet", "--set", "input.allow_empty=true"]
    assert call("validate", job, *settings).code == 0


@pytest.mark.parametrize(
    ("setting", "key", "column"),
    [
        ("prompt={column: txt}", "prompt.column", "txt"),
        ("prompt={token_ids: ids}", "prompt.token_ids", "ids"),
        ("prompt={tools: tools}", "prompt.tools", "tools"),
        ("prompt={template: '{{ text }} {{ title }}'}", "prompt.template", "title"),
        (
            "prompt={messages: [{role: user, content: hi}, {role: user, content: [{type: text, text: '{{ who }}'}]}]}",
            "prompt.messages[1].content[0].text",
            "who",
        ),
        ("input.id=key", "input.id", "key"),
        ("output.columns=[text, year]", "output.columns", "year"),
        ("input.where=id == 'a' and year > 3", "input.where", "year"),
    ],
)
def test_validate_misses_columns(call: Any, job: Path, setting: str, key: str, column: str) -> None:
    result = call("validate", job, "--set", setting)
    assert result.code == 78
    assert (
        f"`{key}`: there is no column {column}; the columns of {job.parent}/in.parquet are id, text, messages"
        in result.err
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ title | default('none') }}{{ text }}",
        "{% if title is defined %}{{ title }}{% endif %}",
        "{% for i in range(3) %}{{ i }}{{ text }}{% endfor %}",
        "{% set x = 5 %}{{ x }}",
        "{{ row['my text'] }}",
        "costs ${PRICE}",
    ],
)
def test_validate_knows_what_a_template_can_do_without(call: Any, job: Path, template: str) -> None:
    result = call("validate", job, "--set", f"prompt={{template: {json.dumps(template)}}}")
    assert (result.code, result.err) == (0, "")


def test_validate_needs_some_prompt(call: Any, job: Path) -> None:
    assert call("validate", job, "--set", "prompt={}").code == 0  # there is a column text
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), job.parent / "in.parquet")
    result = call("validate", job, "--set", "prompt={}", "--set", "output.columns=[]")
    assert result.code == 78
    assert (
        "`prompt`: expected one of column, template, messages, token_ids, or input with a column messages" in result.err
    )


@pytest.mark.parametrize(
    ("template", "line"), [("a\n{{ text }", 2), ("{{ text }}\n\n{% endif %}", 3), ("{{ text | nofilter }}", 1)]
)
def test_validate_compiles_templates(call: Any, job: Path, template: str, line: int) -> None:
    result = call("validate", job, "--set", f"prompt={{template: {json.dumps(template)}}}")
    assert result.code == 78
    assert result.err.startswith(f"batchgen: {job}: `prompt.template`: not valid Jinja: line {line}: ")


def test_validate_knows_the_columns_of_every_format(call: Any, job: Path) -> None:
    table = pa.table({"id": ["a"], "text": ["x"]})
    with pa.ipc.new_file(job.parent / "in.arrow", table.schema) as writer:
        writer.write_table(table)
    (job.parent / "in.csv").write_text("id,text\na,x\n")
    (job.parent / "in.txt").write_text("x\n")
    (job.parent / "empty.csv").write_text("")
    (job.parent / "id=7").mkdir()
    (job.parent / "id=7" / "in.jsonl").write_text('{"text": "x"}\n')
    for name in ("in.arrow", "in.csv", "in.txt", "empty.csv", "id=7/in.jsonl"):
        settings = ["--set", f"input.path={job.parent}/{name}", "--set", "prompt={column: text}"]
        settings += ["--set", "output.columns=[text]", "--set", f"input.id={'text' if name == 'in.txt' else 'id'}"]
        assert call("validate", job, *settings).code == 0
        result = call("validate", job, *settings, "--set", "prompt={column: txt}")
        assert result.code == (0 if name == "empty.csv" else 78), name
        assert name == "empty.csv" or "column txt" in result.err
    result = call("validate", job, "--set", "input.where=id = 3")
    assert result.code == 78 and "equal is written ==" in result.err


def test_validate_reads_jsonl_as_what_it_is(call: Any, job: Path) -> None:
    (job.parent / "in.jsonl").write_text('{"id": 1, "text": "x"}\n')
    assert call("validate", job, "--set", f"input.path={job.parent}/in.jsonl").code == 0
    result = call("validate", job, "--set", f"input.path={job.parent}/in.jsonl", "--set", "input.format=parquet")
    assert result.code == 65 and "not a Parquet file" in result.err


@pytest.mark.parametrize("name", ["reviews.csv", "reviews.jsonl"])
def test_validate_finds_a_filter_that_fails_every_row(call: Any, job: Path, tmp_path: Path, name: str) -> None:
    rows = {"reviews.csv": "text,stars\ngood,5\nbad,1\n", "reviews.jsonl": '{"text": "good", "stars": "5"}\n'}
    (tmp_path / name).write_text(rows[name])
    path = ["--set", f"input.path={tmp_path / name}", "--set", "input.id=text"]
    wrong = ["--set", "input.where=stars <= 3", "--set", "output.columns=[stars]"]
    result = call("validate", job, *path, *wrong)
    assert result.code == 78 and "compares text with a number; int(...)" in result.err
    right = ["--set", "input.where=int(stars) <= 3", "--set", "output.columns=[stars]"]
    assert call("validate", job, *path, *right).code == 0


@pytest.mark.parametrize(
    "path", ["./nowhere", "/nowhere/model.gguf", "package:no_such_package_here/x.gguf", "package:click/x.gguf"]
)
def test_validate_finds_no_model(call: Any, job: Path, path: str) -> None:
    result = call("validate", job, "--set", f"model.path={path}")
    assert result.code == 69
    assert path in result.err


def test_validate_does_not_ask_the_hub(call: Any, job: Path) -> None:
    assert call("validate", job, "--set", "model.path=org/name").code == 0


def test_validate_finds_an_output_that_cannot_be(call: Any, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("validate", job, "--set", f"output.path={job}/sub/folder")
    assert result.code == 78 and f"{job} is not a folder" in result.err
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)  # root may write everywhere
    result = call("validate", job)
    assert result.code == 77 and f"may not write to {job.parent}" in result.err


# -- status ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(job: Path) -> Iterator[Ledger]:
    """The run of `job`, one of its two shards committed."""
    opened = Ledger.open(
        Store(str(job.parent / "out")),
        spec={"name": "reviews"},
        fingerprint={},
        inputs=[{"path": "in.jsonl", "size": 10, "mtime": 0.0, "etag": None}],
        shape={"format": "jsonl"},
        must_be_new=False,
        info={"version": __version__},
        prove=lambda index: "proof",
    )
    shard = ShardRange(0, 0, 0, 2, 0, 5)
    counted = Counters(rows=2, rows_failed=1, prompt_tokens=1234, output_tokens=50)
    opened.acknowledge(opened.write_part(shard, b"{}\n{}\n", counted))
    opened.checkpoint([])
    yield opened
    opened.close()


def test_a_broken_template_ends_a_run_before_it_leaves_anything(call: Any, job: Path) -> None:
    job.write_text(job.read_text().replace("text }}", "text }"))
    result = call("run", job)
    assert result.code == 78 and "`prompt.template`: not valid Jinja: line 2: " in result.err
    assert json.loads(result.out)["status"] == "failed" and not (job.parent / "out").exists()


def test_status_of_a_running_job(call: Any, job: Path, ledger: Ledger) -> None:
    for place in (job, job.parent / "out"):
        result = call("status", place)
        assert result.code == 0
        assert result.out.startswith(f"reviews in {job.parent}/out\n")
        assert f"state          running, process {os.getpid()} on " in result.out
        assert "rows           2\n" in result.out
        assert "prompt tokens  1,234\n" in result.out


def test_status_of_a_run_that_failed(call: Any, job: Path, ledger: Ledger) -> None:
    ledger.close("too many rows failed")
    found = json.loads(call("status", job, "--json").out)
    assert (found["state"], found["error"]) == ("failed", "too many rows failed")
    assert "state          failed: too many rows failed\n" in call("status", job).out


def test_status_goes_from_stopped_to_finished(call: Any, job: Path, ledger: Ledger) -> None:
    second = ShardRange(0, 1, 2, 6, 5, 10)
    ledger.commit_index(0, [ShardRange(0, 0, 0, 2, 0, 5), second])
    ledger.close()
    found = json.loads(call("status", job, "--json").out)
    assert (found["state"], found["rows_done"], found["rows_total"], found["shards_total"]) == ("stopped", 2, 8, 2)
    assert "rows           2 of 8 (25.0%)\n" in call("status", job).out
    ledger.acknowledge(ledger.write_part(second, b"{}\n" * 6, Counters(rows=6)))
    ledger.finish({})
    found = json.loads(call("status", job, "--json").out)
    assert (found["state"], found["rows_done"], found["rows_failed"]) == ("finished", 8, 1)
    assert "state          finished\n" in call("status", job).out


def test_status_of_a_folder_without_a_run(call: Any, tmp_path: Path) -> None:
    result = call("status", tmp_path)
    assert (result.code, result.out) == (0, f"{tmp_path}: no run in this folder\n")
    assert json.loads(call("status", tmp_path, "--json").out)["state"] == "empty"
    result = call("status", tmp_path / "typo")
    assert result.code == 66 and "typo: no such folder" in result.err


# -- bench -------------------------------------------------------------------------------------------------------------


def test_bench_engine_hands_its_settings_on(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    fake = types.ModuleType("batchgen.bench")
    fake.engine = lambda **options: asked.append(options) or {"tokens": 5}  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "batchgen.bench", fake)
    monkeypatch.setattr(batchgen, "bench", fake, raising=False)
    command = ["bench", "engine", "--model", "m.gguf"]
    result = call(*command, "--workload", "nano", "--set", "model.dtype=bfloat16", "--set", "engine.max_num_seqs=4")
    assert json.loads(result.out) == {"tokens": 5}
    (options,) = asked
    assert (options["model"].path, options["model"].dtype, options["spec"].max_num_seqs) == ("m.gguf", "bfloat16", 4)
    assert (options["workload"], options["workload_file"], options["save"]) == ("nano", None, None)
    result = call(*command, "--set", "model.dtyp=bfloat16")
    assert result.code == 78 and "did you mean dtype?" in result.err
    assert call(*command, "--set", "sampling.temperature=1").code == 64  # nothing that would be ignored
    assert len(asked) == 1
    assert options["random_weights"] is None
    call("bench", "engine", "--config", "qwen3-0.6b", "--random-weights", "--set", "engine.max_num_seqs=4")
    assert asked[1]["model"].path == "qwen3-0.6b" and asked[1]["random_weights"]["hidden_size"] == 1024
    result = call("bench", "engine", "--config", "qwen4", "--random-weights")
    assert result.code == 69 and "smollm2-135m, qwen3-0.6b, llama-3.1-8b, or a file.json" in result.err


def test_bench_data_hands_its_workload_on(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bench_data.Workload, bool]] = []

    def measure(workload: bench_data.Workload, *, resume: bool) -> dict[str, Any]:
        asked.append((workload, resume))
        return {"rows": 5}

    monkeypatch.setattr(bench_data, "measure", measure)
    sizes = ["--rows", "5", "--prompt-tokens", "7", "--answer-tokens", "2", "--files", "3", "--carried-bytes", "9"]
    forms = ["--input-format", "jsonl", "--output-format", "jsonl", "--model", "m.gguf"]
    place = ["--folder", "s3://b/x", "--storage-option", "anon=true", "--storage-option", "client_kwargs={a: 1}"]
    result = call("bench", "data", *sizes, *forms, *place, "--resume")
    assert json.loads(result.out) == {"rows": 5}
    options = {"anon": True, "client_kwargs": {"a": 1}}
    assert asked == [(bench_data.Workload(5, 7, 2, 3, "jsonl", "jsonl", 9, "m.gguf", "s3://b/x", options), True)]
    assert call("bench", "data", "--storage-option", "anon").code == 64
    assert call("bench", "data", "--storage-option", "a={").code == 78
    assert call("bench", "data", "--rows", "0").code == 64
    assert len(asked) == 1


@pytest.mark.parametrize("command", ["engine", "scheduler"])
def test_help_names_every_workload(call: Any, command: str) -> None:
    said = call("bench", command, "--help").out
    assert all(re.search(rf"\b{name}\b", said) for name in WORKLOADS)


def test_bench_scheduler_simulates(call: Any) -> None:
    sizes = ["--workload", "prefix", "--rows", "60", "--blocks", "150", "--max-num-seqs", "20", "--certain"]
    found = json.loads(call("bench", "scheduler", *sizes, "--parameters", "1e6").out)
    assert (found["rows"], found["kv_blocks"], found["max_num_seqs"], found["parameters"]) == (60, 150, 20, 1e6)
    assert found["cached_tokens"] > 50 * 500 and found["recomputed_tokens"] < 1000
    result = call("bench", "scheduler", "--workload", "nan")
    assert result.code == 78 and "expected one of nano, mixed" in result.err
    assert call("bench", "scheduler", "--kv-share", "0").code == 64


# -- the process -------------------------------------------------------------------------------------------------------

MODULES_AFTER = """
import sys
from batchgen.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
heavy = ("torch", "transformers", "pyarrow", "numpy", "pydantic", "yaml", "jinja2", "fsspec")
print("imported:", *(name for name in heavy if name in sys.modules))
"""


def imported(*args: str | Path) -> set[str]:
    command = [sys.executable, "-c", MODULES_AFTER, *args]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.splitlines()[-1].removeprefix("imported:").split())


def test_help_imports_nothing(job: Path) -> None:
    assert imported("--help") == set()
    assert imported("run", "--help") == set()
    assert imported("--version") == set()


@pytest.mark.parametrize("override", ["input.id=nope", "prompt.template=hello {{ txt }}"])
def test_validate_finds_a_column_that_no_line_has(call: Any, job: Path, override: str) -> None:
    (job.parent / "in.jsonl").write_text('{"text": "x", "id": 1}\n' * 3)
    result = call("validate", job, "--set", f"input.path={job.parent}/in.jsonl", "--set", override)
    assert result.code == 78
    assert "none of the first 3 rows has a column" in result.err and "in.jsonl are id, text" in result.err


def test_validate_and_status_import_no_torch(job: Path) -> None:
    assert "torch" not in imported("validate", job)
    (job.parent / "in.jsonl").write_text('{"id": 1, "text": "x"}\n')
    assert not {"torch", "pyarrow", "numpy"} & imported("validate", job, "--set", f"input.path={job.parent}/in.jsonl")
    assert not {"torch", "transformers"} & imported("status", job)


def test_a_reader_that_leaves_early_is_no_error(job: Path, ledger: Ledger) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "batchgen.cli", "status", job]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    os.close(write)
    assert (result.returncode, result.stderr) == (0, "")


def test_text_that_the_terminal_cannot_show_is_escaped(job: Path) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "batchgen.cli", "validate", job, "--set", f"output.path={job.parent}/✓"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("\\u2713\n")


def test_version(call: Any) -> None:
    assert call("--version").out == f"batchgen {__version__}\n"
