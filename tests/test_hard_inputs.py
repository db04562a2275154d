"""Input files that are hard to read right, through a whole job: each case as people have met it."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import CHATML, FakeModel, byte_tokenizer
from inputs import put, put_table, zstd

import batchgen
from batchgen import job, spec
from batchgen.errors import BatchgenError, ConfigError, DataError, NoInputError
from batchgen.io.stores import Store
from batchgen.runstatus import read_success

GOOD = b'{"id":"a","prompt":"x"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("model") / "bytes", chat_template=CHATML)


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Any:
    """Runs a job over files; gives its summary and its result rows."""
    starts = iter(range(100))

    def run(path: Any, *, out: str = "", **changes: dict[str, Any]) -> tuple[dict, list[dict]]:
        target = tmp_path / (out or f"out{next(starts)}")
        a_job = spec.parse(
            {
                "model": {"path": "fake"},
                "input": {"path": path, **changes.get("input", {})},
                "prompt": changes.get("prompt", {"column": "prompt", "chat": False}),
                "sampling": {"max_tokens": 20},
                "output": {"path": str(target), "format": "jsonl", "shard_rows": 4, **changes.get("output", {})},
                "errors": {"max_failed": 0.9},
            }
        )
        summary = job.run(a_job, model_opener=lambda _: FakeModel(folder))
        if a_job.output.format == "parquet":
            parts = sorted(target.glob("part-*.parquet"))
            return summary, [row for part in parts for row in pq.read_table(part).to_pylist()]
        lines = [line for part in sorted(target.glob("part-*.jsonl")) for line in part.read_bytes().splitlines()]
        return summary, [json.loads(line.decode("utf-8"), parse_constant=pytest.fail) for line in lines]

    return run


def codes(rows: list[dict]) -> list[str | None]:
    return [row["error"] and row["error"]["code"] for row in rows]


def fails(run: Any, path: Any, kind: type[BatchgenError], code: int, says: str, **changes: dict[str, Any]) -> str:
    with pytest.raises(kind, match=says) as caught:
        run(path, **changes)
    assert caught.value.exit_code == code
    return str(caught.value)


def test_a_byte_order_mark(run: Any, tmp_path: Path) -> None:
    """A1: the first row is there, with its keys, and the results are those without the mark."""
    data = b"".join(b'{"id":"r%d","prompt":"text %d"}\n' % (i, i) for i in range(3))
    wanted = run(put(tmp_path, data, "in/a.jsonl").path, input={"id": "id"})[1]
    marked = run(put(tmp_path, b"\xef\xbb\xbf" + data, "in/b.jsonl").path, input={"id": "id"})[1]
    assert [row["id"] for row in marked] == ["r0", "r1", "r2"] and marked == wanted and codes(marked) == [None] * 3


def test_a_line_of_5_mb(run: Any, tmp_path: Path) -> None:
    """A3: the long row fails or not, its neighbours are as they would be without it."""
    long = json.dumps({"id": "long", "prompt": "x" * (5 << 20)}).encode() + b"\n"
    with_it = run(put(tmp_path, GOOD + long + GOOD, "in/a.jsonl").path)[1]
    without = run(put(tmp_path, GOOD + GOOD, "in/b.jsonl").path)[1]
    assert codes(with_it) == [None, "prompt_too_long", None]
    assert [with_it[0]["text"], with_it[2]["text"]] == [row["text"] for row in without]


def test_a_json_array_and_odd_line_ends(run: Any, tmp_path: Path) -> None:
    """A4: an array is refused by name and line; CRLF and blank lines are welcome."""
    array = json.dumps([{"id": 1, "prompt": "x"}, {"id": 2, "prompt": "y"}], indent=2).encode()
    said = fails(run, put(tmp_path, array).path, DataError, 65, "file is a JSON array, not JSON Lines: line 1 ")
    assert "x.jsonl" in said
    odd = b"\r\n" + GOOD.replace(b"\n", b"\r\n") + b"\n  \n" + GOOD
    assert codes(run(put(tmp_path, odd).path)[1]) == [None, None]


def test_lone_surrogates(run: Any, tmp_path: Path) -> None:
    """A6: half a pair fails its row, or becomes U+FFFD where the job says so; a whole pair is one character."""
    lines = [r'{"id":"a","prompt":"ok \ud83d bad"}', r'{"id":"b","prompt":"\ud83d\ude00"}', '{"id":"c","prompt":"x"}']
    raw = b'{"id":"d","prompt":"caf\xe9"}\n'
    file = put(tmp_path, "".join(line + "\n" for line in lines).encode() + raw)
    options: dict[str, Any] = {"output": {"columns": ["prompt"]}}
    found = run(file.path, input={"id": "id"}, **options)[1]
    assert codes(found) == ["invalid_unicode", None, None, "invalid_unicode"]
    assert [row["prompt"] for row in found] == [None, "\U0001f600", "x", None]
    replaced = run(file.path, input={"id": "id", "unicode_errors": "replace"}, **options)[1]
    assert codes(replaced) == [None] * 4
    assert [row["prompt"] for row in replaced] == ["ok \ufffd bad", "\U0001f600", "x", "caf\ufffd"]
    assert [row["text"] for row in replaced][1:3] == [row["text"] for row in found][1:3]
    broken = pa.array([b"x", b"caf\xe9", b"x"], pa.binary()).view(pa.string())
    table = put_table(tmp_path, pa.table({"prompt": broken, "deep": pa.array([["a"], ["b"], None])}))
    assert codes(run(table.path, **options)[1]) == [None, "invalid_unicode", None]
    replaced = run(table.path, input={"unicode_errors": "replace"}, **options)[1]
    assert codes(replaced) == [None] * 3 and replaced[1]["prompt"] == "caf\ufffd"


def test_ids_that_look_like_numbers(run: Any, tmp_path: Path) -> None:
    """A8: text ids come out as the text they were, from every format."""
    ids = ["72057594038135102", "007", "1e5"]
    table = pa.table({"id": ids, "prompt": ["x", "y", "z"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    rows = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    table_csv = "id,prompt\n" + "".join(f"{row['id']},{row['prompt']}\n" for row in table.to_pylist())
    files = [
        put(tmp_path, rows.encode()),
        put_table(tmp_path, table),
        put(tmp_path, table_csv.encode(), "x.csv"),
        put(tmp_path, sink.getvalue().to_pybytes(), "x.arrow"),
    ]
    for file, form in [*((file, "parquet") for file in files), (files[0], "jsonl")]:
        found = run(file.path, input={"id": "id"}, output={"format": form, "columns": {"id": "string"}})[1]
        assert [row["id"] for row in found] == ids == [row["input_id"] for row in found]


def test_a_column_of_nulls_in_the_first_file(run: Any, tmp_path: Path) -> None:
    """A9: a carried column has one type over all files."""
    put_table(tmp_path / "in", pa.table({"prompt": ["x"], "d": pa.nulls(1)}), "1.parquet")
    put_table(tmp_path / "in", pa.table({"prompt": ["y"], "d": ["x"]}), "2.parquet")
    put(tmp_path / "lines", b'{"prompt":"x","d":null}\n', "1.jsonl")
    put(tmp_path / "lines", b'{"prompt":"y","d":"x"}\n', "2.jsonl")
    for source, form in (("in", "parquet"), ("lines", "jsonl")):
        found = run(str(tmp_path / source), output={"columns": ["d"], "format": form})[1]
        assert codes(found) == [None, None] and [row["d"] for row in found] == [None, "x"]


def test_parquet_without_row_groups(run: Any, tmp_path: Path) -> None:
    """A11: no rows from it, all of the file beside it."""
    (tmp_path / "in").mkdir()
    with pq.ParquetWriter(tmp_path / "in" / "0.parquet", pa.schema([("prompt", pa.string())])):
        pass
    assert pq.ParquetFile(tmp_path / "in" / "0.parquet").num_row_groups == 0
    put_table(tmp_path / "in", pa.table({"prompt": ["x", "y"]}), "1.parquet")
    summary, found = run(str(tmp_path / "in"))
    assert summary["rows"] == 2 and codes(found) == [None, None]


READ_IN_A_CHILD = """
import re, sys
from batchgen.io.files import expand
from batchgen.io.sources import read_shards
file = expand([sys.argv[1]], {})[0]
size = 0
for chunk in read_shards(file, "parquet", columns=None, shard_rows=None, done={}, storage_options={}):
    size += sum(len(row.values["prompt"]) for row in chunk.rows)
# getrusage would count the parent before exec too
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(size, int(peak[1]) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a peak is read from /proc")
@pytest.mark.parametrize(("kind", "count"), [("string", 22_000), ("dictionary", 22_000), ("large dictionary", 3_000)])
def test_more_text_in_a_column_than_memory_should_hold(tmp_path: Path, kind: str, count: int) -> None:
    """A13: 2.2 GB of text in one row group, which a dictionary makes a small file, are read in bounded memory."""
    words = pa.array([f"{i:08d}" * 12_500 for i in range(8)])  # of 100 kB
    words = words.cast(pa.large_string()) if kind == "large dictionary" else words
    column = pa.DictionaryArray.from_arrays(pa.array([i % 8 for i in range(count)], pa.int32()), words)
    file = put_table(tmp_path, pa.table({"prompt": column}), store_schema=kind != "string")
    stored = pq.ParquetFile(file.path)
    assert stored.num_row_groups == 1 and pa.types.is_dictionary(stored.schema_arrow.field(0).type) == (
        kind != "string"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(batchgen.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", READ_IN_A_CHILD, file.path], env=env, capture_output=True, text=True, check=True
    )
    size, megabytes = map(int, done.stdout.split())
    assert size == count * 100_000
    assert megabytes < 600


def test_no_column_is_ever_put_together() -> None:
    """A13: joining the pieces of a text column overflows at 2 GiB, so no reader does."""
    paths = [path for path in Path(batchgen.__file__).parent.rglob("*.py") if path.stem != "readback"]  # our own parts
    for path in paths:
        assert not re.search(r"combine_chunks|read_all\(|read_table\(|\.to_table\(", path.read_text()), path


def test_compressed_by_content(run: Any, tmp_path: Path) -> None:
    """A14: every row of gzip and zstd, with or without a suffix; what is not known is refused, never 0 rows."""
    data = b"".join(b'{"prompt":"text %d"}\n' % i for i in range(5))
    for name, pack in (("rows.jsonl.gz", gzip.compress), ("rows.jsonl.zst", zstd), ("a", gzip.compress)):
        summary, found = run(put(tmp_path, pack(data), name).path)
        assert summary["rows"] == 5 and codes(found) == [None] * 5
    for magic in (b"BZh91AY", b"\xfd7zXZ\x00", b"\x04\x22\x4d\x18"):
        fails(
            run,
            put(tmp_path, magic + b"\0" * 50, "rows.jsonl.gz").path,
            DataError,
            65,
            "rows.jsonl.gz: .* not supported",
        )


def test_a_gzip_file_cut_at_70_percent(run: Any, tmp_path: Path) -> None:
    """A16: an error with the file's name, and the run is not complete."""
    packed = gzip.compress(b"".join(json.dumps({"prompt": os.urandom(20).hex()}).encode() + b"\n" for _ in range(500)))
    file = put(tmp_path, packed[: len(packed) * 7 // 10], "cut.jsonl.gz")
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz: the file is damaged or cut short") as caught:
        run(file.path, out="cut")
    assert caught.value.exit_code == 65
    assert read_success(Store(str(tmp_path / "cut"))) is None


def test_input_that_is_not_there(run: Any, tmp_path: Path) -> None:
    """A17: nothing found is an error that names the pattern, unless nothing is allowed; a folder is its data files."""
    fails(run, str(tmp_path / "in" / "*.jsonl"), NoInputError, 66, r"in/\*\.jsonl")
    (tmp_path / "in").mkdir()
    put(tmp_path / "in", GOOD, "_hidden.jsonl")
    fails(run, str(tmp_path / "in"), NoInputError, 66, "/in'")
    summary, _ = run(str(tmp_path / "in" / "*.parquet"), out="empty", input={"allow_empty": True})
    success = read_success(Store(str(tmp_path / "empty")))
    assert summary["rows"] == 0 and success is not None and success["counters"]["rows"] == 0
    put(tmp_path / "in", GOOD * 2, "a[1].jsonl")
    assert run(str(tmp_path / "in" / "a[1].jsonl"))[0]["rows"] == 2
    assert run(str(tmp_path / "in"))[0]["rows"] == 2


def test_nan_and_a_key_twice(run: Any, tmp_path: Path) -> None:
    """A18: each is its row's error with the line's number; NaN is null where the job says so, a key twice never is."""
    data = b'{"id":1,"prompt":"x","score":NaN}\n{"id":1,"id":2,"prompt":"y"}\n' + GOOD
    file = put(tmp_path, data)
    found = run(file.path, output={"columns": ["score"]})[1]
    assert codes(found) == ["invalid_json", "invalid_json", None]
    assert [row["error"]["message"].partition(":")[0] for row in found[:2]] == ["line 1", "line 2"]
    found = run(file.path, input={"nan": None}, output={"columns": ["score"]})[1]
    assert codes(found) == [None, "invalid_json", None] and found[0]["score"] is None


def test_messages_as_parquet_structs(run: Any, tmp_path: Path) -> None:
    """A20: lists of structs padded with nulls give the prompts that the same rows give as JSON Lines."""
    messages = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        [{"role": "user", "content": "again", "tool_calls": None}],
    ]
    call = pa.struct([("id", pa.string()), ("arguments", pa.string())])
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]))
    table = put_table(tmp_path, pa.table({"messages": pa.array(messages, kind)}))
    lines = put(tmp_path, b"".join(json.dumps({"messages": one}).encode() + b"\n" for one in messages))
    prompt: dict[str, Any] = {"prompt": {"column": "messages"}}
    first, second = run(table.path, **prompt)[1], run(lines.path, **prompt)[1]
    assert codes(first) == [None, None] and first == second


# The formats and filters of a job


def test_the_same_rows_from_every_format(run: Any, tmp_path: Path) -> None:
    table = pa.table({"text": [f"line {i}" for i in range(10)]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    lines = "".join(f"line {i}\n" for i in range(10)).encode()
    found = [
        run(file.path, prompt={"column": "text", "chat": False}, output={"columns": ["text"]})[1]
        for file in (
            put_table(tmp_path, table),
            put(tmp_path, sink.getvalue().to_pybytes(), "x.arrow"),
            put(tmp_path, b"text\n" + lines, "x.csv"),
            put(tmp_path, lines, "x.txt"),
        )
    ]
    assert codes(found[0]) == [None] * 10 and all(one == found[0] for one in found)
    assert [row["input_text"] for row in found[0]] == table["text"].to_pylist()


def test_a_filter_over_a_whole_job(run: Any, tmp_path: Path) -> None:
    rows = [{"key": f"k{i}", "prompt": f"text {i}", "stars": i % 5} for i in range(20)]
    table = put_table(tmp_path, pa.Table.from_pylist(rows), row_group_size=3)
    lines = put(tmp_path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    for number, file in enumerate((table, lines)):
        options: dict[str, Any] = {
            "input": {"id": "key", "where": "stars >= 3 and (key < 'k15' or key > 'k4')"},
            "output": {"columns": ["prompt"], "format": "parquet"},
        }
        summary, found = run(file.path, out=f"f{number}", **options)
        kept = [row for row in rows if row["stars"] >= 3 and (row["key"] < "k15" or row["key"] > "k4")]  # type: ignore[operator]
        assert [row["id"] for row in found] == [row["key"] for row in kept]
        assert summary["rows"] == len(kept)
        parts = sorted((tmp_path / f"f{number}").glob("part-*"))
        assert len(parts) == 5  # of every four rows, those without any left too
        assert run(file.path, out=f"f{number}", **options)[0]["rows"] == len(kept)
        options["input"]["where"] = "stars >= 4"
        with pytest.raises(ConfigError, match="where"):
            run(file.path, out=f"f{number}", **options)


def test_a_filter_with_a_typing_error(run: Any, tmp_path: Path) -> None:
    """Never a job that succeeds with none of its rows."""
    table = put_table(tmp_path, pa.table({"prompt": ["x"], "stars": [5]}))
    fails(run, table.path, ConfigError, 78, "no input file has a column 'star'.*stars", input={"where": "star > 3"})
    lines = put(tmp_path, b'{"prompt":"x","stars":5}\n' * 9)
    where = "stars > 3 and lang == 'en'"
    fails(run, lines.path, NoInputError, 66, "none of the rows passes stars > 3 and lang", input={"where": where})
    fails(run, lines.path, NoInputError, 66, "input.where: none of the rows passes", input={"where": "stars > 7"})
    summary, found = run(lines.path, input={"where": "stars > 7", "allow_empty": True})
    assert summary["rows"] == 0 and found == [] and summary["complete"]


def test_a_filter_may_name_a_column_that_json_lines_leave_out(
    run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is null in every row stands in none; it is said, once, and the job ends as any other."""
    lines = put(tmp_path, b"".join(b'{"prompt":"p%d"}\n' % i for i in range(9)))
    for _ in range(2):
        summary, found = run(lines.path, out="o", input={"where": "deleted is None and prompt != 'p3'"})
        assert (summary["status"], summary["complete"], summary["rows"], len(found)) == ("done", True, 8, 8)
    said = capfd.readouterr().err
    assert said.count("batchgen: input.where: none of the rows read has a column 'deleted', which counts as null") == 1


def test_folders_give_columns(run: Any, tmp_path: Path) -> None:
    base = tmp_path / "in"
    put_table(base, pa.table({"prompt": ["a", "b"], "n": [1, 2]}), "day=2025-01-31/lang=en/x.parquet")
    put_table(base, pa.table({"prompt": ["c"], "n": [3]}), "day=2025-02-01/lang=__HIVE_DEFAULT_PARTITION__/x.parquet")
    put_table(base, pa.table({"prompt": ["d"], "n": [4], "lang": ["own"]}), "day=a%2Fb/lang=de/x.parquet")
    options: dict[str, Any] = {"output": {"columns": ["day", "lang", "n"], "format": "parquet"}}
    options["prompt"] = {"template": "{{ day }} {{ prompt }}", "chat": False}
    found = run(str(base), **options)[1]
    assert [(row["day"], row["lang"], row["n"]) for row in found] == [
        ("2025-01-31", "en", 1),
        ("2025-01-31", "en", 2),
        ("2025-02-01", None, 3),
        ("a/b", "own", 4),
    ]
    assert codes(found) == [None] * 4
    assert run(str(base), input={"where": "lang in ['en', 'own'] and n > 1"}, **options)[0]["rows"] == 2
    assert run(str(base / "day=2025*" / "*" / "*.parquet"), **options)[1] == found[:3]
    assert run(str(base / "day=2025-01-31"), **options)[1] == found[:2]
    put(base, b'{"prompt":"j"}\n{"prompt":"k","day":"own"}\n', "day=1/x.jsonl")
    put(base, b"prompt\nc\n", "day=2/x.csv")
    put(base, b"line\n", "day=3/x.txt")
    everything = {"prompt": {"template": "{{ prompt or text }}", "chat": False}, "output": {"columns": ["day"]}}
    days = [row["day"] for row in run(str(base / "day=?" / "x.*"), **everything)[1]]
    assert days == ["1", "own", "2", "3"]
