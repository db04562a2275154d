"""A run folder, local or remote, whose names are created once, whole and durable."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, TypeVar, cast

from batchgen.errors import PermissionDenied, StorageError
from batchgen.io.localdisk import LocalDisk
from batchgen.io.remote import RemoteDisk, open_remote
from batchgen.io.storage import (
    PAUSE_SECONDS,
    ObjectMissing,
    PermanentError,
    Powers,
    SteadyFile,
    bucket_missing,
    local_path,
    naming,
    patiently,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PROBES = "_batchgen/probe/"


def open_disk(url: str, storage_options: Mapping[str, Any]) -> LocalDisk | RemoteDisk:
    """What reaches the files that `url` names."""
    return LocalDisk() if local_path(url) is not None else open_remote(url, storage_options)


class Store:
    """One folder, local or at an fsspec URL: the only way run state is read and written.

    Names are relative to it and "/"-separated; folders between are made as needed. Every access goes through one of
    these methods and stands for itself, so that a wrapper can fail or stop any of them.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        retries: int = 0,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        """An operation that fails is tried `retries` times more, after up to `pause` seconds and twice as long each
        time."""
        self.url = url
        self._root = local_path(url) or url
        self._disk = open_disk(url, storage_options or {})
        self._retries, self._pause = retries, pause
        self._probing = threading.Lock()

    def path(self, name: str = "") -> str:
        """Where `name` is, for messages."""
        assert not name or all(part not in {"", ".", ".."} for part in name.split("/")), name
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _try(self, name: str, operation: Callable[[str], _T]) -> _T:
        """Every operation may be repeated: one that took effect unnoticed finds its own work (see `create`)."""
        path = self.path(name)
        return patiently(path, lambda: operation(path), self._retries, self._pause)

    # what the store can do

    @property
    def atomic_create(self) -> bool:
        """Whether `create` lets only one of several writers win. Where it does not, only the lease keeps them apart."""
        return self.probe().create

    @property
    def can_compare(self) -> bool:
        """Whether `replace_if` lets only one of several writers win."""
        return self.probe().compare

    def probe(self) -> Powers:
        """Find out, once, whether the server keeps what its kind of store promises: it may be an older or a
        simpler one that passes over the conditions of a request. Done by itself before the first `create`."""
        with self._probing:
            if not self._disk.proven:
                self._disk.powers = self._probed()
                self._disk.proven = True
        return self._disk.powers

    def _probed(self) -> Powers:
        name = f"{PROBES}{uuid.uuid4().hex}"
        try:
            creates = self._refuses(lambda: self._creates_twice(name))
            compares = creates and self._refuses(lambda: self._replaces_stale(name))
        finally:
            try:
                self._try(name, self._disk.delete)
            except (StorageError, PermissionDenied) as error:
                logger.warning("a file that only tried the store out stays behind: %s", error)
        if not creates:
            logger.info("%s: tried out, this store writes over a file that should be new", self.url)
        return Powers(creates, compares)

    @staticmethod
    def _refuses(attempt: Callable[[], bool]) -> bool:
        try:
            return attempt()
        except PermanentError:  # a condition that the server does not know
            return False

    def _creates_twice(self, name: str) -> bool:
        self._try(name, lambda path: self._disk.create(path, b"first"))
        again = self._try(name, lambda path: self._disk.create(path, b"second"))
        return not again and self._try(name, self._disk.read) == b"first"

    def _replaces_stale(self, name: str) -> bool:
        absent, old = f"{name}-absent", self.version(name)
        if old is None or self._try(absent, lambda path: self._disk.replace_if(path, b"never", old)):
            self.delete(absent)
            return False
        self._try(name, lambda path: self._disk.replace_if(path, b"third", old))
        again = self._try(name, lambda path: self._disk.replace_if(path, b"fourth", old))
        return not again and self._try(name, self._disk.read) == b"third"

    # writing

    def create(self, name: str, data: bytes) -> bool:
        """Give `name` these bytes, whole and durable, if it has none yet; False if it has.

        These may be our own, of a try that failed after it took effect: who needs to know compares them.
        """
        self.probe()
        return self._try(name, lambda path: self._disk.create(path, data))

    def replace(self, name: str, data: bytes) -> None:
        """Give `name` these bytes whatever it had before; a reader sees the old or the new ones, never a mixture."""
        self._try(name, lambda path: self._disk.replace(path, data))

    def replace_from(self, name: str, chunks: Iterable[bytes]) -> None:
        """`replace` with bytes that do not fit into memory. Not tried again where it fails."""
        path = self.path(name)
        with naming(path):
            self._disk.replace_from(path, chunks)

    def version(self, name: str) -> str | None:
        """What tells the present content of `name` from any other; None where it is missing."""
        return self._try(name, self._disk.version)

    def replace_if(self, name: str, data: bytes, version: str) -> bool:
        """Give `name` these bytes if it still is at `version`; False where it is at another one, or missing.

        True also where it has these very bytes already, of a try that failed after it took effect. Locally, and where
        `can_compare` is False, only the lease keeps a writer on another machine from coming between.
        """
        self.probe()
        done = self._try(name, lambda path: self._disk.replace_if(path, data, version))
        return done or self._holds(name, data)

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.read(name) == data
        except ObjectMissing:
            return False

    def delete(self, name: str) -> None:
        """Remove `name`; nothing happens where it is missing."""
        self._try(name, self._disk.delete)

    def sweep(self) -> None:
        """Remove staged files: what this object could not remove at once, and in this folder what dead processes of
        this machine left behind. Those of living processes and of other machines are never touched."""
        self._disk.sweep(self._root)

    # reading

    def read(self, name: str) -> bytes:
        return self._try(name, self._disk.read)

    def open(self, name: str) -> BinaryIO:
        """For reading a part of it: seekable, and to be closed."""
        path = self.path(name)
        return cast(BinaryIO, SteadyFile(path, lambda: self._disk.open(path), self._retries, self._pause))

    def exists(self, name: str) -> bool:
        return self._try(name, self._disk.stat) is not None

    def size(self, name: str) -> int:
        entry = self._try(name, self._disk.stat)
        if entry is None or entry.size is None:
            raise ObjectMissing(f"{self.path(name)}: no such file")
        return entry.size

    def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """The files under the folder `prefix` as sorted names, at any depth or only in the folder itself; [] where
        there is no such folder.

        Names with a part that starts with "." are not ours or not finished, and are left out.
        """
        top = prefix.strip("/")
        if recursive and isinstance(self._disk, RemoteDisk):  # one request instead of one for each folder
            look = self._disk.find
            names = self._try(top, lambda path: _or_empty(look, path))
            shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
            return sorted(f"{top}/{name}" if top else name for name in shown)
        found: list[str] = []
        folders = [top]
        while folders:
            folder = folders.pop()
            for entry in self._try(folder, lambda path: _or_empty(self._disk.ls, path)):
                if not entry.name.startswith("."):
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.kind == "folder" and recursive:
                        folders.append(name)
                    elif entry.kind == "file":
                        found.append(name)
        return sorted(found)


def _or_empty(look: Callable[[str], list[_T]], path: str) -> list[_T]:
    """What is in a folder: nothing, where there is none."""
    try:
        return look(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if bucket_missing(error):
            raise
        return []
