"""The queue of entries: what leaves it together, and when."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tei_grpc.engine.queue import ANY, Demand, Queue, Size, Taken
from tei_grpc.types import Entry, Kind


def entry(id: int, length: int = 1, deadline_ns: int | None = None) -> Entry:
    return Entry(id, Kind.EMBED, np.zeros(length, np.int32), deadline_ns=deadline_ns)


def ids(entries: list[Entry]) -> list[int]:
    return [entry.id for entry in entries]


def test_entries_leave_in_order_of_arrival():
    queue = Queue(2, None)
    for id in range(3):
        queue.put(entry(id))
    assert [ids(queue.take().batch), ids(queue.take().batch)] == [[0, 1], [2]]


def test_batch_keeps_to_the_limits_of_the_queue():
    queue = Queue(10, 2)
    for id, length in enumerate([6, 6, 4, 1]):
        queue.put(entry(id, length))
    assert ids(queue.take().batch) == [0, 2]


def test_cancelled_entry_has_left():
    queue = Queue(10, None)
    queue.put(entry(0))
    queue.put(entry(1))
    assert queue.cancel(0)
    assert not queue.cancel(0)
    assert ids(queue.take().batch) == [1]


def test_expired_entry_does_not_run():
    queue = Queue(10, None)
    queue.put(entry(0, deadline_ns=time.monotonic_ns() - 1))
    queue.put(entry(1, deadline_ns=time.monotonic_ns() + 10**12))
    taken = queue.take()
    assert (ids(taken.batch), ids(taken.expired)) == ([1], [0])
    assert len(queue) == 0


def test_closing_hands_back_what_waits_and_takes_nothing_more():
    queue = Queue(10, None)
    queue.put(entry(0))
    assert ids(queue.close()) == [0]
    assert queue.closed
    assert not queue.put(entry(1))
    assert queue.take() is None


def test_closing_wakes_the_taker():
    queue = Queue(10, None)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    queue.close()
    thread.join(5)
    assert taken == [None]


def test_entry_wakes_the_taker():
    queue = Queue(10, None)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    queue.put(entry(7))
    thread.join(5)
    assert ids(taken[0].batch) == [7]


def test_taker_gives_up_after_its_timeout():
    assert Queue(10, None).take(timeout=0.001) is None


@contextmanager
def taker(queue: Queue, size: Size, timeout: float = 10) -> Iterator[list[Taken | None]]:
    """A thread that waits for a batch; what it got, at the end."""
    taken: list[Taken | None] = []
    thread = threading.Thread(target=lambda: taken.append(queue.take(timeout, size)))
    thread.start()
    yield taken
    thread.join(10)
    assert not thread.is_alive()


def test_taker_waits_for_as_many_tokens_as_it_wants():
    queue = Queue(100, None)
    with taker(queue, Size(6, 50, 50)) as taken:
        for id in range(3):
            queue.put(entry(id, length=2))
    assert ids(taken[0].batch) == [0, 1, 2]


def test_batch_beside_another_has_no_more_tokens_than_it_may():
    queue = Queue(100, None)
    for id in range(5):
        queue.put(entry(id, length=4))
    assert ids(queue.take(0, Size(6, 10, 10)).batch) == [0, 1]
    assert ids(queue.take(0, Size(6, 10, 10)).batch) == [2, 3]
    assert queue.take(0, Size(6, 10, 10)) is None
    assert ids(queue.take(0).batch) == [4]


def test_text_that_is_too_long_for_now_is_not_overtaken():
    queue = Queue(100, None)
    queue.put(entry(0, length=51))
    with taker(queue, Size(6, 50, 50), timeout=0.05) as taken:
        for id in range(1, 20):
            queue.put(entry(id, length=5))
    assert taken == [None]
    assert ids(queue.take(0).batch) == list(range(10))


def test_text_that_follows_one_too_long_leaves_when_that_is_cancelled():
    queue = Queue(100, None)
    queue.put(entry(0, length=51))
    queue.put(entry(1, length=6))
    with taker(queue, Size(6, 50, 50)) as taken:
        queue.cancel(0)
    assert ids(taken[0].batch) == [1]


def test_taker_gives_up_in_time_however_much_arrives():
    queue, id = Queue(100, None), 0
    queue.put(entry(0, length=51))
    with taker(queue, Size(6, 50, 50), timeout=0.05) as taken:
        end = time.monotonic() + 10
        while not taken and time.monotonic() < end:
            queue.put(entry(id := id + 1))
    assert taken == [None]
    assert time.monotonic() < end


def test_taker_that_is_woken_looks_around_once():
    queue = Queue(100, None)
    with taker(queue, Size(1, 100, ANY)) as taken:
        queue.wake()
    assert taken == [None]
    with taker(queue, Size(1, 100, ANY)) as taken:
        queue.put(entry(0))
    assert ids(taken[0].batch) == [0]


def test_waking_nobody_is_not_lost():
    queue = Queue(100, None)
    queue.wake()
    assert queue.take(10) is None


def test_tokens_that_wait_are_counted_whatever_becomes_of_them():
    queue, size = Queue(100, None), Size(6, 50, 50)
    past = time.monotonic_ns() - 1
    for id, deadline_ns in enumerate([None, past, None, None]):
        queue.put(entry(id, length=3, deadline_ns=deadline_ns))
    queue.cancel(2)
    assert queue._tokens == 9
    taken = queue.take(0, size)
    assert (ids(taken.batch), ids(taken.expired)) == ([0, 3], [1])
    assert queue.take(0, size) is None
    for clear in (queue.clear, queue.close):
        queue.put(entry(4, length=5))
        assert queue.take(0, size) is None
        assert ids(clear()) == [4]
        assert queue._tokens == 0


def test_closing_wakes_who_waits_for_more():
    queue = Queue(100, None)
    queue.put(entry(0))
    with taker(queue, Size(6, 50, 50)) as taken:
        assert ids(queue.close()) == [0]
    assert taken == [None]


def test_batch_has_its_share_of_what_waits_and_the_first_text_whatever_its_length():
    queue = Queue(100, None)
    for id, length in enumerate((5, 5, 5, 30, 5)):
        queue.put(entry(id, length=length))
    assert queue.demand == Demand(50, 5, 100)
    assert ids(queue.take(0, Size(6, 50, 50, 11)).batch) == [0, 1]
    assert ids(queue.take(0, Size(6, 50, 50, 5)).batch) == [2]
    assert queue.demand == Demand(35, 30, 100)
    assert ids(queue.take(0, Size(6, 50, 50, 6)).batch) == [3]
    assert ids(queue.take(0, Size(1, 50, 50, 6)).batch) == [4]
    assert queue.demand == Demand(0, 0, 100)
