"""A query and a document in a chat template, as token ids. Pure functions."""

from itertools import takewhile

import numpy as np
import tokenizers

from tei_grpc.loading.chat_template import PairTemplate
from tei_grpc.types import Encoding, Input, TruncationDirection


def encode_pair(tokenizer: tokenizers.Tokenizer, template: PairTemplate, input: Input, limit: int) -> Encoding:
    """The tokens of a query and a document in their template; where `input` asks for it, cut to `limit` tokens.

    Only the document is ever cut. What stays longer than `limit` is too long without any document.
    """
    text, start, stop = template.fill(input.text, input.pair or "")
    encoding = encode_unlocked(tokenizer, text)
    ids: list[int] = encoding.ids
    if len(ids) <= limit or not input.truncate:
        return Encoding(np.array(ids, np.int32))
    offsets = encoding.offsets
    head = sum(1 for _ in takewhile(lambda span: span[1] <= start, offsets))
    tail = sum(1 for _ in takewhile(lambda span: span[0] >= stop, reversed(offsets)))
    closing: list[int] = tokenizer.encode(template.suffix, add_special_tokens=False).ids
    kept = _cut(ids[head : len(ids) - tail], max(0, limit - head - len(closing)), input.truncation_direction)
    return Encoding(np.array(ids[:head] + kept + closing, np.int32), is_cut=True)


def encode_unlocked(
    tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False
) -> tokenizers.Encoding:
    """As the tokenizer's `encode`, which keeps the interpreter from all other threads; `encode_batch` does not."""
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _cut(ids: list[int], length: int, direction: TruncationDirection) -> list[int]:
    return ids[:length] if direction is TruncationDirection.RIGHT else ids[max(0, len(ids) - length) :]
