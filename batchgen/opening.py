"""What a job's start shares with a retry and a repair: its input, its identity, and the loop over its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.carry import InputFields, input_fields
from batchgen.errors import NoInputError
from batchgen.feeder import Feeder
from batchgen.io import answers, sinks, sources
from batchgen.io.files import InputFile, expand
from batchgen.io.stores import Store
from batchgen.jobrecord import arrange
from batchgen.lease import Heart
from batchgen.ledger import Ledger
from batchgen.loop import Loop, ModelLike, StartLike, resolved_sampling
from batchgen.metrics import Meter
from batchgen.partwriter import Built, PartWriter
from batchgen.report import Progress
from batchgen.runfolder import Counters
from batchgen.spec import JobSpec, SamplingSpec
from batchgen.watchdog import Watchdog
from batchgen.writer import Writer


def input_files(spec: JobSpec, store: Store | None) -> tuple[list[InputFile], Callable[[int], str] | None]:
    """The job's input files, numbered as the run in `store` numbers them, and what proves the content of one."""
    options = spec.input.storage_options
    files = expand(spec.input.path, options, allow_empty=spec.input.allow_empty)

    def prove(number: int) -> str:
        return sources.content_proof(files[number], options)

    if store is not None:  # new files may sort between those that the run has numbered
        order = arrange(store, [asdict(file) for file in files], prove)
        files = [replace(files[i], number=number) for number, i in enumerate(order)]
    return files, prove


def fingerprint(spec: JobSpec, model: ModelLike | None = None, columns: pa.Schema | None = None) -> dict[str, Any]:
    """What the results depend on, by section; without `model`, what the job file says of it.

    `columns` are those of the results: new input files can have other types of the columns that are carried over.

    Where files lie is not in it: model and tokenizer count by their content, the input too (which the ledger proves).
    """
    sections: dict[str, Any] = {
        "task": spec.task,
        "input": spec.input.model_dump(mode="json", include={"id", "format", "where", "unicode_errors", "nan"}),
        "prompt": spec.prompt.model_dump(mode="json"),
        "sampling": spec.sampling.model_dump(mode="json"),
        "output": spec.output.model_dump(
            mode="json", include={"format", "columns", "token_ids", "skip_special_tokens"}
        ),
        "engine": {"kv_dtype": spec.engine.kv_dtype},
    }
    if model is not None:
        sections["model"] = {
            "content": model.fingerprint(),
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "sampling": resolved_sampling(spec, model).model_dump(mode="json", include=set(SamplingSpec.FROM_MODEL)),
        }
        if spec.model.quantization is not None:  # older records have no such key
            sections["model"]["quantization"] = spec.model.quantization
    if columns is not None:
        sections["columns"] = {field.name: _kind(field) for field in columns}
    return sections


def _kind(field: pa.Field) -> str:
    return "JSON text" if field.metadata == sinks.JSON_TEXT else str(field.type)


def shape(spec: JobSpec) -> dict[str, Any]:
    """What the first start of a run fixes."""
    return {"format": spec.output.format, "shard_rows": spec.output.shard_rows}


def columns_of(spec: JobSpec, files: Sequence[InputFile]) -> tuple[list[str], InputFields, pa.Schema]:
    """The input files' formats, the columns that are carried over from them, and the columns of the results."""
    formats = sources.detect_all(files, spec.input.format, spec.input.storage_options)
    fields = input_fields(spec, files, formats)
    schema = sinks.result_schema(id_field=fields.id, carried=fields.carried, token_ids=spec.output.token_ids)
    if spec.output.format == "openai":
        schema = schema.with_metadata({answers.MODEL: spec.model.path})
    return formats, fields, schema


def refuse_empty(spec: JobSpec, totals: Counters) -> None:
    """NoInputError where a run that is over had no rows, unless the job allows that."""
    if totals.rows or spec.input.allow_empty:
        return
    why = "the input has no rows" if spec.input.where is None else f"none of the rows passes {spec.input.where}"
    key = "input.path" if spec.input.where is None else "input.where"
    raise NoInputError(f"{key}: {why}; correct it, or set input.allow_empty: true where that is normal")


def pinned(spec: JobSpec, record: Mapping[str, Any] | None) -> JobSpec:
    """With `dtype: auto`, the dtype of the first start: another machine would choose another, and other answers."""
    if record is None or spec.model.dtype != "auto":
        return spec
    pinned = record["fingerprint"].get("model", {}).get("dtype", "auto")
    model = spec.model.model_copy(update={"dtype": pinned})
    return spec.model_copy(update={"model": model})


@contextmanager
def open_loop(
    start: StartLike,
    spec: JobSpec,
    files: Sequence[InputFile],
    columns: tuple[Sequence[str], InputFields, pa.Schema],
    numbers: Sequence[int],
    book: Ledger,
    model: ModelLike,
    meter: Meter,
    heart: Heart,
    only: Mapping[int, Mapping[int, npt.NDArray[np.int64]]] | None = None,
) -> Iterator[Loop]:
    """The loop over the rows of the files `numbers`, ready to run: the model is loaded, the feeder reads already.

    `columns` as `columns_of` gives them; `only` names the rows of shards, by file and shard, where not all are run.
    """
    formats, fields, schema = columns
    with ExitStack() as stack:
        feeder = stack.enter_context(
            Feeder(
                spec.model_copy(update={"sampling": resolved_sampling(spec, model)}),
                [files[number] for number in numbers],
                [formats[number] for number in numbers],
                model.tokenizer_path,
                model.max_model_len,
                book.done,
                start.limit,
                fields=fields,
                only=only,
            )
        )
        meter.sizes = {number: files[number].size for number in numbers}
        progress = Progress(meter)
        stack.callback(progress.close)
        writer: Writer[Built] = stack.enter_context(Writer())
        parts = PartWriter(spec, files, formats, fields, schema, book, model.tokenizer)
        dog = Watchdog(spec.errors.stall_timeout)
        loop = Loop(start, spec, files, book, feeder, parts, writer, model, meter, progress, heart, dog)
        stack.enter_context(dog)
        yield loop
