"""Builds the tokenizer that a GGUF file describes in its metadata, as the `tokenizers` library's own objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from batchgen.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "\u2581"  # how sentencepiece writes a space

# What ends a turn or an answer, beside eos: llama.cpp's "end of turn" and "end of message".
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class Split:
    """How a byte-level vocabulary's text was cut up before its merges were learned, as in its published tokenizer.json.

    `pattern` None is GPT-2's, which the library has built in. `whole_words` takes a piece that is a token as it is,
    without merging. `digits` cuts every digit off first. `nfc` composes characters first. `own` makes all the steps
    of those that cut in other ways.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    own: Callable[[], pre_tokenizers.PreTokenizer] | None = None


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")

GPT2 = Split()
GPT_NEOX = Split(nfc=True)
DIGITS = Split(digits=True)
COMMAND_R = Split(digits=True, nfc=True)
LLAMA3 = Split("|".join([CONTRACTION, WORD, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", TAIL]), whole_words=True)
QWEN2 = Split("|".join([CONTRACTION, WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", TAIL]), nfc=True)
TEKKEN = Split("|".join([*CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", TAIL]), whole_words=True)
GPT4O = Split(
    "|".join([*(word + CONTRACTION + "?" for word in CASED), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", TAIL])
)


def _isolated(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]


def _byte_characters_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _deepseek_v3() -> pre_tokenizers.PreTokenizer:
    signs = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
    words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rest = "|".join([signs + "[A-Za-z]+", words, r" ?[\p{P}\p{S}]+[\r\n]*", TAIL])
    return pre_tokenizers.Sequence(
        [*_isolated(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", rest), _byte_characters_only()]
    )


def _deepseek_coder() -> pre_tokenizers.PreTokenizer:
    han_to_hangul = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
    return pre_tokenizers.Sequence(
        [
            *_isolated(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", han_to_hangul),
            pre_tokenizers.Digits(individual_digits=True),
            _byte_characters_only(),
        ]
    )


def _falcon() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            *_isolated("[0-9][0-9][0-9]"),
        ]
    )


SPLITS: dict[str, Split] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("mpt", "olmo"), GPT_NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), DIGITS),
    "command-r": COMMAND_R,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx", "lfm2"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "deepseek-v3": Split(own=_deepseek_v3),
    "deepseek-coder": Split(own=_deepseek_coder),
    "falcon": Split(own=_falcon),
}


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """`special_tokens` are the names chat templates know ("bos_token"), `chat_templates` by name ("default")."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    eos_token_ids: frozenset[int]


def build(metadata: dict[str, Any], where: str) -> GGUFTokenizer:
    """The tokenizer of a GGUF file whose metadata this is; `where` names the file in messages."""
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = values.get("model")
    builder = BUILDERS.get(str(kind))
    if builder is None or "tokens" not in values:
        raise ModelError(
            f"{where}: tokenizer.ggml.model is {kind!r}, supported are {', '.join(sorted(BUILDERS))}; "
            "name a folder with the model's tokenizer.json in model.tokenizer"
        )
    vocabulary = _Vocabulary(values, str(metadata.get("general.architecture", "")), where)
    try:
        tokenizer = builder(vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exceptions for a merge of unknown pieces and the like
        raise ModelError(f"{where}: the GGUF file's tokenizer is broken: {error}") from error
    ends = {vocabulary.id_of(key) for key in END_KEYS} - {None}
    vocabulary.add_special(tokenizer, ends)
    vocabulary.add_bos_and_eos(tokenizer, bos_by_default=kind == "llama")
    special_tokens = {
        name: vocabulary.tokens[index]
        for name, key in NAMED_KEYS.items()
        if (index := vocabulary.id_of(f"{key}_token_id")) is not None
    }
    return GGUFTokenizer(
        tokenizer, special_tokens, _chat_templates(metadata), frozenset(i for i in ends if i is not None)
    )


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {key.removeprefix(prefix + "."): str(v) for key, v in metadata.items() if key.startswith(prefix + ".")}
    if prefix in metadata:
        templates["default"] = str(metadata[prefix])
    return templates


class _Vocabulary:
    """The token list with its types, and what all kinds of tokenizer do with them."""

    def __init__(self, values: dict[str, Any], architecture: str, where: str) -> None:
        self.values = values
        self.architecture = architecture
        self.where = where
        self.tokens: list[str] = values["tokens"]
        types = values.get("token_type")
        self.types: list[int] = [NORMAL] * len(self.tokens) if types is None else list(map(int, types))
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{where}: {len(self.tokens)} tokens but {len(self.types)} token types")

    def id_of(self, key: str) -> int | None:
        """A token id named in the metadata; llama.cpp writes all ones for "none"."""
        index = self.values.get(key)
        return int(index) if index is not None and 0 <= index < len(self.tokens) else None

    def merges(self) -> list[tuple[str, str]]:
        # a merge is "LEFT RIGHT"; only the left piece may begin with a space of its own
        pairs = []
        for merge in self.values.get("merges", ()):
            cut = merge.find(" ", 1)
            pairs.append((merge[:cut], merge[cut + 1 :]))
        return pairs

    def add_special(self, tokenizer: Tokenizer, ends: set[int | None]) -> None:
        """Control tokens, and whatever ends an answer, are special; user-defined ones are matched whole in any text."""
        special, plain = [], []
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if not token:
                continue
            if kind == CONTROL or index in ends or (kind == UNKNOWN and index == self.id_of("unknown_token_id")):
                special.append(AddedToken(token, normalized=False, special=True))
            elif kind == USER_DEFINED and token.strip(SPACE):  # runs of spaces come of merges
                plain.append(AddedToken(token, normalized=False, special=False))
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)

    def add_bos_and_eos(self, tokenizer: Tokenizer, *, bos_by_default: bool) -> None:
        bos, eos = self.id_of("bos_token_id"), self.id_of("eos_token_id")
        single: list[str] = ["$A"]
        if bos is not None and self.values.get("add_bos_token", bos_by_default):
            single.insert(0, "bos")
        if eos is not None and self.values.get("add_eos_token", False):
            single.append("eos")
        names = [(name, index) for name, index in (("bos", bos), ("eos", eos)) if index is not None]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """GPT-2's kind: every byte has a printable character, merges come from the file."""
    kind = vocabulary.values.get("pre", "default")
    split = SPLITS.get(kind)
    if split is None:
        raise ModelError(
            f"{vocabulary.where}: tokenizer.ggml.pre is {kind!r}, supported are {', '.join(sorted(SPLITS))}; "
            "name a folder with the model's tokenizer.json in model.tokenizer"
        )
    ids = {}
    spelling = _byte_characters()
    alphabet = set(spelling)
    for index, (token, token_kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        # ordinary tokens that some converters wrote as plain text are respelled; added tokens are plain text
        plain = token_kind not in (CONTROL, USER_DEFINED) and not alphabet.issuperset(token)
        ids["".join(spelling[byte] for byte in token.encode()) if plain else token] = index
    model = models.BPE(vocab=ids, merges=vocabulary.merges(), ignore_merges=split.whole_words)
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.own() if split.own else _steps(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _steps(split: Split) -> pre_tokenizers.PreTokenizer:
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """Llama's kind: merges follow from the pieces' scores, unknown characters fall back to byte tokens."""
    tokens, values = vocabulary.tokens, vocabulary.values
    gemma = vocabulary.architecture.startswith("gemma")
    if gemma:  # its runs of spaces are stored as spaces, and its merge order is that of the list, not of the scores
        tokens = vocabulary.tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
        order = [-float(index) for index in range(len(tokens))]
    else:
        order = [float(score) for score in values.get("scores", ())]
    if len(order) != len(tokens):
        raise ModelError(f"{vocabulary.where}: {len(tokens)} tokens but {len(order)} tokenizer.ggml.scores")
    unknown = vocabulary.id_of("unknown_token_id")
    ids = {token: index for index, token in enumerate(tokens)}
    merges = vocabulary.merges() or _merges_from_scores(ids, order, vocabulary.types)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(values.get("add_space_prefix", not gemma))
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif vocabulary.architecture == "phi3" and prefix:
        # unlike the scheme below this adds the space in front of text that begins with one, too
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(ids: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others, the best piece first.

    Control, unknown and byte pieces are never made out of text, so they have no merges.
    """
    found = []
    for piece, index in ids.items():
        if types[index] in (CONTROL, UNKNOWN, BYTE):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((scores[index], cut, len(right), left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


BUILDERS: dict[str, Callable[[_Vocabulary], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
