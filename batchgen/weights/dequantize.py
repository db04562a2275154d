"""From quantised codes back to numbers, some rows at a time, so that float32 exists for a part of a tensor only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from batchgen.errors import ModelError

CHUNK_ELEMENTS = 1 << 18  # stays in cache
WIDE = {1: torch.float32, 2: torch.float64, 4: torch.complex128}  # one element that holds so many float32

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1


@dataclass(frozen=True, slots=True)
class Scales:
    """What a matrix's codes are multiplied with, in blocks, after its zero points are taken off."""

    values: torch.Tensor  # (rows / block_rows, columns / block_columns), float32, both rounded up
    block_rows: int
    block_columns: int
    zeros: torch.Tensor | None = None  # the same shape
    groups: torch.Tensor | None = None  # (columns,): the column of `values` for each column; None: they follow in order

    def apply(self, codes: torch.Tensor, start: int) -> torch.Tensor:
        """Codes of the rows from `start` on, (rows, columns) in float32 -> the numbers, in the same memory."""
        num_rows, columns = codes.shape
        index = torch.arange(start, start + num_rows) // self.block_rows
        numbers = codes
        if self.groups is None and self.values.shape[1] * self.block_columns == columns:
            numbers = codes.view(num_rows, -1, self.block_columns)
        for part, operation in ((self.zeros, numbers.sub_), (self.values, numbers.mul_)):
            if part is None:
                continue
            rows = part.index_select(0, index)  # (rows, blocks of columns)
            if numbers.dim() == 3:
                rows = rows.unsqueeze(2)
            elif self.groups is not None:
                rows = rows.index_select(1, self.groups)
            elif rows.shape[1] > 1:
                rows = rows.repeat_interleave(self.block_columns, dim=1)[:, :columns]
            operation(rows)
        return codes


def fill(out: torch.Tensor, scales: Scales, codes: Callable[[slice], torch.Tensor], multiple: int = 1) -> None:
    """Write the matrix `out` (rows, columns); `codes` gives rows in float32, from a multiple of `multiple` on."""
    num_rows, columns = out.shape
    for rows in chunks(num_rows, columns, multiple):
        out[rows] = scales.apply(codes(rows), rows.start)


def chunks(num_rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // columns // multiple) * multiple
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def lookup(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Bytes (rows, n) -> (rows, n * k): each the k float32 numbers that `table` (256, k) has for it."""
    wide = table.view(WIDE[table.shape[1]]).view(-1)  # one element for each byte is several times faster than rows of k
    found = wide.index_select(0, codes.reshape(-1).to(torch.int32))
    return found.view(torch.float32).view(codes.shape[0], -1)


def float8_table(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).view(256, 1)


def integer_table(bits: int) -> torch.Tensor:
    """The unsigned numbers of 2, 4 or 8 bits that a byte holds, lowest bits first."""
    return ((torch.arange(256).view(256, 1) >> torch.arange(0, 8, bits)) & (2**bits - 1)).to(torch.float32)


def pair_table(values: Sequence[float] | torch.Tensor, *, low_first: bool) -> torch.Tensor:
    """Of the 16 `values` the two that a byte names."""
    table, codes = torch.as_tensor(values, dtype=torch.float32), torch.arange(256)
    low, high = table[codes & 15], table[codes >> 4]
    return torch.stack((low, high) if low_first else (high, low), dim=1)


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 words (rows, n) -> the first `count` unsigned numbers of each row, in float32; lowest bits first."""
    # a copy: the strides of a single row or column need not be those that a view of bytes asks for
    stream = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # (rows, 4 n)
    if bits == 3:  # 8 numbers in 3 bytes
        stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 3))
        first, second, third = stream.view(len(stream), -1, 3).to(torch.int32).unbind(2)
        triples = first | second << 8 | third << 16
        numbers = (triples.unsqueeze(2) >> torch.arange(0, 24, 3, dtype=torch.int32)) & 7
        return numbers.view(len(stream), -1)[:, :count].to(torch.float32)
    return lookup(integer_table(bits), stream)[:, :count]


def factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales as they are stored -> float32; bytes are exponents of 2 that begin at -127."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - 127)
    return scales.to(torch.float32)


def group_index(stored: torch.Tensor, num_groups: int, group_size: int, where: str) -> torch.Tensor | None:
    """A g_idx tensor, (columns,); None if it says that groups of columns just follow each other."""
    index = stored.to(torch.int64)
    if torch.equal(index, torch.arange(len(index)) // group_size):
        return None
    if int(index.min()) < 0 or int(index.max()) >= num_groups:
        raise ModelError(
            f"{where} puts columns into groups {int(index.min())} to {int(index.max())}, but there are scales "
            f"for 0 to {num_groups - 1}; is the file damaged?"
        )
    return index
