"""Texts put together from words that are known have the ids that the library gives for the whole text."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from tei_grpc.engine import words
from tei_grpc.engine.words import words_of
from tests import language_models
from tests.checkpoints import BERT_SPECIAL, ROBERTA_SPECIAL, make_tokenizer

SPECIALS = [("[CLS]", 2), ("[SEP]", 3)]
PIECES = [
    "hello",
    "world",
    " ",
    "  ",
    "\n",
    "[SEP]",
    "[sep]",
    "é",
    "e\u0301",
    "北京",
    "\x00",
    "\u3000",
    "\u200d",
    "!",
    "İ",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)


def changed(**parts: object) -> Tokenizer:
    tokenizer = make_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_added(*tokens: AddedToken | str) -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


KINDS = {
    "bert": make_tokenizer(BERT_SPECIAL),
    "roberta": make_tokenizer(ROBERTA_SPECIAL),
    "cased": changed(normalizer=normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False)),
    "unclean": changed(normalizer=normalizers.BertNormalizer(clean_text=False, strip_accents=True)),
    "split specials": changed(encode_special_tokens=True),
    "bert processor": changed(post_processor=processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))),
    "no processor": changed(post_processor=None),
    "added": with_added("wor", AddedToken("hel", single_word=True, lstrip=True, rstrip=True), AddedToken("!")),
}


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(TEXTS, max_size=4))
def test_ids_are_those_of_the_whole_text(kind, texts):
    found = words_of(KINDS[kind])
    assert found is not None
    for _ in ("unknown", "known"):
        assert [ids.tolist() for ids in found.encode(texts)] == [KINDS[kind].encode(text).ids for text in texts]


@pytest.mark.parametrize(
    "tokenizer",
    [
        language_models.make_tokenizer(),
        changed(normalizer=normalizers.Sequence([normalizers.BertNormalizer()])),
        changed(normalizer=None),
        changed(pre_tokenizer=pre_tokenizers.Punctuation()),
        with_added("hello world"),
        with_added("北京"),  # which the normalizer puts spaces around
        changed(post_processor=processors.TemplateProcessing(single="[CLS]:2 $A:0 [SEP]:0", special_tokens=SPECIALS)),
        changed(post_processor=processors.TemplateProcessing(single="$A [SEP] $A", special_tokens=SPECIALS)),
    ],
)
def test_tokenizer_that_may_see_more_than_a_word_is_left_alone(tokenizer):
    assert words_of(tokenizer) is None


def test_words_that_are_known_have_a_limit(monkeypatch):
    monkeypatch.setattr(words, "MOST_WORDS", 3)
    tokenizer = make_tokenizer()
    found = words_of(tokenizer)
    texts = ["a b", "c d", "a d", "a b c d e"]
    for text in texts:
        assert found.encode([text])[0].tolist() == tokenizer.encode(text).ids
        assert len(found._known) <= 3


def test_what_is_longer_than_a_word_is_not_kept():
    found = words_of(make_tokenizer())
    found.encode(["a" * 32 + " " + "b" * 33])
    assert [*found._known] == ["a" * 32]


def test_many_threads_share_the_words(monkeypatch):
    monkeypatch.setattr(words, "MOST_WORDS", 8)
    tokenizer = make_tokenizer()
    found = words_of(tokenizer)
    texts = [f"{chr(97 + number % 26)} {chr(97 + number // 26)} hello" for number in range(26 * 26)]
    expected = [tokenizer.encode(text).ids for text in texts]
    with ThreadPoolExecutor(8) as pool:
        got = [ids.tolist() for (ids,) in pool.map(lambda text: found.encode([text]), texts)]
    assert got == expected
