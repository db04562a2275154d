"""Files wherever they are: input files by pattern, and a run folder whose names are created once.

Local paths take plain system calls, so that durability is ours to prove; everything else goes through fsspec, which
is imported only when a URL asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import os
import random
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar, cast

from batchgen.errors import BatchgenError, ConfigError, DataError, NoInputError, PermissionDenied, StorageError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

REMOTE_BLOCK_BYTES = 1 << 20  # read ahead of a remote file: streams well, and a sampled read costs little more
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
TABLE_MARKERS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}  # a folder of this name makes its parent a table
OUTPUT, ERRORS, BATCH = COPIES = ("output.jsonl", "errors.jsonl", "batch.json")  # what a run folder's parts hold, too
RENAME_NOREPLACE = 1  # linux/fs.h
AT_FDCWD = -100  # fcntl.h

# Where the stores' own listings keep these; the first one present counts.
ETAG_KEYS = ("ETag", "etag", "md5Hash", "content_md5")
MTIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")


class ObjectMissing(StorageError):
    """The name is not there. Another try does not help, unless somebody creates it."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file. `path` is what `open_input` takes; `etag` is None where the store has none."""

    number: int
    path: str
    size: int
    mtime: float | None
    etag: str | None


class _Entry(NamedTuple):
    name: str  # the last part of the path
    kind: str  # "file", "folder", or "other": a broken link, a pipe, a device
    size: int | None
    mtime: float | None
    etag: str | None
    link: bool = False


def local_path(url: str) -> str | None:
    """The path of a local file or folder; None where `url` names another store."""
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return url[len(scheme) :]
    return None if "://" in url else os.path.expanduser(url)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors of the disk or store as ours, with the path in front."""
    try:
        yield
    except BatchgenError:
        raise
    except FileNotFoundError as error:
        raise ObjectMissing(f"{path}: not found") from error
    except PermissionError as error:
        raise PermissionDenied(
            f"{path}: permission denied ({error.strerror or error}); check who owns it, or the credentials"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error or type(error).__name__}") from error
    except Exception as error:  # a store's own client raises what it likes
        if local_path(path) is not None:
            raise
        raise StorageError(f"{path}: {type(error).__name__}: {error}") from error


class _Local:
    """The local disk. A name is given to a file only after its bytes are on the disk."""

    atomic_create = True

    def __init__(self) -> None:
        self._temps: set[str] = set()

    def stat(self, path: str) -> _Entry | None:
        try:
            return self._entry(os.path.basename(path.rstrip("/")), os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def ls(self, path: str) -> list[_Entry]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    found.append(self._entry(entry.name, entry.stat(), entry.is_symlink()))
                except FileNotFoundError:  # deleted just now, or a link to nothing
                    if entry.is_symlink():
                        found.append(_Entry(entry.name, "other", None, None, None, True))
        return found

    @staticmethod
    def _entry(name: str, status: os.stat_result, link: bool = False) -> _Entry:
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "file" if stat.S_ISREG(status.st_mode) else "other"
        return _Entry(name, kind, status.st_size, status.st_mtime, None, link)

    def open(self, path: str) -> BinaryIO:
        return open(path, "rb")

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def create(self, path: str, data: bytes) -> bool:
        temp = self._write_temp(path, data)
        try:
            try:
                os.link(temp, path)
            except FileExistsError:
                # A network file system can answer "exists" to the repetition of a request that did succeed.
                if os.stat(temp).st_nlink < 2:
                    return False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                if not self._rename_if_absent(temp, path):
                    return False
            self._sync_folder(os.path.dirname(path))
            return True
        finally:
            self._drop_temp(temp)

    def replace(self, path: str, data: bytes) -> None:
        temp = self._write_temp(path, data)
        try:
            os.replace(temp, path)
            self._sync_folder(os.path.dirname(path))
        finally:
            self._drop_temp(temp)

    def delete(self, path: str) -> None:
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        self._sync_folder(os.path.dirname(path))

    def sweep(self) -> None:
        for temp in list(self._temps):
            self._drop_temp(temp)

    def _write_temp(self, path: str, data: bytes) -> str:
        folder, name = os.path.split(path)
        self._make_folder(folder)
        temp = os.path.join(folder, f".tmp-{uuid.uuid4().hex}-{name}")
        self._temps.add(temp)
        try:
            with open(temp, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self._drop_temp(temp)
            raise
        return temp

    def _drop_temp(self, temp: str) -> None:
        try:
            os.unlink(temp)
        except FileNotFoundError:
            pass
        except OSError:  # what counts is the final name; `sweep` tries again
            return
        self._temps.discard(temp)

    def _make_folder(self, folder: str) -> None:
        if not folder or os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        self._make_folder(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, "a file stands where a folder is needed", folder) from None
        self._sync_folder(parent)

    @staticmethod
    def _sync_folder(folder: str) -> None:
        descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some network and FUSE file systems cannot, and need not
            if error.errno not in NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)

    @staticmethod
    def _rename_if_absent(temp: str, path: str) -> bool:
        import ctypes

        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        code = errno.ENOSYS
        if rename is not None:
            if rename(AT_FDCWD, os.fsencode(temp), AT_FDCWD, os.fsencode(path), RENAME_NOREPLACE) == 0:
                return True
            code = ctypes.get_errno()
        if code == errno.EEXIST:
            return False
        raise StorageError(
            f"{path}: this file system has neither hard links nor a rename that refuses to overwrite "
            f"({os.strerror(code)}), so results cannot be committed safely; put the folder on another one"
        )


class _Remote:
    """Any store that fsspec reaches. Listings are never taken from its cache."""

    atomic_create = False  # exists-then-write: two writers can both believe that they came first
    _memory_lock: ClassVar[threading.Lock] = threading.Lock()  # memory:// is one store for the whole process

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def _at(self, url: str) -> tuple[Any, str]:
        import fsspec.core

        try:
            system, path = fsspec.core.url_to_fs(url, **self._options)
        except ImportError as error:
            raise ConfigError(f"{url}: {error}") from error
        except ValueError as error:  # an unknown scheme
            raise ConfigError(
                f"{url}: {error}; local paths have no scheme, others need one that fsspec knows"
            ) from error
        return system, path

    def _fresh(self, url: str) -> tuple[Any, str]:
        system, path = self._at(url)
        system.invalidate_cache()
        return system, path

    def stat(self, url: str) -> _Entry | None:
        info = self._info(*self._fresh(url))
        return None if info is None else self._entry(info)

    @staticmethod
    def _info(system: Any, path: str) -> Mapping[str, Any] | None:
        """`system.exists` would take any failure for an absence."""
        try:
            return cast("Mapping[str, Any]", system.info(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def ls(self, url: str) -> list[_Entry]:
        system, path = self._fresh(url)
        here = path.rstrip("/")
        return [self._entry(info) for info in system.ls(path, detail=True) if info["name"].rstrip("/") != here]

    @staticmethod
    def _entry(info: Mapping[str, Any]) -> _Entry:
        mtime = next((info[key] for key in MTIME_KEYS if info.get(key) is not None), None)
        if isinstance(mtime, str):
            try:
                mtime = datetime.fromisoformat(mtime.replace("Z", "+00:00"))
            except ValueError:  # then the content proof decides
                mtime = None
        if isinstance(mtime, datetime):
            mtime = mtime.timestamp()
        etag = next((str(info[key]) for key in ETAG_KEYS if info.get(key)), None)
        kind = {"directory": "folder", "file": "file"}.get(info["type"], "other")
        return _Entry(info["name"].rstrip("/").rpartition("/")[2], kind, info.get("size"), mtime, etag)

    def open(self, url: str) -> BinaryIO:
        system, path = self._fresh(url)
        file = system.open(path, "rb", block_size=REMOTE_BLOCK_BYTES)
        with contextlib.suppress(AttributeError):  # an archive closes its members when nobody holds it any more
            file.opened_from = system
        return cast(BinaryIO, file)

    def read(self, url: str) -> bytes:
        system, path = self._fresh(url)
        return cast(bytes, system.cat_file(path))

    def create(self, url: str, data: bytes) -> bool:
        system, path = self._fresh(url)
        lock = self._memory_lock if "memory" in system.protocol else contextlib.nullcontext()
        with lock:
            if self._info(system, path) is not None:
                return False
            self._write(system, path, data)
        return True

    def replace(self, url: str, data: bytes) -> None:
        self._write(*self._at(url), data)

    @staticmethod
    def _write(system: Any, path: str, data: bytes) -> None:
        try:
            system.pipe_file(path, data)
        except FileNotFoundError:  # a store with real folders
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.pipe_file(path, data)

    def delete(self, url: str) -> None:
        system, path = self._fresh(url)
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(path)

    def sweep(self) -> None:
        """Nothing is staged under another name here."""


def _disk(url: str, storage_options: Mapping[str, Any]) -> _Local | _Remote:
    return _Local() if local_path(url) is not None else _Remote(storage_options)


def open_input(path: str, storage_options: Mapping[str, Any]) -> BinaryIO:
    """The raw bytes of one input file, seekable."""
    with naming(path):
        return _disk(path, storage_options).open(local_path(path) or path)


class Store:
    """One folder, local or at an fsspec URL: the only way run state is read and written.

    Names are relative to it and "/"-separated; folders between are made as needed. Every access goes through one of
    these methods and stands for itself, so that a wrapper can fail or stop any of them.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, *, retries: int = 0, pause: float = 0.5
    ) -> None:
        """An operation that fails is tried `retries` times more, after `pause` seconds and twice as long each time."""
        self.url = url
        self._root = local_path(url) or url
        self._disk = _disk(url, storage_options or {})
        self._pauses = [pause * 2**n for n in range(retries)]
        self.atomic_create = self._disk.atomic_create

    def path(self, name: str = "") -> str:
        """Where `name` is, for messages."""
        assert not name or all(part not in {"", ".", ".."} for part in name.split("/")), name
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _try(self, name: str, operation: Callable[[str], _T]) -> _T:
        """Every operation may be repeated: one that took effect unnoticed finds its own work (see `create`)."""
        path = self.path(name)
        for pause in self._pauses:
            try:
                with naming(path):
                    return operation(path)
            except ObjectMissing:
                raise
            except StorageError as error:
                logger.warning("%s; trying again", error)
                time.sleep(pause * random.uniform(0.75, 1.25))  # so that workers do not come back all at once
        with naming(path):
            return operation(path)

    def create(self, name: str, data: bytes) -> bool:
        """Give `name` these bytes, whole and durable, if it has none yet; False if it has.

        These may be our own, of a try that failed after it took effect: who needs to know compares them.
        """
        return self._try(name, lambda path: self._disk.create(path, data))

    def replace(self, name: str, data: bytes) -> None:
        """Give `name` these bytes whatever it had before; a reader sees the old or the new ones, never a mixture."""
        self._try(name, lambda path: self._disk.replace(path, data))

    def read(self, name: str) -> bytes:
        return self._try(name, self._disk.read)

    def open(self, name: str) -> BinaryIO:
        """For reading a part of it: seekable."""
        return self._try(name, self._disk.open)

    def exists(self, name: str) -> bool:
        return self._try(name, self._disk.stat) is not None

    def size(self, name: str) -> int:
        entry = self._try(name, self._disk.stat)
        if entry is None or entry.size is None:
            raise ObjectMissing(f"{self.path(name)}: no such file")
        return entry.size

    def list(self, prefix: str = "") -> list[str]:
        """All files under the folder `prefix`, at any depth, as sorted names; [] where there is no such folder.
        Names with a part that starts with "." are not ours or not finished, and are left out."""
        found: list[str] = []
        folders = [prefix.strip("/")]
        while folders:
            folder = folders.pop()
            for entry in self._try(folder, self._entries):
                if not entry.name.startswith("."):
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.kind == "folder":
                        folders.append(name)
                    elif entry.kind == "file":
                        found.append(name)
        return sorted(found)

    def _entries(self, path: str) -> Sequence[_Entry]:
        try:
            return self._disk.ls(path)
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def delete(self, name: str) -> None:
        """Remove `name`; nothing happens where it is missing."""
        self._try(name, self._disk.delete)

    def sweep(self) -> None:
        """Remove what this object staged and could not remove at once. Others' staged files are never touched."""
        self._disk.sweep()


def expand(paths: Sequence[str], storage_options: Mapping[str, Any], *, allow_empty: bool = False) -> list[InputFile]:
    """The input files that `paths` (files, folders, globs, URLs) name: sorted by path within each, each file once."""
    found: dict[str, tuple[str, _Entry]] = {}
    for pattern in paths:
        finder = _Finder(pattern, storage_options)
        with naming(pattern):
            hits = sorted(finder.find(), key=lambda hit: hit[0])
        if not hits and not allow_empty:
            raise NoInputError(finder.nothing())
        for path, entry in hits:
            local = local_path(path)
            found.setdefault(path if local is None else os.path.abspath(local), (path, entry))
    return [_input_file(number, path, entry) for number, (path, entry) in enumerate(found.values())]


def _input_file(number: int, path: str, entry: _Entry) -> InputFile:
    local = local_path(path)
    if entry.kind != "file":
        raise DataError(f"{path}: a broken link or not a regular file; input must be files that can be read again")
    if local is not None and not os.access(local, os.R_OK):
        raise PermissionDenied(f"{path}: permission denied: this user may not read the file")
    if entry.size is None:
        raise StorageError(f"{path}: the store does not tell its size; copy the file to a store that does")
    return InputFile(number, path, entry.size, entry.mtime, entry.etag)


class _Finder:
    """The files that one pattern names."""

    def __init__(self, pattern: str, storage_options: Mapping[str, Any]) -> None:
        self._pattern = pattern
        self._local = local_path(pattern) is not None
        self._disk = _disk(pattern, storage_options)
        path, self._chain = local_path(pattern) or pattern, ""
        head, separator, chain = path.partition("::")
        if not self._local and "://" in head:  # zip://*.jsonl::s3://bucket/file.zip: the pattern is in the first link
            path, self._chain = head, separator + chain
        self._path = path
        self._listed: dict[str, list[_Entry]] = {}
        self._other_folders = False

    def find(self) -> list[tuple[str, _Entry]]:
        """What exists under exactly this name comes first: a name may hold `[`."""
        entry = self._disk.stat(self._path + self._chain)
        if entry is not None and entry.kind != "folder":
            return [(self._path + self._chain, entry)]
        if entry is not None:
            base = self._path if self._path.endswith("/") else self._path + "/"
            self._refuse_tables_above(base)
            return list(self._folder(base))
        fixed = re.match(r"(?:[^*?\[]*/)?(?=[^/]*[*?\[])", self._path)  # up to the first part with a wildcard
        if fixed is None:
            return []
        base = fixed.group()
        self._refuse_tables_above(base)
        return list(self._glob(base, [part for part in self._path[len(base) :].split("/") if part]))

    def nothing(self) -> str:
        """The message for a pattern that names no file."""
        here = f" (working directory {os.getcwd()})" if self._local else ""
        if self._other_folders:
            return (
                f"input.path {self._pattern!r}: the folder has no data files of its own, only sub-folders{here}; "
                f"{self._pattern.rstrip('/') + '/**'!r} reads them too"
            )
        return (
            f"input.path {self._pattern!r}: no file matches{here}; "
            "correct the path, or set input.allow_empty: true where no input is normal"
        )

    def _folder(self, base: str) -> Iterator[tuple[str, _Entry]]:
        """A folder's data files, and those of its key=value sub-folders."""
        entries = self._ls(base)
        copies = COPIES if any(entry.name == "_batchgen" for entry in entries) else ()
        for entry in entries:
            if entry.name.startswith(("_", ".")) or entry.name in copies:
                continue
            if entry.kind != "folder":
                yield base + entry.name + self._chain, entry
            elif "=" in entry.name:
                yield from self._folder(base + entry.name + "/")
            else:
                self._other_folders = True

    def _glob(self, base: str, parts: list[str]) -> Iterator[tuple[str, _Entry]]:
        """Files under `base` that match: `*` does not match a leading ".", and `**` enters what `_folder` would see."""
        part, rest = parts[0], parts[1:]
        if part == "**" and rest:
            yield from self._glob(base, rest)
        for entry in self._ls(base):
            path = base + entry.name
            if part == "**":
                if entry.name.startswith(("_", ".")):
                    continue
                if entry.kind == "folder" and not entry.link:
                    yield from self._glob(path + "/", parts)
                elif entry.kind != "folder" and not rest:
                    yield path + self._chain, entry
            elif not fnmatch.fnmatchcase(entry.name, part) or (entry.name[0] == "." and part[0] != "."):
                continue
            elif rest:
                if entry.kind == "folder":
                    yield from self._glob(path + "/", rest)
            elif entry.kind != "folder":
                yield path + self._chain, entry
            elif not entry.name.startswith(("_", ".")):
                yield from self._folder(path + "/")

    def _ls(self, base: str) -> list[_Entry]:
        if base not in self._listed:
            try:
                entries = self._disk.ls((base or ".") + self._chain)
            except (FileNotFoundError, NotADirectoryError):
                entries = []
            self._listed[base] = entries
            self._refuse_table(base, {entry.name for entry in entries if entry.kind == "folder"})
        return self._listed[base]

    def _refuse_tables_above(self, base: str) -> None:
        parts = base.rstrip("/").split("/")
        first = 3 if "://" in base else 1  # a bucket's own parent is no folder
        for end in range(first, len(parts)):
            above = "/".join(parts[:end]) + "/"
            try:
                folders = {name for name in (*TABLE_MARKERS, "metadata") if self._is_folder(above + name)}
                self._refuse_table(above, folders)
            except DataError:
                raise
            except Exception:  # a precaution only: who may read a folder need not be allowed to look above it
                return

    def _is_folder(self, path: str) -> bool:
        entry = self._disk.stat(path + self._chain)
        return entry is not None and entry.kind == "folder"

    def _refuse_table(self, base: str, folders: set[str]) -> None:
        """A table's folder also holds files whose rows were deleted or replaced: only its log knows which count."""
        kinds = [TABLE_MARKERS[name] for name in sorted(folders & TABLE_MARKERS.keys())]
        if "metadata" in folders and any(
            entry.name.endswith(".metadata.json") for entry in self._disk.ls(base + "metadata" + self._chain)
        ):
            kinds.append("Iceberg")
        if kinds:
            raise DataError(
                f"{base.rstrip('/') or '.'}: this folder is a {kinds[0]} table; read as plain files it would also give "
                "rows that were deleted or replaced. Export the table to Parquet first, or name single files"
            )
