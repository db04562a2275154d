"""Tokenizers of GGUF files on awkward text: against sentencepiece itself and against the tokenizers library."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from models_at_hand import GEMMA3, SMOLLM2
from sentencepiece import sentencepiece_model_pb2 as pb
from test_tokenizer import CORPUS, byte_level_bpe, byte_level_gguf, write_gguf
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from batchgen.tokenizer import Tokenizer
from batchgen.weights.gguf_metadata import read_metadata

AWKWARD = [
    "",
    " ",
    "   ",
    "\n\n\n",
    "\t\t x\t\ty\r\n\r\n  z  ",
    "a  b   c    d" + " " * 40 + "e",
    "😀👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 e\u0301\u0308 \u0301 \u0308x\u200d\u200b\ufeff",
    "日本語のテキスト、中文字符。한국어 텍스트 1234 ２３４",
    "العربية السلام عليكم ١٢٣ עברית ภาษาไทยไม่มีช่องว่าง नमस्ते",
    "def f(x: int) -> dict[str, int]:\n    return {'a': x ** 2, \"b\": x != 3}  # done\n\n\n\tpass;",
    "\0\1\2\x1f\x7f\x85\xa0\u2028\u3000NUL\0NUL",
    "x" * 500 + "supercalifragilistic" * 20,
    "½ ² Ⅷ ① 3.14 1,000,000 12345678901234567890",
    "I'LL we'Ve 's don't ''' ```code``` --- === !!! $x==y <|im_start|",
    "▁ ▁▁x \u2581",
    "ﬁ ﬀ Å Å ½ ℃ \U0001d573\U0001d58a",
]


def of_pieces(rust: RustTokenizer, text: str) -> list[int]:
    return rust.encode(text, add_special_tokens=False).ids


# --- sentencepiece ---


def trained() -> pb.ModelProto:
    """Like Llama's: no normalisation, all white space kept, bytes for unknown characters."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS, *(text for text in AWKWARD if "\0" not in text and len(text) < 200)]),
        model_writer=out,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<turn>"],
        minloglevel=2,
    )
    proto = pb.ModelProto()
    proto.ParseFromString(out.getvalue())
    return proto


def processor(proto: pb.ModelProto, prefix: bool) -> sentencepiece.SentencePieceProcessor:
    proto.normalizer_spec.add_dummy_prefix = prefix
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_are_sentencepieces(tmp_path: Path, prefix: bool) -> None:
    proto = trained()
    ours = Tokenizer.load(
        write_gguf(
            tmp_path / "model.gguf",
            model="llama",
            tokens=[piece.piece for piece in proto.pieces],
            scores=[piece.score for piece in proto.pieces],
            token_type=[piece.type for piece in proto.pieces],
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
            add_space_prefix=prefix,
        )
    )
    theirs = processor(proto, prefix)
    for text in [*AWKWARD, *CORPUS, "a<turn>b <turn> c<turn><turn>"]:
        if (prefix and text.startswith((" ", "▁"))) or not text:
            continue  # the space in front is not doubled, as in transformers' tokenizers of such files
        assert ours.encode(text, add_special_tokens=False).tolist() == theirs.encode(text), text


@pytest.mark.skipif(GEMMA3 is None, reason="the model is not installed")
def test_gemma3s_ids_are_sentencepieces() -> None:
    assert GEMMA3 is not None
    metadata = read_metadata(GEMMA3)
    proto = pb.ModelProto()
    proto.trainer_spec.model_type = pb.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_id = metadata["tokenizer.ggml.unknown_token_id"]
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for token, score, kind in zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True):
        # the converter wrote spaces for sentencepiece's sign in user-defined pieces
        piece = token.replace(" ", "▁") if kind == pb.ModelProto.SentencePiece.USER_DEFINED else token
        proto.pieces.add(piece=piece, score=score, type=int(kind))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    ours = Tokenizer.load(GEMMA3)
    wrong = []
    for text in [*AWKWARD, *CORPUS]:
        if " " * 32 in text:
            continue  # see below
        ids, expected = ours.encode(text, add_special_tokens=False).tolist(), theirs.encode(text)
        if ids != expected:
            at = next((n for n, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(ids))
            wrong.append((text[:60], at, ids[at : at + 6], expected[at : at + 6]))
    assert not wrong, wrong
    # sentencepiece takes the longest run there is, of 31, first; transformers' tokenizer makes it of merges
    assert ours.encode(" " * 40, add_special_tokens=False).tolist() == [152, 160]
    assert ours.adds_bos and ours.eos_token_ids == {1}


# --- byte-level ---

PATTERN = {
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
STEPS: dict[str, Any] = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            GPT2,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    **{
        name: pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        for name, patterns in PATTERN.items()
    },
}
COMPOSED = ("qwen2", "olmo", "command-r")


@pytest.mark.parametrize("pre", STEPS)
def test_ids_are_those_of_the_published_steps(tmp_path: Path, pre: str) -> None:
    """As the models' own tokenizer.json has them."""
    rust = byte_level_bpe()
    rust.pre_tokenizer = STEPS[pre]
    if pre in COMPOSED:
        rust.normalizer = normalizers.NFC()
    ours = Tokenizer.load(byte_level_gguf(tmp_path / "model.gguf", pre))
    for text in [*AWKWARD, *CORPUS, "x<|im_start|>user <|im_end|>\n<s>y"]:
        assert ours.encode(text, add_special_tokens=False).tolist() == of_pieces(rust, text), text


@pytest.mark.skipif(SMOLLM2 is None, reason="the model is not installed")
def test_smollm2s_ids_are_those_of_its_published_steps() -> None:
    assert SMOLLM2 is not None
    from transformers import AutoTokenizer

    rust = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name).backend_tokenizer
    rust.pre_tokenizer = DIGITS  # which transformers' conversion leaves out
    ours = Tokenizer.load(SMOLLM2)
    for text in [*AWKWARD, *CORPUS, "x<|im_start|>user <|im_end|>\ny"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids.tolist() == of_pieces(rust, text), text
        assert ours.decode_batch([ids], skip_special_tokens=False) == [text]
