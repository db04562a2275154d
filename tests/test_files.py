"""Finding input files by pattern, and reading them."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import DataError, NoInputError, PermissionDenied
from batchgen.io.files import expand, open_input
from batchgen.io.storage import ObjectMissing, local_path
from batchgen.io.stores import Store

counter = itertools.count()


def write(path: Path, data: bytes = b"{}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(paths: list[str] | str, **options: Any) -> list[str]:
    return [file.path for file in expand([paths] if isinstance(paths, str) else paths, {}, **options)]


def test_import_is_light() -> None:
    """`status` and `validate` on local paths pay for neither Arrow nor fsspec."""
    code = (
        "import sys, batchgen.io.files, batchgen.io.stores as stores; stores.Store('.').list('no-such-folder');"
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


def failing(error: BaseException) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


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
