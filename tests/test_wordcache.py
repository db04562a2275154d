"""Encoding by pieces gives the ids of the whole text, for every kind of tokenizer for which it is done at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from batchgen import wordcache
from batchgen.weights import gguf_tokenizer
from batchgen.weights.gguf_tokenizer import Split
from batchgen.wordcache import WordCache

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024 and we don't mind 12345 or 3.14 at all!",
    "def main(args):\n    return {k: v for k, v in args.items()}\n\n\tprint('done')\r\n",
    "Größe, naïve café, 日本語のテキスト, русский текст, 😀 emoji 👍🏽, ½ ² Ⅷ ①, العربية, नमस्ते",
]
SPLITS = {name: split for name in dir(gguf_tokenizer) if isinstance(split := getattr(gguf_tokenizer, name), Split)}
PIECES = [
    *[
        "a",
        "b c",
        "The fox",
        "don't",
        "I'LL",
        "12",
        "3.5",
        "x_y",
        "->",
        "日本",
        "é",
        "e\u0301",
        "\u0308",
        "😀",
        "½",
        "ß",
    ],
    *["\n", "\t", "\r\n", "\x0b", "\x1c", "\x85", "\xa0", "\u180e", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff"],
    *["<bos>", "<|turn|>", "<", "|>", "\0", "/", "\u1100\u1161", "word," * 30],
]
TEXTS = st.lists(st.one_of(st.just(" "), st.sampled_from(PIECES), st.characters(exclude_categories=["Cs"]))).map(
    "".join
)


def tokenizer(split: Split) -> RustTokenizer:
    """As a GGUF file of this kind gives it, with special tokens around every text."""
    return RustTokenizer.from_str(trained(split))


@cache
def trained(split: Split) -> str:
    rust = RustTokenizer(models.BPE(ignore_merges=split.whole_words))
    if split.nfc:
        rust.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    rust.pre_tokenizer = pre_tokenizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<bos>", "<eos>", "<|turn|>"],
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS * 4, trainer)
    rust.post_processor = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)])
    return rust.to_str()


@pytest.mark.parametrize("name", SPLITS)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    rust = tokenizer(SPLITS[name])
    words = WordCache.of(rust)
    assert words is not None

    @settings(max_examples=60, deadline=None)
    @given(st.lists(TEXTS, min_size=1, max_size=12), st.booleans())
    def check(texts: list[str], special: bool) -> None:
        texts = [*texts, *CORPUS, *CORPUS]
        found = words.encode_batch(texts, add_special_tokens=special)
        expected = rust.encode_batch_fast(texts, add_special_tokens=special)
        assert [ids.tolist() for ids in found] == [encoding.ids for encoding in expected]
        assert all(ids.flags.writeable for ids in found)

    check()


def changed(change: Callable[[RustTokenizer], object]) -> RustTokenizer:
    rust = tokenizer(gguf_tokenizer.GPT2)
    change(rust)
    return rust


def set_pre_tokenizer(part: pre_tokenizers.PreTokenizer) -> Callable[[RustTokenizer], None]:
    return lambda rust: setattr(rust, "pre_tokenizer", part)


@pytest.mark.parametrize(
    "change",
    [
        set_pre_tokenizer(pre_tokenizers.Metaspace()),
        set_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        set_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),  # words hold spaces
        set_pre_tokenizer(
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"[a-z ]+"), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        ),
        lambda rust: setattr(rust, "normalizer", normalizers.Replace(" ", "_")),
        lambda rust: setattr(rust.model, "dropout", 0.1),
        lambda rust: rust.add_tokens([AddedToken("two words")]),
        lambda rust: rust.add_tokens([AddedToken("<mask>", rstrip=True)]),
        lambda rust: rust.add_tokens([AddedToken("<mask>", lstrip=True)]),
        lambda rust: rust.add_tokens([AddedToken("mask", single_word=True)]),
    ],
)
def test_tokenizers_of_other_rules_are_left_alone(change: Callable[[RustTokenizer], object]) -> None:
    assert WordCache.of(changed(lambda rust: None)) is not None
    assert WordCache.of(changed(change)) is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordcache, "MAX_PIECES", 100)
    words = WordCache.of(tokenizer(gguf_tokenizer.GPT2))
    assert words is not None
    for start in range(0, 800, 40):
        words.encode_batch(
            [f"number {n} of many, " + "long" * n for n in range(start, start + 40)] * 4, add_special_tokens=False
        )
        assert len(words._known) < 100 + 200
    assert max(map(len, words._known)) <= wordcache.MAX_PIECE_CHARS


def test_text_that_does_not_repeat_itself_is_encoded_whole() -> None:
    rust = tokenizer(gguf_tokenizer.GPT2)
    words = WordCache.of(rust)
    assert words is not None
    texts = [f"{n:x} {n * 7919:x} {n * 104729:x}" for n in range(800)]
    found = words.encode_batch(texts, add_special_tokens=False)
    assert [ids.tolist() for ids in found] == [rust.encode(text, add_special_tokens=False).ids for text in texts]
    assert len(words._known) < 400
