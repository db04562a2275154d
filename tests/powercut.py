"""A local disk that loses power: what was not fsynced, file and folder both, may be gone afterwards.

`PowerCut` watches the system calls of `batchgen.io.localdisk` on a real folder and keeps, beside it, what is durable: a
file's bytes as of its last fsync, a folder's names as of its own last fsync. `after` builds the folder that the next
boot finds: what is durable, and of the rest whatever `keeps` says.
"""

from __future__ import annotations

import builtins
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import Died

from batchgen.io import localdisk


class _File:
    """An inode; `folder` are its names where it is a folder."""

    def __init__(self, is_folder: bool) -> None:
        self.data, self.synced = b"", b""
        self.names: dict[str, _File] | None = {} if is_folder else None
        self.durable: dict[str, _File] = {}
        self.changes: list[dict[str, _File | None]] = []  # of its names since its last fsync; None: taken away


class PowerCut:
    """Stands in for `os` and `open` in `batchgen.io.localdisk`; dies before or after the `at`-th change of the disk."""

    def __init__(self, root: Path, at: int = 0, after: bool = False) -> None:
        root.mkdir(exist_ok=True)
        self._root, self._top = str(root), _File(True)
        self._adopt(root, self._top)
        self._at, self._after = at, after
        self.count = 0
        self.dead = False
        self._lock = threading.RLock()
        self._descriptors: dict[int, _File] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @property
    def met(self) -> bool:
        return self.count >= self._at

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(localdisk, "os", self)
        patch.setattr(localdisk, "open", self._open_file, raising=False)

    def _adopt(self, path: Path, folder: _File) -> None:
        """What the boot found is durable."""
        for child in path.iterdir():
            node = _File(child.is_dir())
            if child.is_dir():
                self._adopt(child, node)
            else:
                node.data = node.synced = child.read_bytes()
            assert folder.names is not None
            folder.names[child.name] = folder.durable[child.name] = node

    def _find(self, path: str) -> tuple[_File, str]:
        """The folder that a path lies in, and its name there."""
        parts = os.path.relpath(path, self._root).split("/")
        folder = self._top
        for part in parts[:-1]:
            assert folder.names is not None
            folder = folder.names[part]
        return folder, parts[-1]

    def _inside(self, path: Any) -> bool:
        return isinstance(path, str) and (path + "/").startswith(self._root + "/") and path != self._root

    def _change(self, do: Callable[[], Any], note: Callable[[], None]) -> Any:
        """One call that changes the disk, or fails to because the machine is off."""
        with self._lock:
            if self.dead:
                raise Died
            if self.count + 1 == self._at and not self._after:
                self.count, self.dead = self._at, True
                raise Died
            result = do()  # what is refused changes nothing
            note()
            self.count += 1
            if self.count == self._at:
                self.dead = True
                raise Died
            return result

    def _rename(self, folder: _File, change: dict[str, _File | None]) -> None:
        folder.changes.append(change)
        _apply(folder.names, change)

    # the calls

    def link(self, old: str, new: str) -> None:
        (source, name), (target, new_name) = self._find(old), self._find(new)
        assert source.names is not None
        self._change(lambda: os.link(old, new), lambda: self._rename(target, {new_name: _there(source.names, name)}))

    def replace(self, old: str, new: str) -> None:
        (source, name), (target, new_name) = self._find(old), self._find(new)
        assert source is target, "a rename between folders is not one change"
        self._change(
            lambda: os.replace(old, new),
            lambda: self._rename(target, {new_name: _there(source.names, name), name: None}),
        )

    rename = replace

    def unlink(self, path: str) -> None:
        folder, name = self._find(path)
        self._change(lambda: os.unlink(path), lambda: self._rename(folder, {name: None}))

    def mkdir(self, path: str, *rest: Any) -> None:
        if not self._inside(path):
            return os.mkdir(path, *rest)
        folder, name = self._find(path)
        self._change(lambda: os.mkdir(path, *rest), lambda: self._rename(folder, {name: _File(True)}))

    def open(self, path: str, flags: int, *rest: Any) -> int:
        descriptor = os.open(path, flags, *rest)
        if flags & os.O_DIRECTORY and (self._inside(path) or path == self._root):
            self._descriptors[descriptor] = self._find(path + "/x")[0]
        return descriptor

    def close(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        os.close(descriptor)

    def fsync(self, descriptor: int) -> None:
        node = self._descriptors.get(descriptor)
        if node is None:
            return

        def note() -> None:
            if node.names is None:
                node.synced = node.data
            else:
                node.durable = dict(node.names)
                node.changes.clear()

        self._change(lambda: None, note)

    def _open_file(self, path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not self._inside(path) or mode == "rb":
            return builtins.open(path, mode, *rest, **named)
        assert mode in ("xb", "wb"), f"{path} is opened with {mode}, which this disk does not know"
        folder, name = self._find(path)
        node = _File(False)
        file = self._change(
            lambda: builtins.open(path, mode, *rest, **named),  # noqa: SIM115 - whoever opens it closes it
            lambda: self._rename(folder, {name: node}),
        )
        self._descriptors[file.fileno()] = node
        real_write = file.write

        class Watched:
            def __enter__(self) -> Watched:
                return self

            def __exit__(self, *exc: object) -> None:
                disk._descriptors.pop(file.fileno(), None)
                file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(self, data: bytes) -> Any:
                def note() -> None:
                    node.data += data

                return disk._change(lambda: real_write(data), note)

        disk = self
        return Watched()

    # the next process, and the next boot

    def next_process(self) -> None:
        """The process died and the machine did not: what it had not fsynced is there, and still not durable."""
        self.dead, self._at = False, 0

    def after(self, folder: Path, keeps: Callable[[], bool] = lambda: False) -> Path:
        """What is found in `folder` after the power cut: all that is durable, and changes that `keeps` lets live."""
        self.dead = True
        _build(self._top, folder, keeps)
        return folder


def _there(names: dict[str, _File] | None, name: str) -> _File:
    assert names is not None
    return names[name]


def _apply(names: dict[str, _File] | None, change: dict[str, _File | None]) -> None:
    assert names is not None
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _build(folder: _File, path: Path, keeps: Callable[[], bool]) -> None:
    path.mkdir()
    names = dict(folder.durable)
    for change in folder.changes:
        if keeps():
            _apply(names, change)
    for name, node in names.items():
        if node.names is not None:
            _build(node, path / name, keeps)
        elif node.synced == node.data or keeps():
            (path / name).write_bytes(node.data)
        else:  # some of the bytes, or as many zeros
            (path / name).write_bytes(node.data[: len(node.data) // 2] if keeps() else bytes(len(node.data)))
