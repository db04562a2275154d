"""Parameters of a row: read as the job's own, put over the job's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchgen import spec
from batchgen.errors import ConfigError, InvalidRow
from batchgen.rowparams import KEYS, MAX_SAMPLES, RowParams, read_column, read_value
from batchgen.spec import SamplingSpec

# One good and one bad value for every key, in this order of `KEYS`.
VALUES: dict[str, tuple[Any, Any]] = {
    "max_tokens": (5, 1.5),
    "temperature": (0.7, -1),
    "top_p": (0.5, 0),
    "top_k": (3, 0),
    "min_p": (0.1, 2),
    "n": (MAX_SAMPLES, MAX_SAMPLES + 1),
    "seed": (9, -9),
    "repetition_penalty": (1, 1.5),
    "presence_penalty": (0, 1.5),
    "frequency_penalty": (0, 1.5),
    "stop": (["a", "b"], [""]),
    "stop_token_ids": ([1, 2], ["a"]),
    "include_stop": (True, "yes"),
    "ignore_eos": (True, 1),
    "min_tokens": (0, 5),
    "logprobs": (None, 3),
    "prompt_logprobs": (None, 3),
    "logit_bias": ({}, {7: 1.0}),
    "bad_words": ([], ["a"]),
    "repetition_stop": (None, {"times": 2}),
}


def test_every_key_is_tried() -> None:
    assert tuple(VALUES) == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_a_value_is_what_the_job_file_makes_of_it(key: str) -> None:
    good, bad = VALUES[key]
    assert read_value(key, good, "here") == getattr(SamplingSpec(**{"max_tokens": 1, key: good}), key)
    with pytest.raises(InvalidRow, match=r"^here: ") as caught:
        read_value(key, bad, "here")
    assert caught.value.code == "invalid_parameter"
    if key != "n":  # of a whole job it may be more
        with pytest.raises(ValueError):
            SamplingSpec(**{"max_tokens": 1, key: bad})


def test_the_wrong_value_is_shown() -> None:
    with pytest.raises(InvalidRow, match=r"^here: -1 given, expected an integer >= 0, or null$"):
        read_value("max_tokens", -1, "here")
    with pytest.raises(InvalidRow, match=r"^here: 0.5 given, which is not supported yet in this version$"):
        read_value("presence_penalty", 0.5, "here")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_column_of_objects_or_of_json_text(as_text: bool) -> None:
    given = {"temperature": 1, "max_tokens": None, "stop": "END"}
    row = {"params": json.dumps(given) if as_text else given}
    assert read_column(row, "params") == {"temperature": 1.0, "stop": ("END",)}


def test_a_row_that_gives_nothing() -> None:
    assert read_column({"params": None}, "params") == {}
    assert read_column({"params": {}}, "params") == {}


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ({"temprature": 1}, 'unknown key "temprature"; did you mean temperature?'),
        ({"zzz": 1}, 'unknown key "zzz"; a row may give max_tokens'),
        ({"defaults": "model"}, 'unknown key "defaults"'),
        ({"column": "x"}, 'unknown key "column"'),
        ({"temperature": -1}, "temperature: -1 given"),
        ("{", "not valid JSON"),
        ("[1]", "this is an array"),
        ('{"n": 1, "n": 2}', "the key 'n' occurs twice"),
        ('{"temperature": NaN}', "NaN is not a JSON value"),
        (5, "5 given, expected an object or JSON text"),
        ([["n", 1]], "a list given, expected an object or JSON text"),
    ],
)
def test_a_column_that_cannot_be_used(value: Any, part: str) -> None:
    with pytest.raises(InvalidRow) as caught:
        read_column({"params": value}, "params")
    assert caught.value.code == "invalid_parameter" and caught.value.message.startswith("column `params`: ")
    assert part in caught.value.message


def test_a_row_without_the_column() -> None:
    with pytest.raises(InvalidRow, match="no column `params`") as caught:
        read_column({}, "params")
    assert caught.value.code == "missing_column"


def test_what_a_row_gives_stands_over_the_jobs() -> None:
    job = SamplingSpec(max_tokens=5, temperature=0.5, stop=["a"], seed=3)
    params = RowParams(job, vocab_size=100)
    assert params.over({}, "here") is params.default == job.params()
    assert params.over({"presence_penalty": 0.0}, "here") is params.default
    made = params.over({"temperature": 1.0, "n": 2}, "here")
    assert made == SamplingSpec(max_tokens=5, temperature=1.0, stop=["a"], seed=3, n=2).params()
    assert params.over({"temperature": 1.0, "n": 2}, "here") is made


def test_token_ids_that_the_model_has_not() -> None:
    params = RowParams(SamplingSpec(max_tokens=5), vocab_size=100)
    assert params.over({"stop_token_ids": (99,)}, "here").stop_token_ids == (99,)
    with pytest.raises(InvalidRow, match=r"^here: stop_token_ids: 100, but the model's ids are 0 to 99$"):
        params.over({"stop_token_ids": (100,)}, "here")


# -- keys of a job that OpenAI's lines take the place of ---------------------------------------------------------------

JOB: dict[str, Any] = {
    "model": {"path": "m"},
    "input": {"path": "x", "format": "openai"},
    "sampling": {"max_tokens": None},
    "output": {"path": "out", "format": "openai"},
}


def test_a_job_of_openai_requests() -> None:
    assert spec.parse(JOB).input.id_column == "custom_id"
    allowed = {"tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}, "too_long": "truncate_left"}
    spec.parse({**JOB, "prompt": allowed, "sampling": {"max_tokens": None, "temperature": 1.0}})
    spec.parse({**JOB, "input": {**JOB["input"], "id": "custom_id"}})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("input", "id", "key"),
        ("prompt", "column", "text"),
        ("prompt", "template", "{{ text }}"),
        ("prompt", "messages", [{"role": "user", "content": "a"}]),
        ("prompt", "token_ids", "ids"),
        ("prompt", "chat", False),
        ("prompt", "tools", "column"),
        ("sampling", "column", "params"),
        ("sampling", "max_tokens", 5),
        ("output", "columns", ["a"]),
        ("output", "token_ids", True),
    ],
)
def test_keys_without_a_meaning_are_refused_by_name(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^job: {section}\.{key} "):
        spec.parse({**JOB, section: {**JOB.get(section, {}), key: value}}, overrides=["model.path=other"])
