"""Texts of a wanted length, whatever the model's tokenizer."""

import pytest

from tei_grpc.pb import tei_pb2
from tests.contract.targets import Target

WORDS = ("cat", "dog")  # one token each in every vocabulary that this suite has met


def count_tokens(target: Target, text: str) -> int:
    """Tokens of a text as the model gets it."""
    request = tei_pb2.EncodeRequest(inputs=text, add_special_tokens=True)
    return len(target.ask("Tokenize/Tokenize", request).reply.tokens)


def text_of(target: Target, tokens: int, word: str = WORDS[0]) -> str:
    """`word` over and over, `tokens` tokens with the special ones."""
    text = " ".join([word] * (tokens - count_tokens(target, word) + 1))
    if count_tokens(target, text) != tokens:
        pytest.skip(f"{word!r} is not one token")
    return text
