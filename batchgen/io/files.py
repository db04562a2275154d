"""Input files: found by pattern, wherever they are, and read through failures that pass."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from batchgen.errors import ConfigError, DataError, Interrupted, NoInputError, PermissionDenied, StorageError
from batchgen.io.storage import Entry, SteadyFile, bucket_missing, local_path, naming, patiently
from batchgen.io.stores import open_disk

READ_RETRIES = 5  # of a read that fails in a way that may pass
TABLE_MARKERS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}  # a folder of this name makes its parent a table
OUTPUT, ERRORS, BATCH = COPIES = ("output.jsonl", "errors.jsonl", "batch.json")  # what a run folder's parts hold, too


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file. `path` is what `open_input` takes; `etag` is None where the store has none."""

    number: int
    path: str
    size: int
    mtime: float | None
    etag: str | None


def open_input(path: str, storage_options: Mapping[str, Any], retries: int = READ_RETRIES) -> BinaryIO:
    """The raw bytes of one input file, seekable. A read that fails goes on where it was, `retries` times."""
    disk, at = open_disk(path, storage_options), local_path(path) or path
    return cast(BinaryIO, SteadyFile(path, lambda: disk.open(at), retries))


def check_unchanged(file: InputFile, storage_options: Mapping[str, Any]) -> None:
    """DataError where a file is not what it was when the run was opened, as far as its size and date tell."""
    disk, at = open_disk(file.path, storage_options), local_path(file.path) or file.path
    entry = patiently(file.path, lambda: disk.stat(at), READ_RETRIES)
    if entry is not None and entry.size == file.size:
        marks = ((entry.etag, file.etag), (entry.mtime, file.mtime))
        now, then = next((pair for pair in marks if None not in pair), (None, None))
        if now == then:
            return
    what = "is gone" if entry is None else f"has changed ({file.size} bytes then, {entry.size} now)"
    raise DataError(
        f"{file.path}: this input file {what} while the run read it; what was read of it since is not committed. "
        "Bring the old file back and run again, or give the job another output.path"
    )


def expand(paths: Sequence[str], storage_options: Mapping[str, Any], *, allow_empty: bool = False) -> list[InputFile]:
    """The input files that `paths` (files, folders, globs, URLs) name: sorted by path within each, each file once."""
    found: dict[str, tuple[str, Entry]] = {}
    for pattern in paths:
        finder = _Finder(pattern, storage_options)
        with naming(pattern):
            hits = sorted(finder.find(), key=lambda hit: hit[0])
        if not hits and not allow_empty:
            raise NoInputError(finder.nothing())
        for path, entry in hits:
            local = local_path(path)
            found.setdefault(path if local is None else os.path.abspath(local), (path, entry))
    return [_input_file(number, path, entry) for number, (path, entry) in enumerate(found.values())]


def _input_file(number: int, path: str, entry: Entry) -> InputFile:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path!a}: the name of this input file is not UTF-8 text; rename it") from None
    local = local_path(path)
    if entry.kind != "file":
        raise DataError(f"{path}: a broken link or not a regular file; input must be files that can be read again")
    if local is not None and not os.access(local, os.R_OK):
        raise PermissionDenied(f"{path}: permission denied: this user may not read the file")
    if entry.size is None:
        raise StorageError(f"{path}: the store does not tell its size; copy the file to a store that does")
    return InputFile(number, path, entry.size, entry.mtime, entry.etag)


class _Finder:
    """The files that one pattern names."""

    def __init__(self, pattern: str, storage_options: Mapping[str, Any]) -> None:
        self._pattern = pattern
        self._local = local_path(pattern) is not None
        self._disk = open_disk(pattern, storage_options)
        path, self._chain = local_path(pattern) or pattern, ""
        head, separator, chain = path.partition("::")
        if not self._local and "://" in head:  # zip://*.jsonl::s3://bucket/file.zip: the pattern is in the first link
            path, self._chain = head, separator + chain
        self._path = path
        self._listed: dict[str, list[Entry]] = {}
        self._other_folders = False

    def find(self) -> list[tuple[str, Entry]]:
        """What exists under exactly this name comes first: a name may hold `[`."""
        entry = self._disk.stat(self._path + self._chain)
        if entry is not None and entry.kind != "folder":
            return [(self._path + self._chain, entry)]
        if entry is not None:
            base = self._path if self._path.endswith("/") else self._path + "/"
            self._refuse_tables_above(base)
            return list(self._folder(base))
        fixed = re.match(r"(?:[^*?\[]*/)?(?=[^/]*[*?\[])", self._path)  # up to the first part with a wildcard
        if fixed is None:
            return []
        base = fixed.group()
        self._refuse_tables_above(base)
        return list(self._glob(base, [part for part in self._path[len(base) :].split("/") if part]))

    def nothing(self) -> str:
        """The message for a pattern that names no file."""
        here = f" (working directory {os.getcwd()})" if self._local else ""
        if self._other_folders:
            return (
                f"input.path {self._pattern!r}: the folder has no data files of its own, only sub-folders{here}; "
                f"{self._pattern.rstrip('/') + '/**'!r} reads them too"
            )
        return (
            f"input.path {self._pattern!r}: no file matches{here}; "
            "correct the path, or set input.allow_empty: true where no input is normal"
        )

    def _folder(self, base: str) -> Iterator[tuple[str, Entry]]:
        """A folder's data files, and those of its key=value sub-folders."""
        entries = self._ls(base)
        copies = COPIES if any(entry.name == "_batchgen" for entry in entries) else ()
        for entry in entries:
            if entry.name.startswith(("_", ".")) or entry.name in copies:
                continue
            if entry.kind != "folder":
                yield base + entry.name + self._chain, entry
            elif "=" in entry.name:
                yield from self._folder(base + entry.name + "/")
            else:
                self._other_folders = True

    def _glob(self, base: str, parts: list[str]) -> Iterator[tuple[str, Entry]]:
        """Files under `base` that match: `*` does not match a leading ".", and `**` enters what `_folder` would see."""
        part, rest = parts[0], parts[1:]
        if part == "**" and rest:
            yield from self._glob(base, rest)
        for entry in self._ls(base):
            path = base + entry.name
            if part == "**":
                if entry.name.startswith(("_", ".")):
                    continue
                if entry.kind == "folder" and not entry.link:
                    yield from self._glob(path + "/", parts)
                elif entry.kind != "folder" and not rest:
                    yield path + self._chain, entry
            elif not fnmatch.fnmatchcase(entry.name, part) or (entry.name[0] == "." and part[0] != "."):
                continue
            elif rest:
                if entry.kind == "folder":
                    yield from self._glob(path + "/", rest)
            elif entry.kind != "folder":
                yield path + self._chain, entry
            elif not entry.name.startswith(("_", ".")):
                yield from self._folder(path + "/")

    def _ls(self, base: str) -> list[Entry]:
        if base not in self._listed:
            try:
                entries = self._disk.ls((base or ".") + self._chain)
            except (FileNotFoundError, NotADirectoryError) as error:
                if bucket_missing(error):
                    raise
                entries = []
            self._listed[base] = entries
            self._refuse_table(base, {entry.name for entry in entries if entry.kind == "folder"})
        return self._listed[base]

    def _refuse_tables_above(self, base: str) -> None:
        parts = base.rstrip("/").split("/")
        first = 3 if "://" in base else 1  # a bucket's own parent is no folder
        for end in range(first, len(parts)):
            above = "/".join(parts[:end]) + "/"
            try:
                folders = {name for name in (*TABLE_MARKERS, "metadata") if self._is_folder(above + name)}
                self._refuse_table(above, folders)
            except (DataError, Interrupted):
                raise
            except Exception:  # a precaution only: who may read a folder need not be allowed to look above it
                return

    def _is_folder(self, path: str) -> bool:
        entry = self._disk.stat(path + self._chain)
        return entry is not None and entry.kind == "folder"

    def _refuse_table(self, base: str, folders: set[str]) -> None:
        """A table's folder also holds files whose rows were deleted or replaced: only its log knows which count."""
        kinds = [TABLE_MARKERS[name] for name in sorted(folders & TABLE_MARKERS.keys())]
        if "metadata" in folders and any(
            entry.name.endswith(".metadata.json") for entry in self._disk.ls(base + "metadata" + self._chain)
        ):
            kinds.append("Iceberg")
        if kinds:
            raise DataError(
                f"{base.rstrip('/') or '.'}: this folder is a {kinds[0]} table; read as plain files it would also give "
                "rows that were deleted or replaced. Export the table to Parquet first, or name single files"
            )


def refuse_mixed_folders(patterns: Sequence[str], files: Sequence[InputFile], output: str) -> None:
    """Results among the input would be input of the next start."""
    home = os.path.realpath(local_path(output) or output)
    for pattern in patterns:
        folder, found, _ = (local_path(pattern) or pattern).partition("**")
        finds_folders = folder.rstrip("/").endswith("/*")  # which are read as folders
        if found or finds_folders or os.path.isdir(folder):
            base = os.path.realpath(folder.rstrip("/").removesuffix("*") or ".")
            if home == base or home.startswith(base.rstrip("/") + "/"):
                raise ConfigError(
                    f"output.path: {output} is inside the input, {pattern}; results need a place of their own"
                )
    for file in files:
        if os.path.dirname(os.path.realpath(local_path(file.path) or file.path)) == home:
            raise ConfigError(
                f"output.path: {output} is the folder of an input file, {file.path}; results need one of their own"
            )
