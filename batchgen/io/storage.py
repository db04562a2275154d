"""What disks and stores share: paths, entries, their errors as ours, and how a failing operation is tried again."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar

from batchgen.errors import BatchgenError, ConfigError, DataError, PermissionDenied, StorageError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

PAUSE_SECONDS = 1.0  # the longest pause before the second try; doubled before each one that follows
MAX_PAUSE_SECONDS = 20.0
DEADLINE_SECONDS = 60.0  # no try begins later than this after the first one

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Answers that another try would get again, whatever the store; some 400s are about the way there and are not.
REFUSALS = frozenset({400, 405, 411, 412, 413, 414, 416, 501})
PASSING_CODES = frozenset(
    {"RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "Md5Mismatch", "Throttling"}
)
NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "CredentialUnavailableError"}
)


class PermanentError(StorageError):
    """The store's answer would be the same at another try."""


class ObjectMissing(PermanentError):
    """The name is not there. Another try does not help, unless somebody creates it."""


class Entry(NamedTuple):
    name: str  # the last part of the path
    kind: str  # "file", "folder", or "other": a broken link, a pipe, a device
    size: int | None
    mtime: float | None
    etag: str | None
    link: bool = False


class Powers(NamedTuple):
    """What a store does in one step, without another writer coming between."""

    create: bool  # a name that nobody has yet
    compare: bool  # replace one particular version


def local_path(url: str) -> str | None:
    """The path of a local file or folder; None where `url` names another store."""
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return url[len(scheme) :]
    return None if "://" in url else os.path.expanduser(url)


# -- errors ------------------------------------------------------------------------------------------------------------


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def answer(error: BaseException) -> tuple[str, int]:
    """Error code and HTTP status of a store's answer; "" and 0 where `error` does not come from one."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore's
            code, status = response.get("Error", {}).get("Code"), response.get("ResponseMetadata", {})
            return str(code or ""), int(status.get("HTTPStatusCode", 0))
        status = getattr(one, "status_code", None) or getattr(one, "code", None)  # Azure's, gcsfs's
        if str(status).isdecimal():
            code = getattr(one, "error_code", None) or ""
            return str(getattr(code, "value", code)), int(str(status))
    return "", 0


def bucket_missing(error: BaseException) -> bool:
    return answer(error)[0] in NO_BUCKET


def no_bucket(path: str) -> ConfigError:
    return ConfigError(
        f"{'/'.join(path.split('/')[:3])}: there is no such bucket or container; create it, or correct the URL"
    )


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors of the disk or store as ours, with the path in front."""
    try:
        yield
    except BatchgenError:
        raise
    except Exception as error:
        ours = _translated(path, error)
        if ours is None:
            raise
        raise ours from error


def _translated(path: str, error: Exception) -> BatchgenError | None:
    code, status = answer(error)
    what = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    if code in NO_BUCKET:
        return no_bucket(path)
    if any(type(one).__name__ in NO_CREDENTIALS for one in _chain(error)):
        return PermissionDenied(
            f"{path}: no credentials for this store ({what}); give them in storage_options, or where its client looks "
            "for them: the environment, its configuration file, the machine's role"
        )
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"{path}: not found")
    number = error.errno if isinstance(error, OSError) else None
    if number in DENIED or status in {401, 403} or isinstance(error, PermissionError) or what.startswith("Forbidden"):
        return PermissionDenied(f"{path}: permission denied ({what}); check who owns it, or the credentials")
    if number in DISK_FULL:
        return PermanentError(f"{path}: {what}; make room in {os.path.dirname(path) or '.'} and run again")
    if status in REFUSALS and code not in PASSING_CODES:
        return PermanentError(f"{path}: the store refuses this ({code or status}): {what}")
    if isinstance(error, OSError):
        return StorageError(f"{path}: {what}")
    if local_path(path) is not None:
        return None  # a mistake of ours
    return StorageError(f"{path}: {type(error).__name__}: {error}")  # a store's own client raises what it likes


def patiently(path: str, operation: Callable[[], _T], retries: int, pause: float = PAUSE_SECONDS) -> _T:
    """The operation's result; where it fails in a way that may pass, it is tried `retries` times more.

    Every pause is drawn from zero to its full length, so that workers that failed together do not come back together.
    """
    give_up = time.monotonic() + DEADLINE_SECONDS
    for number in itertools.count():
        try:
            with naming(path):
                return operation()
        except PermanentError:
            raise
        except StorageError as error:
            wait = random.uniform(0, min(MAX_PAUSE_SECONDS, pause * 2**number))
            if number >= retries or time.monotonic() + wait > give_up:
                raise
            logger.warning("%s; trying again", error)
            time.sleep(wait)
    raise AssertionError


# -- reading -----------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A file opened for reading, and what tells whether it is still the same one when it is opened again."""

    file: BinaryIO
    size: int | None
    mark: Any


class SteadyFile(io.RawIOBase):
    """A file that is opened again, and read on from where it was, when a read fails in its midst."""

    def __init__(self, path: str, opener: Callable[[], Opened], retries: int, pause: float = PAUSE_SECONDS) -> None:
        self._path, self._opener, self._retries, self._pause = path, opener, retries, pause
        first = self._patiently(opener)
        self._file: BinaryIO | None = first.file
        self._size, self._mark = first.size, first.mark
        self._at = self._file_at = 0

    def _patiently(self, operation: Callable[[], _T]) -> _T:
        return patiently(self._path, operation, self._retries, self._pause)

    def read(self, size: int | None = -1) -> bytes:
        self._require_open()
        data = self._patiently(lambda: self._read(-1 if size is None else size))
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        try:
            file = self._file or self._reopened()
            if self._file_at != self._at:
                file.seek(self._at)
            data = file.read(size)
        except BaseException:
            self._drop()
            raise
        self._file_at = self._at + len(data)
        return data

    def _reopened(self) -> BinaryIO:
        again = self._opener()
        self._file, self._file_at = again.file, 0
        if (again.size, again.mark) != (self._size, self._mark):
            raise DataError(
                f"{self._path}: the file was changed while it was read; a run's input must stay as it is. Bring the "
                "old one back and run again, or start a new run in another folder"
            )
        return again.file

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):
                file.close()

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self._path}: this file is closed")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._require_open()
        if whence == io.SEEK_END and self._size is None:
            raise io.UnsupportedOperation(f"{self._path}: its size is not known")
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size or 0}[whence]
        if start + offset < 0:
            raise ValueError(f"negative seek position {start + offset}")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()
