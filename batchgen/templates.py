"""Jinja in a sandbox: chat templates as transformers renders them, row templates strictly, both within bounds."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace, missing

from batchgen.errors import InvalidRow

WHOLE_ROW = "row"  # the name under which a template finds columns whose names are no Jinja names
MAX_SECONDS = 2.0
MAX_CHARS = 16 << 20
MAX_BITS = 1 << 16  # of an integer: multiplying long ones cannot be interrupted


class TimeUp(BaseException):
    """Raised in the middle of a template; not an Exception, so that no template construct swallows it."""


class MissingColumn(jinja2.UndefinedError):
    """A row template names a column that the row does not have."""


class PrintsNull(InvalidRow):
    """A row template prints a value that is null: nobody wants "None" in a prompt."""

    def __init__(self) -> None:
        super().__init__("invalid_row", "the template prints a null")


class _StrictColumn(jinja2.StrictUndefined):
    """Undefined top-level names are missing columns; undefined attributes of what is there stay template errors."""

    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = missing,
        name: str | None = None,
        exc: type[jinja2.TemplateRuntimeError] = jinja2.UndefinedError,
    ) -> None:
        super().__init__(hint, obj, name, MissingColumn if obj is missing and hint is None else exc)


class _Sandbox(ImmutableSandboxedEnvironment):
    """No attribute tricks, no changes to the row's values, `range` up to 100,000, repetition up to the output bound."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if abs(right) > 1024 or abs(left) > 1 << 64:
                raise OverflowError(f"the power {left!r} ** {right!r} is too large for a template")
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise OverflowError("a product of that size is too large for a template")
        else:
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, bytes, list, tuple)) and len(sequence) * times > MAX_CHARS:
                    raise OverflowError(f"repeating {len(sequence)} items {times} times is too much for a template")
        return super().call_binop(context, operator, left, right)


class _Generation(ext.Extension):
    """`{% generation %}` marks what a trainer would learn from; for rendering it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own way of declaring it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """A `namespace` that refuses names with which templates have tried to leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja: `self` stays free to be a keyword
        self, *mappings = args
        values = dict(*mappings, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set the underscored name {name!r} on a namespace")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def compiled(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """A template that is rendered often; raises jinja2.TemplateSyntaxError."""
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # jinja's own chain of mappings is copied slowly, at every rendering
    return template


def chat_environment() -> jinja2.Environment:
    """What chat templates expect to find around them."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return environment


def row_environment() -> jinja2.Environment:
    """For templates in a job file: a name that is no column is an error, and so is printing a null."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_StrictColumn,
        finalize=_refuse_null,
        extensions=[ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception)
    return environment


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise PrintsNull
    return value


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The template's text; whatever goes wrong in it, time and size included, is this row's error."""
    pieces: list[str] = []
    size = 0
    try:
        with time_limit(MAX_SECONDS):
            for piece in template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARS:
                    raise InvalidRow("template_error", f"the prompt is longer than {MAX_CHARS} characters")
    except InvalidRow:
        raise
    except TimeUp:
        raise InvalidRow("template_error", f"the template took more than {MAX_SECONDS:g} s") from None
    except MissingColumn as error:
        raise InvalidRow("missing_column", f"the template needs a column that the row does not have: {error}") from None
    except jinja2.TemplateError as error:
        raise InvalidRow("template_error", error.message or type(error).__name__) from None
    except MemoryError:
        raise InvalidRow("template_error", "the template needs too much memory") from None
    except Exception as error:  # templates are programs: any Python error may come out of one
        raise InvalidRow("template_error", f"{type(error).__name__}: {error}") from None
    return "".join(pieces)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the block after `seconds` of the process's processor time: a busy machine changes no result.

    Signals reach the main thread only; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with nullcontext() if _timer_is_set_up.get() else timer():
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


_timer_is_set_up = ContextVar("timer_is_set_up", default=False)


@contextmanager
def timer() -> Iterator[None]:
    """Sets up once what every `time_limit` in the block needs: for each row it would take as long as rendering it.

    For the main thread only.
    """
    before = signal.signal(signal.SIGPROF, _on_timer)
    token = _timer_is_set_up.set(True)
    try:
        yield
    finally:
        _timer_is_set_up.reset(token)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Lets the process grow by at most `extra` bytes in the block: then MemoryError. Only Linux counts what we mean."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _on_timer(number: int, frame: FrameType | None) -> None:
    raise TimeUp
