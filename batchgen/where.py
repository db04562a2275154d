"""Row filters (`input.where`): a small language in Python's notation, read without ever executing it as Python.

A value is text, a number, a truth value, a time, a list or null. A comparison with null is unknown, and unknown behaves
as in SQL: `not` leaves it, `and` and `or` decide where the other side does, and a row is kept only where the whole is
true. Comparing values of two kinds (text with a number) is the row's error, never quietly false.
"""

from __future__ import annotations

import ast
import datetime
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

MAX_LENGTH = 10_000
MAX_DEPTH = 50
QUOTED = "col"  # col["a b"] is the column called "a b"
CONSTANTS = {"true": True, "false": False, "null": None}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ORDERED = ("text", "a number", "a date", "a date and time", "a time of day")
TIMES: dict[str, Callable[[str], Any]] = {
    "a date": datetime.date.fromisoformat,
    "a date and time": datetime.datetime.fromisoformat,
    "a time of day": datetime.time.fromisoformat,
}

_Row = Mapping[str, Any]
_Value = Callable[[_Row], Any]
_Truth = Callable[[_Row], bool | None]


class Mismatch(ValueError):
    """A row's values do not fit the expression; the message says which."""


class ParseError(ValueError):
    """The expression is wrong; the message says where and what."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is known of a column's values in a group of rows: what none is below, what none is above, and if any is
    null. Both are None where all are null."""

    least: Any
    greatest: Any
    has_null: bool

    @property
    def nothing_but_nulls(self) -> bool:
        return self.has_null and self.least is None and self.greatest is None


# The ways a condition can turn out over a group of rows; ERROR is a row that does not fit it.
TRUE, FALSE, UNKNOWN, ERROR = 1, 2, 4, 8
ANY = TRUE | FALSE | UNKNOWN | ERROR
_Outcomes = Callable[[Callable[[str], Bounds | None]], int]


@dataclass(frozen=True, slots=True)
class _Condition:
    holds: _Truth
    outcomes: _Outcomes


class Filter:
    """A parsed expression. `unseen` are those of its columns that no row and no file has had so far; `rows_seen` says
    that there was one."""

    def __init__(self, text: str) -> None:
        self.text = text
        parser = _Parser(text)
        self._condition = parser.whole()
        self.columns: tuple[str, ...] = tuple(parser.columns)
        self.unseen = set(self.columns)
        self.rows_seen = False

    def saw(self, names: Iterable[str]) -> None:
        self.rows_seen = True
        if self.unseen:
            self.unseen.difference_update(names)

    def keeps(self, row: _Row) -> bool:
        """If the row passes. Raises Mismatch."""
        return self._condition.holds(row) is True

    def may_keep(self, bounds: Callable[[str], Bounds | None]) -> bool:
        """False where no row of a group can pass, or be in error, by what `bounds` says of its columns."""
        return bool(self._condition.outcomes(bounds) & (TRUE | ERROR))


def check(text: str) -> None:
    """Raises ParseError where `text` is no expression."""
    _Parser(text).whole()


# -- values ------------------------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    if isinstance(value, bytes):
        return "binary data"
    for kind, types in _KINDS:
        if isinstance(value, types):
            return kind
    return type(value).__name__


_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (  # the first that fits
    ("a truth value", (bool,)),
    ("text", (str,)),
    ("a number", (int, float, Decimal)),
    ("a date and time", (datetime.datetime,)),
    ("a date", (datetime.date,)),
    ("a time of day", (datetime.time,)),
    ("a list", (list, tuple)),
    ("an object", (dict,)),
)


def _null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _alike(left: Any, right: Any, what: str) -> tuple[Any, Any]:
    """Both values in a form in which they compare. A text beside a date or time is read as one."""
    kinds = _kind(left), _kind(right)
    if kinds[0] == kinds[1]:
        if kinds[0] == "a number":
            return _exact(left, right), _exact(right, left)
        return _zoned(left, right), _zoned(right, left)
    if kinds[1] == "text" and kinds[0] in TIMES:
        return _alike(left, _time(kinds[0], right), what)
    if kinds[0] == "text" and kinds[1] in TIMES:
        return _alike(_time(kinds[1], left), right, what)
    hint = "; int(...) or float(...) around the text reads it as one" if {*kinds} == {"text", "a number"} else ""
    raise Mismatch(f"{what} compares {kinds[0]} with {kinds[1]}{hint}")


def _exact(value: Any, other: Any) -> Any:
    """0.1 beside an exact decimal means 0.1, not the nearest binary fraction."""
    return Decimal(str(value)) if isinstance(other, Decimal) and isinstance(value, float) else value


def _zoned(value: Any, other: Any) -> Any:
    """Of two times only one of which has a zone, the other one is in UTC. Python compares two times of one zone by what
    the clock shows, which repeats when summer ends: UTC does not."""
    if not isinstance(value, datetime.datetime | datetime.time) or (value.tzinfo is None and other.tzinfo is None):
        return value
    if value.tzinfo is None:
        return value.replace(tzinfo=datetime.timezone.utc)
    if isinstance(value, datetime.time):
        return value
    try:
        return value.astimezone(datetime.timezone.utc)
    except OverflowError:  # within hours of the year 1 or 10000
        return value


def _time(kind: str, text: str) -> Any:
    try:
        return TIMES[kind](text.removesuffix("Z") + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        raise Mismatch(f"{text[:40]!r} is not {kind} as in 2025-01-31T12:00:00") from None


def _compare(compare: Callable[[Any, Any], bool], left: Any, right: Any, what: str) -> bool | None:
    if _null(left) or _null(right):
        return None
    left, right = _alike(left, right, what)
    if compare not in (operator.eq, operator.ne) and _kind(left) not in ORDERED:
        raise Mismatch(f"{what} puts {_kind(left)} in order")
    return _held(compare, left, right, what)


def _held(compare: Callable[[Any, Any], bool], left: Any, right: Any, what: str) -> bool:
    """Two values of one kind, compared. Whatever Python cannot compare is the row's error."""
    try:
        return compare(left, right)
    except (TypeError, ArithmeticError, RecursionError) as error:
        raise Mismatch(f"{what} cannot be told: {error}") from None


def _contains(item: Any, whole: Any, what: str) -> bool | None:
    """`item in whole`: one of a list, or a piece of a text. As in SQL a null among others makes "no" an unknown."""
    if _null(item) or whole is None:
        return None
    if isinstance(whole, str) and isinstance(item, str):
        return item in whole
    if not isinstance(whole, list | tuple):
        raise Mismatch(f"{what} looks for {_kind(item)} in {_kind(whole)}")
    fits = [other for other in whole if not _null(other)]
    for other in fits:
        try:
            if _compare(operator.eq, item, other, what):
                return True
        except Mismatch:  # in a list of several kinds another one can fit
            if all(_kind(one) != _kind(item) for one in fits):
                raise
    return False if len(fits) == len(whole) else None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


# -- the language ------------------------------------------------------------------------------------------------------


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text = text.replace("\n", " ").replace("\r", " ")
        self.columns: dict[str, None] = {}
        if len(text) > MAX_LENGTH:
            raise ParseError(f"longer than {MAX_LENGTH:,} characters")
        self._lead = len(text) - len(text.lstrip())
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            at = self._lead + max(error.offset or 1, 1)
            raise ParseError(f"at character {at}: {self._hint(error.msg, at)}") from None
        except (RecursionError, MemoryError, ValueError) as error:  # nested too deeply; a NUL
            raise ParseError(f"cannot be read: {error or type(error).__name__}") from None

    def whole(self) -> _Condition:
        level: list[ast.AST] = [self._tree]
        for _ in range(MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise ParseError("nested too deeply")
        found = self._condition(self._tree)
        if not self.columns:
            raise ParseError('names no column; a column is written as its bare name, or as col["its name"]')
        return found

    def _hint(self, message: str, at: int) -> str:
        plain = self._text
        for sign in ("==", "!=", "<=", ">="):
            plain = plain.replace(sign, "")
        if "=" in plain:
            return f"{message}; equal is written =="
        if " AND " in plain or " OR " in plain or "NOT " in plain or "&&" in plain or "||" in plain or "<>" in plain:
            return f"{message}; write and, or, not, !="
        return f'{message}; a column whose name is no plain word is written col["its name"]'

    def _wrong(self, node: ast.AST, what: str) -> ParseError:
        offset = len(self._text.strip().encode()[: getattr(node, "col_offset", 0)].decode()) + self._lead
        return ParseError(f"at character {offset + 1}: {what}")

    def _source(self, node: ast.AST) -> str:
        return f"`{ast.unparse(node)}`"

    # conditions

    def _condition(self, node: ast.expr) -> _Condition:
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(value) for value in node.values]
            return _all(parts) if isinstance(node.op, ast.And) else _any(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _negated(self._condition(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = [self._comparison(*part) for part in zip(sides, node.ops, sides[1:], strict=False)]
            return parts[0] if len(parts) == 1 else _all(parts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._text_test(node, node.func)
        name = self._column_name(node)
        if name is None:
            raise self._wrong(
                node, f"{self._source(node)} is no condition; expected a comparison, or a column that is true or false"
            )

        def holds(row: _Row) -> bool | None:
            value = row.get(name)
            if value is not None and not isinstance(value, bool):
                raise Mismatch(f"{name} stands alone as a condition and is {_kind(value)}")
            return value

        return _Condition(holds, lambda bounds: ANY)

    def _text_test(self, node: ast.Call, function: ast.Attribute) -> _Condition:
        """x.startswith("a"), x.endswith("a")"""
        if function.attr not in ("startswith", "endswith") or len(node.args) != 1 or node.keywords:
            raise self._wrong(node, f"{self._source(node)}: expected .startswith(TEXT) or .endswith(TEXT)")
        value, part, what = self._value(function.value), self._value(node.args[0]), self._source(node)
        test = str.startswith if function.attr == "startswith" else str.endswith

        def holds(row: _Row) -> bool | None:
            left, right = value(row), part(row)
            if left is None or right is None:
                return None
            if not isinstance(left, str) or not isinstance(right, str):
                raise Mismatch(f"{what} needs text and finds {_kind(right if isinstance(left, str) else left)}")
            return test(left, right)

        return _Condition(holds, lambda bounds: ANY)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> _Condition:
        if isinstance(op, ast.Is | ast.IsNot):
            if not self._is_null(right):
                raise self._wrong(right, "only `is None` and `is not None` are there; equal is written ==")
            return self._null_test(left, wanted=isinstance(op, ast.Is))
        if self._is_null(left) or self._is_null(right):
            raise self._wrong(left, "nothing equals None; write `is None` or `is not None`")
        what = self._source(ast.Compare(left, [op], [right]))
        first, second = self._value(left), self._value(right)
        if isinstance(op, ast.In | ast.NotIn):
            found = _Condition(lambda row: _contains(first(row), second(row), what), self._outcomes_in(left, right))
            return found if isinstance(op, ast.In) else _negated(found)
        compare = COMPARE[type(op)]
        return _Condition(
            lambda row: _compare(compare, first(row), second(row), what), self._outcomes_of(left, compare, right)
        )

    def _null_test(self, node: ast.expr, wanted: bool) -> _Condition:
        value, name = self._value(node), self._column_name(node)

        def outcomes(bounds: Callable[[str], Bounds | None]) -> int:
            known = None if name is None else bounds(name)
            if known is None or known.has_null or known.least is None or isinstance(known.least, float):  # NaN is null
                return ANY
            return FALSE if wanted else TRUE

        return _Condition(lambda row: _null(value(row)) is wanted, outcomes)

    # what a comparison can give over a group of rows

    def _outcomes_of(self, left: ast.expr, compare: Callable[[Any, Any], bool], right: ast.expr) -> _Outcomes:
        mirrored = {operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge}
        mirrored[operator.ge] = operator.le
        name, constant = self._column_name(left), self._constant(right)
        if name is None:
            name, constant = self._column_name(right), self._constant(left)
            compare = mirrored.get(compare, compare)
        if name is None or constant is None:
            return lambda bounds: ANY
        return lambda bounds: _over(bounds(name), compare, constant)

    def _outcomes_in(self, left: ast.expr, right: ast.expr) -> _Outcomes:
        name = self._column_name(left)
        constants = [self._constant(item) for item in right.elts] if isinstance(right, ast.List | ast.Tuple) else []
        if name is None or not constants or len({_kind(constant) for constant in constants}) > 1:
            return lambda bounds: ANY

        def outcomes(bounds: Callable[[str], Bounds | None]) -> int:
            known = bounds(name)
            each = [_over(known, operator.eq, constant) for constant in constants]
            if any(one & (TRUE | ERROR) for one in each):
                return ANY
            return each[0]

        return outcomes

    # values

    def _value(self, node: ast.expr) -> _Value:
        name = self._column_name(node)
        if name is not None:
            return lambda row: row.get(name)
        if isinstance(node, ast.List | ast.Tuple):
            items = [self._value(item) for item in node.elts]
            if not items:
                raise self._wrong(node, "an empty list")
            fixed = [self._constant(item) for item in node.elts]
            if None not in fixed:
                return lambda row: fixed
            return lambda row: [item(row) for item in items]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            if len(node.args) != 1 or node.keywords:
                raise self._wrong(node, f"{node.func.id}() takes one value")
            function, argument, what = FUNCTIONS[node.func.id], self._value(node.args[0]), self._source(node)

            def value(row: _Row) -> Any:
                given = argument(row)
                return None if given is None else function(given, what)

            return value
        constant = self._constant(node)
        if constant is None:
            raise self._wrong(
                node,
                f"{self._source(node)} is not part of the language: columns, text, numbers, lists, "
                f"{', '.join(f'{name}()' for name in FUNCTIONS)}",
            )
        return lambda row: constant

    def _constant(self, node: ast.expr) -> Any:
        """The value of a literal; None where the node is none."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._constant(node.operand)
            return -number if isinstance(number, int | float) and not isinstance(number, bool) else None
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
            if isinstance(node.value, float) and not math.isfinite(node.value):
                raise self._wrong(node, "a number out of range")
            return node.value
        return CONSTANTS.get(node.id) if isinstance(node, ast.Name) else None

    def _is_null(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return node.value is None
        return isinstance(node, ast.Name) and node.id in CONSTANTS and CONSTANTS[node.id] is None

    def _column_name(self, node: ast.expr) -> str | None:
        """The column that a node names, if it names one."""
        if isinstance(node, ast.Name) and node.id == QUOTED:
            raise self._wrong(node, f'{QUOTED} is followed by a column\'s name: {QUOTED}["a name"]')
        if isinstance(node, ast.Name) and node.id not in CONSTANTS:
            self.columns[node.id] = None
            return node.id
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == QUOTED:
            if not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, str):
                raise self._wrong(node, f'{self._source(node)}: expected {QUOTED}["a name"]')
            self.columns[node.slice.value] = None
            return node.slice.value
        return None


def _length(value: Any, what: str) -> int:
    if not isinstance(value, str | list | dict):
        raise Mismatch(f"{what} needs text or a list and finds {_kind(value)}")
    return len(value)


def _number(convert: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    def number(value: Any, what: str) -> Any:
        """A text that stands for a number (white space around it is not minded), or a number."""
        if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
            raise Mismatch(f"{what} needs a number or its text and finds {_kind(value)}")
        try:
            return convert(value)
        except (ValueError, OverflowError):
            raise Mismatch(f"{what}: {str(value)[:40]!r} is no such number") from None

    return number


FUNCTIONS: dict[str, Callable[[Any, str], Any]] = {"len": _length, "int": _number(int), "float": _number(float)}


# -- logic -------------------------------------------------------------------------------------------------------------


def _negated(one: _Condition) -> _Condition:
    def outcomes(bounds: Callable[[str], Bounds | None]) -> int:
        found = one.outcomes(bounds)
        kept = found & (UNKNOWN | ERROR)
        return kept | (TRUE if found & FALSE else 0) | (FALSE if found & TRUE else 0)

    return _Condition(lambda row: _not(one.holds(row)), outcomes)


def _all(parts: list[_Condition]) -> _Condition:
    return _series(parts, ends=False)


def _any(parts: list[_Condition]) -> _Condition:
    return _series(parts, ends=True)


def _series(parts: list[_Condition], ends: bool) -> _Condition:
    """`and` (ends with the first false) or `or` (with the first true); what stands behind the end is not looked at."""
    end, other = (TRUE, FALSE) if ends else (FALSE, TRUE)

    def holds(row: _Row) -> bool | None:
        result: bool | None = not ends
        for part in parts:
            value = part.holds(row)
            if value is ends:
                return ends
            if value is None:
                result = None
        return result

    def outcomes(bounds: Callable[[str], Bounds | None]) -> int:
        so_far, result = other, 0  # what the parts looked at can have given together
        for part in parts:
            found = part.outcomes(bounds)
            result |= found & (end | ERROR)
            goes_on = found & ~(end | ERROR)
            if not goes_on:
                return result
            unknown = UNKNOWN if goes_on & UNKNOWN or so_far & UNKNOWN else 0
            so_far = unknown | (other if goes_on & other and so_far & other else 0)
        return result | so_far

    return _Condition(holds, outcomes)


def _over(known: Bounds | None, compare: Callable[[Any, Any], bool], constant: Any) -> int:
    """How comparing a column's values with a constant can turn out."""
    if known is None:
        return ANY
    if known.nothing_but_nulls:
        return UNKNOWN
    if _null(known.least) or _null(known.greatest):
        return ANY
    try:
        low, value = _alike(known.least, constant, "")
        high = _alike(known.greatest, constant, "")[0]
        if _kind(low) not in ORDERED or not _held(operator.le, low, high, ""):
            return ANY
        _held(operator.le, low, value, "")
    except Mismatch:
        return ANY
    constant = value
    unknown = UNKNOWN if known.has_null or isinstance(low, float) else 0  # NaN counts as null and is in no statistics
    if compare is operator.eq:
        always, never = low == high == constant, constant < low or constant > high
    elif compare is operator.ne:
        always, never = constant < low or constant > high, low == high == constant
    else:
        ends = compare(low, constant), compare(high, constant)
        always, never = all(ends), not any(ends)
    return unknown | (0 if never else TRUE) | (0 if always else FALSE)
