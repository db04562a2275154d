"""One line of JSON Lines: parsed fast where the result is certain, strictly where it is not."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import orjson

SPACED_COLON = re.compile(rb'"[ \t\r]+:')
UNPAIRED = re.compile("[\ud800-\udfff]")
JSON_KINDS = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def utf8(text: str) -> str:
    """Text that can be written: an error message may quote half a surrogate pair out of a bad row."""
    return text.encode("utf-8", "backslashreplace").decode()


def parse(
    data: bytes, *, replace_unicode: bool = False, nan_as_null: bool = False
) -> tuple[dict[str, Any] | None, tuple[str, str] | None]:
    """The object in a line, and (code, message) of what is wrong with it, if anything is.

    Where something is wrong the object is what can be read all the same (what cannot is None), or None. What is no
    Unicode text becomes U+FFFD with `replace_unicode`, and NaN and Infinity are null with `nan_as_null`.
    """
    values = parse_fast(data)
    if values is None:
        return parse_strict(data, replace_unicode=replace_unicode, nan_as_null=nan_as_null)
    return values, None


def parse_fast(data: bytes) -> dict[str, Any] | None:
    """The object in a line, or None where only `parse_strict` can tell.

    orjson makes floats of integers over 64 bit, and takes the last of duplicate keys. That none was lost is seen by
    counting: `":` ends every key written (if no white space stands before its colon), and stands besides only inside
    strings, as an escaped quote before a colon or where a string begins with a colon. Without the escaped ones
    (which are `\\":`, as no key ends in a backslash) there are as many as members were parsed: then no key is lost.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if type(value) is not dict:
        return None
    members = 0
    stack: list[Any] = [value]
    while stack:
        items = stack.pop()
        if type(items) is dict:
            members += len(items)
            items = items.values()
        for item in items:
            kind = type(item)
            if kind is dict or kind is list:
                stack.append(item)
            elif kind is float and not -(2.0**63) < item < 2.0**63:
                return None
    surplus = data.count(b'":') - members
    if surplus and (surplus != data.count(b'\\":') or b'\\\\":' in data):
        return None
    if (b" :" in data or b"\t:" in data or b"\r:" in data) and SPACED_COLON.search(data):
        return None
    return value


def parse_strict(
    data: bytes, *, replace_unicode: bool = False, nan_as_null: bool = False
) -> tuple[dict[str, Any] | None, tuple[str, str] | None]:
    """`parse` without its fast way."""
    problems: list[tuple[str, str]] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise _DuplicateKey(key)
                seen.add(key)
        return found

    def constant(name: str) -> None:
        if not nan_as_null:
            problems.append(("invalid_json", f"{name} is not a JSON value; use null"))

    def real(text: str) -> float | None:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            problems.append(("invalid_json", f"the number {text[:40]} is too large"))
            return None
        return value

    # Bytes that are not UTF-8 become unpaired surrogates, which are looked for below in any case.
    text = data.decode("utf-8", "replace" if replace_unicode else "surrogateescape")
    try:
        value = json.loads(text, object_pairs_hook=members, parse_constant=constant, parse_float=real)
        if replace_unicode:
            value = replaced(value)
        unpaired = _drop_unpaired(value) if isinstance(value, dict) else None
    except _DuplicateKey as error:
        return None, ("invalid_json", f"the key {error.args[0]!a} occurs twice in one object")
    except json.JSONDecodeError as error:
        return None, ("invalid_json", f"not valid JSON: {error.msg} at character {error.pos + 1}")
    except RecursionError:
        return None, ("invalid_json", "nested too deeply")
    except ValueError:
        return None, ("invalid_json", "an integer of thousands of digits")
    if not isinstance(value, dict) and problems:
        return None, problems[0]
    if not isinstance(value, dict):
        return None, ("invalid_row", f"a row must be a JSON object {{...}}, this is {JSON_KINDS[type(value)]}")
    if unpaired:
        problems.insert(0, ("invalid_unicode", unpaired))
    return value, problems[0] if problems else None


def replaced(value: Any) -> Any:
    """A JSON value with U+FFFD for every unpaired surrogate in its texts."""
    if isinstance(value, str):
        return UNPAIRED.sub("\ufffd", value)
    if isinstance(value, list):
        return [replaced(item) for item in value]
    if isinstance(value, dict):
        return {replaced(key): replaced(item) for key, item in value.items()}
    return value


class _DuplicateKey(Exception):
    pass


def _drop_unpaired(row: dict[str, Any]) -> str | None:
    """Set values that are not valid Unicode text to None; what was wrong with the first one."""
    problem = None
    with contextlib.suppress(UnicodeEncodeError):
        json.dumps(row, ensure_ascii=False).encode("utf-8")
        return None
    for key, value in list(row.items()):
        try:
            json.dumps([key, value], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            char = ord(error.object[error.start])
            what = f"an unpaired surrogate \\u{char:04x}"
            if 0xDC80 <= char <= 0xDCFF:
                what = f"bytes that are not UTF-8 (0x{char - 0xDC00:02x}), or {what}"
            problem = problem or f"the text of {key!a} holds {what}"
            try:
                key.encode("utf-8")
                row[key] = None
            except UnicodeEncodeError:
                del row[key]
    return problem
