"""Before anything imports torch; and what many tests share: a model's folder, stores, an S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined: its tests run on CPU tensors

import pytest

from batchgen import share_cores

if TYPE_CHECKING:
    from s3 import Bucket, S3Server

    from batchgen.io.stores import Store

share_cores()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, with a chat template."""
    from fakes import CHATML, byte_tokenizer

    return byte_tokenizer(tmp_path_factory.mktemp("model") / "bytes", chat_template=CHATML)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all tests: it takes a second to start."""
    from s3 import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[Bucket]:
    """A fresh bucket: `url` and `storage_options` for a Store or an input file."""
    yield s3_server.bucket()
    s3_server.fault = lambda request: None


@pytest.fixture
def memory() -> Store:
    from scripted_job import fresh_memory

    return fresh_memory()


@pytest.fixture
def every_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are written whenever one is asked for."""
    monkeypatch.setattr("batchgen.lease.HEARTBEAT_SECONDS", 0.0)


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who died and lives on in this process counts as dead."""
    from history import let_the_dead_be_dead

    let_the_dead_be_dead(monkeypatch)
