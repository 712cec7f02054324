"""How a batch is cut for two threads, and what they are given."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tei_grpc.engine.batch import pack
from tei_grpc.engine.shards import LEAST_TOKENS, Shards, results
from tei_grpc.types import Batch, Entry, Kind

HIDDEN = 384


def batch(number: int, tokens: int = 1) -> Batch:
    return pack([Entry(number, Kind.EMBED, np.zeros(tokens, np.int32))])


def number(batch: Batch) -> int:
    return batch.entries[0].id


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield Shards(HIDDEN, 4)
    torch.set_num_threads(before)


def cost(length: int) -> int:
    """FLOPs of a BERT layer, those of attention three times."""
    return 2 * 12 * HIDDEN**2 * length + 3 * 2 * 2 * HIDDEN * length**2


@given(lengths=st.lists(st.integers(1, 512), min_size=1, max_size=300).map(sorted))
def test_every_text_is_in_one_shard_and_they_cost_about_the_same(shards: Shards, lengths: list[int]) -> None:
    cut = shards.cut(lengths)
    if cut:
        assert sorted(row for rows in cut for row in rows) == list(range(len(lengths)))
        assert all(rows == sorted(rows) for rows in cut)
        assert max(sum(cost(lengths[row]) for row in rows) for rows in cut) <= 0.55 * sum(map(cost, lengths))


@pytest.mark.parametrize("lengths", [[9] * 200, [512] * 8, [10, 20, 30, 60, 80, 110, 150, 300], list(range(3, 33))])
def test_usual_batches_are_cut(shards: Shards, lengths: list[int]) -> None:
    assert len(shards.cut(lengths)) == 2


def test_texts_of_equal_length_stay_together(shards: Shards) -> None:
    cut = shards.cut([9] * 64)
    assert sum(1 for rows in cut for one, other in pairwise(rows) if other > one + 1) <= 16


@pytest.mark.parametrize("lengths", [[512], [10, 10, 400], [LEAST_TOKENS, LEAST_TOKENS - 1]])
def test_what_cannot_be_halved_or_is_small_stays_whole(shards: Shards, lengths: list[int]) -> None:
    assert shards.cut(lengths) == []


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_cores_that_cannot_be_halved_run_batches_whole(threads: int) -> None:
    assert Shards(HIDDEN, threads).cut([64] * 64) == []


def test_uneven_shards_are_not_cut(shards: Shards) -> None:
    assert shards.cut([40, 300]) == []


@pytest.mark.parametrize("lengths", [[300], [40, 300], [64] * 64])
def test_one_thread_has_all_of_a_batch_where_another_one_is_to_come(shards: Shards, lengths: list[int]) -> None:
    assert shards.cut(lengths, into=1) == [[*range(len(lengths))]]


def test_no_batch_is_to_come_beside_one_where_cores_cannot_be_halved() -> None:
    assert Shards(HIDDEN, 3).cut([64] * 64, into=1) == []


def test_both_threads_work_at_once_with_half_of_the_cores(shards: Shards) -> None:
    met = threading.Barrier(2, timeout=10)

    def work(shard: Batch) -> tuple[int, int]:
        met.wait()
        torch.ones(1 << 16).sum()  # torch reads what is set when a thread first shares out work
        return number(shard), torch.get_num_threads()

    assert results(shards.start(work, [batch(7), batch(8)])) == [(7, 2), (8, 2)]
    assert torch.get_num_threads() == 4


def test_threads_to_come_have_all_cores(shards: Shards) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [4]


def test_error_of_one_shard_comes_after_the_other_has_ended(shards: Shards) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work(shard: Batch) -> None:
        if number(shard) == 1:
            began.wait(10)
            threading.Timer(0.2, may_end.set).start()
            raise ValueError("this one")
        began.set()
        may_end.wait(10)
        ended.set()

    with pytest.raises(ValueError, match="this one"):
        results(shards.start(work, [batch(1), batch(2)]))
    assert ended.is_set()


def test_error_leaves_nothing_of_its_batch_behind(shards: Shards) -> None:
    class Activations:
        pass

    kept = []

    def work(_: Batch) -> None:
        activations = Activations()
        kept.append(weakref.ref(activations))
        raise ValueError

    gc.disable()
    try:
        with suppress(ValueError):
            results(shards.start(work, [batch(1), batch(2)]))
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


class Held:
    """Work that goes on until it is let go of."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self, shard: Batch) -> int:
        self.began.set()
        assert self.may_end.wait(10)
        return number(shard)


@pytest.mark.parametrize("lengths", [[64] * 64, [512], [9]])
def test_batch_that_comes_while_a_thread_works_goes_to_the_other_as_it_is(shards: Shards, lengths: list[int]) -> None:
    held = Held()
    running = shards.start(held, [batch(0)])
    assert shards.cut(lengths) == [list(range(len(lengths)))]
    assert results(shards.start(number, [batch(1)])) == [1]
    held.may_end.set()
    assert results(running) == [0]


def test_room_is_there_while_a_thread_has_nothing_to_do(shards: Shards) -> None:
    first, second = Held(), Held()
    assert shards.wait(0, timeout=0)
    running = shards.start(first, [batch(0, tokens=3)])
    assert shards.wait(1, timeout=0)
    also = shards.start(second, [batch(1, tokens=4)])
    assert not shards.wait(1, timeout=0.001)
    assert (shards.busy, shards.tokens) == (2, 7)
    first.may_end.set()
    assert shards.wait(1, timeout=10)
    assert (shards.busy, shards.tokens) == (1, 4)
    second.may_end.set()
    assert shards.wait(0, timeout=10)
    assert results(running) + results(also) == [0, 1]


def test_shard_that_has_answered_is_no_longer_under_way(shards: Shards) -> None:
    for _ in range(300):
        results(shards.start(number, [batch(0), batch(1)]))
        assert shards.busy == 0


def test_who_waits_is_woken_when_answers_are_there_or_an_error(shards: Shards) -> None:
    woken: SimpleQueue[bool] = SimpleQueue()
    held = Held()

    def fail(shard: Batch) -> int:
        held(shard)
        raise ValueError

    shards.wake = lambda: woken.put(futures[0].done() and shards.busy == 0)
    for work in (held, fail):
        held.may_end.clear()
        futures = shards.start(work, [batch(0)])
        held.may_end.set()
        assert woken.get(timeout=10)
    shards.wake = lambda: None


def test_threads_end_with_their_shards() -> None:
    before = set(threading.enumerate())
    shards = Shards(HIDDEN, 2)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del shards
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)
