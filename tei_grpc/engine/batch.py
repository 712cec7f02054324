"""Forms batches: which waiting entries leave together, and how they lie end to end. Pure functions."""

from collections.abc import Iterable, Sequence

import numpy as np

from tei_grpc.types import Batch, Entry


def fill(lengths: Iterable[int], max_tokens: int, max_requests: int | None) -> list[int]:
    """Indices, in arrival order, of the entries that form the next batch.

    The head is always taken; after it every later entry that still fits. Since nothing in front of an entry is ever
    left out in its favour, no entry leaves in a later batch than under first-come-first-served.
    """
    taken: list[int] = []
    room = max_tokens
    for index, length in enumerate(lengths):
        if length <= room or not taken:
            taken.append(index)
            room -= length
        if room <= 0 or len(taken) == max_requests:
            break
    return taken


def pack(entries: Sequence[Entry]) -> Batch:
    """Lay the entries' sequences end to end; positions restart at 0 with each of them."""
    lengths = np.fromiter((len(entry) for entry in entries), np.int32, len(entries))
    cu_seqlens = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    tokens = int(cu_seqlens[-1])
    return Batch(
        entries=entries,
        input_ids=np.concatenate([entry.input_ids for entry in entries]),
        position_ids=np.arange(tokens, dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths),
        token_type_ids=_token_type_ids(entries, cu_seqlens),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
    )


def _token_type_ids(entries: Sequence[Entry], cu_seqlens: np.ndarray) -> np.ndarray:
    ids = np.zeros(int(cu_seqlens[-1]), np.int32)
    for entry, start in zip(entries, cu_seqlens, strict=False):
        if entry.token_type_ids is not None:
            ids[start : start + len(entry)] = entry.token_type_ids
    return ids
