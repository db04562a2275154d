"""Storage that gives up in the middle of a job: the right exit code, earlier work kept, another start completes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeModel, byte_tokenizer
from test_job import job_of, results, start, write_rows

from batchgen.errors import ExitCode, PermissionDenied, StorageError
from batchgen.io.localdisk import LocalDisk


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("model") / "bytes")


class Disk:
    """A disk that refuses writes from the `after`-th on, until it is `mended`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, after: int) -> None:
        self.mended, self.refused = False, 0
        writes = 0
        write = LocalDisk._write_temp

        def failing(disk: LocalDisk, path: str, chunks: Any) -> str:
            nonlocal writes
            writes += 1
            if not self.mended and writes > after:
                self.refused += 1
                raise OSError(number, os.strerror(number), path)
            return write(disk, path, chunks)

        monkeypatch.setattr(LocalDisk, "_write_temp", failing)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("after", [0, 1, 3, 6, 9])
@pytest.mark.parametrize(
    ("number", "error", "code"),
    [
        (errno.ENOSPC, StorageError, ExitCode.IO),
        (errno.EDQUOT, StorageError, ExitCode.IO),
        (errno.EIO, StorageError, ExitCode.IO),
        (errno.EACCES, PermissionDenied, ExitCode.PERMISSION),
        (errno.EROFS, PermissionDenied, ExitCode.PERMISSION),
    ],
)
def test_a_disk_that_takes_no_more(
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[Exception],
    code: ExitCode,
    after: int,
    kind: str,
) -> None:
    monkeypatch.setattr("batchgen.io.storage.time.sleep", lambda seconds: None)
    monkeypatch.setattr("batchgen.lease.process_runs", lambda pid, started: False)  # the failed start was this process
    a_job = job_of(tmp_path, write_rows(tmp_path / "in", 100), output__format=kind)
    disk = Disk(monkeypatch, number, after)
    with pytest.raises(error, match=os.strerror(number)) as failed:
        start(a_job, FakeModel(model_folder))
    assert failed.value.exit_code == code and disk.refused  # type: ignore[attr-defined]
    parts = {path: path.read_bytes() for path in (tmp_path / "out").glob("part-*")}
    assert not (tmp_path / "out/_SUCCESS").exists()
    disk.mended = True
    assert start(a_job, FakeModel(model_folder))["rows"] == 100
    assert {path: path.read_bytes() for path in parts} == parts
    assert [row["id"] for row in results(a_job)] == [f"k{i}" for i in range(100)]
    assert not list((tmp_path / "out").rglob(".tmp-*"))
