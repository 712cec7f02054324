"""Owns the ids of words: tokenizers of BERT's kind read a text word by word, and each word need be read only once.

Between spaces such a tokenizer sees nothing of a word's neighbours: BertNormalizer changes characters one by one,
BertPreTokenizer splits at spaces, WordPiece reads what is between them. So a text's ids are those of its words, and to
look them up takes a fraction of the time. The tokenizers library does so inside BPE and Unigram, not for WordPiece.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from tei_grpc.types import Ints

MOST_WORDS = 1 << 16  # that are known at a time, in about 15 MB
LONGEST_WORD = 32  # characters; what is longer is hardly a word, and unlikely to come again
PROBES = ("a", "b")


class Words:
    """The ids of texts, put together from those of their words. Any thread may ask."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, head: bytes, tail: bytes) -> None:
        """Take a tokenizer of BERT's kind, and the ids that it puts around a text."""
        self._tokenizer, self._head, self._tail = tokenizer, head, tail
        self._known: dict[str, bytes] = {}  # nothing is ever taken out: who looks something up finds what was there

    def encode(self, texts: Sequence[str]) -> list[Ints]:
        """The ids of each text [length], special tokens included: those that the tokenizer gives for it."""
        split = [text.split(" ") for text in texts]
        try:
            return self._join(split, self._known)
        except KeyError:
            return self._join(split, self._read(set(chain.from_iterable(split))))

    def _join(self, split: Sequence[Sequence[str]], ids: Mapping[str, bytes]) -> list[Ints]:
        look_up, head, tail = ids.__getitem__, self._head, self._tail
        return [np.frombuffer(b"".join([head, *map(look_up, words), tail]), np.int32) for words in split]

    def _read(self, words: Iterable[str]) -> dict[str, bytes]:
        """The ids of words; from now on they are known."""
        known = self._known
        found = {word: known[word] for word in words if word in known}
        unknown = [word for word in words if word not in found]
        encodings = self._tokenizer.encode_batch_fast(unknown, add_special_tokens=False)
        new = {word: to_bytes(encoding.ids) for word, encoding in zip(unknown, encodings, strict=True)}
        if len(known) + len(new) > MOST_WORDS:
            self._known = known = {}
        known.update(islice(((word, ids) for word, ids in new.items() if len(word) <= LONGEST_WORD), MOST_WORDS))
        return found | new


def words_of(tokenizer: tokenizers.Tokenizer) -> Words | None:
    """The words of a tokenizer, if it is of BERT's kind and gives all tokens of a single text the type 0."""
    if not _reads_words(tokenizer):
        return None
    frames = [_frame(tokenizer, text) for text in PROBES]
    return Words(tokenizer, *frames[0]) if frames[0] is not None and frames[0] == frames[1] else None


def to_bytes(ids: Sequence[int]) -> bytes:
    """As the memory of an int32 array."""
    return np.array(ids, np.int32).tobytes()


def _reads_words(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether normalizer, splitting, model and added tokens see nothing beyond a space."""
    normalizer = tokenizer.normalizer
    if not isinstance(normalizer, normalizers.BertNormalizer):
        return False
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return (
        isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        and isinstance(tokenizer.model, models.WordPiece)
        and all(text.split() == [text] for text in chain(added, map(normalizer.normalize_str, added)))
    )


def _frame(tokenizer: tokenizers.Tokenizer, text: str) -> tuple[bytes, bytes] | None:
    """The ids around those of `text`, where there is one such place and all types are 0."""
    inner = tokenizer.encode(text, add_special_tokens=False).ids
    encoding = tokenizer.encode(text)
    ids = encoding.ids
    starts = [start for start in range(len(ids)) if inner and ids[start : start + len(inner)] == inner]
    if len(starts) != 1 or any(encoding.type_ids):
        return None
    return to_bytes(ids[: starts[0]]), to_bytes(ids[starts[0] + len(inner) :])
