"""Requests of OpenAI batch files: every field is used, harmless, or its row's error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchgen import jobfile, spec
from batchgen.errors import InvalidRow
from batchgen.io.openai import _ENDPOINTS, CHAT, COMPLETIONS, Call, endpoint_of, model_of, read_call

ROOT = Path(__file__).parent.parent
MESSAGES = [{"role": "user", "content": "Hello?"}]


def chat(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": MESSAGES, **body}}


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "Once", **body}}


def problem(row: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(InvalidRow) as caught:
        read_call(row)
    return caught.value.code, caught.value.message


def test_a_chat_and_a_completion() -> None:
    assert read_call(chat(model="gpt")) == Call(CHAT, MESSAGES, None, None, {})
    assert read_call(completion(max_tokens=3)) == Call(COMPLETIONS, None, "Once", None, {"max_tokens": 3})


@pytest.mark.parametrize(("body", "url"), [({"messages": MESSAGES}, CHAT), ({"prompt": "Once"}, COMPLETIONS)])
def test_lines_of_other_services_have_no_method_and_no_url(body: dict[str, Any], url: str) -> None:
    assert read_call({"custom_id": "a", "body": body}).url == url
    assert read_call({"custom_id": "a", "method": None, "url": None, "body": body}).url == url
    assert read_call({"custom_id": "a", "body": body, "comment": "other columns are columns"}).url == url


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 7, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 1, "top_p": 0.5, "n": 3, "seed": 4}, {"temperature": 1.0, "top_p": 0.5, "n": 3, "seed": 4}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"stop_token_ids": [3], "ignore_eos": True}, {"stop_token_ids": (3,), "ignore_eos": True}),
        ({"presence_penalty": 0, "frequency_penalty": 0.0}, {"presence_penalty": 0.0, "frequency_penalty": 0.0}),
        ({"repetition_penalty": 1, "min_tokens": 0}, {"repetition_penalty": 1.0, "min_tokens": 0}),
        ({"temperature": None, "max_tokens": None, "stop": None, "tools": None, "response_format": None}, {}),
    ],
)
def test_parameters_are_read_as_the_job_files(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert read_call(chat(**given)).sampling == read


@pytest.mark.parametrize(
    "body",
    [
        {"user": "ada", "metadata": {"a": 1}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "y"},
        {"stream": False, "logprobs": False, "top_logprobs": 0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "functions": [], "function_call": "none"},
    ],
)
def test_what_changes_nothing_is_accepted(body: dict[str, Any]) -> None:
    assert read_call(chat(**body)).sampling == {}


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read_call(chat()).tools is None
    assert read_call(chat(tools=[])).tools == []
    assert read_call(chat(tools=tools, tool_choice="auto", parallel_tool_calls=True)).tools == tools
    assert read_call(chat(tools=tools, tool_choice="none")).tools == []
    assert "body.tools:" in problem(chat(tools={"name": "f"}))[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", "10"),
        ("max_tokens", True),
        ("max_completion_tokens", -1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 0),
        ("n", 0),
        ("n", 129),
        ("n", 10**12),
        ("seed", -1),
        ("stop", ["", "END"]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 1),
        ("logit_bias", {"5": -100}),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("stream", True),
        ("stream", 0),
        ("model", 5),
        ("messages", "Hello?"),
        ("audio", {"voice": "x"}),
        ("temprature", 0.5),
        ("prompt", "Once"),
        ("echo", False),
    ],
)
def test_what_cannot_be_honoured_fails_its_row_and_is_named(field: str, value: Any) -> None:
    code, message = problem(chat(**{field: value}))
    assert code == "invalid_parameter" and message.startswith(f"body.{field}: ")


def test_a_misspelt_field_is_told_its_name() -> None:
    assert problem(chat(temprature=0.5))[1].endswith("did you mean temperature?")
    assert problem(chat(prompt="Once"))[1] == f"body.prompt: not a field of {CHAT}"


def test_two_names_for_one_thing_must_agree() -> None:
    assert "give one of them" in problem(chat(max_tokens=1, max_completion_tokens=2))[1]


def test_tool_calls_side_by_side_cannot_be_forbidden() -> None:
    assert "parallel_tool_calls" in problem(chat(tools=[{"name": "f"}], parallel_tool_calls=False))[1]


@pytest.mark.parametrize("prompt", ["Once", ["Once"], [1, 2], [[1, 2]]])
def test_one_prompt(prompt: Any) -> None:
    assert read_call(completion(prompt=prompt)).prompt in ("Once", [1, 2])


@pytest.mark.parametrize("prompt", [["Once", "Twice"], [[1], [2]], 5, {"text": "Once"}, [[]], [["Once"]]])
def test_other_prompts(prompt: Any) -> None:
    if prompt in ([[]], [["Once"]]):  # lists of ids are looked into where the vocabulary is known
        assert read_call(completion(prompt=prompt)).prompt == prompt[0]
        return
    assert problem(completion(prompt=prompt))[1].startswith("body.prompt: ")


@pytest.mark.parametrize(
    "body", [{"echo": False}, {"suffix": ""}, {"best_of": 1}, {"best_of": 2, "n": 2}, {"logprobs": None}]
)
def test_completion_fields_that_change_nothing(body: dict[str, Any]) -> None:
    read_call(completion(**body))


@pytest.mark.parametrize(
    "body", [{"echo": True}, {"suffix": "end"}, {"best_of": 3}, {"logprobs": 0}, {"max_completion_tokens": 3}]
)
def test_completion_fields_that_fail_their_row(body: dict[str, Any]) -> None:
    (field,) = body
    assert problem(completion(**body))[1].startswith(f"body.{field}: ")


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        ({"custom_id": None}, "invalid_row", "custom_id: null given"),
        ({"custom_id": 7}, "invalid_row", "custom_id: 7 given"),
        ({"method": "GET"}, "invalid_parameter", 'method: "GET" given, expected POST'),
        ({"url": "/v1/embeddings"}, "invalid_parameter", 'url: "/v1/embeddings" given'),
        ({"url": 5}, "invalid_parameter", "url: 5 given"),
        ({"body": None}, "invalid_row", "body: null given"),
        ({"body": [1]}, "invalid_row", "body: a list given"),
        ({"body": {}}, "invalid_row", "body: no messages, which /v1/chat/completions needs"),
        ({"body": {}, "url": None}, "invalid_row", "neither messages nor prompt"),
    ],
)
def test_lines_that_are_no_request(change: dict[str, Any], code: str, part: str) -> None:
    found, message = problem({**chat(), **change})
    assert found == code and part in message


def test_missing_parts_of_a_line() -> None:
    row = chat()
    for key in ("custom_id", "body"):
        left = {name: value for name, value in row.items() if name != key}
        assert problem(left) == ("invalid_row", problem(left)[1]) and f"{key}: nothing given" in problem(left)[1]


@pytest.mark.parametrize("body", [None, 5, [], "x", {"messages": None}, {"model": 5}])
def test_what_answers_repeat_of_a_body_that_may_be_anything(body: Any) -> None:
    assert endpoint_of(body) is None and model_of(body) is None
    assert endpoint_of({"prompt": "a"}) == COMPLETIONS and model_of({"model": "m"}) == "m"


def test_the_document_names_every_field_and_its_job_is_one() -> None:
    text = (ROOT / "docs/openai-batch.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == frozenset().union(*(endpoint.fields for endpoint in _ENDPOINTS))
    (job,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert spec.parse(jobfile.parse_mapping(job, "docs/openai-batch.md")).input.format == "openai"
