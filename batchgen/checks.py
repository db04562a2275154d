"""What can be checked of a job in a moment: templates, the model's place, input and output. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.errors import ConfigError, InvalidRow, PermissionDenied
from batchgen.io.files import InputFile, expand, open_input, refuse_mixed_folders
from batchgen.io.partitions import partitions
from batchgen.io.storage import local_path
from batchgen.spec import JobSpec, PromptSpec
from batchgen.where import Filter, Mismatch

HEAD_BYTES = 256 << 10  # of a JSON Lines file that `validate` looks at


def check(spec: JobSpec, where: str) -> str:
    """Raises the error that a run of the job would end with; returns what it would read and write, in a line."""
    variables = _template_variables(spec.prompt, where)
    _check_model(spec)
    _check_output(spec.output.path)
    files = expand(spec.input.path, spec.input.storage_options, allow_empty=spec.input.allow_empty)
    refuse_mixed_folders(spec.input.path, files, spec.output.path)
    if files:
        _check_columns(spec, files[0], variables, where)
    size = sum(file.size for file in files)
    return f"{len(files)} input file{'' if len(files) == 1 else 's'} ({size / 1e6:,.1f} MB) into {spec.output.path}"


def check_templates(spec: JobSpec, where: str) -> None:
    """Raises ConfigError where one of the job's templates is none; looks at nothing else."""
    _template_variables(spec.prompt, where)


# -- templates ---------------------------------------------------------------------------------------------------------


def _template_variables(prompt: PromptSpec, where: str) -> dict[str, str]:
    """The columns that the job's templates cannot do without, each with the key that wants it."""
    sources = dict(_templates(prompt))
    if not sources:
        return {}
    import jinja2
    from jinja2 import meta, nodes

    from batchgen.templates import row_environment

    environment = row_environment()
    wanted: dict[str, str] = {}
    for key, text in sources.items():
        try:
            environment.from_string(text)
            tree = environment.parse(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{where}: `{key}`: not valid Jinja: line {error.lineno}: {error.message}") from None
        names = meta.find_undeclared_variables(tree) - set(environment.globals)
        for node in tree.find_all((nodes.Test, nodes.Filter)):
            # `x is defined` and `x | default(...)` are how a template does without x.
            if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name):
                names.discard(node.node.name)
        wanted.update(dict.fromkeys(names, key))
    return wanted


def _templates(prompt: PromptSpec) -> Iterator[tuple[str, str]]:
    """Key and text of every template in the job file."""
    if prompt.template is not None:
        yield "prompt.template", prompt.template
    for index, message in enumerate(prompt.messages or ()):
        yield from _texts(f"prompt.messages[{index}].content", message.get("content"))


def _texts(key: str, content: Any) -> Iterator[tuple[str, str]]:
    """A message's content is text, or a list of parts that may hold some."""
    if isinstance(content, str):
        yield key, content
    elif isinstance(content, list | tuple):
        for index, part in enumerate(content):
            if isinstance(part, dict):
                yield from _texts(f"{key}[{index}].text", part.get("text"))


# -- places ------------------------------------------------------------------------------------------------------------


def _check_model(spec: JobSpec) -> None:
    from batchgen import weights
    from batchgen.weights import hub, remote

    path = spec.model.path
    if weights.is_remote(path):  # only looked at: nothing is downloaded to check a job
        remote.find(path, spec.model.storage_options)
    elif Path(path).exists() or hub.parse(path, spec.model.revision) is None:  # the hub is not asked
        weights.resolve(path)


def _check_output(path: str) -> None:
    """The folder can be made or written to, as far as asking without trying can tell."""
    folder = local_path(path)
    if folder is None:
        return
    at = Path(folder).absolute()
    while not os.path.lexists(at):
        at = at.parent
    if not at.is_dir():
        raise ConfigError(f"`output.path: {path}`: {at} is not a folder; choose another place")
    if not os.access(at, os.W_OK | os.X_OK):
        raise PermissionDenied(f"`output.path: {path}`: this user may not write to {at}")


# -- columns -----------------------------------------------------------------------------------------------------------


def _check_columns(spec: JobSpec, file: InputFile, variables: dict[str, str], where: str) -> None:
    """The columns that the job needs are in the first file: in its schema, or in one of its first JSON lines."""
    with open_input(file.path, spec.input.storage_options) as raw:
        head = raw.read(HEAD_BYTES)
    if spec.input.format in ("jsonl", "openai") or (spec.input.format == "auto" and head.lstrip()[:1] == b"{"):
        _check_lines(spec, file, head, variables, where)  # Arrow, slow to import, is not needed
        return
    from batchgen.io import sources
    from batchgen.templates import WHOLE_ROW

    found = sources.detect(file, spec.input.format, spec.input.storage_options)
    schema = sources.schema(file, found, spec.input.storage_options)
    if schema is None:
        _check_lines(spec, file, head, variables, where)
        return
    if not head:  # a text file without rows
        return
    have = f"the columns of {file.path} are {', '.join(schema.names)}"
    variables.pop(WHOLE_ROW, None)
    for column, key in _wanted(spec, variables):
        if column not in schema.names:
            raise ConfigError(f"{where}: `{key}`: there is no column {column}; {have}")
    if spec.input.where is not None:
        options = spec.input.storage_options
        chunks = sources.read_shards(file, found, columns=None, shard_rows=None, done={}, storage_options=options)
        _check_filter(spec.input.where, [row.values for row in next(chunks).rows if row.values is not None], where)
    prompt = spec.prompt
    given = any(source is not None for source in (prompt.column, prompt.template, prompt.messages, prompt.token_ids))
    if not given and not any(column in schema.names for column in PromptSpec.DEFAULT_COLUMNS):
        raise ConfigError(
            f"{where}: `prompt`: expected one of column, template, messages, token_ids, or input with a column "
            f"{' or '.join(PromptSpec.DEFAULT_COLUMNS)}; {have}"
        )


def _check_filter(text: str, rows: Sequence[Mapping[str, Any]], where: str) -> None:
    """A filter that can judge none of the first rows, because it compares text with a number say, fails them all."""
    wanted, problems = Filter(text), []
    for row in rows:
        try:
            wanted.keeps(row)
        except Mismatch as error:
            problems.append(str(error))
    if rows and len(problems) == len(rows):
        raise ConfigError(f"{where}: `input.where`: {problems[0]}, in each of the first {len(rows)} rows")


def _check_lines(spec: JobSpec, file: InputFile, head: bytes, variables: dict[str, str], where: str) -> None:
    """A column that none of the first JSON lines has is a typing error: every row would fail."""
    from batchgen.io.jsonline import parse
    from batchgen.templates import WHOLE_ROW

    lines = head.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    whole = lines if len(head) < HEAD_BYTES else lines[:-1]
    rows = [values for line in whole if line.strip() and isinstance(values := parse(line.strip())[0], dict)]
    if not rows:  # compressed, or no JSON Lines: the run will look closer
        return
    if spec.input.where is not None:
        _check_filter(spec.input.where, rows, where)
    if spec.input.format == "openai":
        _check_requests(rows, file, where)
    have = set(partitions(file.path)).union(*rows)
    prompt = spec.prompt
    given = any(one is not None for one in (prompt.column, prompt.template, prompt.messages, prompt.token_ids))
    by_default = spec.input.format == "auto" and not given and not have.intersection(PromptSpec.DEFAULT_COLUMNS)
    if by_default and all("custom_id" in row and "body" in row for row in rows):
        raise ConfigError(f"{where}: `input.format`: {file.path} holds OpenAI batch requests; set it to openai")
    variables.pop(WHOLE_ROW, None)
    for column, key in _wanted(spec, variables):
        if column not in have and key not in ("output.columns", "input.where"):  # those may be rare
            raise ConfigError(
                f"{where}: `{key}`: none of the first {len(rows)} rows has a column {column}; the columns of "
                f"{file.path} are {', '.join(sorted(have))}"
            )


def _check_requests(rows: Sequence[Mapping[str, Any]], file: InputFile, where: str) -> None:
    """One bad request is its own trouble; where all of the first are, the file or the job is wrong."""
    from batchgen.io.openai import read_call

    problems = []
    for row in rows:
        try:
            read_call(row)
            return
        except InvalidRow as error:
            problems.append(error.message)
    raise ConfigError(
        f"{where}: `input.format: openai`: none of the first {len(rows)} lines of {file.path} is a request that can be "
        f"answered; the first: {problems[0]}"
    )


def _wanted(spec: JobSpec, variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every column that the job needs, with the key that wants it."""
    prompt = spec.prompt
    named = {
        "prompt.column": prompt.column,
        "prompt.token_ids": prompt.token_ids,
        "input.id": spec.input.id,
        "sampling.column": spec.sampling.column,
    }
    if isinstance(prompt.tools, str):
        named["prompt.tools"] = prompt.tools
    yield from ((column, key) for key, column in named.items() if column is not None)
    yield from variables.items()
    if spec.input.where is not None:
        yield from ((column, "input.where") for column in Filter(spec.input.where).columns)
    if spec.output.columns != "all":
        yield from ((column, "output.columns") for column in spec.output.columns)
