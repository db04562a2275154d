"""The Jinja sandbox: what templates may do, and where they end."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from batchgen import templates
from batchgen.errors import InvalidRow
from batchgen.templates import chat_environment, render, row_environment


def row_text(source: str, **row: Any) -> str:
    return render(row_environment().from_string(source), row)


def chat_text(source: str, **variables: Any) -> str:
    return render(chat_environment().from_string(source), variables)


def failure(source: str, **row: Any) -> InvalidRow:
    with pytest.raises(InvalidRow) as caught:
        row_text(source, **row)
    return caught.value


def test_rows() -> None:
    assert row_text("{% if a %}{{ a }}{% endif %}\n{{ b | tojson }}", a=1, b={"x": "<ä>"}) == '1{"x": "<ä>"}'
    assert row_text("{{ c | default('none') }}{% if c is defined %}!{% endif %}") == "none"


def test_missing_columns_are_named() -> None:
    error = failure("{{ a }} {{ titel }}", a=1)
    assert error.code == "missing_column" and "'titel'" in error.message
    assert failure("{% for x in things %}{% endfor %}").code == "missing_column"
    # what is there and lacks something is another matter
    assert failure("{{ a.b }}", a={}).code == "template_error"


def test_nulls_are_not_printed() -> None:
    assert failure("{{ a }}", a=None).code == "invalid_row"
    assert row_text("{{ 'x' if a is none else a }}", a=None) == "x"


def test_errors_say_what_happened() -> None:
    assert failure("{{ 1 / 0 }}").message.startswith("ZeroDivisionError")
    assert failure("{{ raise_exception('not this one') }}").message == "not this one"
    assert failure("{{ a + 1 }}", a="x").code == "template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ x.__init__.__globals__ }}",
        "{{ x.append(1) }}",
        "{{ x.clear() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
    ],
)
def test_no_way_out(source: str) -> None:
    with pytest.raises(InvalidRow) as caught:
        chat_text(source + "{{ 1 }}", x=[])
    assert caught.value.code == "template_error"


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(templates, "MAX_CHARS", 1000)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "took more than 0.2 s" in failure(endless).message
    assert "longer than 1000" in failure("{% for a in range(2000) %}x{% endfor %}").message
    assert "Range too big" in failure("{{ range(10 ** 9) | list }}").message
    for source in ("{{ 'x' * 1001 }}", "{{ 10001 * 'x' }}", "{{ [1, 2] * 501 }}"):
        assert "too much for a template" in failure(source).message
    assert "too large" in failure("{{ 9 ** 99999 }}").message
    squares = "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"
    assert "too large" in failure(squares).message
    assert row_text("{{ 'x' * 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 'x' * -1 }}") == "xxx68"


def test_a_swallowing_template_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja itself ignores errors in places, as in sorting out an undefined attribute; not this one."""
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.2)
    source = "{% macro f(n) %}{% for a in range(99999) %}{{ f(n + 1) if n < 50 }}{% endfor %}{% endmacro %}{{ f(0) }}"
    assert "took more than" in failure(source).message


def test_a_timer_that_is_set_up_before_serves_every_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGPROF)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with templates.timer():
        for _ in range(2):
            assert "took more than 0.2 s" in failure(endless).message
        assert row_text("fine") == "fine"
    assert signal.getsignal(signal.SIGPROF) == before
    assert "took more than 0.2 s" in failure(endless).message  # and without it
    assert signal.getsignal(signal.SIGPROF) == before


@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's private memory")
def test_memory_is_bounded() -> None:
    code = """
from batchgen import templates
from batchgen.errors import InvalidRow
source = "{% set n = namespace(x='x' * 1000) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
try:
    with templates.memory_limit(100 << 20):
        templates.render(templates.row_environment().from_string(source), {})
except InvalidRow as error:
    print(error.code, error.message)
print(len("y" * (200 << 20)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["template_error the template needs too much memory", str(200 << 20)]
