"""One piece as bytes: an Arrow stream with its sha256 behind it, and what its rows say."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.types import Completion, RowError, RowKey, TokenIds

ROW_BYTES = 64  # what a row takes beside its tokens and texts, roughly
_DIGEST_BYTES = 32
_SCHEMA = pa.schema(
    [
        pa.field("file", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("check", pa.uint32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string()),  # null: in flight, and so is everything below
        pa.field("stop_string", pa.string()),
        pa.field("stop_token", pa.int64()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)

Key = tuple[int, int, int]  # file, row, sample


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a piece: a finished sample, or what one in flight gained from token `start` on."""

    key: Key
    start: int
    check: int  # of the tokens before `start`
    token_ids: TokenIds
    finished: Completion | None = None

    @property
    def size(self) -> int:
        return ROW_BYTES + self.token_ids.nbytes + (_text_bytes(self.finished) if self.finished else 0)


def _text_bytes(completion: Completion) -> int:
    return len(completion.error.message) if completion.error else 0


def checksum(token_ids: TokenIds, before: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).tobytes(), before)


def encode(entries: list[Entry], digest: str, notes: bytes = b"") -> bytes:
    """A piece; `digest` names the run it belongs to."""
    done = [entry.finished for entry in entries]
    stops = [c.stop_reason if c else None for c in done]
    errors = [c.error if c else None for c in done]
    offsets = np.zeros(len(entries) + 1, np.int32)
    np.cumsum([len(entry.token_ids) for entry in entries], out=offsets[1:])
    tokens = np.concatenate([entry.token_ids for entry in entries]).astype(np.int32, copy=False)
    columns: dict[str, Any] = {
        "file": [entry.key[0] for entry in entries],
        "row": [entry.key[1] for entry in entries],
        "sample": [entry.key[2] for entry in entries],
        "start": [entry.start for entry in entries],
        "check": [entry.check for entry in entries],
        "token_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        "finish_reason": [c.finish_reason if c else None for c in done],
        "stop_string": [stop if isinstance(stop, str) else None for stop in stops],
        "stop_token": [None if stop is None or isinstance(stop, str) else int(stop) for stop in stops],
        "prompt_tokens": [c.prompt_tokens if c else None for c in done],
        "error_code": [error.code if error else None for error in errors],
        "error_message": [error.message.encode("utf-8", "backslashreplace") if error else None for error in errors],
    }
    schema = _SCHEMA.with_metadata({"batchgen.digest": digest, "batchgen.notes": notes})
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    data = sink.getvalue().to_pybytes()
    return data + hashlib.sha256(data).digest()


def decode(data: bytes, digest: str) -> pa.RecordBatch:
    """A piece's rows. ValueError where it is torn, damaged or another run's."""
    stream = memoryview(data)[:-_DIGEST_BYTES]
    if len(data) < _DIGEST_BYTES or hashlib.sha256(stream).digest() != data[-_DIGEST_BYTES:]:
        raise ValueError("its checksum does not fit")
    with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
        own = (reader.schema.metadata or {}).get(b"batchgen.digest")
        if not reader.schema.equals(_SCHEMA) or own != digest.encode():
            raise ValueError("it belongs to another run or release")
        return reader.read_next_batch()


def notes_of(batch: pa.RecordBatch) -> bytes:
    """What a piece's writer wants to be remembered."""
    return bytes((batch.schema.metadata or {}).get(b"batchgen.notes", b""))


def entries_of(batch: pa.RecordBatch) -> Iterator[Entry]:
    offsets = batch.column("token_ids").offsets.to_numpy()
    tokens = batch.column("token_ids").values.to_numpy()
    names = [field.name for field in batch.schema if field.name != "token_ids"]
    columns = [batch.column(name).to_pylist() for name in names]
    for i, values in enumerate(zip(*columns, strict=True)):
        row = dict(zip(names, values, strict=True))
        key, ids = (row["file"], row["row"], row["sample"]), tokens[offsets[i] : offsets[i + 1]]
        finished = None
        if row["finish_reason"] is not None:
            finished = Completion(
                RowKey(*key[:2]),
                key[2],
                ids,
                row["finish_reason"],
                row["stop_string"] if row["stop_token"] is None else row["stop_token"],
                row["prompt_tokens"],
                None if row["error_code"] is None else RowError(row["error_code"], row["error_message"]),
            )
        yield Entry(key, row["start"], row["check"], ids, finished)


@dataclass(frozen=True, slots=True)
class Listing:
    """Which samples a piece has, without their tokens; one item of each array for each."""

    files: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int32]
    ended: npt.NDArray[np.bool_]
    places: npt.NDArray[np.int32]  # within the piece
    sizes: npt.NDArray[np.int32]  # bytes of tokens
    length: int  # of the piece, what is left out here too

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Listing:
        return cls(
            batch.column("file").to_numpy(),
            batch.column("row").to_numpy(),
            batch.column("sample").to_numpy(),
            batch.column("finish_reason").is_valid().to_numpy(zero_copy_only=False),
            np.arange(batch.num_rows, dtype=np.int32),
            np.diff(batch.column("token_ids").offsets.to_numpy()) * 4,
            batch.num_rows,
        )

    @classmethod
    def of_entries(cls, entries: list[Entry]) -> Listing:
        keys = np.array([entry.key for entry in entries], np.int64)  # (num_entries, 3)
        return cls(
            keys[:, 0].astype(np.int32),
            keys[:, 1],
            keys[:, 2].astype(np.int32),
            np.array([entry.finished is not None for entry in entries], np.bool_),
            np.arange(len(entries), dtype=np.int32),
            np.array([entry.token_ids.nbytes for entry in entries], np.int32),
            len(entries),
        )

    def only(self, chosen: npt.NDArray[np.bool_]) -> Listing:
        return Listing(
            self.files[chosen],
            self.rows[chosen],
            self.samples[chosen],
            self.ended[chosen],
            self.places[chosen],
            self.sizes[chosen],
            self.length,
        )

    @classmethod
    def joined(cls, listings: Sequence[Listing]) -> Listing:
        """Those of several pieces, one after the other."""
        return cls(
            np.concatenate([one.files for one in listings]),
            np.concatenate([one.rows for one in listings]),
            np.concatenate([one.samples for one in listings]),
            np.concatenate([one.ended for one in listings]),
            np.concatenate([one.places for one in listings]),
            np.concatenate([one.sizes for one in listings]),
            sum(one.length for one in listings),
        )
