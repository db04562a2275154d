"""Results as OpenAI's batch API gives them: a line for each request, and at the end of a run what is made of all lines.

A line holds all that counting it again needs, and nothing in it depends on when or in how many starts it was made.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from batchgen.io.files import BATCH, ERRORS, OUTPUT
from batchgen.io.jsonline import utf8
from batchgen.io.stores import Store
from batchgen.runfolder import Counters
from batchgen.types import Completion

if TYPE_CHECKING:
    from batchgen.io.sinks import ShardResults

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = b"batchgen.model"  # in the schema's metadata: the name that answers give where a request has none
OUR_FAULT = frozenset({"nonfinite_logits", "out_of_memory", "timeout", "internal"})  # and not the request's
_ANSWERED = b'"error":null}\n'  # how the line of an answered request ends, and no other: `error` is the last key
_BLOCK_BYTES = 1 << 20


# -- lines -------------------------------------------------------------------------------------------------------------


def build(schema: pa.Schema, results: ShardResults, digest: str) -> bytes:
    """The lines of a part; `digest` names the run."""
    default = (schema.metadata or {}).get(MODEL, b"").decode()
    lines, at, file = io.BytesIO(), 0, results.shard.file
    rows, counts, truncated = results.rows.tolist(), results.samples.tolist(), results.truncated.tolist()
    for row, count, cut, (custom_id, endpoint, model) in zip(rows, counts, truncated, _requests(results), strict=True):
        part = slice(at, at + count)
        at += count
        name = hashlib.blake2b(f"{digest} {file}:{row}".encode(), digest_size=12).hexdigest()
        shape = (endpoint or CHAT, model or default)
        response, error = _response(name, *shape, results.completions[part], results.texts[part], cut)
        line = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
        lines.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    return lines.getvalue()


def _requests(results: ShardResults) -> Iterator[tuple[str | None, str | None, str | None]]:
    """Each row's id, and of OpenAI requests the endpoint and the model that they name."""
    if not any(batch.num_columns for batch in results.inputs):
        yield from ((f"{results.shard.file}:{row}", None, None) for row in results.rows.tolist())
        return
    table = pa.Table.from_batches(results.inputs)
    ids, *others = table.columns
    try:
        names = ids.cast(pa.string()).to_pylist()
    except pa.ArrowException:  # lists, structs, binary data
        names = [None if one is None else str(one) for one in ids.to_pylist()]
    nothing = [None] * len(names)
    endpoints, models = (column.to_pylist() for column in others) if others else (nothing, nothing)
    yield from zip(names, endpoints, models, strict=True)


def _response(
    name: str, endpoint: str, model: str, samples: Sequence[Completion], texts: Sequence[str], truncated: bool
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """A request's response, and its error: a request of which one sample failed has failed."""
    is_chat = endpoint != COMPLETIONS
    failed = next((sample.error for sample in samples if sample.error is not None), None)
    prompt_tokens, tokens = samples[0].prompt_tokens, sum(len(sample.token_ids) for sample in samples)
    made: dict[str, Any] = {
        "choices": [_choice(one, text, is_chat) for one, text in zip(samples, texts, strict=True)],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens},
    }
    if truncated:
        made["truncated"] = True
    if failed is None:
        head = {
            "id": f"chatcmpl-{name}" if is_chat else f"cmpl-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,  # a time would make two runs of one job differ; batch.json has it
            "model": model,
        }
        return {"status_code": 200, "request_id": f"req_{name}", "body": head | made}, None
    error = {"code": failed.code, "message": utf8(failed.message)}
    ours = failed.code in OUR_FAULT
    kind = "server_error" if ours else "invalid_request_error"
    body: dict[str, Any] = {"error": {**error, "type": kind, "param": None}}
    if len(samples) > 1 or prompt_tokens or tokens or truncated:  # what a row that was run has to show all the same
        body |= made
    return {"status_code": 500 if ours else 400, "request_id": f"req_{name}", "body": body}, error


def _choice(sample: Completion, text: str, is_chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": sample.sample}
    if sample.error is None:
        answer = {"role": "assistant", "content": text, "refusal": None}
        choice |= {"message": answer} if is_chat else {"text": text}
    else:
        choice["error"] = {"code": sample.error.code, "message": utf8(sample.error.message)}
    return choice | {"logprobs": None, "finish_reason": sample.finish_reason}


def tally(line: Mapping[str, Any], counters: Counters) -> None:
    """Count one line as `ShardResults.counters` counts its row. Raises KeyError or TypeError where it is no line."""
    body, error = line["response"]["body"], line["error"]
    counters.rows += 1
    counters.rows_failed += error is not None
    choices = body.get("choices", ()) if error is not None else body["choices"]
    counters.results += len(choices) or 1
    for choice in choices:
        counters.finish_reasons[choice["finish_reason"]] += 1
        if "error" in choice:
            counters.failed[choice["error"]["code"]] += 1
    if choices:
        counters.prompt_tokens += body["usage"]["prompt_tokens"]
        counters.output_tokens += body["usage"]["completion_tokens"]
        counters.truncated += body.get("truncated", False)
    else:
        counters.finish_reasons["error"] += 1
        counters.failed[error["code"]] += 1


# -- the whole run -----------------------------------------------------------------------------------------------------


def publish(
    store: Store,
    parts: Sequence[str],
    counters: Counters,
    *,
    digest: str,
    inputs: Sequence[str],
    created: int,
    completed: int,
    pulse: Callable[[], None],
) -> None:
    """Write output.jsonl, errors.jsonl and batch.json out of all parts, in their order, over what is there.

    Only for a run that is complete. All follow from the parts but for the time in batch.json, so that doing it twice,
    or again after a crash in the middle, does no harm. `pulse` is called again and again, and may raise what ends it.
    """
    store.replace_from(OUTPUT, _lines(store, parts, pulse, answered=True))
    store.replace_from(ERRORS, _lines(store, parts, pulse, answered=False))
    failed = counters.rows_failed
    total_tokens = counters.prompt_tokens + counters.output_tokens
    batch = {
        "id": f"batch_{digest[:24]}",
        "object": "batch",
        "endpoint": _endpoint(store),
        "errors": None,
        "input_file_id": inputs[0].rstrip("/").rpartition("/")[2] if len(inputs) == 1 else None,
        "completion_window": "24h",  # the only one that the API knows
        "status": "completed",
        "output_file_id": OUTPUT,
        "error_file_id": ERRORS if failed else None,
        "created_at": created,
        "completed_at": completed,
        "request_counts": {"total": counters.rows, "completed": counters.rows - failed, "failed": failed},
        "usage": {
            "input_tokens": counters.prompt_tokens,
            "output_tokens": counters.output_tokens,
            "total_tokens": total_tokens,
        },
        "metadata": None,
    }
    store.replace(BATCH, orjson.dumps(batch, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _lines(store: Store, parts: Sequence[str], pulse: Callable[[], None], *, answered: bool) -> Iterator[bytes]:
    """The lines of answered requests, or the others, in blocks."""
    block: list[bytes] = []
    size = 0
    for name in parts:
        pulse()
        for line in io.BytesIO(store.read(name)):
            if line.endswith(_ANSWERED) == answered:
                block.append(line)
                size += len(line)
                if size >= _BLOCK_BYTES:
                    yield b"".join(block)
                    block, size = [], 0
    yield b"".join(block)


def _endpoint(store: Store) -> str:
    """The endpoint of the first answer; a batch has one, though a file of requests may mix them."""
    with store.open(OUTPUT) as file:
        first = file.readline()
    if first and orjson.loads(first)["response"]["body"]["object"] == "text_completion":
        return COMPLETIONS
    return CHAT
