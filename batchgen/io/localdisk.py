"""The local disk: durable by plain system calls, a name given to a file only after its bytes are on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator

from batchgen.errors import StorageError
from batchgen.io.storage import Entry, Opened, Powers
from batchgen.processes import machine, process_runs, started

NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
NO_LOCKS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
RENAME_NOREPLACE = 1  # linux/fs.h
AT_FDCWD = -100  # fcntl.h

_TEMP = re.compile(r"\.tmp-([0-9a-f]{12})-(\d+)-(\d+)-[0-9a-f]{32}-.+")  # machine, process, its start, ...


class LocalDisk:
    """Files under plain paths.

    A staged file's name tells whose it is, so that a later start can remove what a dead process left behind.
    """

    powers = Powers(create=True, compare=True)
    proven = True

    def __init__(self) -> None:
        self._temps: set[str] = set()
        self._durable: set[str] = set()  # folders whose names are on the disk
        self._owner: tuple[int, str] = (0, "")  # this process and how staged names begin

    def stat(self, path: str) -> Entry | None:
        try:
            return self._entry(os.path.basename(path.rstrip("/")), os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def ls(self, path: str) -> list[Entry]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    found.append(self._entry(entry.name, entry.stat(), entry.is_symlink()))
                except FileNotFoundError:  # deleted just now, or a link to nothing
                    if entry.is_symlink():
                        found.append(Entry(entry.name, "other", None, None, None, True))
        return found

    @staticmethod
    def _entry(name: str, status: os.stat_result, link: bool = False) -> Entry:
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "file" if stat.S_ISREG(status.st_mode) else "other"
        return Entry(name, kind, status.st_size, status.st_mtime, None, link)

    def open(self, path: str) -> Opened:
        file = open(path, "rb")  # noqa: SIM115, the caller closes it
        status = os.fstat(file.fileno())
        return Opened(file, status.st_size, status.st_mtime_ns)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def create(self, path: str, data: bytes) -> bool:
        temp = self._write_temp(path, [data])
        try:
            try:
                os.link(temp, path)
            except FileExistsError:
                # A network file system can answer "exists" to the repetition of a request that did succeed.
                if os.stat(temp).st_nlink < 2:
                    self._sync_folder(os.path.dirname(path))  # it may be the work of a process that died before this
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
        self.replace_from(path, [data])

    def replace_from(self, path: str, chunks: Iterable[bytes]) -> None:
        temp = self._write_temp(path, chunks)
        try:
            os.replace(temp, path)
            self._sync_folder(os.path.dirname(path))
        finally:
            self._drop_temp(temp)

    def version(self, path: str) -> str | None:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"

    def replace_if(self, path: str, data: bytes, version: str) -> bool:
        """Compare, then rename, while the folder is locked against our other processes on this machine.

        Nothing keeps others out, and on network file systems without such locks nothing but the run's lease does.
        """
        temp = self._write_temp(path, [data])
        try:
            with self._locked(os.path.dirname(path)):
                if self.version(path) != version:
                    return False
                os.replace(temp, path)
            self._sync_folder(os.path.dirname(path))
            return True
        finally:
            self._drop_temp(temp)

    def delete(self, path: str) -> None:
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        self._sync_folder(os.path.dirname(path))

    def sweep(self, root: str) -> None:
        """Remove staged files under `root`: this object's own, and those of processes that are surely dead.

        Surely dead is a process of this boot of this machine (and container) that runs no more.
        """
        for temp in list(self._temps):
            self._drop_temp(temp)
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                owner = _TEMP.fullmatch(name)
                if owner and owner[1] == _machine_tag() and not process_runs(int(owner[2]), float(owner[3])):
                    self._drop_temp(os.path.join(folder, name))

    def _write_temp(self, path: str, chunks: Iterable[bytes]) -> str:
        folder, name = os.path.split(path)
        self._make_folder(folder)
        temp = os.path.join(folder, f"{self._prefix()}{uuid.uuid4().hex}-{name}")
        self._temps.add(temp)
        try:
            with open(temp, "xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self._drop_temp(temp)
            raise
        return temp

    def _prefix(self) -> str:
        if self._owner[0] != os.getpid():
            self._owner = os.getpid(), f".tmp-{_machine_tag()}-{os.getpid()}-{started(os.getpid()):.0f}-"
        return self._owner[1]

    def _drop_temp(self, temp: str) -> None:
        try:
            os.unlink(temp)
        except FileNotFoundError:
            pass
        except OSError:  # what counts is the final name; `sweep` tries again
            return
        self._temps.discard(temp)

    def _make_folder(self, folder: str) -> None:
        """Have `folder` on the disk: one that is there may be the work of a process that died before it synced it."""
        if not folder:
            return
        parent = os.path.dirname(folder)
        if os.path.isdir(folder):
            if folder not in self._durable:
                with contextlib.suppress(PermissionError):  # who may use a folder need not be able to open its parent
                    self._sync_folder(parent)
                self._durable.add(folder)
            return
        self._make_folder(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, "a file stands where a folder is needed", folder) from None
        self._sync_folder(parent)
        self._durable.add(folder)

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
    @contextlib.contextmanager
    def _locked(folder: str) -> Iterator[None]:
        try:
            descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield
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


def _machine_tag() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:12]
