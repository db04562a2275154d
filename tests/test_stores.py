"""A store whose names are created once, whole and durable: the same contract on disk, in memory and over HTTP."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from s3 import Bucket, nth

from batchgen.errors import ConfigError, DataError, PermissionDenied, StorageError
from batchgen.io import remote
from batchgen.io.files import expand, open_input
from batchgen.io.storage import ObjectMissing, PermanentError, SteadyFile
from batchgen.io.stores import Store
from batchgen.runfolder import put_new

counter = itertools.count()


@dataclass
class Folder:
    """A place for a run: stores opened in it see the same files."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def store(self, **given: Any) -> Store:
        return Store(self.url, self.options, **given)


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "s3":
        bucket = request.getfixturevalue("s3")
        return Folder(bucket.url, bucket.storage_options)
    return Folder(str(tmp_path / "run") if request.param == "local" else f"memory://run{next(counter)}/out")


def race(count: int, attempt: Callable[[int], bool]) -> list[int]:
    """Who of `count` threads that start together succeeds."""
    barrier = threading.Barrier(count)
    won: list[int] = []

    def run(number: int) -> None:
        barrier.wait()
        if attempt(number):
            won.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def write(path: Path, data: bytes = b"{}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_create_read_replace_delete(folder: Folder) -> None:
    store = folder.store()
    assert store.list() == []
    assert not store.exists("a/b/one.json")
    assert store.create("a/b/one.json", b"first") is True
    assert store.create("a/b/one.json", b"second") is False
    assert store.read("a/b/one.json") == b"first"
    store.replace("a/b/one.json", b"longer than before")
    store.replace("a/new", b"")
    assert store.read("a/b/one.json") == b"longer than before"
    assert store.size("a/b/one.json") == 18
    assert store.size("a/new") == 0
    assert store.exists("a/new")
    with store.open("a/b/one.json") as file:
        file.seek(-6, os.SEEK_END)
        assert file.read() == b"before"
    store.delete("a/b/one.json")
    store.delete("a/b/one.json")
    assert not store.exists("a/b/one.json")
    assert store.create("a/b/one.json", b"third") is True
    assert store.list() == ["a/b/one.json", "a/new"]


def test_atomic_create_is_promised_only_where_it_holds(tmp_path: Path) -> None:
    assert Store(str(tmp_path)).atomic_create is True
    assert Store(f"file://{tmp_path}").atomic_create is True
    assert Store("memory://somewhere").atomic_create is True
    assert Store("memory://somewhere").can_compare is True
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    store = Store("elsewhere://run")
    assert store.atomic_create is False and store.can_compare is False
    assert store.create("a", b"1") and not store.create("a", b"2") and store.read("a") == b"1"


def test_list_is_sorted_recursive_and_fresh(folder: Folder) -> None:
    """Case F6: what another process adds or grows is seen at once."""
    store, other = folder.store(), folder.store()
    for name in ("part-1", "part-0", "state/pieces/b", "state/pieces/a", "state/x", "statement"):
        store.create(name, b"1")
    assert store.list() == ["part-0", "part-1", "state/pieces/a", "state/pieces/b", "state/x", "statement"]
    assert store.list("state") == ["state/pieces/a", "state/pieces/b", "state/x"]
    assert store.list("state/pieces/") == ["state/pieces/a", "state/pieces/b"]
    assert store.list("missing") == []
    assert store.list("part-0") == store.list("missing", recursive=False) == []
    assert store.list(recursive=False) == ["part-0", "part-1", "statement"]
    assert store.list("state", recursive=False) == ["state/x"]
    other.create("state/pieces/c", b"1")
    other.replace("state/x", b"12345")
    other.delete("part-0")
    assert store.list("state") == ["state/pieces/a", "state/pieces/b", "state/pieces/c", "state/x"]
    assert store.size("state/x") == 5
    assert not store.exists("part-0")


def test_missing_names_are_told_apart(folder: Folder) -> None:
    store = folder.store()
    for call in (store.read, store.size, store.open):
        with pytest.raises(ObjectMissing, match=r"run.*nothing\.json"):
            call("nothing.json")
    assert issubclass(ObjectMissing, StorageError)


def test_names_stay_inside_the_folder(folder: Folder) -> None:
    for name in ("../x", "a/../../x", "/etc/x", "a//b"):
        with pytest.raises(AssertionError):
            folder.store().create(name, b"")


@pytest.mark.parametrize("round_", range(3))
def test_of_concurrent_creates_one_wins(folder: Folder, round_: int) -> None:
    won = race(8, lambda number: folder.store().create("part", str(number).encode() * 1000))
    assert len(won) == 1
    assert folder.store().read("part") == str(won[0]).encode() * 1000
    assert folder.store().list() == ["part"]


def test_bytes_are_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def recorded(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            what = name
            if name == "fsync":
                target = os.readlink(f"/proc/self/fd/{args[0]}")
                what = "fsync folder" if os.path.isdir(target) else f"fsync {os.path.basename(target)[:5]}"
            calls.append(what)
            return real(*args, **kwargs)

        return call

    store = Store(str(tmp_path))
    for name in ("fsync", "link", "unlink", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    store.create("a", b"x")
    assert calls == ["fsync folder", "fsync .tmp-", "link", "fsync folder", "unlink"]
    calls.clear()
    store.replace("a", b"x")
    assert calls[:3] == ["fsync .tmp-", "replace", "fsync folder"]
    calls.clear()
    store.create("new/deep/a", b"x")
    assert calls == ["fsync folder", "fsync folder", "fsync .tmp-", "link", "fsync folder", "unlink"]
    assert os.listdir(tmp_path / "new" / "deep") == ["a"]


CRASH = """
import os, sys
from batchgen.io.stores import Store
store = Store(sys.argv[1])
store.create("before", b"1")
setattr(os, sys.argv[2], lambda *arguments, **names: os._exit(9))
store.create("part", b"whole")
"""


@pytest.mark.parametrize(("at", "there"), [("fsync", False), ("link", False), ("unlink", True)])
def test_a_crashed_create_leaves_at_most_a_hidden_file(tmp_path: Path, at: str, there: bool) -> None:
    """Case F3: killed at any step, the name is whole or not there."""
    result = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), at], check=False)
    assert result.returncode == 9
    temps = [name for name in os.listdir(tmp_path) if name.startswith(".tmp-") and name.endswith("-part")]
    assert len(temps) == 1
    store = Store(str(tmp_path))
    assert store.list() == (["before", "part"] if there else ["before"])
    store.sweep()
    assert temps[0] not in os.listdir(tmp_path)
    assert store.create("part", b"again") is not there
    assert store.read("part") == (b"whole" if there else b"again")


def test_sweep_removes_what_this_store_staged_and_what_the_dead_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case F14: never a living writer's file, nor one of another machine, nor one that tells nothing."""
    store = Store(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(OSError(errno.EIO, "Input/output error")))
        assert store.create("_batchgen/part", b"x") is True  # it is there, whatever becomes of the staged file
    folder = tmp_path / "_batchgen"
    (own,) = (name for name in os.listdir(folder) if name != "part")
    tag, pid, begun, number = own.split("-")[1:5]
    assert int(pid) == os.getpid()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    living = [
        f".tmp-{tag}-{pid}-{begun}-{'0' * 32}-part",  # of another Store in this process
        f".tmp-{tag}-1-{round(psutil.Process(1).create_time())}-{number}-part",
        f".tmp-{'0' * 12}-{dead.pid}-{begun}-{number}-part",  # another machine's
        ".tmp-0123-part",
        f".tmp-{tag}-{dead.pid}",
    ]
    gone = [f".tmp-{tag}-{dead.pid}-{begun}-{number}-part", f".tmp-{tag}-1-{int(begun) + 1000}-{number}-part"]
    for name in living + gone:
        write(folder / name)
    write(tmp_path / ".hidden" / gone[0])
    store.sweep()
    assert sorted(os.listdir(folder)) == sorted([*living, "part"])
    assert os.listdir(tmp_path / ".hidden") == gone[:1]


def failing(error: BaseException) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("at", ["fsync", "link"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_create_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: BaseException
) -> None:
    store = Store(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, at, failing(error))
        with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
            store.create("part", b"x")
    if isinstance(error, OSError):
        assert str(tmp_path / "part") in str(caught.value) and "No space left" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_permission_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(PermissionDenied, match="part: permission denied"):
        Store(str(tmp_path)).create("part", b"x")


def test_a_link_that_was_made_although_the_answer_is_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    assert Store(str(tmp_path)).create("part", b"x") is True


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_a_rename_that_does_not_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", failing(OSError(code, "no links here")))
    store = Store(str(tmp_path))
    assert store.create("part", b"one") is True
    assert store.create("part", b"two") is False
    assert store.read("part") == b"one"
    assert os.listdir(tmp_path) == ["part"]
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    with pytest.raises(StorageError, match="neither hard links nor a rename"):
        store.create("other", b"x")
    assert os.listdir(tmp_path) == ["part"]


def test_a_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    write(tmp_path / "state")
    store = Store(str(tmp_path))
    with pytest.raises(ConfigError, match="correct the path"):
        store.create("state/x", b"")
    assert store.list("state") == []
    assert not store.exists("state/x")


class Elsewhere(AbstractFileSystem):
    """A store that nobody vouches for."""

    protocol = "elsewhere"
    files: ClassVar[dict[str, bytes]] = {}

    def info(self, path: str, **kwargs: Any) -> Any:
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(self.files[path])}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        return self.files[path]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.files[path] = value


class Failing(MemoryFileSystem):
    """A store that is away."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    error: ClassVar[BaseException] = ConnectionError("connection reset")

    def info(self, path: str, **kwargs: Any) -> Any:
        raise self.error

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        raise self.error

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False, **kwargs: Any) -> Any:
        raise self.error

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        raise self.error


def test_a_failing_store_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    store = Store("failing://bucket/run")
    calls = (store.list, lambda: store.exists("a"), lambda: store.create("a", b""), lambda: store.replace("a", b""))
    for call in calls:
        with pytest.raises(StorageError, match=r"failing://bucket/run.*connection reset"):
            call()
    with pytest.raises(StorageError, match="connection reset"):
        expand(["failing://bucket/*.jsonl"], {}, allow_empty=True)

    class ClientError(Exception):
        """A client's own kind of error."""

    monkeypatch.setattr(Failing, "error", ClientError("slow down"))
    with pytest.raises(StorageError, match="ClientError: slow down"):
        store.list()
    monkeypatch.setattr(Failing, "error", PermissionError("AccessDenied"))
    with pytest.raises(PermissionDenied, match="AccessDenied"):
        store.list()


def test_unknown_scheme_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="nosuch://x"):
        Store("nosuch://x").list()


def test_a_failing_store_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path), retries=2, pause=0.001)
    whole, failures = os.link, [OSError(errno.EIO, "Input/output error")] * 2

    def link(*names: str) -> None:
        if failures:
            raise failures.pop()
        whole(*names)

    monkeypatch.setattr("batchgen.io.localdisk.os.link", link)
    assert store.create("a", b"1") and store.read("a") == b"1"
    failures[:] = [OSError(errno.EIO, "Input/output error")] * 3
    with pytest.raises(StorageError, match="Input/output error"):
        store.create("b", b"1")
    failures[:] = [PermissionError(errno.EACCES, "Permission denied")]
    with pytest.raises(PermissionDenied):
        store.create("c", b"1")
    assert not failures and store.list() == ["a"]


def test_pauses_grow_are_drawn_from_zero_and_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return high

    monkeypatch.setattr("batchgen.io.storage.random.uniform", uniform)
    monkeypatch.setattr("batchgen.io.storage.time.sleep", sleep)
    monkeypatch.setattr("batchgen.io.storage.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "link", failing(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StorageError):
        Store(str(tmp_path), retries=100).create("a", b"1")
    assert drawn[:6] == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 20)]
    assert clock[0] <= 60  # the last pause would have led past it


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_what_another_try_cannot_cure_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PermissionDenied if code == errno.EROFS else StorageError) as caught:
        Store(str(tmp_path), retries=5).replace("a", b"1")
    assert len(calls) == 1
    assert caught.value.exit_code == (77 if code == errno.EROFS else 74)
    assert code == errno.EROFS or f"make room in {tmp_path}" in str(caught.value)


# Compare and set


def test_replace_if_replaces_one_version_only(folder: Folder) -> None:
    store = folder.store()
    assert store.can_compare
    assert store.version("a") is None
    store.create("a", b"one")
    first = store.version("a")
    assert first is not None and store.version("a") == first
    assert store.replace_if("a", b"two", first) is True
    assert store.read("a") == b"two"
    assert store.replace_if("a", b"three", first) is False
    assert store.read("a") == b"two"
    assert store.version("a") not in (None, first)


def test_replace_if_of_an_absent_name_is_lost(folder: Folder) -> None:
    """Case F8: the lease object was deleted meanwhile."""
    store = folder.store()
    store.create("a", b"one")
    version = store.version("a")
    assert version is not None
    store.delete("a")
    assert store.replace_if("a", b"two", version) is False
    assert store.replace_if("deep/er", b"two", version) is False
    assert store.list() == []


def test_of_concurrent_replacements_one_wins(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: str, target: str) -> None:
        time.sleep(0.05)  # between comparing and renaming
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    folder.store().create("part", b"old")
    version = folder.store().version("part")
    assert version is not None
    won = race(8, lambda number: folder.store().replace_if("part", str(number).encode(), version))
    assert len(won) == 1
    assert folder.store().read("part") == str(won[0]).encode()


# Faults over HTTP

BEFORE_AND_AFTER = pytest.mark.parametrize("when", ["before", "after"])
PASSING = [(500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests"), (409, "ConditionalRequestConflict")]


def tried_out(s3: Bucket, **given: Any) -> Store:
    """A store that has asked the server already what it can do."""
    store = Store(s3.url, s3.storage_options, pause=0.001, **given)
    assert store.atomic_create and store.can_compare
    s3.server.requests.clear()
    return store


def sent(s3: Bucket, method: str) -> int:
    return sum(request["REQUEST_METHOD"] == method for request in s3.server.requests)


@BEFORE_AND_AFTER
@pytest.mark.parametrize(("status", "code"), PASSING)
def test_an_unknown_outcome_is_settled(s3: Bucket, when: str, status: int, code: str) -> None:
    store = tried_out(s3, retries=1)
    s3.server.fault = nth(1, (when, status, code), REQUEST_METHOD="PUT")
    assert put_new(store, "part", b"mine") is True
    assert sent(s3, "PUT") == 2  # neither botocore nor s3fs repeats it too
    s3.server.fault = nth(1, (when, status, code), REQUEST_METHOD="PUT")
    assert put_new(store, "part", b"other") is False
    assert store.read("part") == b"mine"
    s3.server.fault = nth(1, (when, status, code), REQUEST_METHOD="PUT")
    version = store.version("part")
    assert version is not None
    assert store.replace_if("part", b"newer", version) is True
    s3.server.fault = nth(1, (when, status, code), REQUEST_METHOD="PUT")
    assert store.replace_if("part", b"newest", version) is False
    assert store.read("part") == b"newer"
    for name in ("GET", "HEAD") if when == "before" else ():
        s3.server.fault = nth(1, ("before", status, code), REQUEST_METHOD=name)
        assert store.read("part") == b"newer" and store.exists("part") and store.list() == ["part"]


@BEFORE_AND_AFTER
def test_without_another_try_what_stands_there_decides(s3: Bucket, when: str) -> None:
    store = tried_out(s3)
    s3.server.fault = nth(1, (when, 500, "InternalError"), REQUEST_METHOD="PUT")
    if when == "after":
        assert put_new(store, "part", b"mine") is True
    else:
        with pytest.raises(StorageError, match=r"s3://.*/run/part: .*on purpose"):
            put_new(store, "part", b"mine")
        assert not store.exists("part")


@BEFORE_AND_AFTER
def test_a_timeout_is_tried_again(s3: Bucket, when: str) -> None:
    s3.storage_options["config_kwargs"] = {"read_timeout": 0.3, "retries": {"total_max_attempts": 1}}
    store = tried_out(s3, retries=1)
    answered = threading.Event()
    late = nth(1, (when, 200, "OK"), REQUEST_METHOD="PUT")

    def fault(request: dict[str, Any]) -> tuple[str, int, str] | None:
        found = late(request)
        if found is None:
            return None
        if when == "after":
            key, body = request["PATH_INFO"].split("/", 2)[2], request["wsgi.input"].read()
            s3.client().put_object(Bucket=s3.name, Key=key, Body=body)
        answered.wait(5)
        return "before", 500, "TooLate"

    s3.server.fault = fault
    try:
        assert put_new(store, "part", b"mine") is True
    finally:
        answered.set()
    assert store.read("part") == b"mine"


def test_a_write_ends_in_bounded_time_whatever_the_client_waits_for(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, answered = tried_out(s3), threading.Event()
    monkeypatch.setattr(remote, "PUT_SECONDS", 0.2)

    def fault(request: dict[str, Any]) -> None:
        answered.wait(10)

    s3.server.fault = fault
    try:
        for call in (
            lambda: store.create("a", b""),
            lambda: store.replace("a", b""),
            lambda: store.replace_if("a", b"", "any"),
        ):
            with pytest.raises(StorageError, match="Timeout"):
                call()
    finally:
        answered.set()


def test_tries_are_as_many_as_asked_for(s3: Bucket) -> None:
    store = tried_out(s3, retries=2)
    s3.server.fault = lambda request: ("before", 503, "SlowDown")
    for call in (lambda: store.create("a", b""), lambda: store.read("a"), lambda: store.exists("a"), store.list):
        s3.server.requests.clear()
        with pytest.raises(StorageError, match=r"s3://.*/run"):
            call()
        assert len(s3.server.requests) == 3


def test_a_refusal_is_not_tried_again(s3: Bucket) -> None:
    store = tried_out(s3, retries=5)
    s3.server.fault = lambda request: ("before", 403, "AccessDenied")
    for call in (lambda: store.create("a", b""), lambda: store.read("a"), store.list):
        s3.server.requests.clear()
        with pytest.raises(PermissionDenied, match="permission denied"):
            call()
        assert len(s3.server.requests) == 1
    s3.server.fault = lambda request: ("before", 400, "InvalidRequest")
    s3.server.requests.clear()
    with pytest.raises(PermanentError, match="refuses this"):
        store.replace("a", b"")
    assert len(s3.server.requests) == 1


def test_a_missing_bucket_and_missing_credentials_are_named(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Store("s3://no-such-bucket/run", s3.storage_options, retries=5)
    for call in (lambda: nowhere.create("a", b""), lambda: nowhere.read("a"), nowhere.list, lambda: nowhere.open("a")):
        with pytest.raises(ConfigError, match="there is no such bucket"):
            call()
    with pytest.raises(ConfigError, match="there is no such bucket"):
        expand(["s3://no-such-bucket/*.jsonl"], s3.storage_options)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {key: value for key, value in s3.storage_options.items() if key not in ("key", "secret")}
    with pytest.raises(PermissionDenied, match="no credentials"):
        Store(s3.url, options, retries=5).read("a")


def ignores(header: str) -> Callable[[dict[str, Any]], None]:
    """A server that does not know a condition."""

    def fault(request: dict[str, Any]) -> None:
        request.pop(header, None)

    return fault


@pytest.mark.parametrize("answer", [None, (501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_server_without_conditional_create_is_found_out(s3: Bucket, answer: tuple[int, str] | None) -> None:
    def fault(request: dict[str, Any]) -> tuple[str, int, str] | None:
        knows = request.pop("HTTP_IF_NONE_MATCH", None) is None
        return None if answer is None or knows else ("before", *answer)

    s3.server.fault = fault
    store = Store(s3.url, s3.storage_options)
    assert store.create("a", b"one") is True  # asks by itself
    assert store.atomic_create is False and store.can_compare is False
    assert store.create("a", b"two") is False
    assert store.read("a") == b"one"
    version = store.version("a")
    assert version is not None and store.replace_if("a", b"two", version)
    assert not store.replace_if("a", b"three", version) and not store.replace_if("b", b"three", version)
    assert store.list() == ["a"]


def test_a_server_without_conditional_replace_is_found_out(s3: Bucket) -> None:
    s3.server.fault = ignores("HTTP_IF_MATCH")
    store = Store(s3.url, s3.storage_options)
    assert store.atomic_create is True and store.can_compare is False
    store.create("a", b"one")
    assert not store.replace_if("a", b"two", "another") and store.read("a") == b"one"
    assert store.list() == ["a"]


def test_a_store_is_tried_out_once_and_only_for_writing(s3: Bucket) -> None:
    store = Store(s3.url, s3.storage_options, retries=1, pause=0.001)
    assert store.list() == [] and not store.exists("a")
    assert sent(s3, "PUT") == 0
    s3.server.fault = nth(1, ("after", 500, "InternalError"), REQUEST_METHOD="PUT")
    won = race(4, lambda number: store.create(f"name-{number}", b""))
    assert len(won) == 4 and store.atomic_create
    probes = [request for request in s3.server.requests if "/probe/" in request["PATH_INFO"]]
    assert sum(request["REQUEST_METHOD"] == "DELETE" for request in probes) == 1
    assert len(store.list()) == 4


def test_a_large_part_is_one_conditional_request(s3: Bucket) -> None:
    store, data = tried_out(s3), bytes(101 << 20)  # beyond where s3fs would cut it
    assert store.create("part", data) is True
    (put,) = [request for request in s3.server.requests if request["REQUEST_METHOD"] == "PUT"]
    assert put["HTTP_IF_NONE_MATCH"] == "*" and s3.server.requests == [put]
    assert store.create("part", b"other") is False
    s3.server.requests.clear()
    assert store.read("part") == data
    assert [request["REQUEST_METHOD"] for request in s3.server.requests] == ["GET"]


def test_a_multipart_upload_is_conditional_and_is_given_up_when_it_fails(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is larger than one request may be; moto checks the condition of one request only."""
    monkeypatch.setattr(remote, "ONE_PUT_BYTES", 10 << 20)
    store, data = tried_out(s3), os.urandom(1 << 20) * 12
    s3.server.fault = nth(2, ("before", 500, "InternalError"), REQUEST_METHOD="PUT")
    with pytest.raises(StorageError, match="on purpose"):
        put_new(store, "part", data)
    assert sent(s3, "DELETE") == 1
    assert not s3.client().list_multipart_uploads(Bucket=s3.name).get("Uploads")
    assert store.list() == []
    s3.server.fault = nth(2, ("after", 500, "InternalError"), REQUEST_METHOD="POST")  # the last answer is lost
    s3.server.requests.clear()
    assert put_new(store, "part", data) is True
    *_, last = (request for request in s3.server.requests if request["REQUEST_METHOD"] == "POST")
    assert last["HTTP_IF_NONE_MATCH"] == "*"
    assert not s3.client().list_multipart_uploads(Bucket=s3.name).get("Uploads")


def test_a_listing_is_one_request_and_the_top_is_not_walked(s3: Bucket) -> None:
    store = tried_out(s3)
    for name in ("part-0", "_batchgen/job.json", "_batchgen/pieces/0/1", "_batchgen/pieces/0/2", "_batchgen/.hidden/x"):
        store.create(name, b"1")
    for list_ in (store.list, lambda: store.list("_batchgen"), lambda: store.list(recursive=False)):
        s3.server.requests.clear()
        list_()
        assert len(s3.server.requests) == 1
    assert "delimiter=%2F" in s3.server.requests[0]["QUERY_STRING"]
    assert store.list(recursive=False) == ["part-0"]
    assert store.list("_batchgen") == ["_batchgen/job.json", "_batchgen/pieces/0/1", "_batchgen/pieces/0/2"]


def test_connections_and_handles_are_bounded(folder: Folder) -> None:
    store = folder.store()
    for number in range(40):
        store.create(f"{number}", b"0123456789")
    before, most = len(os.listdir("/proc/self/fd")), []

    def look(number: int) -> bool:
        with store.open(f"{number}") as file:
            file.seek(-3, os.SEEK_END)
            assert file.read() == b"789"
            most.append(len(os.listdir("/proc/self/fd")) - before)
        return store.replace(f"{number}", b"") is None and store.size(f"{number}") == 0

    assert len(race(24, look)) == 24  # each holds two at most
    assert max(most) < 64
    if not folder.url.startswith("s3"):
        assert len(os.listdir("/proc/self/fd")) <= before


# Reading on after a failure


@pytest.fixture
def input_file(folder: Folder) -> str:
    folder.store().create("input", bytes(range(256)) * (3 << 12))  # three times what is read ahead
    return f"{folder.url}/input"


class Breaking:
    """Makes the `at`-th read of any file fail, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: Exception, between: Callable[[], None]) -> None:
        self.count = 0
        real = SteadyFile._reopened
        opened = SteadyFile.__init__

        def wrap(file: Any) -> Any:
            class Wrapped:
                def read(inner, size: int = -1) -> bytes:
                    self.count += 1
                    if self.count == at:
                        between()
                        raise error
                    return bytes(file.read(size))

                def __getattr__(inner, name: str) -> Any:
                    return getattr(file, name)

            return Wrapped()

        def init(steady: Any, *args: Any, **kwargs: Any) -> None:
            opened(steady, *args, **kwargs)
            steady._file = wrap(steady._file)

        def reopened(steady: Any) -> Any:
            steady._file = wrap(real(steady))
            return steady._file

        monkeypatch.setattr(SteadyFile, "__init__", init)
        monkeypatch.setattr(SteadyFile, "_reopened", reopened)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_reading_goes_on_where_it_was(
    folder: Folder, input_file: str, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr("batchgen.io.storage.PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("batchgen.io.storage.time.sleep", lambda seconds: None)
    Breaking(monkeypatch, at, OSError(errno.EIO, "Input/output error"), lambda: None)
    whole = bytes(range(256)) * (3 << 12)
    with open_input(input_file, folder.options, retries=1) as file:
        assert b"".join(iter(lambda: file.read(400_000), b"")) == whole
        assert file.seek(-3, os.SEEK_END) == len(whole) - 3
        assert file.read() == whole[-3:] and file.read(1) == b""
        file.seek(10)
        assert file.seek(5, os.SEEK_CUR) == file.tell() == 15
        buffer = bytearray(4)
        assert file.readinto(buffer) == 4 and buffer == whole[15:19]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_without_another_try_the_failure_is_named(
    folder: Folder, input_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Breaking(monkeypatch, 2, OSError(errno.EIO, "Input/output error"), lambda: None)
    with open_input(input_file, folder.options, retries=0) as file:
        assert len(file.read(100)) == 100
        with pytest.raises(StorageError, match="input: Input/output error"):
            file.read(100)


def test_a_file_that_changed_meanwhile_is_not_read_on(
    folder: Folder, input_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.io.storage.time.sleep", lambda seconds: None)
    other = bytes(range(1, 256)) + b"\0"
    change = lambda: folder.store().replace("input", other * (3 << 12))  # noqa: E731
    Breaking(monkeypatch, 2, OSError(errno.EIO, "Input/output error"), change)
    with open_input(input_file, folder.options, retries=3) as file:
        assert file.read(3) == b"\0\1\2"
        with pytest.raises(DataError, match="input: the file was changed while it was read"):
            file.read(3)


def test_answers_lost_while_reading_over_http(s3: Bucket) -> None:
    store = tried_out(s3, retries=1)
    data = os.urandom(3 << 20)
    store.create("input", data)
    for number in (1, 2, 3):
        s3.server.fault = nth(number, ("before", 503, "SlowDown"), REQUEST_METHOD="GET")
        with store.open("input") as file:
            assert b"".join(iter(lambda: file.read(500_000), b"")) == data
    s3.server.fault = nth(1, ("before", 500, "InternalError"), REQUEST_METHOD="HEAD")
    with store.open("input") as file:
        file.seek(-10, os.SEEK_END)
        assert file.read() == data[-10:]
