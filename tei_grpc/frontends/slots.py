"""Memory that front-ends and the process with the model share: one slot per permit.

A slot has a part for ids, which its front-end writes, and a part for arrays, which the other side writes; each side
copies out at once what the other has written. It belongs to whoever holds the permit, so its size is bounded by
`--max-concurrent-requests`, and it is free when the permit is, even if its front-end was killed.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tei_grpc.types import Entry, Ints, Kind

Arrays: TypeAlias = tuple[NDArray[Any], ...]

WORD = 4  # bytes of every value: ids, indices, float32
ARRAY_WORDS = 16_384  # of a slot's part for arrays; larger ones go through a file of their own


class Slots:
    """`count` slots for entries of up to `longest` tokens, in a file in memory that all processes have open."""

    def __init__(self, file: int, count: int, longest: int) -> None:
        """Map the file, which is made as large as it has to be; memory is taken only by what was ever written to."""
        self._longest = longest
        size = 2 * longest + ARRAY_WORDS  # ids, type ids, arrays
        if os.fstat(file).st_size < count * size * WORD:
            os.ftruncate(file, count * size * WORD)
        memory = mmap.mmap(file, count * size * WORD)
        self._words = np.frombuffer(memory, np.int32).reshape(count, size)

    def put_ids(self, slot: int, entry: Entry) -> None:
        """Write the entry's ids, and their types if it has any."""
        words, length = self._words[slot], len(entry)
        words[:length] = entry.input_ids
        if entry.token_type_ids is not None:
            words[length : 2 * length] = entry.token_type_ids

    def take_ids(self, slot: int, length: int, *, has_types: bool) -> tuple[Ints, Ints | None]:
        """Copy ids and types out, [length] each."""
        words = self._words[slot, : 2 * length].copy()
        return words[:length], words[length:] if has_types else None

    def put_arrays(self, slot: int, words: Ints) -> bool:
        """Write what `to_words` made; False if it is too large for a slot."""
        if len(words) > ARRAY_WORDS:
            return False
        start = 2 * self._longest
        self._words[slot, start : start + len(words)] = words
        return True

    def take_arrays(self, slot: int, words: int) -> Ints:
        """Copy out what `put_arrays` wrote, [words]."""
        start = 2 * self._longest
        return self._words[slot, start : start + words].copy()


def to_words(arrays: Sequence[NDArray[Any]]) -> Ints:
    """Return the bytes of float32 and uint32 arrays, one after the other, as 4-byte words. Raises TypeError."""
    words = [_words_of(array) for array in arrays]
    return words[0] if len(words) == 1 else np.concatenate(words)


def _words_of(array: NDArray[Any]) -> Ints:
    if array.itemsize != WORD:
        raise TypeError("values must have 4 bytes")
    return np.ascontiguousarray(array).reshape(-1).view(np.int32)


def to_arrays(kind: Kind, words: Ints, rows: int) -> Arrays:
    """Return the arrays of an Output of this kind from their words."""
    if kind is Kind.EMBED_SPARSE:
        middle = len(words) // 2
        return words[:middle].view(np.uint32), words[middle:].view(np.float32)
    values = words.view(np.float32)
    return (values.reshape(rows, -1) if kind is Kind.EMBED_ALL else values,)
