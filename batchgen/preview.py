"""The first rows of a job, as the model sees and answers them; writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from batchgen.collector import texts
from batchgen.feeder import Feeder, RowBatch
from batchgen.io import sources
from batchgen.io.files import expand
from batchgen.job import open_model
from batchgen.loop import ModelLike, noise_key, resolved_sampling
from batchgen.planner import EngineLike
from batchgen.spec import JobSpec
from batchgen.tokenizer import Tokenizer
from batchgen.types import Completion, Request, RowError, RowKey, SamplingParams


def preview(
    spec: JobSpec, n: int, *, model_opener: Callable[[JobSpec], ModelLike] = open_model
) -> Iterator[dict[str, Any]]:
    """The first `n` rows: the prompt as the model sees it, and its answers. Writes nothing."""
    files = expand(spec.input.path, spec.input.storage_options, allow_empty=spec.input.allow_empty)
    formats = sources.detect_all(files, spec.input.format, spec.input.storage_options)
    model = model_opener(spec)
    spec = spec.model_copy(update={"sampling": resolved_sampling(spec, model)})
    default = spec.sampling.params()
    with Feeder(spec, files, formats, model.tokenizer_path, model.max_model_len, {}, n) as feeder:
        engine = model.engine(feeder.demand)
        while not feeder.finished:
            batch = feeder.get(timeout=1.0)
            if batch is not None and batch.num_rows:
                yield from _answers(batch, engine, model.tokenizer, spec, batch.params or [default] * batch.num_rows)


def _answers(
    batch: RowBatch, engine: EngineLike, tokenizer: Tokenizer, spec: JobSpec, params: Sequence[SamplingParams]
) -> Iterator[dict[str, Any]]:
    """One previewed batch, run to its end."""
    errors = {index: RowError(code, message) for index, code, message in batch.errors}
    names = batch.noise_names()
    prompts = [batch.token_ids[start:end] for start, end in zip(batch.offsets, batch.offsets[1:], strict=False)]
    place_of = {int(row): index for index, row in enumerate(batch.rows)}
    done: dict[tuple[int, int], Completion] = {}
    for index, prompt in enumerate(prompts):
        key = RowKey(batch.file, int(batch.rows[index]))
        if index not in errors:
            engine.add(Request(key, prompt, params[index], noise_key(params[index].seed, names[index])))
    while engine.has_work:
        done.update(((place_of[one.key.row], one.sample), one) for one in engine.step())
    shown = tokenizer.decode_batch(prompts, skip_special_tokens=False)
    places = sorted(done)
    skip_special = spec.output.skip_special_tokens
    answered = texts(
        [done[place] for place in places],
        tokenizer,
        keeps_stop=[params[index].include_stop for index, _ in places],
        skip_special=skip_special,
    )
    text_of = dict(zip(places, answered, strict=True))
    for index in range(batch.num_rows):
        for sample in range(params[index].n if index not in errors else 1):
            one = done.get((index, sample))
            error = errors.get(index) if one is None else one.error
            yield {
                "id": names[index],
                "prompt": shown[index] if one is not None else None,
                "prompt_tokens": one.prompt_tokens if one is not None else None,
                "text": text_of[index, sample] if one is not None and error is None else None,
                "finish_reason": "error" if one is None else one.finish_reason,
                "error": None if error is None else asdict(error),
            }
