"""Before anything imports torch; and the S3 server that tests of stores share."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined: its tests run on CPU tensors

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from batchgen import share_cores

if TYPE_CHECKING:
    from s3 import Bucket, S3Server

    from batchgen.io.stores import Store

share_cores()


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
