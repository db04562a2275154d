"""Input files for tests, and what is read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.io.files import InputFile, expand
from batchgen.io.sources import Chunk, Row, detect, read_shards
from batchgen.types import ShardRange
from batchgen.where import Filter


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def put(folder: Path, data: bytes, name: str = "x.jsonl") -> InputFile:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return expand([str(path)], {})[0]


def put_table(folder: Path, table: pa.Table, name: str = "x.parquet", **options: Any) -> InputFile:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return expand([str(path)], {})[0]


def chunks(
    file: InputFile,
    format: str = "",
    *,
    columns: list[str] | None = None,
    shard_rows: int | None = None,
    done: dict[int, ShardRange | None] | None = None,
    where: str | None = None,
    **options: Any,
) -> list[Chunk]:
    return list(
        read_shards(
            file,
            format or detect(file, "auto", {}),
            columns=columns,
            shard_rows=shard_rows,
            done=done or {},
            storage_options={},
            where=None if where is None else Filter(where),
            **options,
        )
    )


def rows(file: InputFile, format: str = "", **options: Any) -> list[Row]:
    return [row for chunk in chunks(file, format, **options) for row in chunk.rows]


def values(file: InputFile, format: str = "", **options: Any) -> list[dict[str, Any] | None]:
    return [row.values for row in rows(file, format, **options)]


def ranges(file: InputFile, format: str = "", **options: Any) -> list[ShardRange]:
    return [chunk.end for chunk in chunks(file, format, **options) if chunk.end is not None]
