"""A job file's text as plain data: YAML that keeps its line numbers, `--set` overrides, `${NAME}` substitution."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import yaml

from batchgen.errors import ConfigError, NoInputError, PermissionDenied, StorageError, UsageError

# Jinja belongs to the prompt, and a regex or a stop string may well hold "${": these sections stay as they are.
VERBATIM_SECTIONS = frozenset({"prompt", "sampling", "structured"})

_REFERENCE = re.compile(r"\$\$\{|\$\{(?:(?P<env>env:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\})?")


def read(path: str | os.PathLike[str]) -> str:
    """The text of the job file at `path`."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise NoInputError(f"{path}: no such job file") from None
    except (IsADirectoryError, NotADirectoryError):
        raise NoInputError(f"{path}: expected a job file, this is not a file") from None
    except PermissionError:
        raise PermissionDenied(f"{path}: no permission to read the job file") from None
    except OSError as error:
        raise StorageError(f"{path}: the job file cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the job file is not UTF-8 text (byte {error.start})") from None


# -- YAML --------------------------------------------------------------------------------------------------------------


def _null(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> None:
    return None


def _bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    return node.value.lower() == "true"


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _str(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    """A pair of escapes as JSON writes an emoji, "\\ud83d\\ude00", is one character; half a pair is no text at all."""
    try:
        return str(node.value).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise yaml.MarkedYAMLError(problem="half of a surrogate pair", problem_mark=node.start_mark) from None


def _tag(name: str) -> str:
    return f"tag:yaml.org,2002:{name}"


class _Loader(yaml.SafeLoader):
    """YAML with the plain scalars of version 1.2, safe, and without silent last-wins for a key given twice.

    PyYAML's own scalars are those of YAML 1.1, where `no` is false, 010 is 8, 1:30 is 90 and 1e-4 is text.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {  # noqa: RUF012 - as PyYAML declares it
        None: [
            (_tag("null"), re.compile(r"(?:~|null|Null|NULL|)$")),
            (_tag("bool"), re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")),
            (_tag("int"), re.compile(r"(?:[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40})$")),
            (_tag("float"), re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")),
            (_tag("float"), re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")),
            (_tag("merge"), re.compile(r"<<$")),
        ]
    }
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        **yaml.SafeLoader.yaml_constructors,
        _tag("null"): _null,
        _tag("bool"): _bool,
        _tag("int"): _int,
        _tag("float"): _float,
        _tag("str"): _str,
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in lines:
                problem = f"the key {key.value!r} is given twice, first in line {lines[name]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
        return node


def parse_yaml(text: str, where: str) -> Any:
    """The one YAML document in `text`; what is wrong with it is said with its line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}: not valid YAML: {place}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply") from None


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """`parse_yaml`, when the document has to be a mapping, as a job file has."""
    data = parse_yaml(text, where)
    if not isinstance(data, dict):
        found = "it is empty" if data is None else f"it holds a {type(data).__name__}"
        raise ConfigError(f"{where}: expected a mapping of sections (model, input, sampling, output), {found}")
    return data


# -- overrides and substitution ----------------------------------------------------------------------------------------


def apply_override(data: dict[str, Any], override: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A copy of `data` with `override`, "a.b.c=YAML", in it; and the path of the key that it sets."""
    where = f"--set {override}"
    path, equals, text = override.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise UsageError(f"{where}: expected KEY=VALUE with the full path of the key, such as sampling.temperature=0.7")
    try:
        value = _typed(text)
    except ConfigError:
        raise ConfigError(f"{where}: the value is not valid YAML; text that looks like YAML goes in quotes") from None

    def put(at: Any, depth: int) -> dict[str, Any]:
        if at is None:
            at = {}
        if not isinstance(at, dict):
            raise ConfigError(f"{where}: `{'.'.join(keys[:depth])}` is not a mapping, it has no key {keys[depth]}")
        last = depth == len(keys) - 1
        return {**at, keys[depth]: value if last else put(at.get(keys[depth]), depth + 1)}

    return put(data, 0), keys


def substitute(
    data: dict[str, Any], params: Mapping[str, str], environ: Mapping[str, str], where: str
) -> dict[str, Any]:
    """A copy of `data` with every `${NAME}` and `${env:NAME}` outside the verbatim sections replaced.

    A string that is wholly one reference takes the YAML type of the value, others stay text; `$${` is a plain `${`.
    """
    problems: list[str] = []
    used: set[str] = set()

    def value_of(match: re.Match[str], path: str) -> str:
        if match[0] == "$${":
            return "${"
        name, values = match["name"], environ if match["env"] else params
        if name is None:
            problems.append(f"{where}: `{path}`: expected ${{NAME}} or ${{env:NAME}}; a plain ${{ is written $${{")
        elif name in values:
            if not match["env"]:
                used.add(name)
            return values[name]
        elif match["env"]:
            problems.append(f"{where}: `{path}`: the environment has no variable {name}, needed by {match[0]}")
        else:
            also = f" (the environment's {name} is ${{env:{name}}})" if name in environ else ""
            problems.append(f"{where}: `{path}`: no value for {match[0]}; give --param {name}=VALUE{also}")
        return ""

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole and whole["name"]:
            text = value_of(whole, path)
            try:
                return _typed(text)
            except ConfigError:
                return text
        return _REFERENCE.sub(lambda match: value_of(match, path), value)

    try:
        result = {key: item if key in VERBATIM_SECTIONS else walk(item, str(key)) for key, item in data.items()}
    except RecursionError:
        raise ConfigError(f"{where}: a YAML alias refers to itself") from None
    problems.extend(_unused(set(params) - used, used, where))
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def _unused(names: Iterable[str], used: Iterable[str], where: str) -> list[str]:
    """A parameter that nothing uses is a typo, here or in the file."""
    lines = []
    for name in sorted(names):
        near = get_close_matches(name, used, 1)
        outside = f"it is replaced everywhere but in {', '.join(sorted(VERBATIM_SECTIONS))}"
        hint = f"did you mean {near[0]}?" if near else outside
        lines.append(f"--param {name}: {where} has no ${{{name}}}; {hint}")
    return lines


def _typed(text: str) -> Any:
    """`text` as YAML where it is one scalar, a quoted string, or a list or mapping in brackets; else as it stands.

    Paths such as `*.parquet` or `a: b` are no YAML, or other YAML than was meant.
    """
    if text[:1] in tuple("[{\"'"):
        return parse_yaml(text, "value")
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    if tag in (_tag("str"), _tag("merge")):
        return text
    return _Loader.yaml_constructors[tag](loader, yaml.ScalarNode(tag, text))
