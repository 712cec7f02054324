"""A document is cut so that the words after it stay whole."""

import pytest

from tei_grpc.engine.templating import encode_pair
from tei_grpc.loading.chat_template import PairTemplate
from tei_grpc.types import Input, TruncationDirection
from tests.language_models import make_tokenizer

PLAIN = PairTemplate("Q: ", "\nD: ", " her yes")
SIDES = list(TruncationDirection)


def text_of(template: PairTemplate, limit: int, side: TruncationDirection, document: str = "no world no her no") -> str:
    tokenizer = make_tokenizer()
    input = Input("hello", document, truncate=True, truncation_direction=side)
    ids = encode_pair(tokenizer, template, input, limit).input_ids.tolist()
    assert len(ids) == limit
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("limit", range(20, 28))
def test_cut_leaves_the_template_and_the_query_whole(side: TruncationDirection, limit: int) -> None:
    text = text_of(PLAIN, limit, side)
    assert text.startswith("Q: hello\nD:")
    assert text.endswith(" her yes")


def test_right_keeps_the_beginning_and_left_the_end() -> None:
    assert "D: no w" in text_of(PLAIN, 20, TruncationDirection.RIGHT)
    assert text_of(PLAIN, 20, TruncationDirection.LEFT).endswith("no her yes")


def test_document_may_be_cut_to_nothing() -> None:
    tokenizer = make_tokenizer()
    bare = PairTemplate("Q: ", "<|im_start|>", "<|im_end|>")
    ids = encode_pair(tokenizer, bare, Input("hello", "world", truncate=True), 1).input_ids.tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Q: hello<|im_start|><|im_end|>"
