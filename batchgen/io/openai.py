"""The requests of OpenAI batch files: one line's call, checked field by field.

A field of a body is used, is harmless, or fails its row: nothing of a request is silently left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from batchgen import kinds
from batchgen.errors import InvalidRow
from batchgen.io.answers import CHAT, COMPLETIONS
from batchgen.rowparams import read_value

ID = "custom_id"

# Fields that become sampling parameters: the field's name, and the job file's.
_SAMPLING = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "n": "n",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    # not OpenAI's, but known to the engines that people write such files for
    "top_k": "top_k",
    "min_p": "min_p",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
}

# Fields about the caller, the bill and the service: no answer depends on them.
_HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")

_Body = Mapping[str, Any]


def _is(*allowed: Any) -> Callable[[Any, _Body], bool]:
    """1, 1.0 and true are equal to Python, but are not the same."""
    return lambda value, body: any(type(value) is type(one) and value == one for one in allowed)


# Fields of which only the value that changes nothing is accepted: what a value must be, in words, and whether it is.
_NEUTRAL: dict[str, tuple[str, Callable[[Any, _Body], bool]]] = {
    "stream": ("false", _is(False)),
    "logit_bias": ("{}", lambda value, body: value == {}),
}
_CHAT_NEUTRAL: dict[str, tuple[str, Callable[[Any, _Body], bool]]] = {
    "logprobs": ("false", _is(False)),
    "top_logprobs": ("0", _is(0)),
    "response_format": ('{"type": "text"}', lambda value, body: value == {"type": "text"}),
    "tool_choice": ('"none" or "auto"', _is("none", "auto")),
    "parallel_tool_calls": (
        "true where there are tools",
        lambda value, body: value is True or (value is False and not body.get("tools")),
    ),
    "functions": ("an empty list (the newer `tools` are supported)", lambda value, body: value == []),
    "function_call": ('"none"', _is("none")),
    "modalities": ('["text"]', lambda value, body: value == ["text"]),
}
_COMPLETIONS_NEUTRAL: dict[str, tuple[str, Callable[[Any, _Body], bool]]] = {
    "logprobs": ("null", lambda value, body: False),
    "echo": ("false", _is(False)),
    "suffix": ("null or empty", _is("")),
    "best_of": ("the same as n", lambda value, body: type(value) is int and value == (body.get("n") or 1)),
}


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """What a body of this endpoint may hold. `prompt` is the field that holds the prompt."""

    url: str
    prompt: str
    sampling: Mapping[str, str]
    neutral: Mapping[str, tuple[str, Callable[[Any, _Body], bool]]]
    others: frozenset[str]
    fields: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", self.others.union(self.sampling, self.neutral))


_CHAT_SAMPLING = {**_SAMPLING, "max_completion_tokens": "max_tokens"}
_ENDPOINTS = (
    _Endpoint(
        CHAT,
        "messages",
        _CHAT_SAMPLING,
        {**_NEUTRAL, **_CHAT_NEUTRAL},
        frozenset({"messages", "model", "tools", *_HARMLESS}),
    ),
    _Endpoint(
        COMPLETIONS,
        "prompt",
        _SAMPLING,
        {**_NEUTRAL, **_COMPLETIONS_NEUTRAL},
        frozenset({"prompt", "model", *_HARMLESS}),
    ),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request. A chat has `messages` (not looked into), a completion has `prompt`: text or token ids.

    `tools` None means that the request says nothing of them. `sampling` holds values of `rowparams.read_value`.
    """

    url: str
    messages: Any
    prompt: Any
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]


def read_call(row: Mapping[str, Any]) -> Call:
    """The call of one line `{custom_id, method, url, body}`; method and url may be missing. Raises InvalidRow."""
    _check_id(row)
    body = row.get("body")
    if not isinstance(body, Mapping):
        given = kinds.shown(body) if "body" in row else "nothing"
        raise InvalidRow("invalid_row", f"body: {given} given, expected an object")
    endpoint = _endpoint(row, body)
    sampling: dict[str, Any] = {}
    for name, value in body.items():
        if name not in endpoint.fields:
            raise _invalid(name, _unknown(name, endpoint))
        if value is None:
            continue
        if name in endpoint.sampling:
            _take(sampling, endpoint.sampling[name], name, value)
        elif name in endpoint.neutral:
            expected, accepts = endpoint.neutral[name]
            if not accepts(value, body):
                raise _invalid(name, f"{_short(value)} given, only {expected} is supported")
        elif name == "model" and not isinstance(value, str):
            raise _invalid(name, f"{_short(value)} given, expected text")
    prompt = body.get(endpoint.prompt)
    if prompt is None:
        raise InvalidRow("invalid_row", f"body: no {endpoint.prompt}, which {endpoint.url} needs")
    if endpoint.url == CHAT:
        if not isinstance(prompt, list):
            raise _invalid("messages", f"{_short(prompt)} given, expected a list of messages")
        return Call(CHAT, prompt, None, _tools(body), sampling)
    return Call(COMPLETIONS, None, _one_prompt(prompt), None, sampling)


def endpoint_of(body: Any) -> str | None:
    """The endpoint that a body is for; None where it may be anything."""
    given = body if isinstance(body, Mapping) else {}
    return next((endpoint.url for endpoint in _ENDPOINTS if given.get(endpoint.prompt) is not None), None)


def model_of(body: Any) -> str | None:
    """The model that a body names; None where it names none."""
    model = body.get("model") if isinstance(body, Mapping) else None
    return model if isinstance(model, str) else None


def _check_id(row: Mapping[str, Any]) -> None:
    given = row.get(ID)
    if not isinstance(given, str):
        shown = kinds.shown(given) if ID in row else "nothing"
        raise InvalidRow("invalid_row", f"{ID}: {shown} given, expected text that names the request")


def _endpoint(row: Mapping[str, Any], body: _Body) -> _Endpoint:
    method, url = row.get("method"), row.get("url")
    if method not in (None, "POST"):
        raise InvalidRow("invalid_parameter", f"method: {kinds.shown(method)} given, expected POST")
    for endpoint in _ENDPOINTS:
        if url == endpoint.url or (url is None and body.get(endpoint.prompt) is not None):
            return endpoint
    if url is not None:
        raise InvalidRow("invalid_parameter", f"url: {kinds.shown(url)} given, expected {CHAT} or {COMPLETIONS}")
    raise InvalidRow("invalid_row", "body: neither messages nor prompt, and no url that tells which")


def _take(sampling: dict[str, Any], key: str, name: str, value: Any) -> None:
    read = read_value(key, value, f"body.{name}")
    if sampling.get(key) not in (None, read):  # max_tokens and max_completion_tokens
        raise _invalid(name, f"{read} given, and {sampling[key]} under its other name; give one of them")
    sampling[key] = read


def _tools(body: _Body) -> list[dict[str, Any]] | None:
    """Templates get no tools where none is to be called: what a model does not know of it cannot call."""
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _invalid("tools", f"{_short(tools)} given, expected a list of objects")
    return [] if body.get("tool_choice") == "none" else tools


def _one_prompt(prompt: Any) -> Any:
    """Text, or a list of token ids; a list that holds one of these stands for it."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise _invalid("prompt", f"a list of {len(prompt)} prompts, expected one; give each a line of its own")
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise _invalid("prompt", f"{_short(prompt)} given, expected text or a list of token ids")
    return prompt


def _unknown(name: str, endpoint: _Endpoint) -> str:
    if any(name in other.fields for other in _ENDPOINTS):
        return f"not a field of {endpoint.url}"
    near = get_close_matches(name.lower(), endpoint.fields, 1)
    return f"unknown field; did you mean {near[0]}?" if near else "this field is not supported"


def _invalid(name: str, what: str) -> InvalidRow:
    return InvalidRow("invalid_parameter", f"body.{name}: {what}")


def _short(value: Any) -> str:
    """Small mappings and lists as they are: it is their content that is refused."""
    text = str(value) if isinstance(value, dict | list) else ""
    return text if 0 < len(text) <= 60 else kinds.shown(value)
