"""Finding input files by pattern, and a store whose names are created once, whole and durable."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from batchgen.errors import ConfigError, DataError, NoInputError, PermissionDenied, StorageError
from batchgen.io.files import ObjectMissing, Store, expand, local_path, open_input

counter = itertools.count()


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://run{next(counter)}/out"


def write(path: Path, data: bytes = b"{}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(paths: list[str] | str, **options: Any) -> list[str]:
    return [file.path for file in expand([paths] if isinstance(paths, str) else paths, {}, **options)]


# The store


def test_create_read_replace_delete(folder: str) -> None:
    store = Store(folder)
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


def test_atomic_create_is_promised_only_where_it_holds(tmp_path: Path) -> None:
    assert Store(str(tmp_path)).atomic_create is True
    assert Store(f"file://{tmp_path}").atomic_create is True
    assert Store("memory://somewhere").atomic_create is False


def test_list_is_sorted_recursive_and_fresh(folder: str) -> None:
    """Case F6: what another process adds or grows is seen at once."""
    store, other = Store(folder), Store(folder)
    for name in ("part-1", "part-0", "state/pieces/b", "state/pieces/a", "state/x", "statement"):
        store.create(name, b"1")
    assert store.list() == ["part-0", "part-1", "state/pieces/a", "state/pieces/b", "state/x", "statement"]
    assert store.list("state") == ["state/pieces/a", "state/pieces/b", "state/x"]
    assert store.list("state/pieces/") == ["state/pieces/a", "state/pieces/b"]
    assert store.list("missing") == []
    other.create("state/pieces/c", b"1")
    other.replace("state/x", b"12345")
    other.delete("part-0")
    assert store.list("state") == ["state/pieces/a", "state/pieces/b", "state/pieces/c", "state/x"]
    assert store.size("state/x") == 5
    assert not store.exists("part-0")


def test_missing_names_are_told_apart(folder: str) -> None:
    store = Store(folder)
    for call in (store.read, store.size, store.open):
        with pytest.raises(ObjectMissing, match=r"run.*nothing\.json"):
            call("nothing.json")
    assert issubclass(ObjectMissing, StorageError)


def test_names_stay_inside_the_folder(folder: str) -> None:
    for name in ("../x", "a/../../x", "/etc/x", "a//b"):
        with pytest.raises(AssertionError):
            Store(folder).create(name, b"")


@pytest.mark.parametrize("round_", range(5))
def test_of_concurrent_creates_one_wins(folder: str, round_: int) -> None:
    barrier = threading.Barrier(8)
    won: list[int] = []

    def create(number: int) -> None:
        store = Store(folder)
        barrier.wait()
        if store.create("part", str(number).encode() * 1000):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert Store(folder).read("part") == str(won[0]).encode() * 1000
    assert Store(folder).list() == ["part"]


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
    assert calls == ["fsync .tmp-", "link", "fsync folder", "unlink"]
    calls.clear()
    store.replace("a", b"x")
    assert calls[:3] == ["fsync .tmp-", "replace", "fsync folder"]
    calls.clear()
    store.create("new/deep/a", b"x")
    assert calls == ["fsync folder", "fsync folder", "fsync .tmp-", "link", "fsync folder", "unlink"]
    assert os.listdir(tmp_path / "new" / "deep") == ["a"]


CRASH = """
import os, sys
from batchgen.io.files import Store
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
    store.sweep()  # case F14: what others staged stays
    assert temps[0] in os.listdir(tmp_path)
    assert store.create("part", b"again") is not there
    assert store.read("part") == (b"whole" if there else b"again")


def test_sweep_removes_only_what_this_store_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write(tmp_path / ".tmp-0123-part", b"another writer's")
    store = Store(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing(OSError(errno.EIO, "Input/output error")))
        assert store.create("part", b"x") is True  # it is there, whatever becomes of the staged file
    assert len(os.listdir(tmp_path)) == 3
    store.sweep()
    assert sorted(os.listdir(tmp_path)) == [other.name, "part"]


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
    with pytest.raises(StorageError):
        store.create("state/x", b"")
    assert store.list("state") == []
    assert not store.exists("state/x")


class Failing(MemoryFileSystem):
    """A store that is away."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    error: ClassVar[BaseException] = ConnectionError("connection reset")

    def info(self, path: str, **kwargs: Any) -> Any:
        raise self.error

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
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


def test_import_is_light() -> None:
    """`status` and `validate` on local paths pay for neither Arrow nor fsspec."""
    code = (
        "import sys, batchgen.io.files as files; files.Store('.').list('no-such-folder');"
        "print([name for name in ('pyarrow', 'numpy', 'torch', 'fsspec', 'ctypes') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# Input files


def test_glob_order_numbers_and_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a10.jsonl", "a2.jsonl", "B.jsonl", ".hidden.jsonl", "c.txt"):
        write(tmp_path / "in" / name, name.encode())
    monkeypatch.chdir(tmp_path)
    files = expand(["in/b*.jsonl", "in/*.jsonl", str(tmp_path / "in" / "c.txt")], {}, allow_empty=False)
    wanted = ["in/b.jsonl", "in/B.jsonl", "in/a10.jsonl", "in/a2.jsonl", f"{tmp_path}/in/c.txt"]
    assert [file.path for file in files] == wanted
    assert [file.number for file in files] == [0, 1, 2, 3, 4]
    assert files[0].size == len("b.jsonl")
    assert files[0].mtime == os.stat("in/b.jsonl").st_mtime
    assert files[0].etag is None
    assert names("*/b.jsonl") == ["in/b.jsonl"]
    assert names("./in/[ab]*.jsonl") == ["./in/a10.jsonl", "./in/a2.jsonl", "./in/b.jsonl"]
    assert names("in/.*.jsonl") == ["in/.hidden.jsonl"]
    assert names(f"{tmp_path}/i?/b.jsonl") == [f"{tmp_path}/in/b.jsonl"]
    assert names(f"file://{tmp_path}/in/b.jsonl") == [f"{tmp_path}/in/b.jsonl"]


def test_a_real_name_with_wildcard_characters_is_itself(tmp_path: Path) -> None:
    """Case A17."""
    real = write(tmp_path / "data[1]*.jsonl")
    write(tmp_path / "data1x.jsonl")
    assert names(str(real)) == [str(real)]
    inside = write(tmp_path / "set[2]" / "a.jsonl")
    assert names(str(inside.parent)) == [str(inside)]
    assert names(str(tmp_path / "set[[]2]" / "*.jsonl")) == [str(inside)]


def test_double_star_walks_without_hidden_folders_and_link_loops(tmp_path: Path) -> None:
    deep = write(tmp_path / "a" / "b" / "c.jsonl")
    top = write(tmp_path / "top.jsonl")
    write(tmp_path / "a" / "_work" / "x.jsonl")
    write(tmp_path / ".git" / "x.jsonl")
    write(tmp_path / "a" / "_SUCCESS")
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    assert names(f"{tmp_path}/**/*.jsonl") == [str(deep), str(top)]
    assert names(f"{tmp_path}/**") == [str(deep), str(top)]
    assert names(f"{tmp_path}/**/b/*") == [str(deep)]


def test_folder_means_its_data_files(tmp_path: Path) -> None:
    """Case A17: names starting with _ or . are skipped at every level, key=value folders are entered."""
    first = write(tmp_path / "part-0.parquet")
    second = write(tmp_path / "lang=de" / "day=1" / "part-0.parquet")
    for name in ("_SUCCESS", ".part.crc", "_tmp/x.parquet", ".x/y.parquet", "lang=de/_tmp=1/x", "raw/z.parquet"):
        write(tmp_path / name)
    assert names(str(tmp_path)) == [str(second), str(first)]
    assert names(f"{tmp_path}/") == [str(second), str(first)]
    assert names(f"{tmp_path}/lang=*") == [str(second)]


@pytest.mark.parametrize(
    "pattern", ["in/*.jsonl", "nothing.jsonl", "nowhere/*/x", "empty", "only_hidden", "[", "a/b.c"]
)
def test_no_match_is_an_error_naming_pattern_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Case A17."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "only_hidden" / "_SUCCESS")
    write(tmp_path / "a")
    good = write(tmp_path / "good.jsonl")
    for patterns in ([pattern], [str(good), pattern]):
        with pytest.raises(NoInputError) as caught:
            expand(patterns, {}, allow_empty=False)
        assert repr(pattern) in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        assert caught.value.exit_code == 66
    assert expand([pattern], {}, allow_empty=True) == []


def test_folder_of_folders_says_what_to_write(tmp_path: Path) -> None:
    write(tmp_path / "in" / "en" / "a.jsonl")
    with pytest.raises(NoInputError, match=r"only sub-folders.*/in/\*\*"):
        names(str(tmp_path / "in"))


@pytest.mark.parametrize("pattern", ["table", "table/*.parquet", "table/day=1/*", "table/**/*.parquet", "*/*.parquet"])
@pytest.mark.parametrize(
    ("marker", "kind"),
    [
        ("_delta_log/00000.json", "Delta Lake"),
        ("metadata/v1.metadata.json", "Iceberg"),
        (".hoodie/hoodie.properties", "Hudi"),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
def test_tables_are_not_read_as_plain_files(tmp_path: Path, pattern: str, marker: str, kind: str, remote: bool) -> None:
    root = f"memory://tables{next(counter)}" if remote else str(tmp_path)
    store = Store(root)
    for name in ("table/a.parquet", "table/day=1/b.parquet", f"table/{marker}"):
        store.create(name, b"PAR1")
    with pytest.raises(DataError, match=f"table.*{kind} table") as caught:
        names(f"{root}/{pattern}")
    assert caught.value.exit_code == 65
    assert names(f"{root}/table/a.parquet") == [f"{root}/table/a.parquet"]  # one file named is one file meant


def test_a_folder_called_metadata_is_no_table(tmp_path: Path) -> None:
    write(tmp_path / "metadata" / "readme.txt")
    path = write(tmp_path / "a.jsonl")
    assert names(str(tmp_path)) == [str(path)]


def test_unreadable_and_unfit_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *args: False)
        with pytest.raises(PermissionDenied, match=r"a\.jsonl"):
            names(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing(PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(PermissionDenied, match="permission denied"):
            names(f"{tmp_path}/*", allow_empty=True)
    os.mkfifo(tmp_path / "pipe")
    os.symlink("missing", tmp_path / "dangling.jsonl")
    for pattern in ("pipe", "*.jsonl"):
        with pytest.raises(DataError, match="regular file"):
            names(f"{tmp_path}/{pattern}")


def test_remote_patterns() -> None:
    root = f"memory://in{next(counter)}"
    store = Store(root)
    for name in ("a/2.jsonl", "a/1.jsonl", "b/3.jsonl", "b/x=1/4.jsonl", "a/_skip", "odd[1].jsonl"):
        store.create(name, b"{}\n{}\n")
    assert names(f"{root}/*/*.jsonl") == [f"{root}/a/1.jsonl", f"{root}/a/2.jsonl", f"{root}/b/3.jsonl"]
    assert names(f"{root}/b/**") == [f"{root}/b/3.jsonl", f"{root}/b/x=1/4.jsonl"]
    assert names(f"{root}/a") == [f"{root}/a/1.jsonl", f"{root}/a/2.jsonl"]
    assert names(f"{root}/odd[1].jsonl") == [f"{root}/odd[1].jsonl"]
    file = expand([f"{root}/a/1.jsonl"], {})[0]
    assert file.size == 6 and file.mtime is not None
    with open_input(file.path, {}) as opened:
        opened.seek(3)
        assert opened.read() == b"{}\n"
    with pytest.raises(NoInputError, match="memory://"):
        names(f"{root}/c/*.jsonl")


def test_chained_urls(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("in/a.jsonl", "{}\n")
        archive.writestr("in/b.jsonl", "{}\n{}\n")
    url = f"zip://in/*.jsonl::file://{tmp_path}/all.zip"
    files = expand([url], {})
    assert [file.path for file in files] == [url.replace("*", "a"), url.replace("*", "b")]
    assert [file.size for file in files] == [3, 6]
    with open_input(files[1].path, {}) as opened:
        assert opened.read() == b"{}\n{}\n"


def test_local_path() -> None:
    assert local_path("a/b") == "a/b"
    assert local_path("file:///a/b") == "/a/b"
    assert local_path("s3://a/b") is None
    assert local_path("~/x") == os.path.expanduser("~/x")


def test_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match=r"gone\.jsonl"):
        open_input(str(tmp_path / "gone.jsonl"), {})


def test_a_failing_store_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path), retries=2, pause=0.001)
    whole, failures = os.link, [OSError(errno.EIO, "Input/output error")] * 2

    def link(*names: str) -> None:
        if failures:
            raise failures.pop()
        whole(*names)

    monkeypatch.setattr("batchgen.io.files.os.link", link)
    assert store.create("a", b"1") and store.read("a") == b"1"
    failures[:] = [OSError(errno.EIO, "Input/output error")] * 3
    with pytest.raises(StorageError, match="Input/output error"):
        store.create("b", b"1")
    failures[:] = [PermissionError(errno.EACCES, "Permission denied")]
    with pytest.raises(PermissionDenied):
        store.create("c", b"1")
    assert not failures and store.list() == ["a"]
