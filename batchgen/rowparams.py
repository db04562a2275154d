"""Sampling parameters that a row brings: read as the job file's own keys are, and put over the job's."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from batchgen import kinds
from batchgen.errors import InvalidRow
from batchgen.io import jsonline
from batchgen.spec import NOT_SUPPORTED, SamplingSpec, explained
from batchgen.types import SamplingParams

KEYS = tuple(name for name in SamplingSpec.model_fields if name not in ("defaults", "column"))
MAX_SAMPLES = 128  # that one row may ask for; a job may ask for more, with one `n` for all of them
_PARAMS = frozenset(SamplingParams.__dataclass_fields__)


@cache
def _reader(key: str) -> TypeAdapter[Any]:
    """What the job file's schema does with this key alone."""
    field = SamplingSpec.model_fields[key]
    annotation: Any = field.annotation
    for kind in field.metadata:
        annotation = Annotated[annotation, kind]
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


def read_value(key: str, value: Any, where: str) -> Any:
    """The value of a sampling key as `SamplingSpec` holds it; InvalidRow that names `where` it cannot be used."""
    path = f"sampling.{key}"
    try:
        read = _reader(key).validate_python(value)
    except ValidationError as error:
        raise InvalidRow("invalid_parameter", f"{where}: {explained(error.errors()[0], path)}") from None
    if path in NOT_SUPPORTED and NOT_SUPPORTED[path][1](read):
        shown = kinds.shown(value)
        raise InvalidRow("invalid_parameter", f"{where}: {shown} given, which is not supported yet in this version")
    if key == "n" and read > MAX_SAMPLES:
        raise InvalidRow("invalid_parameter", f"{where}: {read} given, a row may ask for up to {MAX_SAMPLES} answers")
    return read


def read_column(values: Mapping[str, Any], column: str) -> dict[str, Any]:
    """What a row's `sampling.column` gives: an object, or JSON text; nulls are not given."""
    if column not in values:
        raise InvalidRow("missing_column", f"the row has no column `{column}`, which sampling.column names")
    where, given = f"column `{column}`", values[column]
    if given is None:
        return {}
    if isinstance(given, str):
        given, problem = jsonline.parse(given.encode("utf-8", "surrogatepass"))
        if problem is not None:
            raise InvalidRow("invalid_parameter", f"{where}: {problem[1]}")
    if not isinstance(given, Mapping):
        raise InvalidRow("invalid_parameter", f"{where}: {kinds.shown(given)} given, expected an object or JSON text")
    read = {}
    for key, value in given.items():
        if key not in KEYS:
            near = get_close_matches(str(key).lower(), KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"a row may give {', '.join(KEYS)}"
            raise InvalidRow("invalid_parameter", f"{where}: unknown key {kinds.shown(key)}; {hint}")
        if value is not None:
            read[key] = read_value(key, value, f"{where}: {key}")
    return read


class RowParams:
    """The parameters of each row: the job's, and over them what the row gives."""

    def __init__(self, sampling: SamplingSpec, vocab_size: int) -> None:
        self.default = sampling.params()
        self._base = {name: getattr(self.default, name) for name in _PARAMS}
        self._vocab_size = vocab_size
        self._made: dict[tuple[tuple[str, Any], ...], SamplingParams] = {}  # rows mostly give the same few

    def over(self, given: Mapping[str, Any], where: str) -> SamplingParams:
        """`given` holds values of `read_value`."""
        own = {key: value for key, value in given.items() if key in _PARAMS}
        if not own:
            return self.default
        signature = tuple(own.items())
        made = self._made.get(signature)
        if made is None:
            for token_id in own.get("stop_token_ids", ()):
                if token_id >= self._vocab_size:
                    limit = self._vocab_size - 1
                    message = f"{where}: stop_token_ids: {token_id}, but the model's ids are 0 to {limit}"
                    raise InvalidRow("invalid_parameter", message)
            if len(self._made) >= 4096:
                self._made.clear()
            made = self._made[signature] = SamplingParams(**{**self._base, **own})
        return made
