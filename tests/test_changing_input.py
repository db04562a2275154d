"""Input that changes, moves or cannot be reached, and records that were changed by hand: never a wrong success."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeModel, byte_tokenizer
from test_job import job_of, results, start, write_rows

from batchgen import job
from batchgen.errors import BatchgenError, ConfigError, DataError, Interrupted, PermissionDenied, StorageError
from batchgen.io.files import expand


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("model") / "bytes")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"key": "new", "text": "new"}\n')


def rewritten(path: Path) -> None:
    data = path.read_bytes().replace(b"row", b"ROW")
    time.sleep(0.01)
    path.write_bytes(data)


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [truncated, appended, rewritten, removed])
@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_changes_under_a_run(
    tmp_path: Path, model_folder: Path, change: Callable[[Path], None], which: int
) -> None:
    files = [write_rows(tmp_path / "in", 400, name, start=first) for name, first in (("a.jsonl", 0), ("b.jsonl", 1000))]
    old, stamp = files[which].read_bytes(), files[which].stat()
    a_job = job_of(tmp_path, tmp_path / "in")
    changed = []

    def think() -> None:
        if not changed:
            changed.append(True)
            change(files[which])

    # one that is gone before it is opened is not found
    with pytest.raises((DataError, StorageError), match=f"{files[which].name}: (this input file|not found)"):
        start(a_job, FakeModel(model_folder, FakeEngine(running=32, think=think)))
    assert not (tmp_path / "out/_SUCCESS").exists()
    if change is not removed:
        with pytest.raises(ConfigError, match="not the one this run was started with"):
            start(a_job, FakeModel(model_folder))
    files[which].write_bytes(old)
    os.utime(files[which], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert start(a_job, FakeModel(model_folder))["rows"] == 800
    assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in [*range(400), *range(1000, 1400)]]
    assert all(row["input_text"].startswith('"row ') for row in results(a_job))


def test_a_file_that_moved_to_another_value_of_its_folder(tmp_path: Path, model_folder: Path) -> None:
    """Columns that folders give are content: a run must not mix two values of them."""
    write_rows(tmp_path / "in/day=1", 200, "x.jsonl")
    a_job = job_of(tmp_path, tmp_path / "in", output__columns=["day"])
    with pytest.raises(Interrupted):
        slow = FakeEngine(running=8, think=lambda: time.sleep(0.01))
        start(a_job, FakeModel(model_folder, slow), job.RunOptions(max_output_tokens=300))
    (tmp_path / "in/day=1").rename(tmp_path / "in/day=2")
    with pytest.raises(ConfigError, match="not the one this run was started with"):
        start(a_job, FakeModel(model_folder))
    (tmp_path / "in/day=2").rename(tmp_path / "in/day=1")
    assert start(a_job, FakeModel(model_folder))["rows"] == 200


@pytest.mark.parametrize("name", ["index/00000.json", "inputs/000001.json", "job.json"])
def test_records_changed_by_hand_are_damaged(tmp_path: Path, model_folder: Path, name: str) -> None:
    """A list that lost an entry is still valid JSON; its checksum tells."""
    a_job = job_of(tmp_path, write_rows(tmp_path, 100))
    with pytest.raises(Interrupted):
        slow = FakeEngine(running=8, think=lambda: time.sleep(0.01))
        start(a_job, FakeModel(model_folder, slow), job.RunOptions(max_output_tokens=500))
    path = tmp_path / "out/_batchgen" / name
    record = json.loads(path.read_bytes())
    for key, value in record.items():
        if isinstance(value, (list, dict)) and key in ("shards", "files", "shape"):
            record[key] = value[:-1] if isinstance(value, list) else {}
    path.write_text(json.dumps(record))
    try:
        start(a_job, FakeModel(model_folder))
    except BatchgenError as error:
        assert isinstance(error, ConfigError)
    else:
        assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in range(100)]


class Server(http.server.BaseHTTPRequestHandler):
    status = 500

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *what: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}/rows.jsonl"
        found.shutdown()


@pytest.mark.parametrize(
    ("status", "error"), [(500, StorageError), (503, StorageError), (429, StorageError), (403, PermissionDenied)]
)
def test_a_server_that_fails_is_no_empty_input(
    server: str, status: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "status", status)
    with pytest.raises(error):
        expand([server], {}, allow_empty=True)


def test_what_a_server_has_not_is_absent(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "status", 404)
    assert expand([server], {}, allow_empty=True) == []
    with pytest.raises(StorageError):
        expand(["http://127.0.0.1:1/rows.jsonl"], {}, allow_empty=True)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text("{}\n")
    with pytest.raises(DataError, match="not UTF-8"):
        expand([str(tmp_path)], {})
