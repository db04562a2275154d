"""Reads a Hugging Face model folder: config.json and safetensors files, sharded or not."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from batchgen.errors import ModelError
from batchgen.weights import add_samples, read_json, regular_file
from batchgen.weights.safetensors_header import read_entries

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NUMBERED = re.compile(r"model-(?P<number>[0-9]{1,6})-of-(?P<total>[0-9]{1,6})\.safetensors")
PIECE_ELEMENTS = 1 << 20  # converted at a time: stays in cache
READ_BYTES = 1 << 30  # of one call, which ends at 2 GiB anyway
MAX_HEADER_BYTES = 100_000_000
WITHOUT_INDEX = ", or set model.ignore_index: true where the files that are there are the whole model"
HASHED = ("config.json", "generation_config.json", "hf_quant_config.json")  # the last says how ModelOpt quantised
# safetensors dtype -> torch dtype: of parts of quantised tensors (weights/quantized.py), and of plain numbers
PARTS = {
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}
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

    def __init__(self, folder: Path, *, ignore_index: bool = False) -> None:
        self.path = folder
        self.config: dict[str, Any] = read_json(folder / "config.json", _no_config(folder))
        generation = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation, "") if generation.exists() else {}
        shards, placed = _shards(folder, ignore_index)
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
                f"download the model again{WITHOUT_INDEX}"
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
                    yield name, read(name, dtype)

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
    def reader(self) -> Iterator[Callable[[str, torch.dtype | None], torch.Tensor]]:
        """A function that reads a tensor, in a dtype (None: as it is stored). Files are opened at their first tensor,
        closed at the end."""
        with ExitStack() as files:
            opened: dict[str, FileIO] = {}

            def read(name: str, dtype: torch.dtype | None) -> torch.Tensor:
                tensor = self.tensors[name]
                if tensor.shard not in opened:
                    path = self.path / tensor.shard
                    opened[tensor.shard] = files.enter_context(open(path, "rb", buffering=0))
                return read_tensor(opened[tensor.shard], tensor, dtype)

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


def read_tensor(file: FileIO, tensor: Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in `dtype` (None: as stored).

    Read, not mapped: page by page a disk is slower than in long reads. Another dtype is made piece by piece, so that
    there is never a second copy.
    """
    import torch

    stored: torch.dtype = getattr(torch, {**DTYPES, **PARTS}[tensor.dtype])
    out = torch.empty(tensor.shape, dtype=dtype or stored)
    flat, at = out.view(-1), tensor.start
    if out.dtype == stored:
        _fill(file, at, flat)
        return out
    piece = torch.empty(min(PIECE_ELEMENTS, len(flat)), dtype=stored)
    for target in flat.split(PIECE_ELEMENTS):
        part = piece[: len(target)]
        _fill(file, at, part)
        target.copy_(part)
        at += part.nbytes
    return out


def _fill(file: FileIO, at: int, tensor: torch.Tensor) -> None:
    import torch

    left = memoryview(cast("bytearray", tensor.view(torch.uint8).numpy())) if len(tensor) else memoryview(b"")
    while left:
        count = os.preadv(file.fileno(), [left[:READ_BYTES]], at)
        if not count:
            raise ModelError(f"{file.name!s} became shorter while a tensor was read from it")
        left, at = left[count:], at + count


def _no_config(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f"; it holds {found[0]}: name that file as model.path" if found else ""
    return f"{folder} has no config.json: not a Hugging Face model folder, or an incomplete download{hint}"


def _shards(folder: Path, ignore_index: bool) -> tuple[list[str], dict[str, str]]:
    """The shard files in order, and tensor name -> shard as the index says ({} without one). Opens only the index."""
    if ignore_index or not (folder / INDEX).exists():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        hint = f" {pickles[0]} is a pickle, which is never read: convert it to safetensors." if pickles else ""
        if not (folder / SINGLE).exists() and (numbered := _numbered(folder)):
            return numbered, {}
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
            f"missing shard {shard} in {folder}, which {INDEX} names; incomplete download? Download the model again"
            + WITHOUT_INDEX,
        )
    return shards, placed


def _numbered(folder: Path) -> list[str]:
    """The files model-00001-of-0000N.safetensors where no index is; all N have to be there. [] where none is."""
    found = {file.name: match for file in folder.iterdir() if (match := NUMBERED.fullmatch(file.name))}
    totals = sorted({match["total"] for match in found.values()})
    if len(totals) > 1:
        raise ModelError(
            f"{folder} has no {INDEX}, and files of several models: of {' and of '.join(totals)} shards; remove those "
            "that do not belong to it"
        )
    for total in totals:
        names = [f"model-{n:0{len(total)}}-of-{total}.safetensors" for n in range(1, int(total) + 1)]
        missing = [name for name in names if name not in found]
        if missing or len(found) != len(names):
            raise ModelError(
                f"missing shard {', '.join(missing[:1])} in {folder}, which has {len(found)} of {total} and no {INDEX}"
                "; incomplete download? Download the model again"
            )
    for name in found:
        regular_file(folder / name, f"missing shard {name} in {folder}; incomplete download?")
    return sorted(found)


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
    return {
        name: Tensor(
            path.name, entry["dtype"], tuple(entry["shape"]), *(data_start + offset for offset in entry["data_offsets"])
        )
        for name, entry in read_entries(path, header).items()
    }
