"""Stores that fsspec reaches, with what each can do in one step. fsspec is imported only when a URL asks for it.

Which request makes a create or a replace conditional is known per store, from its client's source:

- S3 (s3fs): `If-None-Match: *` and `If-Match` on PutObject. Bodies below 5 GB go in one PutObject; of a multipart
  upload only the last request is conditional, some servers ignore that, and a killed process leaves it open.
- Google Cloud Storage (gcsfs): `ifGenerationMatch`, 0 for a new name, also in one request.
- Azure (adlfs): `If-None-Match: *` and `If-Match` on Put Blob, on Put Block List where its client splits a large body.
- memory: a lock; the store belongs to this process.

What a server does with these conditions is asked before it is trusted: see `Store.probe`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, BinaryIO, ClassVar, cast

from batchgen.errors import ConfigError
from batchgen.io.storage import Entry, Opened, Powers, answer, bucket_missing, naming, no_bucket

BLOCK_BYTES = 1 << 20  # read ahead of a remote file: streams well, and a sampled read costs little more
UPLOAD_PART_BYTES = 16 << 20  # of a file too large for memory
ONE_PUT_BYTES = 5 << 30  # S3's limit for one request
PUT_SECONDS = 60.0  # what a write may take, retries inside the client included, beside the time for its bytes
PUT_BYTES_PER_SECOND = 256 << 10

# Where the stores' own listings keep these; the first one present counts.
ETAG_KEYS = ("ETag", "etag", "md5Hash", "content_md5")
MTIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")


class RemoteDisk:
    """A store that nobody vouches for: only the lease keeps two writers apart. Listings never come from a cache."""

    powers = Powers(create=False, compare=False)
    proven = True  # there is nothing to ask the server

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._options = self.options(options)

    @staticmethod
    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        """What the client is made with: what is `given`, and what we need of it otherwise."""
        return dict(given)

    def _at(self, url: str) -> tuple[Any, str]:
        """The client and the path that it knows; a chained URL has a client for each archive."""
        import fsspec.core

        try:
            return fsspec.core.url_to_fs(url, **self._options)
        except ImportError as error:
            raise ConfigError(f"{url}: {error}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{url}: {error}; correct the URL or its storage_options") from error

    def _fresh(self, url: str) -> tuple[Any, str]:
        system, path = self._at(url)
        system.invalidate_cache()
        return system, path

    # reading

    def stat(self, url: str) -> Entry | None:
        info = self._info(url)
        return None if info is None else self._entry(info)

    def _info(self, url: str) -> Mapping[str, Any] | None:
        """`exists` of fsspec would take any failure for an absence."""
        system, path = self._fresh(url)
        try:
            return cast("Mapping[str, Any]", system.info(path))
        except (FileNotFoundError, NotADirectoryError) as error:
            if bucket_missing(error):
                raise
            cause = error.__cause__  # fsspec's HTTP takes any failure for an absence, too
            failed = isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError))
            if cause is not None and (failed or answer(cause)[1] not in {0, 404, 410}):
                raise cause from None
            return None

    def ls(self, url: str) -> list[Entry]:
        system, path = self._fresh(url)
        here = path.rstrip("/")
        return [self._entry(info) for info in system.ls(path, detail=True) if info["name"].rstrip("/") != here]

    def find(self, url: str) -> list[str]:
        """The files under a folder at any depth, by their names from there on: one listing, where the store has it."""
        system, path = self._fresh(url)
        base = path.rstrip("/") + "/"
        found = system.find(path, withdirs=False, detail=True)
        if not isinstance(found, Mapping):  # adlfs, where the path is a file
            return []
        return [
            name[len(base) :]
            for name, info in found.items()
            if name.startswith(base) and name != base and info["type"] == "file"
        ]

    @staticmethod
    def _entry(info: Mapping[str, Any]) -> Entry:
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
        return Entry(info["name"].rstrip("/").rpartition("/")[2], kind, info.get("size"), mtime, etag)

    def open(self, url: str) -> Opened:
        system, path = self._fresh(url)
        file = system.open(path, "rb", block_size=BLOCK_BYTES)
        with contextlib.suppress(AttributeError):  # an archive closes its members when nobody holds it any more
            file.opened_from = system
        known = getattr(file, "details", None)
        entry = self._entry(known if isinstance(known, Mapping) and "name" in known else system.info(path))
        return Opened(cast(BinaryIO, file), entry.size, entry.etag or entry.mtime)

    def read(self, url: str) -> bytes:
        system, path = self._fresh(url)
        return cast(bytes, system.cat_file(path))

    def version(self, url: str) -> str | None:
        entry = self.stat(url)
        return None if entry is None else entry.etag or f"{entry.size}-{entry.mtime}"

    # writing

    def create(self, url: str, data: bytes) -> bool:
        """Look, then write: two writers can both believe that they came first."""
        if self.stat(url) is not None:
            return False
        self.replace(url, data)
        return True

    def replace_if(self, url: str, data: bytes, version: str) -> bool:
        """Look, then write."""
        if self.version(url) != version:
            return False
        self.replace(url, data)
        return True

    def replace(self, url: str, data: bytes) -> None:
        system, path = self._at(url)
        try:
            system.pipe_file(path, data)
        except FileNotFoundError as error:  # a store with real folders
            if bucket_missing(error):
                raise
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.pipe_file(path, data)

    def replace_from(self, url: str, chunks: Iterable[bytes]) -> None:
        """An upload in parts, which the store shows when it is closed; given up where it fails."""
        system, path = self._at(url)
        file = system.open(path, "wb", block_size=UPLOAD_PART_BYTES)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.close()
        except BaseException:
            # a file that is merely left would be finished with what it holds so far
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True
            raise

    def delete(self, url: str) -> None:
        system, path = self._fresh(url)
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(path)

    def sweep(self, root: str) -> None:
        """Nothing is staged under another name here."""


class MemoryDisk(RemoteDisk):
    """memory:// is one store for the whole process."""

    powers = Powers(create=True, compare=True)
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def ls(self, url: str) -> list[Entry]:
        with self._lock:
            return super().ls(url)

    def find(self, url: str) -> list[str]:
        with self._lock:
            return super().find(url)

    def stat(self, url: str) -> Entry | None:
        with self._lock:
            return super().stat(url)

    def create(self, url: str, data: bytes) -> bool:
        with self._lock:
            return super().create(url, data)

    def replace(self, url: str, data: bytes) -> None:
        with self._lock:
            super().replace(url, data)

    def version(self, url: str) -> str | None:
        with self._lock:
            return None if self.stat(url) is None else hashlib.sha256(self.read(url)).hexdigest()

    def replace_if(self, url: str, data: bytes, version: str) -> bool:
        with self._lock:
            return super().replace_if(url, data, version)


class _ObjectStore(RemoteDisk):
    """A store known to have conditional writes. Its client is held, so that threads share one pool of connections."""

    powers = Powers(create=True, compare=True)
    proven = False

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        self._system = super()._at(url)[0]

    def _at(self, url: str) -> tuple[Any, str]:
        return self._system, self._system._strip_protocol(url)

    def create(self, url: str, data: bytes) -> bool:
        if not self.powers.create:
            return super().create(url, data)
        try:
            self._put_new(self._at(url)[1], data)
        except Exception as error:
            if _refused(error):
                return False
            raise
        return True

    def replace_if(self, url: str, data: bytes, version: str) -> bool:
        if not self.powers.compare:
            return super().replace_if(url, data, version)
        try:
            self._put_over(self._at(url)[1], data, version)
        except Exception as error:
            if _refused(error) or (_absent(error) and not bucket_missing(error)):
                return False
            raise
        return True

    def replace(self, url: str, data: bytes) -> None:
        self._put(self._at(url)[1], data)

    def _put(self, path: str, data: bytes, **more: Any) -> None:
        """Write in one request, where the store has such large ones, and in bounded time.

        A client that waits for leave to send its body ("100 Continue") would wait for ever.
        """
        self._system.pipe_file(path, data, timeout=_time_for(data), **more)

    def _put_new(self, path: str, data: bytes) -> None:
        self._put(path, data, mode="create")

    def _put_over(self, path: str, data: bytes, version: str) -> None:
        raise NotImplementedError


def _time_for(data: bytes) -> float:
    return PUT_SECONDS + len(data) / PUT_BYTES_PER_SECOND


def _refused(error: BaseException) -> bool:
    """The name is taken, or the version another one."""
    code, status = answer(error)
    return isinstance(error, FileExistsError) or status == 412 or code == "BlobAlreadyExists"  # older adlfs's


def _absent(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or answer(error)[1] == 404


class S3Disk(_ObjectStore):
    @staticmethod
    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        """Retries are ours alone: those of botocore, of s3fs and ours would be multiplied."""
        config = {"retries": {"mode": "standard", "total_max_attempts": 1}, **(given.get("config_kwargs") or {})}
        return {"use_listings_cache": False, **given, "config_kwargs": config}

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        self._system.retries = 1
        self._system.max_concurrency = 1  # one object is one request: ranges could be of two versions

    def _put(self, path: str, data: bytes, **more: Any) -> None:
        super()._put(path, data, chunksize=ONE_PUT_BYTES // 2, **more)  # from twice that on, s3fs cuts

    def _put_over(self, path: str, data: bytes, version: str) -> None:
        bucket, key, _ = self._system.split_path(path)
        given = {"Bucket": bucket, "Key": key, "Body": data, "IfMatch": version}
        self._system.call_s3("put_object", timeout=_time_for(data), **given)


class GoogleDisk(_ObjectStore):
    @staticmethod
    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        """gcsfs tries six times by itself; a connection that stands still must not cost it five minutes each time."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(sock_connect=10, sock_read=60)
        return {"use_listings_cache": False, "requests_timeout": timeout, **given}

    def version(self, url: str) -> str | None:
        info = self._info(url)
        return None if info is None else str(info["generation"])

    def _put(self, path: str, data: bytes, **more: Any) -> None:
        try:
            super()._put(path, data, chunksize=ONE_PUT_BYTES, **more)
        except FileNotFoundError as error:  # gcsfs does not say of what
            raise no_bucket(f"gs://{path}") from error

    def _put_over(self, path: str, data: bytes, version: str) -> None:
        """gcsfs has no parameter for a generation; this is its upload of one request with the condition added."""
        bucket, key, _ = self._system.split_path(path)
        self._system.call(
            "POST",
            self._system.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o",
            bucket,
            uploadType="media",
            name=key,
            ifGenerationMatch=version,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
            timeout=_time_for(data),
        )


class AzureDisk(_ObjectStore):
    @staticmethod
    def options(given: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_listings_cache": False, **given}

    def _put(self, path: str, data: bytes, **more: Any) -> None:
        super()._put(path, data, retry_total=0, **more)  # its first pause would be 15 s

    def _put_new(self, path: str, data: bytes) -> None:
        self._put(path, data, overwrite=False)

    def _put_over(self, path: str, data: bytes, version: str) -> None:
        from azure.core import MatchConditions

        self._put(path, data, etag=version, match_condition=MatchConditions.IfNotModified)


# By the class of the client, not by the URL's scheme, which any package may claim.
DISKS: dict[str, type[RemoteDisk]] = {
    "fsspec.implementations.memory.MemoryFileSystem": MemoryDisk,
    "s3fs.core.S3FileSystem": S3Disk,
    "gcsfs.core.GCSFileSystem": GoogleDisk,
    "adlfs.spec.AzureBlobFileSystem": AzureDisk,
}


def open_remote(url: str, options: Mapping[str, Any]) -> RemoteDisk:
    """The store that a URL names."""
    import fsspec

    with naming(url):
        disk: type[RemoteDisk] = RemoteDisk
        if "::" not in url:  # an archive inside another file is no place for a run
            try:
                client = fsspec.get_filesystem_class(url.partition("://")[0])
            except ImportError as error:
                raise ConfigError(f"{url}: {error}") from error
            except ValueError as error:
                raise ConfigError(
                    f"{url}: {error}; local paths have no scheme, others need one that fsspec knows"
                ) from error
            names = [f"{one.__module__}.{one.__qualname__}" for one in client.__mro__]
            disk = next((DISKS[name] for name in names if name in DISKS), disk)
        return disk(url, options)
