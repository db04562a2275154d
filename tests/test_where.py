"""Row filters: the language, null and kinds, what is refused and where, and row groups that are passed over."""

from __future__ import annotations

import datetime
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import chunks, put, put_table, rows, values

from batchgen import spec
from batchgen.errors import ConfigError
from batchgen.io.sources import check_where
from batchgen.where import MAX_LENGTH, Bounds, Filter, Mismatch, ParseError, check

UTC = datetime.timezone.utc
NEW_YORK = ZoneInfo("America/New_York")
ROW: dict[str, Any] = {
    "n": 5,
    "x": 0.5,
    "lang": "en",
    "text": "an abc",
    "gone": None,
    "nan": float("nan"),
    "flag": True,
    "off": False,
    "tags": ["a", "b", None],
    "meta": {"k": 1},
    "odd name": "y",
    "class": "c",
    "day": datetime.date(2025, 1, 31),
    "at": datetime.datetime(2025, 1, 31, 12, tzinfo=UTC),
    "local": datetime.datetime(2025, 1, 31, 12),
    "clock": datetime.time(12),
    "before": datetime.datetime(2025, 11, 2, 1, 30, tzinfo=NEW_YORK),
    "fold": datetime.datetime(2025, 11, 2, 1, 30, tzinfo=NEW_YORK, fold=1),  # an hour later by the same clock
    "eternal": datetime.datetime(9999, 12, 31, 23, tzinfo=datetime.timezone(datetime.timedelta(hours=-5))),
    "price": Decimal("0.10"),
    "odd": Decimal("NaN"),
    "stars": "4",
    "raw": b"\xff",
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("n == 5", True),
        ("n != 5", False),
        ("5 <= n", True),
        ("n > -1 and n < 1e1", True),
        ("3 < n <= 5", True),
        ("5 < n <= 9", False),
        ("n == 5.0", True),
        ("lang == 'en'", True),
        ('lang in ["de", "en"]', True),
        ("lang in ('de',)", False),
        ("lang not in ['de', 'fr']", True),
        ("lang >= 'e' and lang < 'f'", True),
        ("n in ['a', 5]", True),
        ("'b' in tags", True),
        ("'abc' in text and 'abd' not in text", True),
        ("lang in text", False),
        ("len(text) == 6 and len(tags) == 3 and len(meta) == 1", True),
        ("text.startswith('an') and not text.endswith('an')", True),
        ("flag", True),
        ("not flag or off", False),
        ("flag == true and off == False and off != True", True),
        ("int(stars) >= 4 and float(stars) < 4.5", True),
        ('col["odd name"] == "y" and col["class"] == "c" and col["n"] == 5', True),
        ("day >= '2025-01-31' and day < '2025-02-01'", True),
        ("at == '2025-01-31T12:00:00Z' and at == '2025-01-31T13:00:00+01:00' and at == '2025-01-31T12:00:00'", True),
        ("'2025-01-31 11:59:59' < local", True),
        ("clock < '12:00:01Z' and clock == '12:00:00Z' and clock > '12:00:00+01:00'", True),
        ("clock in ['11:00:00Z', '12:00:00+00:00'] and not clock != '12:00:00'", True),
        ("fold == '2025-11-02T06:30:00Z' and before < fold and not before == fold", True),
        ("eternal > '2025-01-01T00:00:00Z' and eternal == '9999-12-31T23:00:00-05:00'", True),
        ("price == 0.1 and price < 1", True),
        ("lang ==\n  'en'", True),
        ("n == 5 or missing == 1", True),
        # null is unknown
        ("gone == 1", False),
        ("gone != 1", False),
        ("not gone == 1", False),
        ("gone == 1 or n == 5", True),
        ("not (gone == 1 and n == 6)", True),
        ("not (gone == 1 or n == 6)", False),
        ("gone is None and n is not None", True),
        ("gone is null and missing is None", True),
        ("gone in ['a']", False),
        ("gone not in ['a']", False),
        ("'z' in tags", False),
        ("'z' not in tags", False),
        ("len(gone) > 0 or int(gone) == 0 or gone.startswith('a')", False),
        ("gone", False),
        ("not gone", False),
        # and so is NaN
        ("nan < 1 or nan >= 1 or nan != 1 or not nan == 1", False),
        ("nan is None", True),
    ],
)  # fmt: skip
def test_what_an_expression_means(text: str, kept: bool) -> None:
    assert Filter(text).keeps(ROW) is kept


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n == '5'", "`n == '5'` compares a number with text"),
        ("stars > 3", "compares text with a number"),
        ("flag == 1", "compares a truth value with a number"),
        ("flag > off", "puts a truth value in order"),
        ("lang in [1, 2]", "compares text with a number"),
        ("'a' in n", "looks for text in a number"),
        ("n", "n stands alone as a condition and is a number"),
        ("len(n) > 1", "needs text or a list and finds a number"),
        ("int(lang) > 1", "'en' is no such number"),
        ("n.startswith('a')", "needs text and finds a number"),
        ("day > 'yesterday'", "'yesterday' is not a date"),
        ("raw == 'x'", "compares binary data with text"),
        ("tags < ['a']", "puts a list in order"),
        ("odd < 1", "`odd < 1` cannot be told"),
    ],
)
def test_values_of_another_kind_are_the_rows_error_not_false(text: str, says: str) -> None:
    with pytest.raises(Mismatch) as caught:
        Filter(text).keeps(ROW)
    assert says in str(caught.value)
    assert Filter(text).may_keep(lambda name: None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lang = 'en'", "at character 6: .*equal is written =="),
        ("lang == 'en' AND n == 5", "at character 14: .*write and, or, not"),
        ("lang ==", "at character"),
        ("  lang == 'é' and n.upper() == 'A'", "at character 19: `n.upper\\(\\)` is not part of the language"),
        ("n + 1 == 2", "at character 1: `n \\+ 1` is not part"),
        ("n == 5 if flag else 6", "is no condition"),
        ("__import__('os').system('true') == 0", "is not part of the language"),
        ("(lambda: 1)() == n", "not part"),
        ("[x for x in tags] == n", "not part"),
        ("f'{n}' == lang", "not part"),
        ("b'x' == lang", "not part"),
        ("meta['k'] == 1", "not part"),
        ("meta.k == 1", "not part"),
        ("n == None", "write `is None`"),
        ("null != n", "write `is None`"),
        ("n is 5", "only `is None`"),
        ("n in []", "an empty list"),
        ("len(n, n) == 1", "takes one value"),
        ("text.startswith()", "expected .startswith"),
        ("text.lower()", "expected .startswith"),
        ("col == 1", "followed by a column's name"),
        ("col[1] == 1", 'expected col\\["a name"\\]'),
        ("class == 1", 'written col\\["its name"\\]'),
        ("n == 1e999", "out of range"),
        ("1 == 1", "names no column"),
        ("true", "is no condition"),
        ("n == 5; lang == 'en'", "at character 7"),
        ("n == 5) or (lang == 'en'", "at character 7"),
        ("not " * 200 + "flag", "nested too deeply"),
        ("(" * 300 + "n" + ")" * 300 + " == 1", "cannot be read|at character"),
        ("n == 1 \0", "cannot be read|at character"),
        ("n == 1 or " * MAX_LENGTH + "n == 2", "longer than"),
        ("", "."),
    ],
)
def test_wrong_expressions_say_where(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        check(text)


def test_a_job_file_with_a_wrong_filter_is_refused() -> None:
    job = {
        "model": {"path": "m"},
        "input": {"path": "i", "where": "stars > "},
        "sampling": {"max_tokens": 1},
        "output": {"path": "o"},
    }
    with pytest.raises(ConfigError, match=r"`input.where`: at character \d+: ") as caught:
        spec.parse(job)
    assert caught.value.exit_code == 78


# What statistics allow to pass over

COLUMNS = {
    "a": pa.int64(),
    "s": pa.string(),
    "f": pa.float64(),
    "d": pa.date32(),
    "t": pa.timestamp("us", "Asia/Tokyo"),
}
TERMS = [
    "a < 3", "a >= 3", "a == 2", "a != 2", "3 > a", "a in [1, 4]", "a not in [0, 1]", "a is None", "a is not None",
    "s == 'b'", "s > 'b'", "s != 'b'", "s.startswith('b')", "f < 0.5", "f != 1.0", "f is None", "a == 'x'", "s < 1",
    "a < f", "missing == 1", "len(s) > 1",
    "d >= '2025-01-02'", "d == '2025-01-01'", "t < '2025-01-01T12:00:00'", "t == '2025-01-02T09:00:00+09:00'",
]  # fmt: skip
expressions = st.recursive(
    st.sampled_from(TERMS),
    lambda inner: st.one_of(
        inner.map(lambda one: f"not ({one})"),
        st.lists(inner, min_size=2, max_size=3).map(lambda many: " and ".join(f"({one})" for one in many)),
        st.lists(inner, min_size=2, max_size=3).map(lambda many: " or ".join(f"({one})" for one in many)),
    ),
    max_leaves=5,
)
table_rows = st.lists(
    st.fixed_dictionaries(
        {
            "a": st.none() | st.integers(0, 5),
            "s": st.none() | st.sampled_from(["a", "b", "bb", "c"]),
            "f": st.none() | st.sampled_from([0.0, 1.0, float("nan")]),
            "d": st.none() | st.sampled_from([datetime.date(2025, 1, day) for day in (1, 2, 3)]),
            "t": st.none() | st.sampled_from([datetime.datetime(2025, 1, day, tzinfo=UTC) for day in (1, 2, 3)]),
        }
    ),
    max_size=12,
)


def outcome(text: str, row: dict[str, Any]) -> str:
    try:
        return "kept" if Filter(text).keeps(row) else "dropped"
    except Mismatch:
        return "error"


@settings(max_examples=250, deadline=None)
@given(text=expressions, data=table_rows, group=st.integers(1, 4))
def test_pushed_down_or_not_the_same_rows_pass(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: list[dict[str, Any]], group: int
) -> None:
    schema = pa.schema(list(COLUMNS.items()))
    file = put_table(tmp_path_factory.getbasetemp(), pa.Table.from_pylist(data, schema), row_group_size=group)
    wanted = [(i, outcome(text, row) == "error") for i, row in enumerate(data) if outcome(text, row) != "dropped"]
    found = chunks(file, where=text, columns=["a"], shard_rows=5)
    assert [(row.number, row.error is not None) for chunk in found for row in chunk.rows] == wanted
    assert [chunk.end for chunk in found if chunk.end] == [c.end for c in chunks(file, shard_rows=5) if c.end]
    assert all(set(row.values or ()) == {"a"} for chunk in found for row in chunk.rows)


# Every type that Parquet keeps statistics of, and constants of which some fit it
DAY = datetime.datetime(2025, 11, 2, 5)
NUMBERS = ["0", "3", "-1", "1.5", "3000000000", "True", "'b'"]
TIMES = ["'2025-11-02T05:30:00Z'", "'2025-11-02T06:30:00'", "'2025-11-02'", "'12:00:00Z'", "'05:00:00'", "3"]
MANY_TYPES: list[tuple[pa.DataType, list[Any], list[str]]] = [
    (pa.int8(), [-128, 0, 3, 127], NUMBERS),
    (pa.uint8(), [0, 3, 255], NUMBERS),
    (pa.uint32(), [0, 3, 3_000_000_000], NUMBERS),
    (pa.uint64(), [0, 3, 1 << 63], NUMBERS),
    (pa.float32(), [-0.0, 0.0, 1.5, float("nan"), float("inf")], NUMBERS),
    (pa.float64(), [-0.0, 0.0, 1.5, float("nan"), -float("inf")], NUMBERS),
    (pa.float16(), [-2.0, 1.5, float("nan")], NUMBERS),
    (pa.decimal128(5, 2), [Decimal("-1.00"), Decimal("1.50"), Decimal("3.00")], NUMBERS),
    (pa.bool_(), [True, False], NUMBERS),
    (pa.bool8(), [1, 0], NUMBERS),
    (pa.duration("us"), [datetime.timedelta(0), datetime.timedelta(microseconds=3)], NUMBERS),
    (pa.string(), ["", "a", "b", "b" * 5000, "\u00e9", "\uffff", "\U0001f600"], ["'b'", "'\uffff'", "''", "3"]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "c"], ["'b'", "'bb'"]),
    (pa.json_(), ["1", "b"], ["'b'", "1"]),
    (pa.binary(), [b"a", b"b", b"\xff"], ["'b'", "3"]),
    (pa.date32(), [datetime.date(2025, 11, day) for day in (1, 2, 3)], TIMES),
    (pa.date64(), [datetime.date(2025, 11, day) for day in (1, 2, 3)], TIMES),
    (pa.time32("ms"), [datetime.time(5), datetime.time(12), datetime.time(23, 59, 59, 1000)], TIMES),
    (pa.time64("us"), [datetime.time(5), datetime.time(12), datetime.time(23, 59, 59, 1)], TIMES),
    *(
        (kind, [DAY + datetime.timedelta(minutes=30 * i) for i in range(5)], TIMES)
        for kind in (
            pa.timestamp("s"),
            pa.timestamp("ms", "UTC"),
            pa.timestamp("us", "America/New_York"),
            pa.timestamp("ns", "America/New_York"),
        )
    ),
    (pa.timestamp("ns"), [1, -1, 1_500, -1_500, 10**18 + 1], [*TIMES, "'1970-01-01'", "'1969-12-31T23:59:59.999999'"]),
]


@st.composite
def typed_columns(draw: st.DrawFn) -> tuple[pa.Array, str, dict[str, Any]]:
    kind, values, constants = draw(st.sampled_from(MANY_TYPES))
    column = pa.array(draw(st.lists(st.none() | st.sampled_from(values), min_size=1, max_size=8)), kind)
    constant = st.sampled_from(constants)
    compared = st.tuples(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), constant)
    terms = st.one_of(
        compared.map(lambda two: f"x {two[0]} {two[1]}"),
        compared.map(lambda two: f"{two[1]} {two[0]} x"),
        st.tuples(st.sampled_from(["in", "not in"]), st.lists(constant, min_size=1, max_size=3)).map(
            lambda two: f"x {two[0]} [{', '.join(two[1])}]"
        ),
        st.sampled_from(["x is None", "x is not None"]),
    )
    terms = st.one_of(terms, terms.map(lambda one: f"not ({one})"))
    text = draw(st.one_of(terms, st.tuples(terms, st.sampled_from([" and ", " or "]), terms).map("".join)))
    options: dict[str, Any] = {"row_group_size": draw(st.integers(1, 3))}
    if pa.types.is_timestamp(kind) and draw(st.booleans()):
        options["use_deprecated_int96_timestamps"] = True
    if pa.types.is_decimal(kind) and draw(st.booleans()):
        options["store_decimal_as_integer"] = True
    return column, text, options


@settings(max_examples=400, deadline=None)
@given(case=typed_columns())
def test_statistics_or_none_the_same_rows_pass(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[pa.Array, str, dict[str, Any]]
) -> None:
    column, text, options = case
    found = []
    for statistics in (True, False):
        table = pa.table({"x": column, "n": range(len(column))})
        file = put_table(tmp_path_factory.getbasetemp(), table, write_statistics=statistics, **options)
        found.append([(row.number, row.error) for row in rows(file, where=text, columns=["n"])])
    assert found[0] == found[1]


NAN = float("nan")


@pytest.mark.parametrize("bounds", [(NAN, 9.0), (-9.0, NAN), (NAN, NAN), (9.0, -9.0)], ids=str)
@pytest.mark.parametrize("text", ["x > 2.5", "x >= 2.0", "x == 3.0", "x != 4.0", "not x == 4.0", "x not in [4.0]"])
def test_statistics_that_bound_nothing_drop_no_row(tmp_path: Path, text: str, bounds: tuple[float, float]) -> None:
    """NaN as the least or the greatest, as some writers leave it, and a greatest that is below the least."""
    least, greatest = -8.125, 8.125
    file = put_table(tmp_path, pa.table({"x": [greatest, 2.0, 3.0, least]}), use_dictionary=False, compression="none")
    wanted = [row.number for row in rows(file, where=text)]
    data = Path(file.path).read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    for old, new in zip((least, greatest), bounds, strict=True):
        assert struct.pack("<d", old) in footer
        footer = footer.replace(struct.pack("<d", old), struct.pack("<d", new))
    changed = put(tmp_path, data[:start] + footer, "changed.parquet")
    assert [row.number for row in rows(changed, where=text)] == wanted


def test_statistics_of_text_are_those_of_its_bytes(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\x80", "\u00e9".encode()], pa.binary()).view(pa.string())
    for statistics in (True, False):
        file = put_table(tmp_path, pa.table({"s": text}), write_statistics=statistics)
        assert [row.number for row in rows(file, where="s > '\u00ff'", replace_unicode=True)] == [1]


def test_row_groups_that_cannot_match_are_not_read(tmp_path: Path) -> None:
    days = [datetime.date(2025, 1, 1 + i // 10) for i in range(100)]
    table = pa.table({"n": list(range(100)), "day": days, "text": [f"t{i:02}" for i in range(100)]})
    file = put_table(tmp_path, table, row_group_size=10, compression="none")
    raw = bytearray(Path(file.path).read_bytes())
    for group in range(10):
        if group != 3:
            for column in range(3):
                place = pq.ParquetFile(file.path).metadata.row_group(group).column(column)
                begin = place.dictionary_page_offset or place.data_page_offset
                raw[begin : begin + 20] = b"\xff" * 20
    spoilt = put(tmp_path, bytes(raw), "spoilt.parquet")
    for text in ("n >= 30 and n < 40", "day == '2025-01-04'", "text in ['t30', 't39']", "not (n < 30 or n > 39)"):
        found = [row.number for row in rows(spoilt, where=text, columns=["text"])]
        assert found == ([30, 39] if " in " in text else list(range(30, 40)))


def test_statistics_of_what_is_inside_a_column_are_not_its_own(tmp_path: Path) -> None:
    table = pa.table({"a": [{"b": 1}, {"b": 2}], "l": [[1], None], "x.y": ["p", None]})
    file = put_table(tmp_path, table)
    for text, wanted in (
        ('col["a.b"] is None', [0, 1]),
        ("a is not None", [0, 1]),
        ("l is None", [1]),
        ('col["x.y"] == "p"', [0]),
        ('col["x.y"] is None', [1]),
    ):
        assert [row.number for row in rows(file, where=text)] == wanted


def test_bounds_that_are_not_known_keep_everything() -> None:
    assert Filter("a > 3").may_keep(lambda name: None)
    assert not Filter("a > 3").may_keep(lambda name: Bounds(0, 3, True))
    assert not Filter("a > 3").may_keep(lambda name: Bounds(None, None, True))
    # a null lets `and` go on to what is an error; a value that is false does not
    assert Filter("a > 3 and s < 1").may_keep(lambda name: Bounds(0, 3, True) if name == "a" else None)
    assert not Filter("a > 3 and s < 1").may_keep(lambda name: Bounds(0, 3, False) if name == "a" else None)
    assert Filter("f > 3 and s < 1").may_keep(lambda name: Bounds(0.0, 3.0, False) if name == "f" else None)  # NaN
    known = {"a": Bounds(None, None, True), "b": Bounds(2, 2, False)}
    assert not Filter("a == 1 and b == 2").may_keep(known.get)
    assert not Filter("not (a == 1 or b == 3)").may_keep(known.get)
    assert Filter("a == 1 or b == 2").may_keep(known.get)
    assert Filter("a > 3 or b == 1").may_keep(lambda name: Bounds(0, 3, True) if name == "a" else None)


# Rows that cannot be judged, columns that are not there


def test_rows_that_cannot_be_read_or_judged_stay_as_errors(tmp_path: Path) -> None:
    file = put(tmp_path, b'{"s":1}\nbad\n{"s":"x"}\n{"s":9}\n{"t":1}\n{"s":5,"p":"\\ud83d"}\n')
    found = [(row.number, row.error and row.error.code) for row in rows(file, where="s > 5")]
    assert found == [(1, "invalid_json"), (2, "invalid_row"), (3, None), (5, "invalid_unicode")]
    wrong = rows(file, where="s > 5")[1]
    assert wrong.error is not None
    assert wrong.error.message.startswith("input.where: `s > 5` compares text with a number; int(...)")
    text = pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string())
    table = put_table(tmp_path, pa.table({"s": text, "n": [1, 2, 3]}))
    assert [(row.number, row.error and row.error.code) for row in rows(table, where="s == 'b'", columns=["n"])] == [
        (1, "invalid_unicode"),
        (2, None),
    ]


def test_the_filters_own_columns_are_read_but_not_given(tmp_path: Path) -> None:
    table = pa.table({"a": ["1", "2", "3"], "b": ["x", "y", "z"]})
    for file in (put_table(tmp_path, table), put(tmp_path, b"a,b\n1,x\n2,y\n3,z\n", "x.csv")):
        (chunk,) = chunks(file, where="b != 'y'", columns=["a"])
        assert [row.values for row in chunk.rows] == [{"a": "1"}, {"a": "3"}]
        assert chunk.batch is not None and chunk.batch.to_pylist() == [{"a": "1"}, {"a": "3"}]
        (chunk,) = chunks(file, where="b != 'y'", columns=[])
        assert [(row.number, row.values) for row in chunk.rows] == [(0, {}), (2, {})]
        assert chunk.batch is not None and chunk.batch.num_columns == 0


def test_columns_of_every_type_go_through_a_filter(tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": [1, 2, 3],
            "view": pa.array(["a", "b", None], pa.string_view()),
            "bytes": pa.array([b"a", b"b", None], pa.binary_view()),
            "deep": pa.array([[{"x": "a"}], None, []], pa.large_list(pa.struct([("x", pa.string_view())]))),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["p", "q"])),
            "null": pa.nulls(3),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (chunk,) = chunks(put(tmp_path, sink.getvalue().to_pybytes(), "x.arrow"), where="n != 2 and runs >= 'p'")
    rows = table.to_pylist()
    assert [row.values for row in chunk.rows] == [
        {**rows[0], "bytes": "a"},
        {**rows[2], "bytes": None},
    ]
    assert chunk.batch is not None and chunk.batch.to_pylist() == [rows[0], rows[2]]


def test_a_column_that_no_file_has_is_said_at_once(tmp_path: Path) -> None:
    first = put_table(tmp_path, pa.table({"stars": [1], "text": ["x"]}), "1.parquet")
    second = put_table(tmp_path, pa.table({"stars": [1], "late": [2]}), "2.parquet")
    check_where(Filter("stars > 1 and late == 2"), [first, second], ["parquet"] * 2, {})
    assert values(first, where="late == 2") == []
    with pytest.raises(ConfigError, match=r"no input file has a column 'star'; .*1\.parquet has stars, text"):
        check_where(Filter("star > 1"), [first, second], ["parquet"] * 2, {})
    lines = put(tmp_path, b'{"stars":1}\n')
    seen = Filter("star > 1")
    check_where(seen, [lines], ["jsonl"], {})
    assert seen.unseen == {"star"}
