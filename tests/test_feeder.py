"""The feeder process: what it delivers, in which order, and what happens when it, a row or the parent dies."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import CHATML, byte_tokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from batchgen import spec
from batchgen.errors import BatchgenError, ConfigError, DataError, ExitCode, ModelError
from batchgen.feeder import BOOT, Feeder, RowBatch
from batchgen.feeder_child import HEAD_START, NICE
from batchgen.io import sources
from batchgen.io.files import expand
from batchgen.tokenizer import Tokenizer
from batchgen.types import ShardRange


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path / "model", chat_template=CHATML)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def job(data: Path, **sections: dict[str, Any]) -> spec.JobSpec:
    return spec.parse(
        {
            "model": {"path": "m"},
            "input": {"path": str(data), **sections.get("input", {})},
            "prompt": sections.get("prompt", {}),
            "sampling": {"max_tokens": 4},
            "output": {"path": "out", **sections.get("output", {})},
        }
    )


def feeder(
    made: spec.JobSpec,
    model: Path,
    *,
    done: Mapping[int, Mapping[int, ShardRange | None]] | None = None,
    limit: int | None = None,
    **more: Any,
) -> Feeder:
    files = expand(made.input.path, {}, allow_empty=False)
    formats = [sources.detect(file, "auto", {}) for file in files]
    return Feeder(made, files, formats, str(model), 4096, done or {}, limit, **more)


def drain(feed: Feeder, seconds: float = 30) -> list[RowBatch]:
    batches = []
    deadline = time.monotonic() + seconds
    while not feed.finished:
        assert time.monotonic() < deadline, "the feeder does not end"
        if (batch := feed.get(0.5)) is not None:
            batches.append(batch)
    return batches


def delivered(*arguments: Any, **more: Any) -> list[RowBatch]:
    with feeder(*arguments, **more) as feed:
        return drain(feed)


def write_rows(path: Path, rows: Any) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def numbered(path: Path, count: int) -> None:
    write_rows(path, ({"id": i, "text": f"row {i}"} for i in range(count)))


def texts(tokenizer: Tokenizer, batch: RowBatch) -> list[str]:
    pieces = [batch.token_ids[batch.offsets[i] : batch.offsets[i + 1]] for i in range(batch.num_rows)]
    return tokenizer.decode_batch(pieces, skip_special_tokens=False)


def rows_of(batches: list[RowBatch]) -> list[tuple[int, int]]:
    return [(b.file, row) for b in batches for row in b.rows.tolist()]


# -- what it delivers --------------------------------------------------------------------------------------------------


def test_rows_of_json_lines(data: Path, model: Path) -> None:
    write_rows(
        data / "a.jsonl",
        [
            {"id": "007", "text": "one", "stars": 5},
            "{broken",
            {"text": "no id", "stars": None},
            {"id": 3, "text": "no number", "stars": "many"},
            {"id": 4, "text": ["x"], "stars": 1},
            {"id": 5, "text": "six<|im_end|>", "stars": 2},
        ],
    )
    write_rows(data / "b.jsonl", [])
    numbered(data / "c.jsonl", 600)
    made = job(data, input={"id": "id"}, output={"columns": {"stars": "int64"}})
    batches = delivered(made, model)
    tokenizer = Tokenizer.load(model)

    first = batches[0]
    assert (first.file, first.shard, first.rows.tolist(), first.last_of_file) == (0, 0, [0, 1, 2, 3, 4, 5], True)
    assert [(place, code) for place, code, _ in first.errors] == [
        (1, "invalid_json"),
        (2, "missing_column"),
        (3, "invalid_row"),
        (4, "invalid_row"),
    ]
    assert texts(tokenizer, first)[0] == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizer, first)[1:5] == [""] * 4
    assert first.token_ids.dtype == np.int32 and first.offsets.dtype == np.int64
    assert first.carried.to_pydict() == {
        "id": ["007", None, None, "3", "4", "5"],
        "stars": [5, None, None, None, 1, 2],
    }
    assert first.noise_names() == ["007", "0:1", "0:2", "3", "4", "5"]
    assert first.end is not None and (first.end.first_row, first.end.num_rows) == (0, 6)

    empty = batches[1]
    assert (empty.file, empty.num_rows, empty.end, empty.last_of_file) == (1, 0, None, True)
    assert empty.carried.schema == first.carried.schema

    rest = batches[2:]
    assert rows_of(rest) == [(2, i) for i in range(600)] and [b.num_rows for b in rest] == [256, 256, 88]
    assert "row 599" in texts(tokenizer, rest[-1])[-1]
    assert [b.last_of_file for b in rest] == [False, False, True]
    assert rest[-1].end == ShardRange(2, 0, 0, 600, 0, (data / "c.jsonl").stat().st_size)


def test_rows_of_parquet(data: Path, model: Path) -> None:
    messages = [[{"role": "user", "content": f"m{i}", "name": None}] for i in range(5)]
    table = pa.table(
        {
            "key": pa.array(range(5), pa.int16()),
            "messages": messages,
            "when": pa.array([1, 2, 3, 4, None], pa.timestamp("ns")),
            "unused": ["x" * 1000] * 5,
        }
    )
    pq.write_table(table, data / "a.parquet", row_group_size=2)
    made = job(data, input={"id": "key"}, output={"columns": ["when"], "shard_rows": 3})
    batches = delivered(made, model)
    assert rows_of(batches) == [(0, i) for i in range(5)]
    assert {b.shard for b in batches if b.rows[0] < 3} == {0} and {b.shard for b in batches if b.rows[0] >= 3} == {1}
    ends = [batch.end for batch in batches if batch.end is not None]
    assert [(end.shard, end.first_row, end.num_rows) for end in ends] == [(0, 0, 3), (1, 3, 2)]
    assert pa.Table.from_batches([b.carried for b in batches]).equals(table.select(["key", "when"]))
    assert batches[0].noise_names()[1] == "1"
    tokenizer = Tokenizer.load(model)
    assert [text for batch in batches for text in texts(tokenizer, batch)] == [
        f"<|im_start|>user\nm{i}<|im_end|>\n<|im_start|>assistant\n" for i in range(5)
    ]


def test_done_shards_are_left_out(data: Path, model: Path) -> None:
    for name in ("a", "b", "c"):
        numbered(data / f"{name}.jsonl", 10)
    made = job(data, output={"shard_rows": 4})
    ends = [batch.end for batch in delivered(made, model) if batch.end is not None]
    assert [(end.file, end.shard) for end in ends] == [(file, shard) for file in range(3) for shard in range(3)]
    known = {(end.file, end.shard): end for end in ends}
    done = {0: {0: known[0, 0], 1: None}, 1: {shard: known[1, shard] for shard in range(3)}}
    batches = delivered(made, model, done=done)
    assert rows_of(batches) == [(0, 8), (0, 9), *((2, i) for i in range(10))]
    assert [batch.file for batch in batches if batch.last_of_file] == [0, 1, 2]
    middle = next(batch for batch in batches if batch.file == 1)
    assert (middle.num_rows, middle.end) == (0, None)


@pytest.mark.parametrize(("limit", "cut"), [(3, True), (8, False), (10, False), (13, True), (1000, False)])
def test_a_limit_is_a_prefix_of_all_rows(data: Path, model: Path, limit: int, cut: bool) -> None:
    for name in ("a", "b"):
        numbered(data / f"{name}.jsonl", 10)
    made = job(data, output={"shard_rows": 4})
    batches = delivered(made, model, limit=limit)
    everything = [(file, row) for file in range(2) for row in range(10)]
    assert rows_of(batches) == everything[:limit]
    assert [batch.cut_off for batch in batches] == [False] * (len(batches) - 1) + [cut]
    last = batches[-1]
    assert last.end is not None and last.end.first_row + last.end.num_rows == rows_of(batches)[-1][1] + 1
    assert last.last_of_file == (rows_of(batches)[-1][1] == 9)
    # rows that are done count, too
    done = {0: {0: ShardRange(0, 0, 0, 4, 0, batches[0].end.byte_end if batches[0].end and not cut else 0)}}
    if limit in (8, 10):
        assert rows_of(delivered(made, model, done=done, limit=limit)) == everything[4:limit]


def test_a_batch_travels_without_what_it_is_a_slice_of() -> None:
    big = pa.record_batch({"id": pa.array(["x" * 1000] * 1000)})
    batch = RowBatch(
        0,
        0,
        np.arange(2),
        np.arange(3, dtype=np.int32),
        np.array([0, 1, 3]),
        np.zeros(2, bool),
        [],
        big.slice(5, 2),
        None,
        True,
    )
    data = pickle.dumps(batch)
    assert len(data) < 10_000
    assert pickle.loads(data).carried.equals(big.slice(5, 2))


def test_what_the_first_rows_ask_for_is_told_before_they_are_handed_out(data: Path, model: Path) -> None:
    rows = [{"text": "one", "own": {"max_tokens": 7, "n": 2}}, {"text": ["bad"]}, {"text": "four", "own": None}]
    write_rows(data / "a.jsonl", rows)
    made = job(data).model_copy(update={"sampling": spec.SamplingSpec(max_tokens=None, column="own")})
    with feeder(made, model) as feed:
        asked = feed.demand()
        assert asked is not None and asked.complete and not feed.finished
        assert asked.max_tokens == [7, 7, 4096]
        batches = drain(feed)
    tokens = [batch.token_ids[batch.offsets[i] : batch.offsets[i + 1]].tolist() for batch in batches for i in (0, 0, 2)]
    assert rows_of(batches) == [(0, 0), (0, 1), (0, 2)] and [list(prompt) for prompt in asked.prompts] == tokens

    numbered(data / "b.jsonl", 256 * 20)
    with feeder(job(data), model) as feed:
        many = feed.demand()
        assert many is not None and not many.complete
        assert 0 < len(many.prompts) < 256 * 20  # what is read ahead is bounded
        assert len(rows_of(drain(feed))) == 3 + 256 * 20


def test_rows_that_do_not_come_soon_are_not_waited_for(
    data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(data / "a.jsonl", 3)
    monkeypatch.setattr("batchgen.feeder.PATIENCE", 0.0)
    with feeder(job(data), model) as feed:
        assert feed.demand() is None
        assert len(rows_of(drain(feed))) == 3


# -- the process -------------------------------------------------------------------------------------------------------


def test_the_child_is_light_and_out_of_the_way(data: Path, model: Path) -> None:
    numbered(data / "a.jsonl", 256 * 40)
    before = time.monotonic()
    with feeder(job(data), model) as feed:
        assert feed.poll() is None  # does not wait
        while feed.get(5) is None:
            pass
        assert time.monotonic() - before < 10  # well under a second on a quiet machine
        assert feed._child is not None
        child = psutil.Process(feed._child._process.pid)
        before = time.monotonic()
        while child.nice() != NICE:  # once it is ahead
            assert time.monotonic() - before < 10
            time.sleep(0.01)
        assert not [m.path for m in child.memory_maps() if "torch" in m.path or "transformers" in m.path]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            child.send_signal(number)
        assert len(rows_of(drain(feed))) == 256 * 39
    assert not child.is_running()


def test_where_priorities_may_not_be_changed(data: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = "import os\ndef nice(number): raise PermissionError(1, 'Operation not permitted')\nos.nice = nice\n"
    monkeypatch.setattr("batchgen.feeder.BOOT", denied + BOOT)
    numbered(data / "a.jsonl", 256 * (HEAD_START + 2))
    assert len(rows_of(delivered(job(data), model))) == 256 * (HEAD_START + 2)


def test_leaving_early(data: Path, model: Path) -> None:
    numbered(data / "a.jsonl", 256 * 100)
    with feeder(job(data), model) as feed:
        assert feed.get(10) is not None
        child = feed._child
        assert child is not None
        time.sleep(0.3)  # the queue fills up
        before = time.monotonic()
    assert time.monotonic() - before < 2
    assert child._process.returncode == -signal.SIGKILL and not child._thread.is_alive()


def test_a_child_that_is_killed(data: Path, model: Path) -> None:
    numbered(data / "a.jsonl", 256 * 200)
    with feeder(job(data), model) as feed:
        assert feed.get(10) is not None
        assert feed._child is not None
        feed._child._process.kill()
        with pytest.raises(BatchgenError, match=r"killed by signal 9.*out of memory") as caught:
            drain(feed)
    assert caught.value.exit_code == ExitCode.INTERRUPTED


def test_the_child_dies_with_its_parent(data: Path, model: Path) -> None:
    numbered(data / "a.jsonl", 256 * 100)
    code = f"""
import sys, time
sys.path[:0] = {[os.path.dirname(__file__)]!r}
from pathlib import Path
from test_feeder import feeder, job
with feeder(job(Path({str(data)!r})), Path({str(model)!r})) as feed:
    feed.get(10)
    print(feed._child._process.pid, flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    child.wait(timeout=5)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_of_the_child_are_the_parents(data: Path, model: Path, tmp_path: Path) -> None:
    numbered(data / "a.jsonl", 1)
    with pytest.raises(ConfigError, match=r"prompt\.template is not valid Jinja: line 1") as caught:
        delivered(job(data, prompt={"template": "{% if %}"}), model)
    assert "Traceback" in str(caught.value.__cause__)
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        delivered(job(data), tmp_path)


def test_a_file_that_is_damaged_in_the_middle(data: Path, model: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 50] * 2000}), data / "a.parquet", use_dictionary=False, compression="none")
    raw = bytearray((data / "a.parquet").read_bytes())
    raw[200:300] = b"\xff" * 100
    (data / "a.parquet").write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.parquet"):
        delivered(job(data), model)


def test_a_row_that_hangs_while_it_is_rendered(data: Path, model: Path) -> None:
    rows = [{"text": str(i), "n": 99999 if i == 300 else 1} for i in range(600)]
    write_rows(data / "a.jsonl", rows)
    write_rows(data / "b.jsonl", rows[:2])
    template = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}{{ text }}"
    made = job(data, prompt={"template": template}, input={"id": "text"}, output={"shard_rows": 100})
    batches = delivered(made, model, stuck_seconds=0.5)
    assert rows_of(batches) == [*((0, i) for i in range(600)), (1, 0), (1, 1)]
    failed = [(b.file, int(b.rows[place]), code, message) for b in batches for place, code, message in b.errors]
    assert [error[:3] for error in failed] == [(0, 300, "template_error")] and "did not end" in failed[0][3]
    assert [b.carried.column(0)[0].as_py() for b in batches] == [str(b.rows[0]) for b in batches]


@pytest.mark.parametrize("ends", [True, False])
def test_a_child_that_hangs_while_the_first_rows_are_looked_at(
    data: Path, model: Path, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first child sent before is handed out once, before what the next one sends."""
    monkeypatch.setattr("batchgen.feeder.MORE_PATIENCE", 20.0)
    num_rows = 1000 if ends else 5000
    write_rows(data / "a.jsonl", [{"text": str(i), "n": 99999 if i == 600 else 1} for i in range(num_rows)])
    template = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}{{ text }}"
    with feeder(job(data, prompt={"template": template}), model, stuck_seconds=0.3) as feed:
        child = feed._child
        asked = feed.demand()
        assert feed._child is not child, "no child was replaced"
        assert asked is not None and asked.complete is ends
        batches = drain(feed)
    assert rows_of(batches) == [(0, i) for i in range(num_rows)]
    assert [int(batch.rows[place]) for batch in batches for place, _, _ in batch.errors] == [600]
    tokens = [b.token_ids[b.offsets[i] : b.offsets[i + 1]] for b in batches for i in range(b.num_rows)]
    seen = [prompt.tolist() for prompt in asked.prompts]
    assert seen == [prompt.tolist() for prompt in tokens if len(prompt)][: len(seen)] and len(seen) > 600


def test_a_child_that_fails_while_the_first_rows_are_looked_at(
    data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.feeder.MORE_PATIENCE", 20.0)
    pq.write_table(pa.table({"text": ["x" * 50] * 600}), data / "a.parquet")
    (data / "b.parquet").write_bytes((data / "a.parquet").read_bytes()[:-100])
    with feeder(job(data), model) as feed, pytest.raises(DataError, match=r"b\.parquet"):
        feed.demand()


def test_a_row_that_hangs_while_it_is_encoded(data: Path, tmp_path: Path) -> None:
    """Rows are encoded together; the one that hangs is found by encoding them one by one."""
    model = byte_tokenizer(tmp_path / "slow")
    vocab = {"[UNK]": 0, "a": 1, "##a": 2}
    cubic = RustTokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=1 << 30))
    cubic.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cubic.save(str(model / "tokenizer.json"))
    write_rows(data / "a.jsonl", [{"text": "a" * 30_000 if i == 7 else f"row {i}"} for i in range(20)])
    batches = delivered(job(data), model, stuck_seconds=0.5)
    assert rows_of(batches) == [(0, i) for i in range(20)]
    assert [(place, code) for batch in batches for place, code, _ in batch.errors] == [(7, "template_error")]
