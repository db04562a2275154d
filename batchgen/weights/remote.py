"""Models in an object store: the files that a model needs are downloaded into a folder of this machine's own."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError, StorageError
from batchgen.io.storage import Entry, Opened, PermanentError, SteadyFile, naming, patiently
from batchgen.io.stores import open_disk

RETRIES = 5  # of a read that fails in a way that may pass
CHUNK_BYTES = 8 << 20
READERS = 4  # files at a time
INDEX = "model.safetensors.index.json"
TEXTS = ("*.json", "*.jinja")  # small, and among them is the index, which says which weights count
WEIGHTS = "model*.safetensors"
PARTIAL = ".partial"


def fetch(url: str, storage_options: Mapping[str, Any], *, ignore_index: bool = False) -> Path:
    """The local folder, or .gguf file, with what the model at `url` is now.

    Its name holds the files' sizes and versions: another content comes into another folder, and nobody's files change
    under them. A file has its name only when it is whole, so that a download that was killed goes on file by file.
    """
    url = url.rstrip("/")
    disk = open_disk(url, storage_options)
    entries = find(url, storage_options)
    listing = json.dumps([url, *sorted((e.name, e.size, e.etag or e.mtime) for e in entries.values())])
    folder = cache_folder() / hashlib.sha256(listing.encode()).hexdigest()[:32]
    base = url.rpartition("/")[0] if url.endswith(".gguf") else url

    def download(names: Collection[str]) -> None:
        _download({name: entries[name] for name in names}, folder, base, disk.open)

    with naming(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if url.endswith(".gguf"):
            download(entries)
            return folder / next(iter(entries))
        download([name for name in entries if _matches(name, TEXTS)])
        named = set() if ignore_index else _named_by_index(folder)
        shards = named or {name for name in entries if fnmatch.fnmatchcase(name, WEIGHTS)}
        download([name for name in entries if name in shards])
    return folder


def cache_folder() -> Path:
    given = os.environ.get("BATCHGEN_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "batchgen"
    return (Path(given).expanduser() if given else home) / "models"


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def find(url: str, storage_options: Mapping[str, Any]) -> dict[str, Entry]:
    """The files at `url` that can be a part of a model, by name; those of folders below are not."""
    url, disk = url.rstrip("/"), open_disk(url, storage_options)
    found = patiently(url, lambda: disk.stat(url), RETRIES)
    if found is None:
        raise ModelError(f"model path {url!r} does not exist; expected a folder with config.json, or a .gguf file")
    if url.endswith(".gguf") and found.kind == "file":
        return {found.name: _sized(url, found)}
    if found.kind != "folder":
        raise ModelError(f"model path {url!r} is a file that is not GGUF; expected a model folder or a .gguf file")
    if url.endswith(".gguf"):
        raise ModelError(f"model path {url!r} is a folder; expected a file")
    listed = patiently(url, lambda: disk.ls(url), RETRIES)
    wanted = (*TEXTS, "*.safetensors")
    entries = {e.name: _sized(f"{url}/{e.name}", e) for e in listed if e.kind == "file" and _matches(e.name, wanted)}
    if "config.json" not in entries:
        ggufs = sorted(entry.name for entry in listed if entry.name.endswith(".gguf"))
        hint = f"; it holds {ggufs[0]}: name that file as model.path" if ggufs else ""
        raise ModelError(f"model path {url!r} has no config.json: not a Hugging Face model folder{hint}")
    for name in entries:
        if name in (".", "..") or any(character in name for character in "/\\\0"):
            raise ModelError(f"model path {url!r} holds a file named {name!r}, which no local folder can")
    return entries


def _sized(path: str, entry: Entry) -> Entry:
    if entry.size is None:
        raise ModelError(f"{path}: the store does not tell its size; copy the model to a local folder and name that")
    return entry


def _named_by_index(folder: Path) -> set[str]:
    """What the index names, whatever it is; the reader of the folder says what is wrong with it."""
    try:
        placed = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return {shard for shard in placed.values() if isinstance(shard, str)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return set()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: others wait, and find the files there. The lock goes with a process that dies."""
    with naming(str(folder)), open(folder / ".lock", "wb") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: then two may do the same work
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(f"*{PARTIAL}"):
                left.unlink()
        yield


def _download(entries: Mapping[str, Entry], folder: Path, base: str, opener: Callable[[str], Opened]) -> None:
    def there(entry: Entry) -> bool:
        return (folder / entry.name).is_file() and (folder / entry.name).stat().st_size == entry.size

    missing = [entry for entry in entries.values() if not there(entry)]
    needed, free = sum(entry.size or 0 for entry in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise PermanentError(
            f"{folder}: the model at {base} takes {needed} more bytes, and the disk has {free}; make room, or set "
            "BATCHGEN_CACHE to a folder on another disk"
        )
    stop = threading.Event()
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for _ in pool.map(
                lambda entry: _download_one(entry, folder, f"{base}/{entry.name}", opener, stop), missing
            ):
                pass  # raises what a reader raised
        except BaseException:  # a signal, too: nobody waits for what is left
            stop.set()
            raise


def _download_one(entry: Entry, folder: Path, url: str, opener: Callable[[str], Opened], stop: threading.Event) -> None:
    def opened() -> Opened:
        found = opener(url)
        same = entry.etag is None or found.mark == entry.etag
        if found.size != entry.size or not same:
            raise StorageError(f"{url} was changed while it was downloaded; run again when the model is in place")
        return found

    if stop.is_set():
        return
    partial = folder / f"{entry.name}.{os.getpid()}{PARTIAL}"
    try:
        with SteadyFile(url, opened, RETRIES) as source, naming(str(partial)), open(partial, "wb") as target:
            left = entry.size or 0
            while left and not stop.is_set():
                data = source.read(min(CHUNK_BYTES, left))
                if not data:
                    raise StorageError(f"{url} ended {left} bytes early; run again")
                target.write(data)
                left -= len(data)
            if left:
                return
            target.flush()
            os.fsync(target.fileno())
            os.replace(partial, folder / entry.name)
    finally:
        partial.unlink(missing_ok=True)
