"""Renders and encodes prompts: one input row in, token ids out, or the reason why not."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np
from jinja2 import meta

from batchgen import templates
from batchgen.errors import ConfigError, InvalidRow
from batchgen.io.openai import Call
from batchgen.spec import PromptSpec, SamplingSpec
from batchgen.templates import WHOLE_ROW
from batchgen.tokenizer import Tokenizer
from batchgen.types import SamplingParams, TokenIds

logger = logging.getLogger(__name__)

MAX_CUTS = 8  # tries to shorten a conversation until it fits


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model gets. `text` is what the ids were made of; None where they were given, or cut as ids."""

    token_ids: TokenIds
    truncated: bool
    text: str | None


@dataclass(slots=True)
class Draft:
    """A rendered prompt that is not encoded yet.

    Either `token_ids` are given, or `text` is to be encoded: as it is (`mark` empty), or with special tokens in data
    kept as text. `messages` and `tools` are what a chat's text was rendered from, to render it again when it is cut.
    `budget` is how many tokens it is cut to where it is too long.
    """

    text: str = ""
    mark: str = ""
    token_ids: TokenIds | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    budget: int = 0

    def plain_text(self) -> str:
        return self.text.replace(self.mark, "") if self.mark else self.text


@dataclass(slots=True)
class _Source:
    """Where prompts come from. `columns` None means that it depends on the row (or that a template reads all)."""

    columns: frozenset[str] | None
    template: jinja2.Template | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)  # contents are templates


class PromptBuilder:
    """Builds prompts as `prompt:` in a job file says, for one model.

    `too_long: truncate_*` cuts so that the prompt and `max_tokens` fit into the context. Where max_tokens is null, or
    alone as long as the context, it leaves room for one token. A row's own max_tokens counts for that row.
    """

    def __init__(self, prompt: PromptSpec, sampling: SamplingSpec, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._spec = prompt
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._params = sampling.params()
        self._literal = prompt.special_tokens_in_content == "literal"
        self._environment = templates.row_environment()
        self._has_warned: set[str] = set()
        self._source = self._find_source()
        self._wrap = prompt.token_ids is None and prompt.chat is not False and tokenizer.chat_template is not None
        if not self._wrap:
            self._refuse_chat_options()
        else:
            tokenizer.compile_chat_template(with_tools=prompt.tools is not None)
        # characters that may not serve as a mark: those of every text that is not the row's
        self._avoid = tokenizer.template_sources() + json.dumps(prompt.model_dump(mode="json"), ensure_ascii=False)

    def _refuse_chat_options(self) -> None:
        """Options that only a chat template can honour, where none is used."""
        spec = self._spec
        needs = {
            "prompt.messages": spec.messages is not None,
            "prompt.chat: true": spec.chat is True,
            "prompt.tools": spec.tools is not None,
            "prompt.system: merge_into_user": spec.system == "merge_into_user",
            "prompt.continue_final_message: true": spec.continue_final_message,
            "prompt.chat_template_kwargs": bool(spec.chat_template_kwargs),
        }
        why = "prompt.chat is false" if spec.chat is False else "the model has none; give one in model.chat_template"
        for key, given in needs.items():
            if given:
                raise ConfigError(f"{key} needs a chat template, but {why}")

    def _find_source(self) -> _Source:
        spec = self._spec
        if spec.template is not None:
            template, names = self._compile(spec.template, "prompt.template")
            return _Source(names, template)
        if spec.messages is not None:
            found: list[frozenset[str] | None] = []
            messages = []
            for index, given in enumerate(spec.messages):
                where = f"prompt.messages[{index}]"
                try:
                    message = _message(given, where)
                except InvalidRow as error:
                    raise ConfigError(error.message) from None
                if "content" in message:
                    message["content"], names = self._compile(message["content"], f"{where}.content")
                    found.append(names)
                messages.append(message)
            known = [names for names in found if names is not None]
            return _Source(frozenset().union(*known) if len(known) == len(found) else None, None, messages)
        name = spec.column or spec.token_ids
        return _Source(None if name is None else frozenset({name}))

    def _compile(self, source: str, where: str) -> tuple[jinja2.Template, frozenset[str] | None]:
        """The template, and the columns that it reads; None where it can read any."""
        try:
            names = meta.find_undeclared_variables(self._environment.parse(source)) - set(self._environment.globals)
            template = templates.compiled(self._environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{where} is not valid Jinja: line {error.lineno}: {error.message}") from None
        return template, None if WHOLE_ROW in names else frozenset(names)

    def columns(self, available: Iterable[str]) -> list[str]:
        """Those of the available columns that prompts are made of."""
        available = list(available)
        wanted = self._source.columns
        if wanted is None:
            by_default = self._source.template is None and not self._source.messages
            wanted = frozenset(PromptSpec.DEFAULT_COLUMNS if by_default else available)
        if isinstance(self._spec.tools, str):
            wanted |= {self._spec.tools}
        return [name for name in available if name in wanted]

    # -- one row to a draft --------------------------------------------------------------------------------------------

    def build(self, values: Mapping[str, Any]) -> Prompt:
        """The prompt of one row; raises InvalidRow."""
        prompt = self.encode([self.draft(values, self._params)])[0]
        if isinstance(prompt, InvalidRow):
            raise prompt
        return prompt

    def draft(self, values: Mapping[str, Any], params: SamplingParams) -> Draft:
        """Renders one row; raises InvalidRow. Cheap rows by the hundred are then encoded together."""
        draft = self._draft(values)
        draft.budget = self._budget(params)
        return draft

    def draft_call(self, call: Call, params: SamplingParams) -> Draft:
        """Renders an OpenAI request: messages through the chat template, a prompt as it is."""
        if call.messages is not None:
            if self._tokenizer.chat_template is None:
                why = "the model has no chat template; give one in model.chat_template"
                raise InvalidRow("invalid_row", f"{call.url} needs a chat template, but {why}")
            given = call.tools is not None
            tools = call.tools if given else list(self._spec.tools or ())
            messages = _messages(call.messages, "body.messages")
            (messages, tools), mark = self._marked((messages, tools), tools_are_data=given)
            draft = self._chat(messages, tools or None, mark)
        elif isinstance(call.prompt, list):
            draft = Draft(token_ids=self._token_ids(call.prompt, "body.prompt"))
        else:
            (text, _), mark = self._marked((call.prompt, None), tools_are_data=False)
            draft = self._raw(text, mark)
        draft.budget = self._budget(params)
        return draft

    def _budget(self, params: SamplingParams) -> int:
        room = params.max_tokens or 1
        return self._max_model_len - (room if room < self._max_model_len else 1)

    def _draft(self, values: Mapping[str, Any]) -> Draft:
        spec = self._spec
        if spec.token_ids is not None:
            return Draft(token_ids=self._given_ids(values, spec.token_ids))
        tools: Any = spec.tools
        are_data = isinstance(tools, str)  # and not of the job file
        if isinstance(tools, str):
            tools = _json_column(values, tools, "a list of tools")
        elif tools is not None:
            tools = list(tools)
        if self._source.template is not None or self._source.messages:
            names = self._source.columns
            row = dict(values) if names is None else {name: values[name] for name in names if name in values}
            (row, tools), mark = self._marked((row, tools), are_data)
            variables = {WHOLE_ROW: row, **row}
            if self._source.template is not None:
                return self._plain(_render(self._source.template, variables), tools, mark)
            messages = [
                {**message, "content": _render(message["content"], variables)} if "content" in message else message
                for message in self._source.messages
            ]
            return self._chat(messages, tools, mark)
        value, name = self._column(values)
        where = f"column `{name}`"
        if isinstance(value, str) and name != "messages":
            (value, tools), mark = self._marked((value, tools), are_data)
            return self._plain(value, tools, mark)
        if not isinstance(value, (str, list)):
            raise InvalidRow("invalid_row", f"{where} holds {_kind(value)}, expected text or a list of messages")
        if self._spec.chat is False or self._tokenizer.chat_template is None:
            why = "prompt.chat is false" if self._spec.chat is False else "the model has no chat template"
            raise InvalidRow("invalid_row", f"{where} holds {_kind(value)}, expected text, because {why}")
        (messages, tools), mark = self._marked((_messages(value, where), tools), are_data)
        return self._chat(messages, tools, mark)

    def _marked(self, data: tuple[Any, Any], tools_are_data: bool) -> tuple[Any, str]:
        if not self._literal:
            return data, ""
        value, tools = data
        (value, marked_tools), mark = self._tokenizer.mark(
            (value, tools if tools_are_data else None), avoid=self._avoid
        )
        return (value, marked_tools if tools_are_data else tools), mark

    def _column(self, values: Mapping[str, Any]) -> tuple[Any, str]:
        """The prompt's value and its column's name."""
        names = (self._spec.column,) if self._spec.column is not None else PromptSpec.DEFAULT_COLUMNS
        there = [name for name in names if name in values]
        if not there:
            hint = "; OpenAI batch lines need input.format: openai" if {"custom_id", "body"} <= values.keys() else ""
            wanted = " or ".join(f"`{name}`" for name in names)
            raise InvalidRow("missing_column", f"the row has no column {wanted}{hint}")
        for name in there:
            if values[name] is not None:
                return values[name], name
        raise InvalidRow("invalid_row", f"column `{there[0]}` is null")

    def _plain(self, text: str, tools: Any, mark: str) -> Draft:
        if self._wrap:
            return self._chat([{"role": "user", "content": text}], tools, mark)
        return self._raw(text, mark)

    def _raw(self, text: str, mark: str) -> Draft:
        bos = self._tokenizer.bos_token
        if bos and self._tokenizer.adds_bos:  # the tokenizer writes it, once
            given, text = text, text.removeprefix(bos).removeprefix(bos[0] + mark + bos[1:])
            if text != given:
                self._warn_once(f"prompts begin with {bos}, which the tokenizer adds by itself; it is given only once")
        if not text and not (self._spec.allow_empty and self._tokenizer.adds_bos):
            raise InvalidRow("empty_prompt", "the prompt is empty")
        return Draft(text, mark)

    def _chat(self, messages: list[dict[str, Any]], tools: Any, mark: str) -> Draft:
        given = _without_system(messages) if self._spec.system == "merge_into_user" else messages
        goes_on = self._spec.continue_final_message and given[-1]["role"] == "assistant"
        text = self._tokenizer.apply_chat_template(
            given, tools=tools, continue_final_message=goes_on, **self._spec.chat_template_kwargs
        )
        if goes_on and not text.endswith(given[-1]["content"]):
            self._warn_once("the chat template changes the end of messages that the model is to go on with (trims it)")
        return Draft(text, mark, None, messages, tools)

    def _warn_once(self, message: str) -> None:
        if message not in self._has_warned:
            self._has_warned.add(message)
            logger.warning("%s", message)

    def _given_ids(self, values: Mapping[str, Any], name: str) -> TokenIds:
        if name not in values:
            raise InvalidRow("missing_column", f"the row has no column `{name}`")
        return self._token_ids(values[name], f"column `{name}`")

    def _token_ids(self, ids: Any, where: str) -> TokenIds:
        if not isinstance(ids, list):
            raise InvalidRow("invalid_row", f"{where} holds {_kind(ids)}, expected a list of token ids")
        for index, item in enumerate(ids):
            if type(item) is not int or not 0 <= item < self._tokenizer.vocab_size:
                given = item if type(item) is int else _kind(item)
                limit = self._tokenizer.vocab_size
                raise InvalidRow("invalid_row", f"{where}[{index}] is {given}, expected a token id below {limit}")
        return np.array(ids, np.int32)

    # -- drafts to prompts ---------------------------------------------------------------------------------------------

    def encode(self, drafts: Sequence[Draft]) -> list[Prompt | InvalidRow]:
        """Encodes drafts together, which is faster than one by one; a failure is that row's alone."""
        results: list[Prompt | InvalidRow] = []
        for draft, ids in zip(drafts, self._encode_all(drafts), strict=True):
            try:
                results.append(ids if isinstance(ids, InvalidRow) else self._fitted(draft, ids))
            except InvalidRow as error:
                results.append(error)
        return results

    def _encode_all(self, drafts: Sequence[Draft]) -> list[TokenIds | InvalidRow]:
        ids: dict[int, TokenIds | InvalidRow] = {}
        together: dict[bool, list[int]] = {True: [], False: []}  # with and without special tokens added
        for index, draft in enumerate(drafts):
            if draft.token_ids is not None:
                ids[index] = draft.token_ids
            elif not _encodable(draft.text):
                ids[index] = InvalidRow("invalid_unicode", "the prompt holds half of a surrogate pair")
            elif draft.mark:
                ids[index] = self._encode_one(draft)
            else:
                together[draft.messages is None].append(index)
        for special, indices in together.items():
            texts = [drafts[index].text for index in indices]
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=special) if texts else []
            ids.update(zip(indices, encoded, strict=True))
        return [ids[index] for index in range(len(drafts))]

    def _encode_one(self, draft: Draft) -> TokenIds:
        special = draft.messages is None
        if draft.mark:
            return self._tokenizer.encode_literal(draft.text, draft.mark, add_special_tokens=special)
        return self._tokenizer.encode(draft.text, add_special_tokens=special)

    def _fitted(self, draft: Draft, ids: TokenIds) -> Prompt:
        if not len(ids):
            raise InvalidRow("empty_prompt", "the prompt has no tokens")
        policy = self._spec.too_long
        limit = self._max_model_len - 1 if policy == "error" else draft.budget
        if len(ids) <= limit:
            text = (
                None
                if draft.token_ids is not None
                else draft.text.replace(draft.mark, "")
                if draft.mark
                else draft.text
            )
            return Prompt(ids, False, text)
        if policy == "error":
            raise self._too_long(len(ids), limit)
        side = policy.removeprefix("truncate_")
        if draft.messages is not None:
            return self._shortened(draft, draft.messages, ids, side)
        bos = 1 if draft.token_ids is None and self._tokenizer.adds_bos else 0
        if limit <= bos:
            raise self._too_long(len(ids), limit)
        head, tail = _kept(limit - bos, side)
        body = ids[bos:]
        return Prompt(np.concatenate([ids[:bos], body[:head], body[len(body) - tail :]]), True, None)

    def _shortened(self, draft: Draft, messages: list[dict[str, Any]], ids: TokenIds, side: str) -> Prompt:
        """Takes text from the longest user message until the conversation fits: the template's own tokens stay."""
        messages, budget = list(messages), draft.budget
        for _ in range(MAX_CUTS):
            texts = [
                m["content"] if m["role"] == "user" and isinstance(m.get("content"), str) else "" for m in messages
            ]
            longest = max(range(len(texts)), key=lambda index: len(texts[index]))
            if not texts[longest]:
                break
            text = self._cut(texts[longest], len(ids) - budget, side)
            messages[longest] = {**messages[longest], "content": text}
            draft = self._chat(messages, draft.tools, draft.mark)
            ids = self._encode_one(draft)
            if len(ids) <= budget:
                return Prompt(ids, True, draft.plain_text())
        raise self._too_long(len(ids), budget)

    def _cut(self, text: str, over: int, side: str) -> str:
        """`text` without `over` of its tokens, and shorter than before in any case."""
        places = self._tokenizer.encode_with_offsets(text)
        head, tail = _kept(max(len(places) - over, 0), side)
        front = text[: places[head - 1][1]] if head else ""
        back = text[places[len(places) - tail][0] :] if tail else ""
        if len(front) + len(back) >= len(text):  # tokens that share a character
            front, back = (front[:-1], back) if front else (front, back[1:])
        return front + back

    def _too_long(self, length: int, limit: int) -> InvalidRow:
        return InvalidRow(
            "prompt_too_long",
            f"the prompt has {length} tokens, at most {limit} fit into the context of {self._max_model_len}",
        )


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return templates.render(template, variables)
    except templates.PrintsNull:
        nulls = [f"`{name}`" for name, value in variables.items() if value is None]
        where = f" (null here: {', '.join(nulls)})" if nulls else ""
        raise InvalidRow("invalid_row", f"the template prints a null{where}") from None


def _kept(count: int, side: str) -> tuple[int, int]:
    """How many of `count` tokens to keep at the beginning and at the end, when `side` is cut."""
    head = {"left": 0, "right": count, "middle": (count + 1) // 2}[side]
    return head, count - head


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    """A value's type in words."""
    names = {type(None): "null", str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def _json_column(values: Mapping[str, Any], name: str, expected: str) -> list[dict[str, Any]] | None:
    """A column with a list of objects, as such or as JSON text; None where it is null."""
    if name not in values:
        raise InvalidRow("missing_column", f"the row has no column `{name}`")
    value = values[name]
    if value is None:
        return None
    return _objects(value, f"column `{name}`", expected)


def _objects(value: Any, where: str, expected: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRow("invalid_row", f"{where} is text, but not JSON: {error}; expected {expected}") from None
    if not isinstance(value, list):
        raise InvalidRow("invalid_row", f"{where} holds {_kind(value)}, expected {expected}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise InvalidRow("invalid_row", f"{where}[{index}] is {_kind(item)}, expected an object")
    return value


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    """A conversation in the one form that templates get, checked; the row's own objects stay as they are."""
    messages = _objects(value, where, "a list of messages")
    if not messages:
        raise InvalidRow("empty_prompt", f"{where} is an empty list of messages")
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    checked = {key: value for key, value in message.items() if value is not None}
    role, content, calls = checked.get("role"), checked.get("content"), checked.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise InvalidRow("invalid_row", f"{where} has no role (system, user, assistant, tool), found {_kind(role)}")
    if isinstance(content, list):
        checked["content"] = _joined(content, f"{where}.content")
    elif content is None and not calls:
        raise InvalidRow("invalid_row", f"{where} has the role {role!r} and no content")
    elif not isinstance(content, (str, type(None))):
        raise InvalidRow("invalid_row", f"{where}.content holds {_kind(content)}, expected text")
    if calls is not None:
        checked["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(_objects(calls, f"{where}.tool_calls", "a list of tool calls"))
        ]
    return checked


def _without_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages become the beginning of the user message behind them."""
    merged: list[dict[str, Any]] = []
    held: list[str] = []
    for message in messages:
        if message["role"] == "system":
            held.append(message.get("content") or "")
            continue
        if held and message["role"] == "user":
            merged.append({**message, "content": "\n\n".join([*held, message.get("content") or ""])})
            held = []
        else:
            merged.append(message)
    return [*merged, {"role": "user", "content": "\n\n".join(held)}] if held else merged


def _joined(parts: Sequence[Any], where: str) -> str:
    """The text of a content that is a list of parts."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else _kind(part)
        if kind != "text":
            raise InvalidRow("invalid_row", f"{where}[{index}] is of type {kind!r}, only text parts are supported")
        if not isinstance(part.get("text"), str):
            raise InvalidRow("invalid_row", f"{where}[{index}].text holds {_kind(part.get('text'))}, expected text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments become an object, which is what templates expect; OpenAI's API writes them as JSON text."""
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _with_arguments(function, f"{where}.function")}
    return _with_arguments(call, where)


def _with_arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRow("invalid_row", f"{where}.arguments is not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise InvalidRow("invalid_row", f"{where}.arguments holds {_kind(arguments)}, expected an object")
    return dict(function) if arguments is None else {**function, "arguments": arguments}
