"""Text to token ids and back, and the model's chat template: what transformers would do, on the Rust library alone."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from batchgen import templates
from batchgen.errors import ConfigError, InvalidRow, ModelError
from batchgen.types import TokenIds
from batchgen.weights.gguf_metadata import read_metadata
from batchgen.weights.gguf_tokenizer import build
from batchgen.wordcache import WordCache, encode_whole

PRIVATE_USE = range(0xE000, 0xF900)
REPLACEMENT = "\ufffd"
CONTINUE = "\uf8fe\uf8fd"  # where the last message ends, while a template is asked to leave it open
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tokenizer's pieces, whatever files they come from. `special_tokens` are those with a name ("bos_token")."""

    rust: RustTokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    eos_token_ids: frozenset[int]
    content: str  # a hash of what all this was read from


class Tokenizer:
    """One model's tokenizer. Encodes with the published pipeline, so ids equal those of the reference library."""

    def __init__(self, parts: _Parts, *, chat_template: str | None = None) -> None:
        self._rust = parts.rust
        self._rust.no_truncation()
        self._rust.no_padding()
        self._names = parts.special_tokens
        self._templates = {"default": chat_template} if chat_template is not None else parts.chat_templates
        self._environment = templates.chat_environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._template_is_ours = chat_template is not None
        added = self._rust.get_added_tokens_decoder()
        self._special = {t.content for t in added.values() if t.special} | set(self._names.values())
        self._guard = _Guard(self._rust, self._special)
        self._words = WordCache.of(self._rust)
        self._content = parts.content
        self.bos_token = self._names.get("bos_token")
        self.bos_token_id: int | None = self._rust.token_to_id(self.bos_token) if self.bos_token else None
        self.vocab_size: int = max(self._rust.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added), 0)
        eos = self._rust.token_to_id(self._names.get("eos_token", ""))
        self.eos_token_ids: frozenset[int] = parts.eos_token_ids | ({eos} if eos is not None else set())
        empty = self._rust.encode("", add_special_tokens=True).ids
        self.adds_bos: bool = bool(empty) and empty[0] == self.bos_token_id

    @classmethod
    def load(cls, path: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """From a Hugging Face folder or a GGUF file. `chat_template` (Jinja, or a file of it) replaces the model's."""
        path = Path(path)
        parts = _from_folder(path) if path.is_dir() else _from_gguf(path)
        return cls(parts, chat_template=None if chat_template is None else _template_text(chat_template))

    @classmethod
    def of_numbers(cls, vocab_size: int) -> Tokenizer:
        """For a model that comes without one: token 17 is the word "17"."""
        rust = RustTokenizer(WordLevel({str(number): number for number in range(vocab_size)}))
        rust.pre_tokenizer = WhitespaceSplit()
        return cls(_Parts(rust, {}, {}, frozenset(), f"numbers below {vocab_size}"))

    def fingerprint(self) -> str:
        """SHA-256 in hex of everything that decides which ids a text gets: a resumed job needs the same."""
        templates_in_use = json.dumps(sorted(self._templates.items()))
        return hashlib.sha256((self._content + templates_in_use).encode()).hexdigest()

    # -- text to ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenIds]:
        if self._words is not None:
            return self._words.encode_batch(texts, add_special_tokens=add_special_tokens)
        return encode_whole(self._rust, texts, add_special_tokens)

    def encode_with_offsets(self, text: str) -> list[tuple[int, int]]:
        """The place in `text` of every token it has, without special tokens around it."""
        return self._rust.encode(text, add_special_tokens=False).offsets

    def mark(self, value: Any, *, avoid: str = "") -> tuple[Any, str]:
        """Data with every special token's text in it broken by a mark, so that a template can carry it about safely.

        Returns the value as it is, and no mark, where it holds no special token. The mark is a character that stands
        neither in the data nor in `avoid`, the templates' own text.
        """
        return self._guard.mark(value, avoid)

    def encode_literal(self, text: str, mark: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode text rendered from data that `mark` broke: its special tokens stay text, the template's are tokens."""
        return np.array(self._guard.encode(text, mark, add_special_tokens), np.int32)

    # -- chat --------------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The template used without tools; None where the model has none."""
        return self._templates.get(self._template_name(False))

    def _template_name(self, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self._templates else "default"

    def template_sources(self) -> str:
        return "".join(self._templates.values())

    def compile_chat_template(self, *, with_tools: bool = False) -> jinja2.Template:
        """The compiled template; a broken one is an error of the job or of the model."""
        name = self._template_name(with_tools)
        if name not in self._compiled:
            source = self._templates.get(name)
            if source is None:
                known = f" by default, only {', '.join(sorted(self._templates))}" if self._templates else ""
                raise ConfigError(f"the model has no chat template{known}; give one in model.chat_template")
            try:
                self._compiled[name] = templates.compiled(self._environment, source)
            except jinja2.TemplateSyntaxError as error:
                kind = ConfigError if self._template_is_ours else ModelError
                whose = "model.chat_template" if self._template_is_ours else "the model's chat template"
                raise kind(f"{whose} is not valid Jinja: line {error.lineno}: {error.message}") from None
        return self._compiled[name]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model reads it; to be encoded without adding special tokens.

        `continue_final_message` leaves the last message's turn open, for the model to go on with it.
        """
        prepared = [_prepared(message) for message in messages]
        if continue_final_message:
            if not prepared or not isinstance(prepared[-1].get("content"), str):
                raise InvalidRow("invalid_row", "continue_final_message: the last message has no text to go on with")
            prepared[-1]["content"] += CONTINUE + " "
        variables = {
            **self._names,
            "documents": None,
            **kwargs,
            "messages": prepared,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = templates.render(self.compile_chat_template(with_tools=tools is not None), variables)
        if not continue_final_message:
            return text
        kept, found, rest = text.rpartition(CONTINUE)
        if not found:
            raise InvalidRow("template_error", "continue_final_message: the template leaves the last message out")
        # a template that trims messages has taken the space behind our sign, and would have trimmed the text, too
        return kept if rest.startswith(" ") else kept.rstrip()

    # -- ids to text -------------------------------------------------------------------------------------------------

    def decode_batch(
        self,
        batch: Sequence[Sequence[int] | npt.NDArray[np.int32]],
        *,
        skip_special_tokens: bool,
        answers: bool = False,
    ) -> list[str]:
        """Ids that no token has (models pad their vocabulary) decode as nothing.

        `answers` decodes them as what stands behind a prompt: with the space that a decoder takes off a text's start.
        """
        before, text_before = self._before if answers else ([], "")
        lists = [before + (ids.tolist() if isinstance(ids, np.ndarray) else list(ids)) for ids in batch]
        texts = self._rust.decode_batch(lists, skip_special_tokens=skip_special_tokens)
        return [text[len(text_before) :] for text in texts] if text_before else texts

    def stream(self, *, skip_special_tokens: bool = True, answers: bool = False) -> Stream:
        before, text_before = self._before if answers else ([], "")
        return Stream(self._rust, skip_special_tokens, before, len(text_before))

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """A token that stands for a prompt, and its text, where decoders take a space off the first token of all."""
        if not re.search("Metaspace|Strip", str(self._rust.decoder)):
            return [], ""
        for word in (index for token, index in self._rust.get_vocab().items() if token[:1] == "\u2581"):
            once, twice = (self._rust.decode([word] * count, skip_special_tokens=False) for count in (1, 2))
            if once and twice == f"{once} {once}":
                return [word], once
        return [], ""


class Stream:
    """Text token by token, for stop strings: what `push` and the last `flush` return adds up to decoding everything.

    What ends in half a character is held back. (Two exceptions, both in output that is not text: byte tokens that
    are no UTF-8 behind some that are, which make a decoder take back what was fine, and a long run of them.)
    """

    MAX_HELD = 16  # tokens

    def __init__(
        self, rust: RustTokenizer, skip_special_tokens: bool, before: Sequence[int] = (), before_length: int = 0
    ) -> None:
        """`before` are tokens that are out already, and `before_length` the length of their text."""
        self._rust = rust
        self._skip = skip_special_tokens
        # The tokens of the last piece and of the next one: decoders look at what stands before, and take a space off
        # the first piece of all.
        self._window: list[int] = list(before)
        self._last = len(before)  # tokens of the window that belong to the last piece
        self._sent = before_length  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        self._window.append(int(token_id))
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._last <= self.MAX_HELD:
            return ""
        piece = text[self._sent :]
        newest = self._window[self._last :]
        context = self._decode(newest)
        if context:  # else it is special tokens only, before which the next token would look like the first of all
            self._window, text = newest, context
            self._last = len(newest)
        self._sent = len(text)
        return piece

    def flush(self) -> str:
        piece = self._decode(self._window)[self._sent :]
        self._sent += len(piece)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._rust.decode(ids, skip_special_tokens=self._skip)


class _Guard:
    """Keeps special tokens in data from becoming control ids.

    Data is marked before it is rendered: a private-use character goes into every special token's text. In the
    rendered text the special tokens that are still whole are the template's own. They get secret names, the marks go,
    and a twin of the tokenizer that knows special tokens only by these names encodes the text in one piece.
    """

    def __init__(self, rust: RustTokenizer, special: Iterable[str]) -> None:
        self._rust = rust
        self._special = sorted((token for token in special if len(token) > 1), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._secret: dict[str, str] = {}
        self._twin: RustTokenizer | None = None

    def mark(self, value: Any, avoid: str) -> tuple[Any, str]:
        if not any(map(self._pattern.search, _strings(value))):
            return value, ""
        used = set(avoid).union(*_strings(value))
        mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
        if mark is None:
            raise InvalidRow("invalid_unicode", "the row uses every private-use character there is")

        def put(match: re.Match[str]) -> str:
            return match[0][0] + mark + match[0][1:]

        return _mapped(value, lambda text: self._pattern.sub(put, text)), mark

    def encode(self, text: str, mark: str, add_special_tokens: bool) -> list[int]:
        twin = self._twin or self._make_twin()
        named = self._pattern.sub(lambda match: self._secret[match[0]], text).replace(mark, "")
        return twin.encode(named, add_special_tokens=add_special_tokens).ids

    def _make_twin(self) -> RustTokenizer:
        nonce = secrets.token_hex(8)
        self._secret = {token: f"\uf8ff{nonce}:{i}\uf8ff" for i, token in enumerate(self._special)}
        data = json.loads(self._rust.to_str())
        for token in data["added_tokens"]:
            if token["content"] in self._secret:
                token.update(content=self._secret[token["content"]], special=True)
        model = data["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {self._secret.get(token, token): index for token, index in vocab.items()}
        else:
            model["vocab"] = [[self._secret.get(token, token), score] for token, score in vocab]
        if model.get("unk_token") in self._secret:
            model["unk_token"] = self._secret[model["unk_token"]]
        if "merges" in model:
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [pair for pair in pairs if "".join(pair) not in self._secret]
        try:
            twin = RustTokenizer.from_str(json.dumps(data))
        except Exception as error:  # the library raises bare Exceptions
            raise self._unguarded(str(error)) from None
        for token, name in self._secret.items():
            expected = self._rust.token_to_id(token)
            if expected is not None and twin.encode(name, add_special_tokens=False).ids != [expected]:
                raise self._unguarded(f"token {token!r}")
        self._twin = twin
        return twin

    @staticmethod
    def _unguarded(what: str) -> ModelError:
        return ModelError(
            f"this model's tokenizer cannot keep special tokens in data as text ({what}); "
            "set prompt.special_tokens_in_content: allow where the data is trusted"
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no nulls, and reasoning under every name that templates read it by."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING_FIELDS if name in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


# -- files -----------------------------------------------------------------------------------------------------------


def _template_text(template: str) -> str:
    """Inline Jinja always has a brace; anything else names a file."""
    if "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {template}: cannot be read as a file of Jinja: {error}") from None


def _from_gguf(path: Path) -> _Parts:
    metadata = read_metadata(path)
    built = build(metadata, str(path))
    digest = hashlib.sha256()
    for key in sorted(key for key in metadata if key.startswith("tokenizer.")):
        value = metadata[key]
        digest.update(f"{key}={value.tolist() if isinstance(value, np.ndarray) else value!r}\n".encode())
    return _Parts(built.tokenizer, built.special_tokens, built.chat_templates, built.eos_token_ids, digest.hexdigest())


def _from_folder(folder: Path) -> _Parts:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{folder}: has no tokenizer.json; expected the fast tokenizer that transformers' save_pretrained writes "
            "(convert an older tokenizer with AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        rust = RustTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{file}: cannot be read: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(folder, config)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    missing = [_added_token(token) for _, token in sorted(_listed_tokens(config).items())]
    rust.add_tokens(missing)  # those that tokenizer.json has already are left as they are
    rust.add_special_tokens([_added_token(token, special=True) for token in [*named.values(), *extra]])
    special_tokens = {name: _content(token) for name, token in named.items()}
    eos = _eos_ids(_read_json(folder / "config.json")) | _eos_ids(_read_json(folder / "generation_config.json"))
    digest = hashlib.sha256(file.read_bytes())
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        digest.update(json.dumps(_read_json(folder / name), sort_keys=True).encode())
    return _Parts(rust, special_tokens, _folder_templates(folder, config), eos, digest.hexdigest())


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """bos_token and its like, as text or as dictionaries; the older map counts where no token list is given."""
    values = dict(config)
    if "added_tokens_decoder" not in config:
        values |= _read_json(folder / "special_tokens_map.json")
    return {
        name: token
        for name, token in values.items()
        if name.endswith("_token") and (isinstance(token, str) or (isinstance(token, dict) and "content" in token))
    }


def _listed_tokens(config: dict[str, Any]) -> dict[int, Any]:
    return {int(index): token for index, token in (config.get("added_tokens_decoder") or {}).items()}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _added_token(token: Any, *, special: bool = False) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(str(token), special=special, normalized=False)
    flags = {name: bool(token[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in token}
    return AddedToken(str(token["content"]), special=special or bool(token.get("special")), **flags)


def _eos_ids(config: dict[str, Any]) -> frozenset[int]:
    """`eos_token_id` is a number or a list; multimodal configurations keep it with the text model's."""
    ids = config.get("eos_token_id")
    if ids is None:
        ids = (config.get("text_config") or {}).get("eos_token_id")
    return frozenset(int(i) for i in ([ids] if isinstance(ids, int) else ids or []))


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. Files of their own come before what the tokenizer's configuration holds."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    return {str(entry["name"]): str(entry["template"]) for entry in template or []}
