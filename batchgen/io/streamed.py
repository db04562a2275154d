"""A file of the run folder too large for memory, written from pieces under its final name, whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from batchgen.io.files import Store, local_path, naming

IN_MEMORY = 32 << 20  # up to this size it is written like any other file
PART_BYTES = 16 << 20  # of an upload in parts


def replace_from(store: Store, name: str, chunks: Iterable[bytes]) -> None:
    """Give `name` these bytes whatever it had before. After a failure it has what it had, and may be written again."""
    rest = iter(chunks)
    head, size = [], 0
    for chunk in rest:
        head.append(chunk)
        size += len(chunk)
        if size > IN_MEMORY:
            break
    else:
        store.replace(name, b"".join(head))
        return
    everything = itertools.chain(head, rest)
    path = store.path(name)
    if local_path(store.url) is not None:
        _to_disk(path, everything)
    else:
        _to_store(store, path, everything)


def _to_disk(path: str, chunks: Iterator[bytes]) -> None:
    folder, name = os.path.split(path)
    temp = os.path.join(folder, f".tmp-{uuid.uuid4().hex}-{name}")
    try:
        with naming(path):
            with open(temp, "xb") as file:
                for chunk in chunks:  # an error of a part that is read is named already
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temp)


def _to_store(store: Store, url: str, chunks: Iterator[bytes]) -> None:
    """An upload in parts, which the store shows when it is closed; given up where it fails."""
    with naming(url):
        system, path = store._disk._at(url)  # type: ignore[union-attr]
        file = system.open(path, "wb", block_size=PART_BYTES)
    try:
        for chunk in chunks:
            with naming(url):
                file.write(chunk)
        with naming(url):
            file.close()
    except BaseException:
        _give_up(file)
        raise


def _give_up(file: Any) -> None:
    """Have fsspec abort the upload: a file that is merely left would be finished with what it holds so far."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True
