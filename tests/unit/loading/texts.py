"""Texts in many scripts, whose ids are held against those of transformers' tokenizer."""

from collections.abc import Mapping
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models

from tei_grpc.engine.tokenizer import load
from tei_grpc.engine.words import words_of

TEXTS = (
    "hello world",
    "",
    " ",
    "   two  spaces   and a tail  ",
    "What is Deep Learning?",
    "It's 3.14 o'clock; don't panic - she said: \"no!\"",
    "snake_case, camelCase, kebab-case and e-mail@example.org",
    "https://example.org/a?b=c&d=%20#e",
    "ALL CAPITALS, Mixed Case and ﬁ ligatures ½ ² ℌ",
    "line one\nline two\r\nline three\ttabbed",
    "Café naïve résumé Ångström",
    "Cafe\u0301 written with a combining accent",
    "Straße, İstanbul, ǅ and ς",
    "Привет, мир! Как дела?",
    "Ελληνικά κείμενα με τόνους",
    "שלום עולם, מה שלומך?",
    "שָׁלוֹם with points",
    "مرحبا بالعالم، كيف حالك؟",
    "\u202eright to left\u202c and back \u200f \u200e",
    "北京欢迎你。",
    "東京都の天気は晴れです、カタカナも",
    "안녕하세요 세계",
    "ภาษาไทยไม่มีช่องว่าง",
    "नमस्ते दुनिया",
    "தமிழ் மொழி",
    "Tiếng Việt có dấu",
    "😀 smile 👩🏽‍🚀 astronaut 🇩🇪 flag 👨‍👩‍👧 family",
    "zero\u200bwidth \ufeff mark \u00ad soft hyphen",
    "control \x00 \x01 \x07 \x7f \x85 characters",
    "no-break\u00a0space \u2003 em \u3000 ideographic",
    "\ufffd replacement and \ud7ff the last before surrogates \U0010fffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "1234567890 12,345.67 １２３ ٣٤٥",
    "ＦＵＬＬ width and ｈａｌｆ",
    "[CLS] special [SEP] tokens [MASK] of [PAD] BERT [UNK]",
    "<s> special </s> tokens <mask> of <pad> RoBERTa <unk>",
    "<|endoftext|> and <|im_start|>",
    "x[SEP]y<mask>z </s>",
    "##ing ▁meta Ġspace",
    "The quick brown fox jumps over the lazy dog. " * 4,
)
PAIRS = tuple(zip(TEXTS, (*TEXTS[7:], *TEXTS[:7]), strict=True))


def assert_equal_ids(folder: Path, config: Mapping[str, object] | None = None) -> None:
    """Ours give the ids, and for pairs the types, that transformers' tokenizer gives, text by text."""
    ours, theirs = load(folder, config or {}), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    for text, pair in PAIRS:
        encoding, expected = ours.encode(text, pair), theirs([(text, pair)], return_token_type_ids=True)
        assert [encoding.ids] == expected["input_ids"], (text, pair)
        assert [encoding.type_ids] == expected["token_type_ids"], (text, pair)
    assert_equal_together(ours)


def assert_equal_together(tokenizer: Tokenizer) -> None:
    """Neither without offsets, nor by its words where it has any, does a text have other ids or types."""
    expected = [tokenizer.encode(text) for text in TEXTS]
    quick = tokenizer.encode_batch_fast(TEXTS)
    assert [each.ids for each in quick] == [each.ids for each in expected]
    assert [each.type_ids for each in quick] == [each.type_ids for each in expected]
    words = words_of(tokenizer)
    if isinstance(tokenizer.model, models.WordPiece):
        assert words is not None
        assert [ids.tolist() for ids in words.encode(TEXTS)] == [each.ids for each in expected]
        assert not any(any(each.type_ids) for each in expected)
    else:
        assert words is None
