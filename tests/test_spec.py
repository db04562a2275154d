"""The job file: what is accepted, what every mistake is answered with, and that the documentation is the schema's."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen import jobfile, spec
from batchgen.errors import ConfigError, NoInputError, UsageError
from batchgen.spec import NOT_SUPPORTED, JobSpec, SamplingSpec

MINIMAL = """\
model: {path: ./model}
input: {path: data/*.parquet}
sampling: {max_tokens: 16}
output: {path: out/}
"""


def load(tmp_path: Path, text: str = "", minimal: bool = True, **arguments: Any) -> JobSpec:
    path = tmp_path / "reviews.yaml"
    path.write_text((MINIMAL if minimal else "") + text, encoding="utf-8")
    return spec.load(path, **arguments)


def job(**sections: Any) -> dict[str, Any]:
    """A minimal job as data, with `section={key: value}` put in."""
    data = yaml.safe_load(MINIMAL)
    for name, value in sections.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return data


def errors(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        spec.parse(data)
    return str(caught.value).splitlines()


# -- what is accepted --------------------------------------------------------------------------------------------------


def test_a_minimal_job_has_the_documented_defaults(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.name == "reviews"  # the file's stem
    assert loaded.input.path == ("data/*.parquet",)
    assert loaded.output.columns == {}
    assert (loaded.output.format, loaded.output.shard_rows) == ("parquet", "auto")
    assert (loaded.prompt.chat, loaded.prompt.special_tokens_in_content) == ("auto", "literal")
    assert loaded.checkpoint.interval == 60.0
    assert (loaded.errors.max_failed, loaded.errors.retries) == (0.01, 5)
    assert loaded.structured is None
    params = loaded.sampling.params()
    assert (params.max_tokens, params.temperature, params.top_k, params.n, params.stop) == (16, 0.0, None, 1, ())


def test_values_come_in_one_normal_form() -> None:
    loaded = spec.parse(
        job(
            input={"path": ["a", "b"]},
            prompt={"messages": [{"role": "user", "content": "{{ text }}"}], "chat": True},
            sampling={"stop": "END", "stop_token_ids": [5], "temperature": 1, "max_tokens": None, "seed": 2**63 - 1},
            output={"columns": ["a", {"b": "int64"}], "shard_rows": 10},
            engine={"kv_memory": "1.5GiB"},
            checkpoint={"interval": "1h30m"},
            errors={"max_failed": 1},
        )
    )
    assert loaded.input.path == ("a", "b")
    assert loaded.prompt.messages == ({"role": "user", "content": "{{ text }}"},)
    assert loaded.sampling.stop == ("END",)
    assert isinstance(loaded.sampling.temperature, float)
    assert loaded.sampling.params().stop_token_ids == (5,)
    assert loaded.output.columns == {"a": None, "b": "int64"}
    assert loaded.engine.kv_memory == 3 * 2**29
    assert loaded.checkpoint.interval == 5400.0
    assert loaded.errors.max_failed == 1 and isinstance(loaded.errors.max_failed, int)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(60, 60), (0.5, 0.5), ("90", 90), ("60s", 60), ("5m", 300), ("3h", 10800), ("1h30m", 5400), ("1d 2h", 93600)],
)
def test_durations(given: Any, seconds: float) -> None:
    assert spec.parse(job(checkpoint={"interval": given})).checkpoint.interval == seconds


@pytest.mark.parametrize(
    "given", ["", "soon", "5x", "-5s", "h", "1m1h", 0, -1, True, None, float("nan"), "1..5s", "nan"]
)
def test_no_durations(given: Any) -> None:
    assert "`checkpoint.interval`" in errors(job(checkpoint={"interval": given}))[0]


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("auto", "auto"),
        ("8GiB", 8 * 2**30),
        ("512MB", 512_000_000),
        ("2 gib", 2 * 2**31 // 2),
        (2**30, 2**30),
        (0.5, 0.5),
        (1.0, 1.0),
    ],
)
def test_sizes(given: Any, value: Any) -> None:
    read = spec.parse(job(engine={"kv_memory": given})).engine.kv_memory
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("given", ["8", "8G", "lots", "-1GiB", "100KB", 1, 0, -5, 0.0, 1.5, True, None, float("nan")])
def test_no_sizes(given: Any) -> None:
    assert "`engine.kv_memory`" in errors(job(engine={"kv_memory": given}))[0]


def test_all_columns_and_typed_columns() -> None:
    assert spec.parse(job(output={"columns": "all"})).output.columns == "all"
    assert spec.parse(job(output={"columns": {"a": "json", "b": None}})).output.columns == {"a": "json", "b": None}


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "engine:\n  # device: auto\nprompt:\n").engine.device == "auto"


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        spec.parse(job()).sampling.max_tokens = 5  # type: ignore[misc]


def test_json_reads_back_equal_and_without_secrets() -> None:
    loaded = spec.parse(
        job(
            input={"storage_options": {"secret": "hunter2"}},
            prompt={"messages": [{"role": "user", "content": "é"}]},
            sampling={"stop": ["a"]},
            output={"columns": ["a"], "storage_options": {"key": "hunter2"}},
            checkpoint={"interval": "5m"},
            engine={"kv_memory": 0.5},
        )
    )
    text = json.dumps(loaded.to_json())
    assert "hunter2" not in text
    back = JobSpec.model_validate(json.loads(text))
    assert back.to_json() == loaded.to_json()
    assert back.sampling == loaded.sampling and back.prompt == loaded.prompt and back.checkpoint.interval == 300
    assert pickle.loads(pickle.dumps(loaded)) == loaded


def test_json_keeps_the_order_of_columns_however_it_is_written() -> None:
    loaded = spec.parse(job(output={"columns": ["b", {"a": "json"}, "c"]}))
    back = JobSpec.model_validate(json.loads(json.dumps(loaded.to_json(), sort_keys=True)))
    assert list(back.output.columns.items()) == [("b", None), ("a", "json"), ("c", None)]  # type: ignore[union-attr]


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_an_unknown_key_names_its_path_the_file_and_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL.replace("max_tokens", "temprature: 0.5, max_tokens"), minimal=False)
    assert (
        str(caught.value) == f"{tmp_path}/reviews.yaml: `sampling.temprature`: unknown key; did you mean temperature?"
    )


def test_an_unknown_key_far_from_any_lists_the_keys() -> None:
    (line,) = errors(job(checkpoint={"zzz": 1}))
    assert line == "job: `checkpoint.zzz`: unknown key; the keys here are interval"


def test_a_key_in_the_wrong_section_is_found() -> None:
    (line,) = errors(job(temperature=0.5))
    assert line.endswith("`temperature`: unknown key; did you mean sampling.temperature?")


def test_a_wrong_type_says_what_was_given_and_what_was_expected() -> None:
    (line,) = errors(job(sampling={"temperature": "hot"}))
    assert line == 'job: `sampling.temperature`: "hot" given, expected a number >= 0'
    (line,) = errors(job(model={"dtype": "fp16"}))
    assert line == 'job: `model.dtype`: "fp16" given, expected auto, float32, bfloat16 or float16'
    (line,) = errors(job(engine=[1]))
    assert line == "job: `engine`: a list given, expected a mapping"
    (line,) = errors(job(model={"revision": 123}))
    assert line == "job: `model.revision`: 123 given, expected text, in quotes"


def test_all_errors_are_reported_together_one_a_line() -> None:
    lines = errors({"model": {"path": ""}, "input": {"path": []}, "output": {}, "prompts": {}})
    assert [line.split("`")[1] for line in lines] == ["model.path", "input.path", "sampling", "output.path", "prompts"]


@pytest.mark.parametrize("missing", ["model", "input", "sampling", "output"])
def test_required_sections(missing: str) -> None:
    data = job()
    del data[missing]
    (line,) = errors(data)
    assert line.startswith(f"job: `{missing}`: missing, expected a mapping with at least ")


def test_max_tokens_has_no_hidden_default() -> None:
    (line,) = errors(job() | {"sampling": {"temperature": 0.5}})
    assert line == "job: `sampling.max_tokens`: missing, expected an integer >= 0, or null"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "10"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 1.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("n", 0),
        ("n", True),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("repetition_penalty", 0),
        ("presence_penalty", float("nan")),
        ("stop", ["", "END"]),
        ("stop", ""),
        ("stop", [5]),
        ("stop", None),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [2**31]),
        ("include_stop", 1),
        ("include_stop", "yes"),
    ],
)
def test_ranges_of_sampling(key: str, value: Any) -> None:
    (line,) = errors(job(sampling={key: value}))
    assert f"`sampling.{key}`" in line


@pytest.mark.parametrize("value", [-1, -0.1, 1.0, 1.5, float("nan"), "1%", True, None])
def test_max_failed_is_a_count_or_a_share_below_one(value: Any) -> None:
    (line,) = errors(job(errors={"max_failed": value}))
    assert "expected a count of rows, or a share below 1" in line


@pytest.mark.parametrize("columns", ["some", ["a", "a"], [{"a": "int32"}], [1], [""], 5, {"a": "text"}])
def test_wrong_columns(columns: Any) -> None:
    (line,) = errors(job(output={"columns": columns}))
    assert "`output.columns`" in line


@pytest.mark.parametrize(
    "messages", [[], "hello", [{"content": "x"}], [{"role": "user"}], ["x"], [{"role": 1, "content": "x"}]]
)
def test_wrong_messages(messages: Any) -> None:
    (line,) = errors(job(prompt={"messages": messages}))
    assert "`prompt.messages`" in line


def test_a_prompt_has_one_source() -> None:
    (line,) = errors(job(prompt={"column": "a", "template": "b"}))
    assert line == "job: `prompt`: column and template given, expected one of them at most"


def test_a_prompt_that_contradicts_itself() -> None:
    (line,) = errors(job(prompt={"messages": [{"role": "user", "content": "x"}], "chat": False}))
    assert "`prompt`: messages given with chat: false" in line
    for extra in (
        {"chat": True},
        {"tools": "tools"},
        {"chat_template_kwargs": {"a": 1}},
        {"system": "merge_into_user"},
    ):
        (line,) = errors(job(prompt={"token_ids": "ids", **extra}))
        assert "`prompt`: token_ids are taken as they are" in line


def test_structured_has_one_form() -> None:
    (line,) = errors(job(structured={"regex": "a", "choices": ["b"]}))
    assert "expected exactly one of json_schema, regex, choices, grammar, column" in line


def test_a_wrong_secret_is_not_repeated() -> None:
    (line,) = errors(job(output={"storage_options": "hunter2"}))
    assert line == "job: `output.storage_options`: str given, expected a mapping"
    with pytest.raises(ConfigError) as caught:
        spec.parse(job(model={"path": "x", "storage_options": "hunter2"}), overrides=["engine.parallel=x"])
    assert "hunter2" not in str(caught.value) and "`model.storage_options`: str given" in str(caught.value)


# -- features that are not there yet -----------------------------------------------------------------------------------

REFUSED: dict[str, list[Any]] = {
    "task": ["score", "embed"],
    "model.quantization": ["fp8", "int4"],
    "sampling.max_tokens": [0],
    "sampling.repetition_penalty": [1.1],
    "sampling.presence_penalty": [0.5],
    "sampling.frequency_penalty": [-0.5],
    "sampling.min_tokens": [1],
    "sampling.logprobs": [0, 5],
    "sampling.prompt_logprobs": [1],
    "sampling.logit_bias": [{5: 1.0}],
    "sampling.bad_words": [["x"], "x"],
    "sampling.repetition_stop": [{"times": 3}],
    "structured": [{"regex": "a"}, {"json_schema": {"type": "object"}}, {"column": "schema"}],
    "engine.attention": ["flash"],
    "engine.parallel": [{"tensor": 2}],
    "engine.deterministic": [True],
    "errors.row_timeout": ["60s"],
}


def test_every_refusal_is_tested() -> None:
    assert REFUSED.keys() == NOT_SUPPORTED.keys()


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in REFUSED.items() for value in values])
def test_what_is_not_supported_is_refused_and_named(path: str, value: Any) -> None:
    section, _, key = path.rpartition(".")
    (line,) = errors(job(**{section: {key: value}} if section else {key: value}))
    assert line.startswith(f"job: `{path}")
    assert line.endswith("`: not supported yet in this version")


def test_defaults_of_refused_keys_are_accepted_when_written_out() -> None:
    stated = spec.parse(job()).to_json()
    assert JobSpec.model_validate(stated).to_json() == stated


# -- YAML --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: a}\nmodel: {path: b}\n", "line 2, column 1: the key 'model' is given twice, first in line 1"),
        ("model:\n  path: a\n  path: b\n", "line 3, column 3: the key 'path' is given twice, first in line 2"),
        ("input: {path: a, path: b}\n", "line 1, column 18: the key 'path' is given twice"),
        ("model: {path: a\n", "line 2, column 1: "),
        ("a: b: c\n", "line 1, column 5: "),
        ("- a\n- b\n", "expected a mapping of sections (model, input, sampling, output), it holds a list"),
        ("just text\n", "it holds a str"),
        ("", "it is empty"),
        ("# nothing\n", "it is empty"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1, column 4: "),
        ("a: &a [*a]\nmodel: &b {path: *b}\n", "refers to itself"),
        ('name: "half \\ud83d"\n', "line 1, column 7: half of a surrogate pair"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: \x01\n", "not valid YAML"),
    ],
)
def test_yaml_that_is_no_job(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, minimal=False)
    assert str(caught.value).startswith(f"{tmp_path}/reviews.yaml: ")
    assert message in str(caught.value)


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "[no, on, yes, 010, 1e-4, 1:30, 2024-01-01, 0x10, .5, -.inf, ~, null, True, 1_000, +3, '5', 1.]"
    assert jobfile.parse_yaml(text, "test") == [
        *("no", "on", "yes", 10, 1e-4, "1:30", "2024-01-01", 16, 0.5, float("-inf"), None, None),
        *(True, "1_000", 3, "5", 1.0),
    ]


def test_anchors_merge_keys_and_pairs_of_escapes(tmp_path: Path) -> None:
    text = 'base: &base {a: 1, b: 2}\nnext: {<<: *base, b: 3}\ntext: "\\ud83d\\ude00"\n'
    assert jobfile.parse_yaml(text, "test") == {"base": {"a": 1, "b": 2}, "next": {"a": 1, "b": 3}, "text": "😀"}


def test_a_job_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert spec.load(path).name == "bom"


def test_a_job_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"nothing\.yaml: no such job file"):
        spec.load(tmp_path / "nothing.yaml")
    with pytest.raises(NoInputError, match="this is not a file"):
        spec.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        spec.load(tmp_path / "latin.yaml")


# -- overrides ---------------------------------------------------------------------------------------------------------


def test_overrides_are_yaml_and_make_the_sections_they_need(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        overrides=[
            "sampling.temperature=0.7",
            "input.path=[a, b]",
            "prompt.chat_template_kwargs.enable_thinking=false",
            "sampling.stop=a=b: c",
            "output.path=*.x",
            "model.revision=",
            "name='5'",
        ],
    )
    assert loaded.sampling.temperature == 0.7
    assert loaded.input.path == ("a", "b")
    assert loaded.prompt.chat_template_kwargs == {"enable_thinking": False}
    assert loaded.sampling.stop == ("a=b: c",)
    assert loaded.output.path == "*.x"
    assert loaded.model.revision is None
    assert loaded.name == "5"


def test_overrides_come_before_substitution(tmp_path: Path) -> None:
    loaded = load(tmp_path, overrides=["output.path=out/${DATE}/"], params={"DATE": "2025-01-31"})
    assert loaded.output.path == "out/2025-01-31/"


def test_an_override_of_an_alias_changes_only_its_own_key(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "max_tokens: 16}", "max_tokens: 16}\nprompt: {chat_template_kwargs: &shared {a: 1}, tools: [*shared]}"
    )
    loaded = load(tmp_path, text, minimal=False, overrides=["prompt.chat_template_kwargs.a=2"])
    assert loaded.prompt.chat_template_kwargs == {"a": 2}
    assert loaded.prompt.tools == ({"a": 1},)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "sampling.temprature=1",
            "--set sampling.temprature=1: `sampling.temprature`: unknown key; did you mean temperature?",
        ),
        (
            "sampling.temperature=hot",
            '--set sampling.temperature=hot: `sampling.temperature`: "hot" given, expected a number >= 0',
        ),
        ("sampling={}", "--set sampling={}: `sampling.max_tokens`: missing, expected an integer >= 0, or null"),
        ("input.path.x=1", "--set input.path.x=1: `input.path` is not a mapping, it has no key x"),
        (
            "sampling.stop=[a",
            "--set sampling.stop=[a: the value is not valid YAML; text that looks like YAML goes in quotes",
        ),
        ("structured.regex=a", "--set structured.regex=a: `structured`: not supported yet in this version"),
    ],
)
def test_errors_of_an_override_name_it(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, overrides=[override])
    assert str(caught.value) == message


@pytest.mark.parametrize("override", ["sampling.temperature", "=5", "a..b=1", ".a=1", ""])
def test_a_malformed_override_is_a_usage_error(tmp_path: Path, override: str) -> None:
    with pytest.raises(UsageError, match="expected KEY=VALUE"):
        load(tmp_path, overrides=[override])


# -- substitution ------------------------------------------------------------------------------------------------------


def substituted(value: Any, environ: dict[str, str] | None = None, **params: str) -> Any:
    return jobfile.substitute({"output": {"x": value}}, params, environ or {}, "job.yaml")["output"]["x"]


def test_references_inside_text_stay_text() -> None:
    assert substituted("a/${DATE}/${env:HOME}-${DATE}", {"HOME": "h"}, DATE="5") == "a/5/h-5"
    assert substituted(["${A}x", {"b": "x${A}"}], A="1") == ["1x", {"b": "x1"}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("null", None),
        ("", None),
        ("[a, 1]", ["a", 1]),
        ("{a: 1}", {"a": 1}),
        ("'5'", "5"),
        ("2025-01-31", "2025-01-31"),
        ("data/*.parquet", "data/*.parquet"),
        ("*.parquet", "*.parquet"),
        ("a: b", "a: b"),
        ("[ab]*.parquet", "[ab]*.parquet"),
        ("# no comment", "# no comment"),
        ("no", "no"),
        ("${A}", "${A}"),
    ],
)
def test_a_whole_reference_takes_the_yaml_type(text: str, value: Any) -> None:
    read = substituted("${V}", V=text)
    assert read == value and type(read) is type(value)


def test_an_escape_is_a_plain_reference() -> None:
    assert substituted("$${A}") == "${A}"
    assert substituted("$${A}/${A}", A="1") == "${A}/1"


def test_prompt_sampling_and_structured_are_left_alone(tmp_path: Path) -> None:
    text = "prompt: {template: 'costs ${PRICE} {{ text }}'}\n"
    loaded = load(tmp_path, text, overrides=["sampling.stop=${END}"])
    assert loaded.prompt.template == "costs ${PRICE} {{ text }}"
    assert loaded.sampling.stop == ("${END}",)


def test_missing_values_name_the_key_and_the_name(tmp_path: Path) -> None:
    text = "checkpoint: {interval: '${EVERY}'}\nname: 'a ${env:NO_SUCH}'\n"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, overrides=["input.path=[a, 'b/${DATE}']", "errors.retries=${5}"], environ={"DATE": "x"})
    where = f"{tmp_path}/reviews.yaml"
    assert str(caught.value).splitlines() == [
        f"{where}: `name`: the environment has no variable NO_SUCH, needed by ${{env:NO_SUCH}}",
        f"{where}: `input.path[1]`: no value for ${{DATE}}; give --param DATE=VALUE "
        "(the environment's DATE is ${env:DATE})",
        f"{where}: `checkpoint.interval`: no value for ${{EVERY}}; give --param EVERY=VALUE",
        f"{where}: `errors.retries`: expected ${{NAME}} or ${{env:NAME}}; a plain ${{ is written $${{",
    ]


def test_a_parameter_that_nothing_uses_is_a_typo(tmp_path: Path) -> None:
    text = "checkpoint: {interval: '${EVERY}'}\n"
    with pytest.raises(ConfigError, match=r"--param EVRY: .*reviews\.yaml has no \$\{EVRY\}; did you mean EVERY\?"):
        load(tmp_path, text, params={"EVERY": "5s", "EVRY": "6s"})
    with pytest.raises(ConfigError, match=r"everywhere but in prompt, sampling, structured"):
        load(tmp_path, params={"X": "1"})


# -- the model's own defaults ------------------------------------------------------------------------------------------


def sampling(**keys: Any) -> SamplingSpec:
    return spec.parse(job(sampling=keys)).sampling


def test_defaults_of_the_model_are_taken_only_when_asked_for() -> None:
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    assert sampling().with_defaults(config) == sampling()


def test_defaults_of_the_model_fill_what_is_not_given() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 2}
    filled = sampling(defaults="model", top_p=1.0, seed=7).with_defaults(config)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (0.6, 1.0, 20, 0.0)
    assert (filled.max_tokens, filled.seed) == (16, 7)
    assert filled.with_defaults(config) == filled


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({}, 0.0),
        ({"temperature": None, "top_k": None, "top_p": None}, 0.0),
    ],
)
def test_do_sample_decides_the_temperature(config: dict[str, Any], temperature: float) -> None:
    assert sampling(defaults="model").with_defaults(config).temperature == temperature


def test_odd_defaults_of_the_model() -> None:
    assert sampling(defaults="model").with_defaults({"top_k": 0}).top_k is None
    with pytest.raises(ConfigError, match=r"generation config: `sampling\.top_p`: 5 given"):
        sampling(defaults="model").with_defaults({"top_p": 5})
    with pytest.raises(ConfigError, match=r"repetition_penalty of 1\.1: not supported yet"):
        sampling(defaults="model").with_defaults({"repetition_penalty": 1.1})
    stated = sampling(defaults="model", repetition_penalty=1.0)
    assert stated.with_defaults({"repetition_penalty": 1.1}).repetition_penalty == 1.0


# -- documentation -----------------------------------------------------------------------------------------------------


def test_every_key_is_documented_in_a_sentence() -> None:
    for path, section, field in spec._keys(JobSpec):
        if spec._section_of(field.annotation) is None:
            assert field.description and field.description.endswith("."), path
        assert section.__doc__


def test_the_documentation_is_the_schema() -> None:
    page = Path(__file__).parents[1] / "docs" / "job-file.md"
    assert page.read_text(encoding="utf-8") == spec.markdown(), "run: python -m batchgen.spec > docs/job-file.md"


def test_the_example_in_the_documentation_is_a_job(tmp_path: Path) -> None:
    environ = {"S3_KEY": "k", "S3_SECRET": "s"}
    loaded = load(tmp_path, spec.EXAMPLE, minimal=False, params={"DATE": "2025-01-31"}, environ=environ)
    assert loaded.output.storage_options == {"key": "k", "secret": "s"}


def test_reading_a_job_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    code = (
        "import sys; from batchgen import spec; spec.load(sys.argv[1]); "
        "print([name for name in ('torch', 'numpy', 'pyarrow', 'transformers', 'jinja2') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("key", ["engine.max_num_seqs", "engine.kv_memory", "sampling.max_tokens", "sampling.top_k"])
def test_an_integer_that_no_record_can_hold_is_refused(key: str) -> None:
    section, name = key.split(".")
    (line,) = errors(job(**{section: ({"max_tokens": 5} if section == "sampling" else {}) | {name: 2**64}}))
    assert f"`{key}`: {2**64} given, expected less than 2 ** 63" in line


@pytest.mark.parametrize("size", [7, 1, 48, 256, True])
def test_block_sizes_are_those_that_kernels_have(size: int) -> None:
    (line,) = errors(job(engine={"block_size": size}))
    assert "`engine.block_size`" in line and "expected auto or 16, 32, 64 or 128" in line
