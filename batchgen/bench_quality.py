"""What quantising a model while loading changes, over the first rows of a job: agreement of answers, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.engine import Engine
from batchgen.errors import ConfigError, DataError
from batchgen.feeder import Feeder
from batchgen.io import sources
from batchgen.io.files import expand
from batchgen.loader import Model
from batchgen.loop import resolved_sampling
from batchgen.spec import JobSpec
from batchgen.types import NO_TOKENS, Request, RowKey, SamplingParams, TokenIds

MAX_POSITIONS = 1024  # of a row's prompt and answer that both models read: bounds the logits in memory


def measure(spec: JobSpec, rows: int) -> dict[str, Any]:
    """Both models answer the job's first `rows` rows greedily, then both read the plain model's answers.

    Rows that fail with either of them are left out. `rows_equal` is the share of rows with equal answers,
    `tokens_before_difference` the share of the plain answers' tokens that come before the first one that differs. Over
    the positions of the plain model's answers: `perplexity` under either model, and `top1_agreement`, the share at
    which both find the same token most likely. Raises ConfigError where the job quantises nothing, DataError where no
    row can be used.
    """
    if spec.model.quantization is None:
        raise ConfigError("model.quantization: null, so there is nothing to compare; give one, such as int8")
    plain_spec = spec.model_copy(update={"model": spec.model.model_copy(update={"quantization": None})})
    plain = Model(plain_spec.model, spec.engine)
    requests = _requests(plain_spec, plain, rows)
    engine = plain.engine()
    answers = _answers(engine, requests)
    told = _read(engine, requests, answers)
    del engine
    engine = Model(spec.model, spec.engine).engine()
    others = _answers(engine, requests)
    heard = _read(engine, requests, answers)
    pairs = [(answers[row.key], others[row.key]) for row in requests if row.key in answers and row.key in others]
    if not len(told[0]) or not pairs:
        raise DataError(
            f"nothing to compare: none of {len(requests)} rows has an answer that begins within {MAX_POSITIONS} "
            "tokens; `batchgen preview` shows them"
        )
    common = [_common(a, b) for a, b in pairs]
    equal = [n == len(a) == len(b) for n, (a, b) in zip(common, pairs, strict=True)]
    return {
        "bench": "quality",
        "model": spec.model.path,
        "dtype": plain.dtype,
        "quantization": spec.model.quantization,
        "rows": len(pairs),
        "positions": len(told[0]),
        "perplexity": round(math.exp(told[0].mean()), 4),
        "perplexity_quantized": round(math.exp(heard[0].mean()), 4),
        "top1_agreement": round(float((told[1] == heard[1]).mean()), 4),
        "rows_equal": round(sum(equal) / len(equal), 4),
        "tokens_before_difference": round(sum(common) / sum(len(a) for a, _ in pairs), 4),
    }


def _requests(spec: JobSpec, model: Model, rows: int) -> list[Request]:
    """The first rows that can be used, each to be answered greedily to the length that the job allows."""
    files = expand(spec.input.path, spec.input.storage_options)
    formats = sources.detect_all(files, spec.input.format, spec.input.storage_options)
    sampling = resolved_sampling(spec, model)
    spec = spec.model_copy(update={"sampling": sampling})
    default = sampling.params()
    requests = []
    with Feeder(spec, files, formats, model.tokenizer_path, model.max_model_len, {}, rows) as feeder:
        while not feeder.finished:
            batch = feeder.get(timeout=1.0)
            if batch is None:
                continue
            for index, row in enumerate(batch.rows.tolist()):
                start, end = batch.offsets[index : index + 2]
                own = default if batch.params is None else batch.params[index]
                if start < end:  # else a row that fails in the job too
                    params = SamplingParams(max_tokens=own.max_tokens)
                    requests.append(Request(RowKey(batch.file, row), batch.token_ids[start:end], params, 0))
    if not requests:
        raise DataError(f"none of the first {rows} rows can be used; `batchgen preview` says why")
    return requests


def _answers(engine: Engine, requests: Sequence[Request]) -> dict[RowKey, TokenIds]:
    """By row; without those that fail."""
    done = engine.generate(requests)
    return {one.key: one.token_ids for one in done if one.error is None and len(one.token_ids)}


def _read(
    engine: Engine, requests: Sequence[Request], answers: Mapping[RowKey, TokenIds]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """What the model makes of answers to these prompts: at each of their positions the negative log-likelihood of the
    token that stands there, in nats, and the most likely token."""
    runner: Any = engine.runner
    losses, likeliest = [np.empty(0)], [np.empty(0, np.int64)]
    for request in requests:
        first = len(request.prompt_token_ids)
        ids = np.concatenate([request.prompt_token_ids, answers.get(request.key, NO_TOKENS)])[:MAX_POSITIONS]
        if len(ids) <= first:
            continue
        logits = runner.logits_of(ids[:-1])[first - 1 :]  # those that the answer's tokens were chosen by
        targets = torch.from_numpy(ids[first:].astype(np.int64))
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().numpy())
        likeliest.append(logits.argmax(dim=1).numpy())
    return np.concatenate(losses), np.concatenate(likeliest)


def _common(a: TokenIds, b: TokenIds) -> int:
    """Tokens before the first difference."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
