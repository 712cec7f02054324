"""Tokenize and Decode."""

from collections.abc import Sequence

import pytest

from tei_grpc.pb import tei_pb2
from tests.contract.conftest import PROMPT, PROMPT_TEXT
from tests.contract.targets import Code, Target

TEXTS = ["hello world", "Café 😀 北京!", "👨‍👩‍👧 hi", "שלום hello", "a\x00b", "  two  spaces ", "ﬁ ǅ İ ß"]


def tokenize(target: Target, text: str, special: bool = True, **fields: object) -> Sequence[tei_pb2.SimpleToken]:
    request = tei_pb2.EncodeRequest(inputs=text, add_special_tokens=special, **fields)
    tokens: Sequence[tei_pb2.SimpleToken] = target.ask("Tokenize/Tokenize", request).reply.tokens
    return tokens


def decode(target: Target, ids: Sequence[int], skip: bool) -> str:
    text: str = target.ask("Tokenize/Decode", tei_pb2.DecodeRequest(ids=ids, skip_special_tokens=skip)).reply.text
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_token_is_the_bytes_between_its_offsets(target: Target, text: str) -> None:
    raw = text.encode()
    for token in tokenize(target, text):
        if not token.special:
            assert token.text == raw[token.start : token.stop].decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_ascend(target: Target, text: str) -> None:
    starts = [token.start for token in tokenize(target, text) if not token.special]
    assert starts == sorted(starts)


def test_special_tokens_have_no_offsets_and_others_do(target: Target) -> None:
    tokens = tokenize(target, "hello world")
    assert any(token.special for token in tokens)
    for token in tokens:
        assert token.HasField("start") is token.HasField("stop") is not token.special


def test_special_tokens_are_added_only_when_asked_for(target: Target) -> None:
    assert not any(token.special for token in tokenize(target, "hello world", special=False))
    absent = target.ask("Tokenize/Tokenize", tei_pb2.EncodeRequest(inputs="hello world")).reply.tokens
    assert list(absent) == list(tokenize(target, "hello world", special=False))


def test_special_token_that_the_caller_typed_is_one_without_being_special(target: Target) -> None:
    added = next(token for token in tokenize(target, "a") if token.special)
    typed = tokenize(target, f"a {added.text} b", special=False)
    assert [token.special for token in typed if token.id == added.id] == [False]


def test_ids_of_bert_are_known(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("the model is not known")
    assert [token.id for token in tokenize(embedder, "Hello world")] == [101, 7592, 2088, 102]


def test_offsets_of_multibyte_text_are_known(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("the model is not known")
    found = [(token.start, token.stop, token.text) for token in tokenize(embedder, "Café 😀 北京!", special=False)]
    assert found == [(0, 5, "Café"), (6, 10, "😀"), (11, 14, "北"), (14, 17, "京"), (17, 18, "!")]


def test_offsets_count_the_prompt(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("prompts of the model are not known")
    tokens = [token for token in tokenize(embedder, "hello", prompt_name=PROMPT) if not token.special]
    assert [(token.start, token.stop) for token in tokens] == [(0, 5), (5, 6), (7, 12)]
    assert tokens[-1].stop == len(PROMPT_TEXT + "hello")


def test_ids_become_text_again(embedder: Target) -> None:
    ids = [token.id for token in tokenize(embedder, "hello world")]
    assert decode(embedder, ids, skip=True).strip().lower() == "hello world"


def test_decode_leaves_special_tokens_out_only_when_asked_to(target: Target) -> None:
    tokens = tokenize(target, "hello world")
    added = next(token.text for token in tokens if token.special)
    ids = [token.id for token in tokens]
    assert added in decode(target, ids, skip=False)
    assert added not in decode(target, ids, skip=True)


def test_ids_outside_the_vocabulary_are_skipped(target: Target) -> None:
    ids = [token.id for token in tokenize(target, "hello world")]
    assert decode(target, [*ids, 4_000_000_000], skip=True) == decode(target, ids, skip=True)


def test_tokenize_has_no_limit_of_tokens(target: Target) -> None:
    assert len(tokenize(target, "a " * (2 * target.info.max_input_length))) > target.info.max_input_length


def test_token_streams_answer_like_single_calls(target: Target) -> None:
    requests = [tei_pb2.EncodeRequest(inputs=text, add_special_tokens=True) for text in TEXTS]
    streamed = target.ask("Tokenize/TokenizeStream", *requests)
    assert streamed.code is Code.OK
    assert [list(reply.tokens) for reply in streamed.replies] == [list(tokenize(target, text)) for text in TEXTS]
    ids = [[token.id for token in reply.tokens] for reply in streamed.replies]
    decoded = target.ask("Tokenize/DecodeStream", *(tei_pb2.DecodeRequest(ids=message) for message in ids))
    assert [reply.text for reply in decoded.replies] == [decode(target, message, skip=False) for message in ids]
