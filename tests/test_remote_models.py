"""Models in object stores: what is downloaded, when again, and how a download fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from s3 import nth
from tiny import tiny_model

from batchgen.errors import ConfigError, ModelError, PermissionDenied, StorageError
from batchgen.weights import open_checkpoint, resolve

if TYPE_CHECKING:
    from s3 import Bucket


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model(folder, max_shard_size="150KB")
    return folder


class Remote(NamedTuple):
    bucket: Bucket
    url: str
    cache: Path

    def put(self, name: str, data: bytes) -> None:
        self.bucket.client().put_object(Bucket=self.bucket.name, Key=f"models/{name}", Body=data)

    def fetch(self) -> Path:
        return resolve(self.url, storage_options=self.bucket.storage_options)

    def fetched(self) -> list[str]:
        """The objects that were read since the last call."""
        requests, self.bucket.server.requests[:] = list(self.bucket.server.requests), []
        paths = [r["PATH_INFO"] for r in requests if r["REQUEST_METHOD"] == "GET"]
        return sorted({path.rpartition("/")[2] for path in paths if "/models/" in path})


@pytest.fixture
def remote(s3: Bucket, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    found = Remote(s3, f"s3://{s3.name}/models", tmp_path / "cache")
    for file in sharded.iterdir():
        found.put(file.name, file.read_bytes())
    for name in (
        "pytorch_model.bin",
        "modeling.py",
        "consolidated.safetensors",
        "model.safetensors",
        "onnx/config.json",
    ):
        found.put(name, b"never read")
    s3.server.requests.clear()
    return found


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.name != ".lock"}


def test_a_folder_is_downloaded_once_and_only_what_the_model_needs(remote: Remote, sharded: Path) -> None:
    folder = remote.fetch()
    assert folder.is_relative_to(remote.cache)
    assert names(folder) == names(sharded)
    assert open_checkpoint(folder).fingerprint() == open_checkpoint(sharded).fingerprint()
    assert set(remote.fetched()) == names(sharded)
    assert remote.fetch() == folder and remote.fetched() == []


def test_an_index_that_is_ignored_chooses_no_files(remote: Remote, sharded: Path) -> None:
    index = "model.safetensors.index.json"
    stale = (sharded / index).read_text().replace("-of-0000", "-of-0009")
    remote.put(index, stale.encode())
    remote.bucket.client().delete_object(Bucket=remote.bucket.name, Key="models/model.safetensors")
    folder = resolve(remote.url, storage_options=remote.bucket.storage_options, ignore_index=True)
    found = dict(open_checkpoint(folder, ignore_index=True).stream())
    assert sorted(found) == sorted(open_checkpoint(sharded).names)
    with pytest.raises(ModelError, match=r"missing shard model-.*model\.ignore_index"):
        open_checkpoint(remote.fetch())


def test_another_content_comes_into_another_folder(remote: Remote, sharded: Path) -> None:
    before = remote.fetch()
    content = (sharded / "config.json").read_bytes()
    remote.put("config.json", content.replace(b"silu", b"gelu"))  # of the same size
    after = remote.fetch()
    assert after != before
    assert (before / "config.json").read_bytes() == content
    assert json.loads((after / "config.json").read_text())["hidden_act"] == "gelu"


def test_a_killed_download_goes_on_file_by_file(remote: Remote, sharded: Path) -> None:
    last = sorted(sharded.glob("*.safetensors"))[-1].name
    denied = {"PATH_INFO": f"/{remote.bucket.name}/models/{last}", "REQUEST_METHOD": "GET"}
    remote.bucket.server.fault = nth(1, ("before", 403, "AccessDenied"), **denied)
    with pytest.raises(PermissionDenied, match=last):
        remote.fetch()
    (folder,) = (remote.cache / "models").iterdir()
    assert last not in names(folder) and not list(folder.glob("*.partial"))
    (folder / "model-00001.safetensors.1.partial").write_bytes(b"left by a process that was killed")
    whole = names(folder) - {"model-00001.safetensors.1.partial"}
    remote.fetched()
    assert remote.fetch() == folder
    assert last in remote.fetched() and names(folder) == names(sharded) and "config.json" in whole
    assert open_checkpoint(folder).fingerprint() == open_checkpoint(sharded).fingerprint()


def test_a_read_that_fails_once_is_tried_again(remote: Remote, sharded: Path) -> None:
    last = sorted(sharded.glob("*.safetensors"))[-1].name
    fault = nth(1, ("before", 500, "InternalError"), PATH_INFO=f"/{remote.bucket.name}/models/{last}")
    remote.bucket.server.fault = fault
    assert open_checkpoint(remote.fetch()).fingerprint() == open_checkpoint(sharded).fingerprint()


def test_workers_that_start_together_share_one_download(remote: Remote, sharded: Path) -> None:
    code = (
        "import sys, json; from batchgen.weights import resolve; "
        "print(resolve(sys.argv[1], None, json.loads(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, remote.url, json.dumps(remote.bucket.storage_options)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    assert len(found) == 1 and all(worker.returncode == 0 for worker in workers)
    assert open_checkpoint(found.pop()).fingerprint() == open_checkpoint(sharded).fingerprint()
    weights = [r for r in remote.bucket.server.requests if r["REQUEST_METHOD"] == "GET" and "-of-" in r["PATH_INFO"]]
    assert len(weights) == len(list(sharded.glob("*.safetensors")))


def test_one_gguf_file_is_downloaded_alone(remote: Remote) -> None:
    remote.put("small.gguf", b"GGUF")
    remote.fetched()
    found = resolve(f"{remote.url}/small.gguf", storage_options=remote.bucket.storage_options)
    assert found.name == "small.gguf" and found.read_bytes() == b"GGUF" and remote.fetched() == ["small.gguf"]


def test_what_is_not_there_is_said(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    options = remote.bucket.storage_options
    remote.put("ggufs/small.gguf", b"GGUF")
    for path, error, message in (
        (f"{remote.url}/absent", ModelError, "does not exist"),
        (f"{remote.url}/absent.gguf", ModelError, "does not exist"),
        (f"{remote.url}/modeling.py", ModelError, "a file that is not GGUF"),
        (f"{remote.url}/ggufs", ModelError, "no config.json.*it holds small.gguf"),
        ("s3://no-such-bucket-at-all/model", ConfigError, "no such bucket"),
    ):
        with pytest.raises(error, match=message):
            resolve(path, storage_options=options)
    remote.bucket.server.fault = lambda request: ("before", 403, "AccessDenied")
    with pytest.raises(PermissionDenied):
        remote.fetch()


def test_a_missing_shard_is_found_by_the_reader(remote: Remote, sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[0].name
    remote.bucket.client().delete_object(Bucket=remote.bucket.name, Key=f"models/{gone}")
    with pytest.raises(ModelError, match=f"missing shard {gone}"):
        open_checkpoint(remote.fetch())


def test_a_full_disk_is_found_before_the_download(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match=r"more bytes, and the disk has 0; make room, or set BATCHGEN_CACHE"):
        remote.fetch()
    assert remote.fetched() == []


def test_other_stores_of_fsspec_serve_too(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
    system: Any = fsspec.filesystem("memory")
    for file in sharded.iterdir():
        system.pipe_file(f"/remote-model/{file.name}", file.read_bytes())
    found = open_checkpoint(resolve("memory://remote-model/"))
    assert found.fingerprint() == open_checkpoint(sharded).fingerprint()
