"""Batches: who leaves together, and how sequences are laid end to end."""

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tei_grpc.engine.batch import fill, pack
from tei_grpc.types import Entry, Kind

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
MAX_REQUESTS = st.none() | st.integers(1, 5)


def first_come_first_served(lengths: list[int], max_tokens: int, max_requests: int | None) -> list[int]:
    """The head, then the next ones until the first that does not fit."""
    taken, tokens = [0], lengths[0]
    for index, length in enumerate(lengths[1:], 1):
        tokens += length
        if tokens > max_tokens or len(taken) == max_requests:
            break
        taken.append(index)
    return taken


def departures(rule: Callable[..., list[int]], lengths: list[int], *limits: int | None) -> list[int]:
    """For each entry of a full queue, the number of the batch that it leaves with."""
    left, waiting, number = [0] * len(lengths), list(range(len(lengths))), 0
    while waiting:
        for index in [waiting[i] for i in rule([lengths[w] for w in waiting], *limits)]:
            left[index] = number
            waiting.remove(index)
        number += 1
    return left


def entry(id: int, ids: list[int], types: list[int] | None = None) -> Entry:
    return Entry(id, Kind.EMBED, np.array(ids, np.int32), None if types is None else np.array(types, np.int32))


@given(LENGTHS, st.integers(1, 60), MAX_REQUESTS)
def test_no_entry_leaves_later_than_first_come_first_served(lengths, max_tokens, max_requests):
    ours = departures(fill, lengths, max_tokens, max_requests)
    plain = departures(first_come_first_served, lengths, max_tokens, max_requests)
    assert all(a <= b for a, b in zip(ours, plain, strict=True))


@given(LENGTHS, st.integers(1, 60), MAX_REQUESTS)
def test_batch_keeps_to_both_limits(lengths, max_tokens, max_requests):
    taken = fill(lengths, max_tokens, max_requests)
    assert len(taken) == 1 or sum(lengths[i] for i in taken) <= max_tokens
    assert max_requests is None or len(taken) <= max_requests


@given(LENGTHS, st.integers(1, 60), MAX_REQUESTS)
def test_batch_is_in_order_of_arrival(lengths, max_tokens, max_requests):
    taken = fill(lengths, max_tokens, max_requests)
    assert taken == sorted(set(taken))


def test_head_is_taken_even_when_it_alone_exceeds_the_budget():
    assert fill([100, 1], 10, None) == [0]


def test_later_entry_that_fits_goes_along():
    assert fill([6, 7, 4, 3], 10, None) == [0, 2]


def test_nothing_waits_nothing_leaves():
    assert fill([], 10, None) == []


def test_number_of_requests_is_a_limit_of_its_own():
    assert fill([1, 1, 1], 10, 2) == [0, 1]


def test_sequences_lie_end_to_end():
    batch = pack([entry(0, [5, 6, 7]), entry(1, [8]), entry(2, [9, 10])])
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.max_seqlen == 3


def test_positions_restart_with_each_sequence():
    assert pack([entry(0, [5, 6, 7]), entry(1, [8, 9])]).position_ids.tolist() == [0, 1, 2, 0, 1]


def test_type_ids_are_zero_where_an_entry_has_none():
    batch = pack([entry(0, [5, 6]), entry(1, [7, 8, 9], [0, 1, 1]), entry(2, [4])])
    assert batch.token_type_ids.tolist() == [0, 0, 0, 1, 1, 0]


def test_all_arrays_are_int32():
    batch = pack([entry(0, [5], [0])])
    arrays = (batch.input_ids, batch.position_ids, batch.token_type_ids, batch.cu_seqlens)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
