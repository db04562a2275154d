"""The kinds of values that a job file holds, such as a duration or a size: how each is read into one normal form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic_core import CoreSchema, core_schema

COLUMN_TYPES = ("string", "int64", "float64", "bool", "json")


@dataclass(frozen=True)
class Kind:
    """How one kind of value is read, and what a person is told to write.

    `read` gives the value's one normal form, or raises ValueError: with a message where there is more to say than
    what was given and what was expected. It accepts its own results, so that a stored job reads back.
    """

    expected: str
    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)


def shown(value: Any) -> str:
    """A value as a person wrote it, short."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= 60 else f'{text[:56]}..."'
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


# -- numbers -----------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    """Finite, and not a bool, which Python counts among the integers."""
    return type(value) in (int, float) and math.isfinite(value)


def integer(low: int, high: int | None = None) -> Kind:
    def read(value: Any) -> int:
        if type(value) is not int or value < low or (high is not None and value > high):
            raise ValueError
        return _storable(value)

    return Kind(f"an integer >= {low}" if high is None else f"an integer from {low} to {high}", read)


def _storable(value: int) -> int:
    """A run's records hold integers of 64 bits."""
    if value >= 2**63:
        raise ValueError(f"{value} given, expected less than 2 ** 63")
    return value


def number(expected: str, fits: Callable[[float], bool] = lambda value: True) -> Kind:
    def read(value: Any) -> float:
        if not _is_number(value) or not fits(value):
            raise ValueError
        return float(value)

    return Kind(expected, read)


def block_size(value: Any) -> int:
    if value not in (16, 32, 64, 128) or type(value) is not int:
        raise ValueError
    return int(value)


def or_auto(kind: Kind) -> Kind:
    return Kind(f"auto or {kind.expected}", lambda value: value if value == "auto" else kind.read(value))


_DURATION = re.compile(r"(?=\d)(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?")


def duration(value: Any) -> float:
    """Seconds from 60, "60s", "5m" or "1h30m"; ValueError for anything else."""
    if isinstance(value, str) and (match := _DURATION.fullmatch("".join(value.split()))):
        parts = zip(match.groups(), (86400, 3600, 60, 1), strict=True)
        value = sum(float(amount) * unit for amount, unit in parts if amount)
    if not _is_number(value) or value <= 0:
        raise ValueError
    return float(value)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)


def kv_memory(value: Any) -> int | float | str:
    """Bytes as an int, a share as a float, or "auto"."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        value = round(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))
    if type(value) is int and 0 < value < 2**20:
        raise ValueError(f"{value} bytes are no use, expected at least 1MiB; a share has a point, such as 0.8 or 1.0")
    if type(value) is int and value > 0:
        return _storable(value)
    if value == "auto" or (type(value) is float and 0 < value <= 1):
        return value
    raise ValueError


def max_failed(value: Any) -> int | float:
    """A count of rows as an int, a share of all rows as a float."""
    if type(value) is int and value >= 0:
        return _storable(value)
    if type(value) is float and 0 <= value < 1:
        return value
    raise ValueError


# -- text and lists ----------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        quotes = ", in quotes" if isinstance(value, bool | int | float) else ""
        raise ValueError(f"{shown(value)} given, expected text{quotes}")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """A single text is a list of one."""
    return tuple(text(item) for item in (value if isinstance(value, list | tuple) else [value]))


def some_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and not value:
        raise ValueError
    return texts(value)


def stops(value: Any) -> tuple[str, ...]:
    for index, stop in enumerate(value if isinstance(value, list | tuple) else [value]):
        if stop == "":
            raise ValueError(f"entry {index} is empty text, which stands in every answer; leave it out")
    return texts(value)


def token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item < 2**31:
            raise ValueError(f"entry {index}: {shown(item)} given, expected a token id, an integer >= 0")
    return tuple(value)


def chat(value: Any) -> bool | str:
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError


def messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index}: expected a mapping with a role and a content")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"message {index}: has the role {message['role']} and no content")
    return tuple(value)


def tools(value: Any) -> str | tuple[dict[str, Any], ...]:
    if isinstance(value, list | tuple) and all(isinstance(tool, dict) for tool in value):
        return tuple(value)
    if isinstance(value, str) and value:
        return value
    raise ValueError


def columns(value: Any) -> dict[str, str | None] | str:
    """Column name to type, None where the job file gives none; or "all"."""
    if value == "all":
        return "all"
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = [pair for item in value for pair in (item.items() if isinstance(item, dict) else [(item, None)])]
    else:
        raise ValueError
    types: dict[str, str | None] = {}
    for name, kind in pairs:
        if text(name) in types:
            raise ValueError(f"the column {name} is named twice")
        if kind is not None and kind not in COLUMN_TYPES:
            raise ValueError(f"column {name}: {shown(kind)} given, expected one of the types {', '.join(COLUMN_TYPES)}")
        types[name] = kind
    return types


# -- the kinds, as field types -----------------------------------------------------------------------------------------

Text = Annotated[str, Kind("text", text)]
Texts = Annotated[tuple[str, ...], Kind("text or a list of text", texts)]
Choices = Annotated[tuple[str, ...], Kind("a list of text", some_texts)]
Paths = Annotated[tuple[str, ...], Kind("a path or a list of paths", some_texts)]
Stops = Annotated[tuple[str, ...], Kind("text or a list of text", stops)]
TokenIds = Annotated[tuple[int, ...], Kind("a list of token ids", token_ids)]
Natural = Annotated[int, integer(0)]
Count = Annotated[int, integer(1)]
Samples = Annotated[int, integer(1, 1024)]
AutoCount = Annotated[int | Literal["auto"], or_auto(integer(1))]
BlockSize = Annotated[int | Literal["auto"], or_auto(Kind("16, 32, 64 or 128", block_size))]
Seed = Annotated[int, integer(0, 2**63 - 1)]
Number = Annotated[float, number("a number")]
PositiveNumber = Annotated[float, number("a number > 0", lambda value: value > 0)]
NaturalNumber = Annotated[float, number("a number >= 0", lambda value: value >= 0)]
Share = Annotated[float, number("a number from 0 to 1", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[float, number("a number > 0 and <= 1", lambda value: 0 < value <= 1)]
Duration = Annotated[float, Kind("a duration such as 60s, 5m or 1h30m, or a number of seconds", duration)]
KvMemory = Annotated[
    int | float | Literal["auto"],
    Kind("auto, a size such as 8GiB or 512MB, a number of bytes, or a share such as 0.8", kv_memory),
]
MaxFailed = Annotated[int | float, Kind("a count of rows, or a share below 1 such as 0.01", max_failed)]
Chat = Annotated[bool | Literal["auto"], Kind("auto, true or false", chat)]
Messages = Annotated[tuple[dict[str, Any], ...], Kind("a list of {role, content}", messages)]
Tools = Annotated[str | tuple[dict[str, Any], ...], Kind("a list of tools, or a column", tools)]
Columns = Annotated[
    dict[str, str | None] | Literal["all"],
    Kind(f"all, a list of columns, or a mapping of columns to types ({', '.join(COLUMN_TYPES)})", columns),
]
