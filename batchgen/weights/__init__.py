"""Finds a model's files and opens them as one Checkpoint, whatever format they are in. Imports no torch by itself."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from batchgen.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

SAMPLE_BYTES = 4096


class Checkpoint(Protocol):
    """A model's stored form, read lazily. `config` holds config.json's keys, its "dtype" what the tensors truly are."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    names: tuple[str, ...]

    def stream(
        self, names: Collection[str] | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in file order, one tensor in memory at a time, of `names` (None: all).

        Tensors come in `dtype`; None is the stored one, float32 for quantised tensors. They may be views of the
        file, valid until the next is asked for: copy what is to be kept.
        """
        ...

    def by_file(self, names: Collection[str]) -> list[list[str]]:
        """The names, those of a file together: to stream several files at once."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 in hex of configuration, headers and sampled bytes of every tensor; the folder's name is not in."""
        ...


def open_checkpoint(path: str | Path, *, ignore_index: bool = False) -> Checkpoint:
    """Open what `resolve` returned: a folder with config.json and safetensors, quantised or not, or a .gguf file.

    `ignore_index` reads a folder's files as if it had no index.
    """
    path = Path(path)
    if path.is_dir():
        from batchgen.weights.quantized import dequantised
        from batchgen.weights.safetensors import SafetensorsCheckpoint

        return dequantised(SafetensorsCheckpoint(path, ignore_index=ignore_index))
    if ignore_index:
        raise ConfigError(f"model.ignore_index: true, but {path} is a GGUF file, which has no index; leave it out")
    from batchgen.weights.gguf import GgufCheckpoint

    return GgufCheckpoint(path)


def resolve(
    path: str,
    revision: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    ignore_index: bool = False,
) -> Path:
    """Turn `model.path` into a local folder or .gguf file; what is elsewhere is downloaded, or found in a cache."""
    from batchgen.weights import hub

    if path.startswith("package:"):
        return _in_package(path)
    if is_remote(path):
        from batchgen.weights import remote

        return remote.fetch(path, storage_options or {}, ignore_index=ignore_index)
    local = Path(re.sub("^(file|local)://", "", path)).expanduser()
    if local.exists():
        return _model_file_or_folder(local, path)
    if wanted := hub.parse(path, revision):
        return hub.fetch(path, wanted)
    raise ModelError(
        f"model path {path!r} does not exist (looked at {local.absolute()}); expected a folder with config.json and "
        "safetensors files, a .gguf file, a hub name like org/name, a URL like s3://bucket/folder, or "
        "package:some_package/file.gguf"
    )


def is_remote(path: str) -> bool:
    """Whether it is in a store that fsspec reaches."""
    return "://" in path and not path.startswith(("hf://", "file://", "local://"))


def _model_file_or_folder(local: Path, path: str) -> Path:
    if local.is_dir() or local.suffix == ".gguf":
        return local.absolute()
    raise ModelError(f"model path {path!r} is a file that is not GGUF; expected a model folder or a .gguf file")


def _in_package(path: str) -> Path:
    package, _, rest = path.removeprefix("package:").partition("/")
    parts = Path(rest).parts
    if not package.isidentifier() or not parts or ".." in parts or Path(rest).is_absolute():
        raise ModelError(f"model path {path!r}: expected package:some_package/file.gguf")
    spec = importlib.util.find_spec(package)  # of a top-level name: finds without importing
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model path {path!r}: no Python package {package!r} is installed for {sys.executable}; install it there"
        )
    folders = list(spec.submodule_search_locations)
    for folder in folders:
        found = Path(folder, *parts)
        if found.exists():
            return _model_file_or_folder(found, path)
    raise ModelError(f"model path {path!r}: {rest!r} is not in the installed package (looked in {', '.join(folders)})")


def regular_file(path: Path, missing: str) -> Path:
    """`path`, if it is a regular file (or a link to one: the hub's cache is made of links); never opens it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise ModelError(missing) from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is not a regular file; a model's files must be")
    return path


def read_json(path: Path, missing: str) -> dict[str, Any]:
    try:
        found = json.loads(regular_file(path, missing).read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); incomplete download?") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}, expected a JSON object")
    return found


def add_samples(digest: hashlib._Hash, file: BinaryIO, spans: Iterable[tuple[int, int]]) -> None:
    """Hash the first, middle and last 4 KiB of each (start, end) span of an open file."""
    for start, end in spans:
        middle = (start + end - SAMPLE_BYTES) // 2
        for wanted in (start, middle, end - SAMPLE_BYTES):
            at = max(start, wanted)
            file.seek(at)
            digest.update(file.read(min(SAMPLE_BYTES, end - at)))
