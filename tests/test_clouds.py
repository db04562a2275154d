"""Google Cloud Storage and Azure through their real clients: which conditions reach the wire, what answers mean.

The servers are stand-ins of ours: that the real ones keep these conditions is what `Store.probe` asks them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from clouds import Azure, CloudServer, Google

from batchgen.errors import ConfigError
from batchgen.io.remote import AzureDisk
from batchgen.io.storage import ObjectMissing
from batchgen.io.stores import Store
from batchgen.runfolder import put_new


class Cloud(NamedTuple):
    server: CloudServer
    url: str
    options: dict[str, Any]
    new: dict[str, str]  # the condition of a write that must be a new object's
    condition: str  # the name of the other condition

    def store(self, **given: Any) -> Store:
        return Store(self.url, self.options, pause=0.001, **given)


@pytest.fixture(params=["google", "azure"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    if request.param == "google":
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks another service about the bucket
        pytest.importorskip("gcsfs")
        server = CloudServer(Google)
        options = {"token": "anon", "endpoint_url": server.url, "skip_instance_cache": True}
        yield Cloud(server, "gs://bucket/run", options, {"ifGenerationMatch": "0"}, "ifGenerationMatch")
    else:
        pytest.importorskip("adlfs")
        server = CloudServer(Azure)
        key = base64.b64encode(b"key").decode()
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey={key};BlobEndpoint={server.url}/account;"
        )
        options = {"connection_string": connection, "skip_instance_cache": True}
        yield Cloud(server, "abfs://bucket/run", options, {"If-None-Match": "*"}, "If-Match")
    server.close()


def test_creates_and_replacements_are_conditional(cloud: Cloud) -> None:
    store = cloud.store()
    assert store.atomic_create and store.can_compare
    assert not cloud.server.objects  # what it was tried out with is gone
    cloud.server.writes.clear()
    assert store.create("a", b"one") is True
    assert store.create("a", b"two") is False
    assert cloud.server.writes == [cloud.new, cloud.new]
    assert store.read("a") == b"one"
    first = store.version("a")
    assert first is not None
    cloud.server.writes.clear()
    assert store.replace_if("a", b"two", first) is True
    assert store.replace_if("a", b"three", first) is False
    assert cloud.server.writes == [{cloud.condition: first}] * 2
    assert store.read("a") == b"two"
    store.replace("a", b"three")
    assert cloud.server.writes[-1] == {}
    store.delete("a")
    store.delete("a")
    assert store.replace_if("a", b"four", first) is False  # case F8
    assert store.version("a") is None and not store.exists("a")
    with pytest.raises(ObjectMissing):
        store.read("a")


def test_listing_and_reading(cloud: Cloud) -> None:
    store = cloud.store()
    for name in ("part-0", "_batchgen/x", "_batchgen/y/z"):
        store.create(name, b"0123456789")
    assert store.list() == ["_batchgen/x", "_batchgen/y/z", "part-0"]
    assert store.list(recursive=False) == ["part-0"]
    assert store.list("_batchgen", recursive=False) == ["_batchgen/x"]
    assert store.list("part-0") == store.list("_batchgen/x") == []
    assert store.list("missing") == store.list("missing", recursive=False) == []
    assert store.size("part-0") == 10


def test_an_unknown_outcome_is_settled(cloud: Cloud) -> None:
    """Whoever tries again, gcsfs by itself or we, finds its own first try."""
    store = cloud.store(retries=1)
    assert store.atomic_create
    cloud.server.writes.clear()
    cloud.server.fails.append(503)
    assert put_new(store, "a", b"mine") is True
    assert cloud.server.writes == [cloud.new, cloud.new]
    assert put_new(store, "a", b"other") is False
    assert store.read("a") == b"mine"


def test_a_server_that_ignores_conditions_is_found_out(cloud: Cloud) -> None:
    cloud.server.knows_conditions = False
    store = cloud.store()
    assert store.create("a", b"one") is True and store.create("a", b"two") is False
    assert not store.atomic_create and not store.can_compare
    assert store.read("a") == b"one"


def test_a_missing_container_is_named(cloud: Cloud) -> None:
    nowhere = Store(cloud.url.replace("bucket", "nowhere"), cloud.options)
    for write in (nowhere.create, nowhere.replace):
        with pytest.raises(ConfigError, match=r"//nowhere[^/]*: there is no such bucket or container"):
            write("a", b"")


def test_an_azure_client_that_does_not_translate_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adlfs before 2024.12."""
    core = pytest.importorskip("azure.core.exceptions")
    blob = pytest.importorskip("azure.storage.blob")
    error = core.ResourceExistsError("The specified blob already exists.")
    error.status_code, error.error_code = 409, blob.StorageErrorCode.BLOB_ALREADY_EXISTS
    disk = AzureDisk("abfs://bucket/run", {"account_name": "account", "anon": True})

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(disk._system, "pipe_file", refuses)
    assert disk.create("abfs://bucket/run/a", b"") is False


def test_a_large_part_is_conditional_too(cloud: Cloud) -> None:
    """gcsfs would cut from 50 MiB on; Azure's client cuts from 64 MiB on, and its last request has the condition."""
    store = cloud.store()
    assert store.atomic_create
    cloud.server.writes.clear()
    data = bytes(51 << 20)
    assert store.create("part", data) is True and store.size("part") == len(data)
    assert cloud.server.writes == [cloud.new]
