"""Reads a Hugging Face model folder: config.json and safetensors files, sharded or not."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from batchgen.errors import ModelError
from batchgen.weights import add_samples, read_json, regular_file

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
HASHED = ("config.json", "generation_config.json", "hf_quant_config.json")  # the last says how ModelOpt quantised
# safetensors dtype -> torch dtype; anything else is part of a quantised format (weights/quantized.py), or no weight
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a header says of one tensor, which lies in bytes [start, end) of its shard file."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsCheckpoint:
    """Every shard's header is read and checked against the file's size before any tensor is."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config: dict[str, Any] = read_json(folder / "config.json", _no_config(folder))
        generation = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation, "") if generation.exists() else {}
        shards, placed = _shards(folder)
        self._headers: dict[str, bytes] = {}
        self.tensors: dict[str, Tensor] = {}
        for shard in shards:
            self._headers[shard] = header = _read_header(folder / shard)
            for name, tensor in _parse_header(folder / shard, header).items():
                if placed.get(name, shard) == shard:  # of a tensor stored twice, the index says which counts
                    self.tensors[name] = tensor
        stale = sorted(set(placed) - set(self.tensors))
        if stale:
            raise ModelError(
                f"{folder / INDEX} names {len(stale)} tensors that its files do not hold where it says, the first "
                f"{stale[0]!r} in {placed[stale[0]]!r}; the index is stale or the download mixed two versions: "
                "download the model again"
            )
        self.names = tuple(self.tensors)
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype in DTYPES:
                sizes[DTYPES[tensor.dtype]] += tensor.end - tensor.start
        if sizes:
            self.config["dtype"] = sizes.most_common(1)[0][0]  # config.json's own word for it is often outdated

    def stream(
        self, names: Collection[str] | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = set(self.tensors if names is None else names)
        self.check_plain(wanted)
        for inside in self.by_file(wanted):
            with self.reader() as read:
                for name in sorted(inside, key=lambda name: self.tensors[name].start):
                    tensor = read(name)
                    yield name, tensor if dtype is None else tensor.to(dtype)

    def check_plain(self, names: Collection[str]) -> None:
        """Refuses tensors that are no plain numbers."""
        for name in sorted(names):
            if self.tensors[name].dtype not in DTYPES:
                raise ModelError(
                    f"{self.path / self.tensors[name].shard}: tensor {name!r} is stored as "
                    f"{self.tensors[name].dtype}, and nothing says how it is quantised; expected one of "
                    f"{', '.join(DTYPES)}"
                )

    def by_file(self, names: Collection[str]) -> list[list[str]]:
        return [[name for name in names if self.tensors[name].shard == shard] for shard in self._headers]

    @contextmanager
    def reader(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """A function that reads a tensor as it is stored. Files are opened at their first tensor, closed at the end."""
        from safetensors import safe_open

        with ExitStack() as files:
            opened: dict[str, Any] = {}

            def read(name: str) -> torch.Tensor:
                shard = self.tensors[name].shard
                if shard not in opened:
                    opened[shard] = files.enter_context(safe_open(str(self.path / shard), framework="pt"))
                tensor: torch.Tensor = opened[shard].get_tensor(name)
                return tensor

            yield read

    @contextmanager
    def byte_reader(self) -> Iterator[Callable[[str], bytes]]:
        """The same for the bytes of small tensors, needing no torch."""
        with ExitStack() as files:
            opened: dict[str, BinaryIO] = {}

            def read(name: str) -> bytes:
                tensor = self.tensors[name]
                if tensor.shard not in opened:
                    opened[tensor.shard] = files.enter_context(open(self.path / tensor.shard, "rb"))
                opened[tensor.shard].seek(tensor.start)
                return opened[tensor.shard].read(tensor.end - tensor.start)

            yield read

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in HASHED:
            file = self.path / name
            content = file.read_bytes() if file.exists() else b""
            if not content and name == HASHED[-1]:
                continue  # other models' fingerprints stay what they were
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        for shard, header in self._headers.items():
            digest.update(f"{shard} {len(header)}\n".encode())
            digest.update(header)
            spans = sorted((t.start, t.end) for t in self.tensors.values() if t.shard == shard)
            with open(self.path / shard, "rb") as opened:
                add_samples(digest, opened, spans)
        return digest.hexdigest()


def _no_config(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f"; it holds {found[0]}: name that file as model.path" if found else ""
    return f"{folder} has no config.json: not a Hugging Face model folder, or an incomplete download{hint}"


def _shards(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The shard files in order, and tensor name -> shard as the index says ({} without one). Opens only the index."""
    if not (folder / INDEX).exists():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        hint = f" {pickles[0]} is a pickle, which is never read: convert it to safetensors." if pickles else ""
        missing = f"{folder} has neither {SINGLE} nor {INDEX}; incomplete download?{hint}"
        regular_file(folder / SINGLE, missing)
        return [SINGLE], {}
    placed = read_json(folder / INDEX, "").get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{folder / INDEX} has no weight_map; incomplete download?")
    shards = sorted({shard if isinstance(shard, str) else repr(shard) for shard in placed.values()})
    for shard in shards:
        if shard in ("", ".", "..") or any(character in shard for character in "/\\\0"):
            raise ModelError(f"{folder / INDEX} names the file {shard!r}; expected a plain file name inside the folder")
    for shard in shards:
        regular_file(
            folder / shard,
            f"missing shard {shard} in {folder}, which {INDEX} names; incomplete download? Download the model again",
        )
    return shards, placed


def _read_header(path: Path) -> bytes:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(
                f"{path} has {size} bytes but claims a header of {length}: truncated or not a safetensors file; "
                "incomplete download?"
            )
        return file.read(length)


def _parse_header(path: Path, header: bytes) -> dict[str, Tensor]:
    data_start = 8 + len(header)
    try:
        entries = json.loads(header)
        tensors = {
            name: Tensor(
                path.name,
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                *(data_start + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} has a damaged safetensors header ({error}); incomplete download?") from error
    size, expected = path.stat().st_size, max((tensor.end for tensor in tensors.values()), default=data_start)
    if size != expected:
        raise ModelError(
            f"missing shard data: {path.name} in {path.parent} has {size} bytes, its header says {expected}; "
            "incomplete download? Download the model again"
        )
    return tensors
