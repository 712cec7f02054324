"""What truncation leaves behind."""

import pytest

from tei_grpc.engine.tokenizer import truncate
from tei_grpc.types import TruncationDirection
from tests.checkpoints import make_tokenizer


@pytest.mark.parametrize("direction", TruncationDirection)
@pytest.mark.parametrize("limit", [3, 4, 5, 40])
def test_what_is_cut_off_two_long_texts_is_not_joined_piece_by_piece(direction, limit):
    tokenizer = make_tokenizer()
    first, second = (tokenizer.encode(letter * 5000, add_special_tokens=False) for letter in "北京")
    truncate(tokenizer, first, second, limit, direction)
    encoding = tokenizer.post_process(first, second)
    assert len(encoding) == limit
    assert len(encoding.overflowing) <= 3  # cut off once, they give one piece each


@pytest.mark.parametrize("direction", TruncationDirection)
@pytest.mark.parametrize("limit", range(3, 16))
def test_both_texts_are_truncated_as_the_library_truncates_them(direction, limit):
    """Up to the odd token, which the library gives to the second text."""
    tokenizer = make_tokenizer()
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("a b c d e f g", "h i j k l"))
    truncate(tokenizer, first, second, limit, direction)
    tokenizer.enable_truncation(limit, direction=direction.value)
    expected = tokenizer.encode("a b c d e f g", "h i j k l")
    assert tokenizer.post_process(first, second).ids == expected.ids
