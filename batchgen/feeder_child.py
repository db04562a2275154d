"""The feeder's child process: input rows in, batches of encoded prompts out through a pipe."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen import errors, templates
from batchgen.carry import Carrier, InputFields
from batchgen.errors import BatchgenError, ConfigError, InvalidRow
from batchgen.io import sources
from batchgen.io.files import InputFile
from batchgen.io.openai import Call, read_call
from batchgen.lifeline import die_with_input
from batchgen.prompts import Draft, Prompt, PromptBuilder
from batchgen.rowparams import RowParams, read_column
from batchgen.spec import JobSpec
from batchgen.tokenizer import Tokenizer
from batchgen.types import NO_TOKENS, RowError, SamplingParams, ShardRange, TokenIds
from batchgen.where import Filter

logger = logging.getLogger(__name__)

HEAD_START = 8  # batches that are made at normal priority: no engine runs before there are rows
NICE = 10  # from then on; at 19 two busy threads of an engine on two cores leave 1 to 2 % of a core
BIG_TEXT = 64 << 10  # longer prompts are encoded one by one, so that a slow one is known
RENDER_MEMORY = 1 << 30  # bytes that rendering a chunk's rows may take on top

_Own = tuple[Mapping[str, Any], Call | None, SamplingParams]
_In = TypeVar("_In")
_Out = TypeVar("_Out")

# Of file and shard the rows to deliver, counted within the shard's kept ones; of a shard that is missing: none.
Only = Mapping[int, Mapping[int, npt.NDArray[np.int64]]]


@dataclass(slots=True, eq=False)
class RowBatch:
    """Rows of one shard in order, ready for the engine. Row i's prompt is token_ids[offsets[i] : offsets[i + 1]].

    `rows` are their numbers in the file; those between that are missing were filtered out. A row in `errors` (its
    place in the batch, a row code, a message) has no tokens. `carried` has num_rows rows: the id where the job names an
    id column, then the carried columns. `params` are the rows' own sampling parameters; None where all have the job's.
    `end` is set with a shard's last rows (there may be none); `cut_off` says that it is the job's limit that ends the
    shard, not the input.
    """

    file: int
    shard: int
    rows: npt.NDArray[np.int64]  # (num_rows,)
    token_ids: TokenIds  # (num_tokens,)
    offsets: npt.NDArray[np.int64]  # (num_rows + 1,)
    truncated: npt.NDArray[np.bool_]  # (num_rows,)
    errors: list[tuple[int, str, str]]
    carried: pa.RecordBatch
    end: ShardRange | None
    last_of_file: bool
    params: list[SamplingParams] | None = None
    has_id: bool = False
    cut_off: bool = False
    share: float = 1.0  # of the file that is read, from 0 to 1

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def next_row(self) -> int:
        """The row after this batch, and after the shard that it ends; 0 where it says nothing of it."""
        if self.end is not None:
            return self.end.first_row + self.end.num_rows
        return int(self.rows[-1]) + 1 if self.num_rows else 0

    def noise_names(self) -> list[str]:
        """What the rows' random draws are named after: their ids, or their places where these are none, or no text."""
        ids: list[str | None] = [None] * self.num_rows
        if self.has_id:
            with contextlib.suppress(pa.ArrowException, UnicodeDecodeError):  # a list, a struct, binary data
                ids = self.carried.column(0).cast(pa.string()).to_pylist()
        return [f"{self.file}:{row}" if name is None else name for row, name in zip(self.rows, ids, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Arrow pickles a slice with all that it is a slice of; its own stream format does not."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.carried.schema) as writer:
            writer.write_batch(self.carried)
        values = [getattr(self, name) for name in self.__slots__ if name != "carried"]
        return _unpickled, (sink.getvalue().to_pybytes(), *values)


def _unpickled(carried: bytes, *values: Any) -> RowBatch:
    names = [name for name in RowBatch.__slots__ if name != "carried"]
    batch = pa.ipc.open_stream(carried).read_next_batch()
    return RowBatch(carried=batch, **dict(zip(names, values, strict=True)))


@dataclass(frozen=True, slots=True)
class Task:
    """What a child has to do.

    Of the file `resume[0]` the rows before `resume[1]` are delivered already. Rows in `hung` are errors. Up to row
    `careful[1]` of file `careful[0]` rows go one by one, because one of them hangs and it is not known which.
    """

    spec: JobSpec
    files: tuple[InputFile, ...]
    formats: tuple[str, ...]
    model_path: str
    max_model_len: int
    fields: InputFields
    done: dict[int, dict[int, ShardRange | None]]
    limit: int | None
    only: Only | None = None
    resume: tuple[int, int] = (-1, 0)
    hung: frozenset[tuple[int, int]] = frozenset()
    careful: tuple[int, int] = (-1, -1)


class State:
    """Shared memory in which the child says what it works on: a counter, the file, the first and the last row.

    The first row is -1 while no row is being rendered or encoded: then the child reads, or waits for its pipe.
    """

    SIZE = 4 * 8

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, self.SIZE)
        self._numbers = np.frombuffer(self._map, np.int64)

    @classmethod
    def create(cls) -> State:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("batchgen-feeder")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, cls.SIZE)
        state = cls(descriptor)
        state.write(0, -1, -1)
        return state

    def write(self, file: int, first: int, last: int) -> None:
        self._numbers[1:] = (file, first, last)
        self._numbers[0] += 1

    def read(self) -> tuple[int, int, int, int]:
        progress, file, first, last = self._numbers.tolist()
        return progress, file, first, last

    def close(self) -> None:
        del self._numbers
        self._map.close()
        os.close(self.descriptor)


def child_main(pipe: int, state: int) -> None:
    """The child process's whole life. The parent's signals to stop are not for it: it is stopped by its parent."""
    logging.basicConfig(format="batchgen: %(message)s", level=logging.WARNING)
    try:
        task: Task = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # the parent is gone
        os._exit(0)
    die_with_input()
    connection = Connection(pipe, readable=False)
    try:
        for number, batch in enumerate(Worker(task, State(state)).run()):
            if number == HEAD_START:
                with contextlib.suppress(OSError):  # forbidden, as in some sandboxes
                    os.nice(NICE)
            _send(connection, ("rows", batch))
        _send(connection, ("finished", None))
    except BrokenPipeError:  # the parent is gone
        pass
    except BaseException as error:
        message = str(error)
        if not isinstance(error, BatchgenError):
            message = f"internal error in the feeder: {type(error).__name__}: {error}"
        # the nearest class that the parent knows
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
        name = names[0] if names else BatchgenError.__name__
        _send(
            connection,
            (
                "failed",
                (
                    name,
                    message,
                    error.reason if isinstance(error, errors.Interrupted) else None,
                    traceback.format_exc(),
                ),
            ),
        )
    # no clean-up is needed, and a thread of some store's client must not keep the process
    os._exit(0)


def _send(connection: Connection, message: tuple[str, Any]) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


@dataclass(slots=True)
class Worker:
    """Reads, renders and encodes."""

    task: Task
    state: State
    builder: PromptBuilder = field(init=False)
    carrier: Carrier = field(init=False)
    where: Filter | None = field(init=False)
    params: RowParams = field(init=False)

    def __post_init__(self) -> None:
        spec = self.task.spec
        tokenizer = Tokenizer.load(self.task.model_path, chat_template=spec.model.chat_template)
        self.builder = PromptBuilder(spec.prompt, spec.sampling, tokenizer, self.task.max_model_len)
        self.carrier = Carrier(self.task.fields)
        self.where = row_filter(spec)
        self.params = RowParams(spec.sampling, tokenizer.vocab_size)

    def run(self) -> Iterator[RowBatch]:
        task = self.task
        left = task.limit
        for file, kind in zip(task.files, task.formats, strict=True):
            if file.number >= task.resume[0]:
                rows = yield from self._file(file, kind, left)
            else:
                rows = self._rows_done(file)
            if left is not None:
                left -= rows
                if left <= 0:
                    return
        self._check_where()

    def _check_where(self) -> None:
        """A warning where no row had a column of the filter; only JSON Lines can go without one that is meant."""
        if self.where is not None and self.where.rows_seen and self.where.unseen:
            missing = ", ".join(map(repr, sorted(self.where.unseen)))
            logger.warning("input.where: none of the rows read has a column %s, which counts as null", missing)

    def _rows_done(self, file: InputFile) -> int:
        """How far the shards that are done reach into a file."""
        known = [shard for shard in self.task.done.get(file.number, {}).values() if shard is not None]
        return max((shard.first_row + shard.num_rows for shard in known), default=0)

    def _file(self, file: InputFile, kind: str, limit: int | None) -> Generator[RowBatch, None, int]:
        """The batches of the file's first `limit` rows; returns how many rows that were, filtered ones included."""
        task = self.task
        delivered = task.resume[1] if file.number == task.resume[0] else 0
        begun: tuple[int, int] | None = None  # the shard whose end is still to come, and its first row
        columns, done = self._columns(file, kind), task.done.get(file.number, {})
        rows = self._rows_done(file)
        chunks = read_chunks(task.spec, file, kind, columns, done, self.where)
        for chunk in chunks if task.only is None else _chosen(chunks, task.only.get(file.number, {})):
            numbers = [row.number for row in chunk.rows]
            end = chunk.end.first_row + chunk.end.num_rows if chunk.end else numbers[-1] + 1 if numbers else 0
            if limit is not None and chunk.shard not in done and (end > limit or (end == limit and not chunk.end)):
                last = self._cut(file, chunk, begun, limit)
                if last is not None:
                    batch = self._batch(file, _from(last, delivered))
                    batch.cut_off = True
                    yield batch
                return limit
            rows = max(rows, end)
            if not numbers or numbers[-1] >= delivered:
                yield self._batch(file, _from(chunk, delivered))
            if chunk.end is not None:
                begun = None
            elif numbers and begun is None:
                begun = chunk.shard, numbers[0]
            if limit is not None and rows >= limit and chunk.end is not None:
                return limit
        return rows

    @staticmethod
    def _cut(file: InputFile, chunk: sources.Chunk, begun: tuple[int, int] | None, limit: int) -> sources.Chunk | None:
        """The chunk's rows up to the limit, as the end of the shard; None where the limit leaves nothing of it."""
        count = sum(row.number < limit for row in chunk.rows)
        if count:
            shard, first = begun or (chunk.shard, chunk.rows[0].number)
        elif begun is None:
            return None
        else:
            shard, first = begun
        batch = None if chunk.batch is None else chunk.batch.slice(0, count)
        end = ShardRange(file.number, shard, first, limit - first, 0, 0)
        return sources.Chunk(shard, chunk.rows[:count], end, False, batch, chunk.share)

    def _columns(self, file: InputFile, kind: str) -> list[str] | None:
        """The columns to read; None reads all, as a format without columns has to anyway."""
        schema = sources.schema(file, kind, self.task.spec.input.storage_options)
        if schema is None:
            return None
        own = self.task.spec.sampling.column
        wanted = [*self.builder.columns(schema.names), *self.task.fields.names, *([] if own is None else [own])]
        return list(dict.fromkeys(wanted))

    def _batch(self, file: InputFile, chunk: sources.Chunk) -> RowBatch:
        carried, wrong = self.carrier.take(chunk)
        prompts, params = self._prompts(file, chunk.rows, wrong)
        failed = [(i, p.code, p.message) for i, p in enumerate(prompts) if isinstance(p, InvalidRow)]
        ids = [prompt.token_ids if isinstance(prompt, Prompt) else NO_TOKENS for prompt in prompts]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(row) for row in ids], out=offsets[1:])
        return RowBatch(
            file=file.number,
            shard=chunk.shard,
            rows=np.array([row.number for row in chunk.rows], np.int64),
            token_ids=np.concatenate(ids) if ids else NO_TOKENS,
            offsets=offsets,
            truncated=np.array([isinstance(prompt, Prompt) and prompt.truncated for prompt in prompts], np.bool_),
            errors=failed,
            carried=carried,
            end=chunk.end,
            last_of_file=chunk.last,
            params=None if all(one is self.params.default for one in params) else params,
            has_id=self.task.fields.id is not None,
            share=chunk.share,
        )

    def _prompts(
        self, file: InputFile, rows: Sequence[sources.Row], wrong: Mapping[int, RowError]
    ) -> tuple[list[Prompt | InvalidRow], list[SamplingParams]]:
        """Every row's prompt, or why it has none, and its sampling parameters."""
        task, state = self.task, self.state
        params = [self.params.default] * len(rows)
        results: dict[int, Prompt | InvalidRow] = {}
        small: dict[int, Draft] = {}
        with templates.memory_limit(RENDER_MEMORY), templates.timer():
            for place, row in enumerate(rows):
                state.write(file.number, row.number, row.number)
                problem = row.error or wrong.get(place)
                if problem is not None or row.values is None:
                    problem = problem or RowError("invalid_row", "the row cannot be read")
                    results[place] = InvalidRow(problem.code, problem.message)
                else:
                    own = self._guarded(self._own, row.values)
                    if isinstance(own, InvalidRow):
                        results[place] = own
                        continue
                    params[place] = own[2]
                    if (file.number, row.number) in task.hung:
                        message = "the prompt could not be made in reasonable time: rendering or encoding did not end"
                        results[place] = InvalidRow("template_error", message)
                        continue
                    draft = self._guarded(self._draft, own)
                    if isinstance(draft, InvalidRow):
                        results[place] = draft
                    else:
                        small[place] = draft
        alone = [place for place, draft in small.items() if self._goes_alone(file, rows[place], draft)]
        for place in alone:
            state.write(file.number, rows[place].number, rows[place].number)
            results[place] = self._encoded([small.pop(place)])[0]
        if small:
            state.write(file.number, rows[min(small)].number, rows[max(small)].number)
            results.update(zip(small, self._encoded(list(small.values())), strict=True))
        state.write(file.number, -1, -1)
        return [results[place] for place in range(len(rows))], params

    def _own(self, values: Mapping[str, Any]) -> _Own:
        """What a row brings: its values, its call where rows are OpenAI requests, its parameters."""
        sampling = self.task.spec.sampling
        if self.task.spec.input.format == "openai":
            call = read_call(values)
            return values, call, self.params.over(call.sampling, "body")
        if sampling.column is not None:
            return values, None, self.params.over(read_column(values, sampling.column), f"column `{sampling.column}`")
        return values, None, self.params.default

    def _draft(self, own: _Own) -> Draft:
        values, call, params = own
        return self.builder.draft(values, params) if call is None else self.builder.draft_call(call, params)

    def _goes_alone(self, file: InputFile, row: sources.Row, draft: Draft) -> bool:
        careful = self.task.careful
        return len(draft.text) > BIG_TEXT or (file.number == careful[0] and row.number <= careful[1])

    def _encoded(self, drafts: list[Draft]) -> list[Prompt | InvalidRow]:
        results = self._guarded(self.builder.encode, drafts)
        if isinstance(results, InvalidRow):  # a bug or a panic over one of them; only that one is to fail
            return [results] if len(drafts) == 1 else [self._encoded([draft])[0] for draft in drafts]
        return results

    @staticmethod
    def _guarded(call: Callable[[_In], _Out], argument: _In) -> _Out | InvalidRow:
        """What goes wrong with a row is the row's error, even where it is our bug."""
        try:
            return call(argument)
        except InvalidRow as error:
            return error
        except (BatchgenError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the tokenizers library is no Exception
            return InvalidRow("internal", f"{type(error).__name__}: {error}")


def _chosen(chunks: Iterator[sources.Chunk], wanted: Mapping[int, npt.NDArray[np.int64]]) -> Iterator[sources.Chunk]:
    """The chunks with the wanted rows of each shard, which are counted within it."""
    shard, count = -1, 0
    for chunk in chunks:
        if chunk.shard != shard:
            shard, count = chunk.shard, 0
        keep = np.isin(np.arange(count, count + len(chunk.rows)), wanted.get(shard, ()))
        count += len(chunk.rows)
        rows = [row for row, is_wanted in zip(chunk.rows, keep.tolist(), strict=True) if is_wanted]
        batch = None if chunk.batch is None else chunk.batch.filter(pa.array(keep))
        yield sources.Chunk(chunk.shard, rows, chunk.end, chunk.last, batch, chunk.share)


def _from(chunk: sources.Chunk, first: int) -> sources.Chunk:
    """The chunk without its rows before row `first`."""
    start = sum(row.number < first for row in chunk.rows)
    if not start:
        return chunk
    batch = None if chunk.batch is None else chunk.batch.slice(start)
    return sources.Chunk(chunk.shard, chunk.rows[start:], chunk.end, chunk.last, batch, chunk.share)


def read_chunks(
    spec: JobSpec,
    file: InputFile,
    kind: str,
    columns: Sequence[str] | None,
    done: Mapping[int, ShardRange | None],
    where: Filter | None,
) -> Iterator[sources.Chunk]:
    """The rows of an input file as the job cuts them into shards, without the shards in `done`."""
    return sources.read_shards(
        file,
        kind,
        columns=columns,
        shard_rows=None if spec.output.shard_rows == "auto" else spec.output.shard_rows,
        done=done,
        storage_options=spec.input.storage_options,
        where=where,
        replace_unicode=spec.input.unicode_errors == "replace",
        nan_as_null=spec.input.nan is None,
    )


def row_filter(spec: JobSpec) -> Filter | None:
    return None if spec.input.where is None else Filter(spec.input.where)


def carried_again(
    spec: JobSpec,
    file: InputFile,
    kind: str,
    fields: InputFields,
    shard: ShardRange,
    earlier: Mapping[int, ShardRange | None],
) -> list[pa.RecordBatch]:
    """The carried columns of a shard's rows, read once more; `earlier` are the shards before it in its file."""
    columns = None if sources.schema(file, kind, spec.input.storage_options) is None else list(fields.names)
    carrier = Carrier(fields)
    batches = []
    for chunk in read_chunks(spec, file, kind, columns, earlier, row_filter(spec)):
        if chunk.shard != shard.shard:
            break
        if chunk.rows:
            batches.append(carrier.take(chunk)[0])
        if chunk.end is not None:
            if chunk.end != shard:
                break
            return batches
    raise ConfigError(f"{file.path}: shard {shard.shard} is not what it was when it was read: the input has changed")
