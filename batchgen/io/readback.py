"""Parts read back: what their result rows hold, and a part in which the failed rows are replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.errors import ConfigError
from batchgen.io import answers
from batchgen.io.sinks import corrupt, first_line, write_parquet
from batchgen.runfolder import Counters

_COLUMNS = ("id", "sample", "finish_reason", "prompt_tokens", "output_tokens", "truncated", "error")


@dataclass(slots=True, eq=False)
class Contents:
    """The result rows of a part, without their texts."""

    ids: list[Any]  # (num_results,)
    samples: npt.NDArray[np.int64]  # (num_results,)
    codes: list[str | None]  # (num_results,) of their errors
    finish_reasons: list[str]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        return np.array([code is not None for code in self.codes], np.bool_)

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """The input row of each result, counted within the part."""  # (num_results,)
        return np.cumsum(self.samples == 0) - 1

    def failed_places(self) -> npt.NDArray[np.int64]:
        """The input rows of which a sample failed, counted within the part."""
        return np.unique(self.places[self.failed])

    def disorder(self) -> str | None:
        """What is wrong with the order of samples, None where each row's are 0, 1, 2 and so on."""
        before = np.concatenate([[-1], self.samples[:-1]])
        wrong = np.flatnonzero((self.samples != 0) & (self.samples != before + 1))
        if not len(wrong) and (not len(self.samples) or self.samples[0] == 0):
            return None
        at = int(wrong[0]) if len(wrong) else 0
        return f"result {at + 1} is sample {self.samples[at]}, after sample {before[at]}"

    def counters(self) -> Counters:
        first = self.samples == 0
        return Counters(
            rows=int(first.sum()),
            rows_failed=len(self.failed_places()),
            results=len(self.samples),
            truncated=int(self.truncated[first].sum()),
            prompt_tokens=int(self.prompt_tokens[first].sum()),
            output_tokens=int(self.output_tokens.sum()),
            failed=Counter(code for code in self.codes if code is not None),
            finish_reasons=Counter(self.finish_reasons),
        )

    def replaced(self, new: Contents, where: npt.NDArray[np.int64]) -> Contents:
        """These results with those of `new` in the places that `where` names: -1 keeps one, else it is new's number."""

        def mixed(old: list[Any], other: list[Any]) -> list[Any]:
            return [one if at < 0 else other[at] for one, at in zip(old, where.tolist(), strict=True)]

        def mixed_numbers(old: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[Any]:
            found = old.copy()
            found[where >= 0] = other[where[where >= 0]]
            return found

        return Contents(
            self.ids,
            self.samples,
            mixed(self.codes, new.codes),
            mixed(self.finish_reasons, new.finish_reasons),
            mixed_numbers(self.prompt_tokens, new.prompt_tokens),
            mixed_numbers(self.output_tokens, new.output_tokens),
            mixed_numbers(self.truncated, new.truncated),
        )


@dataclass(slots=True, eq=False)
class _Requests(Contents):
    """The lines of an OpenAI part: a result here is a line, which holds all samples of its row."""

    tallies: list[Counters]  # of each line

    def counters(self) -> Counters:
        total = Counters()
        for one in self.tallies:
            total.add(one)
        return total

    def replaced(self, new: Contents, where: npt.NDArray[np.int64]) -> Contents:
        assert isinstance(new, _Requests)
        mixed = [one if at < 0 else new.tallies[at] for one, at in zip(self.tallies, where.tolist(), strict=True)]
        nothing = np.zeros(len(mixed), np.int64)
        return _Requests(self.ids, nothing, self.codes, [], nothing, nothing, nothing == 1, mixed)


def read_contents(part_format: str, data: bytes, name: str) -> Contents:
    """What a whole part holds. StorageError where it cannot be read."""
    return _READERS[part_format](data, name)


def _read_parquet(data: bytes, name: str) -> Contents:
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            groups = [file.read_row_group(i, columns=list(_COLUMNS)) for i in range(file.num_row_groups)]
            table = pa.concat_tables(groups) if groups else file.schema_arrow.empty_table()
        table.validate(full=True)
        code = pc.struct_field(table["error"], "code")
        return Contents(
            table["id"].to_pylist(),
            table["sample"].to_numpy().astype(np.int64),
            code.to_pylist(),
            table["finish_reason"].to_pylist(),
            table["prompt_tokens"].to_numpy().astype(np.int64),
            table["output_tokens"].to_numpy().astype(np.int64),
            np.array(table["truncated"].to_pylist(), np.bool_),
        )
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise corrupt(name, f"its rows cannot be read ({first_line(error)})") from error


def _read_jsonl(data: bytes, name: str) -> Contents:
    rows: list[tuple[Any, ...]] = []
    try:
        for line in _lines(data):
            result = orjson.loads(line)
            error = result["error"]
            rows.append((*(result[column] for column in _COLUMNS[:-1]), None if error is None else error["code"]))
        columns = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
        numbers = [np.array(columns[i], np.int64) for i in (1, 3, 4)]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise corrupt(name, f"line {len(rows) + 1} is not a result ({first_line(error)})") from error
    if data and not data.endswith(b"\n"):
        raise corrupt(name, "its last line does not end")
    samples, prompt_tokens, output_tokens = numbers
    truncated = np.array(columns[5], np.bool_)
    return Contents(
        list(columns[0]), samples, list(columns[6]), list(columns[2]), prompt_tokens, output_tokens, truncated
    )


def _read_requests(data: bytes, name: str) -> Contents:
    ids, codes, tallies = [], [], []
    try:
        for line in _lines(data):
            request, counters = orjson.loads(line), Counters()
            answers.tally(request, counters)
            tallies.append(counters)
            ids.append(request["custom_id"])
            codes.append(None if request["error"] is None else request["error"]["code"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise corrupt(name, f"line {len(ids) + 1} is not a result ({first_line(error)})") from error
    if data and not data.endswith(b"\n"):
        raise corrupt(name, "its last line does not end")
    nothing = np.zeros(len(ids), np.int64)
    return _Requests(ids, nothing, codes, [], nothing, nothing, nothing == 1, tallies)


def _lines(data: bytes) -> list[bytes]:
    """Its lines: JSON has no bare line feed, but may have what `splitlines` takes for an end."""
    return data.removesuffix(b"\n").split(b"\n") if data else []


_READERS: dict[str, Callable[[bytes, str], Contents]] = {
    "parquet": _read_parquet,
    "jsonl": _read_jsonl,
    "openai": _read_requests,
}


# -- replacing failed rows ---------------------------------------------------------------------------------------------


def splice(
    part_format: str, old: bytes, new: bytes, name: str, metadata: Callable[[Counters], Mapping[str, str]]
) -> tuple[bytes, Counters]:
    """The part `old` with the results of its failed rows taken from `new`, a part of just these rows.

    Results that did not fail stay as they are, also those of a failed row. `metadata` gives the part's proof.
    """
    before, after = read_contents(part_format, old, name), read_contents(part_format, new, name)
    retried = np.isin(before.places, before.failed_places())
    same = [before.ids[i] for i in np.flatnonzero(retried)] == after.ids
    if not same or not np.array_equal(before.samples[retried], after.samples):
        raise ConfigError(
            f"{name}: its failed rows are not those that the input gives now: the input has changed under the run. "
            "Bring the old files back, or give the job another output.path"
        )
    where = np.full(len(before.samples), -1)  # which result of `new` takes the place of each; -1: none
    where[retried] = np.arange(len(after.samples))
    where[~before.failed] = -1
    counters = before.replaced(after, where).counters()
    if part_format == "parquet":
        return write_parquet(_schema(old), _tables(old, new, where), metadata(counters)), counters
    lines, others = _lines(old), _lines(new)
    mixed = [line if at < 0 else others[at] for line, at in zip(lines, where.tolist(), strict=True)]
    return b"".join(line + b"\n" for line in mixed), counters


def _schema(part: bytes) -> pa.Schema:
    """The columns of a part, with what is noted of each."""
    with pq.ParquetFile(pa.BufferReader(part)) as file:
        return file.schema_arrow.remove_metadata()


def _tables(old: bytes, new: bytes, where: npt.NDArray[np.int64]) -> Iterator[pa.Table]:
    """The row groups of `old` with results of `new` in their places."""
    schema = _schema(old)
    others = pq.read_table(pa.BufferReader(new)).cast(schema)
    start = 0
    with pq.ParquetFile(pa.BufferReader(old)) as file:
        for number in range(file.num_row_groups):
            group = file.read_row_group(number).replace_schema_metadata(None)
            places = where[start : start + len(group)]
            start += len(group)
            taken = places[places >= 0]
            if len(taken):
                order = np.arange(len(group))
                order[places >= 0] = len(group) + np.arange(len(taken))
                fitting = others.slice(int(taken[0]), int(taken[-1] - taken[0]) + 1)  # few: Arrow takes 2 GiB at most
                group = pa.concat_tables([group, fitting.take(pa.array(taken - taken[0]))]).take(pa.array(order))
            yield group


__all__ = ["Contents", "read_contents", "splice"]
