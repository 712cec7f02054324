"""How a batch is cut for two threads, and what they are given."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tei_grpc.engine.shards import LEAST_TOKENS, Shards, results

HIDDEN = 384


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


def test_both_threads_work_at_once_with_half_of_the_cores(shards: Shards) -> None:
    met = threading.Barrier(2, timeout=10)

    def work(number: int) -> tuple[int, int]:
        met.wait()
        torch.ones(1 << 16).sum()  # torch reads what is set when a thread first shares out work
        return number, torch.get_num_threads()

    assert results(shards.start(work, [7, 8])) == [(7, 2), (8, 2)]
    assert torch.get_num_threads() == 4


def test_threads_to_come_have_all_cores(shards: Shards) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [4]


def test_error_of_one_shard_comes_after_the_other_has_ended(shards: Shards) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work(fails: bool) -> None:
        if fails:
            began.wait(10)
            threading.Timer(0.2, may_end.set).start()
            raise ValueError("this one")
        began.set()
        may_end.wait(10)
        ended.set()

    with pytest.raises(ValueError, match="this one"):
        results(shards.start(work, [True, False]))
    assert ended.is_set()


def test_error_leaves_nothing_of_its_batch_behind(shards: Shards) -> None:
    class Activations:
        pass

    kept = []

    def work(_: int) -> None:
        activations = Activations()
        kept.append(weakref.ref(activations))
        raise ValueError

    gc.disable()
    try:
        with suppress(ValueError):
            results(shards.start(work, [0, 1]))
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


def test_threads_end_with_their_shards() -> None:
    before = set(threading.enumerate())
    shards = Shards(HIDDEN, 2)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del shards
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)
