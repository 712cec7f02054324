"""The device thread over a runner whose batches run side by side: when each starts, and what is delivered."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

import pytest
import torch

from tei_grpc.engine import flight, worker
from tei_grpc.engine.flight import Started
from tei_grpc.engine.queue import ANY, NONE, Demand, Size
from tei_grpc.engine.shards import THREADS, Shards, results
from tei_grpc.errors import DeadlineError, InferenceError, TeiError, UnavailableError
from tei_grpc.metrics import Metrics
from tei_grpc.types import Batch, Output
from tests.fakes import Arrays, FakeDevice, FakeRunner, answer
from tests.samples import sample
from tests.unit.engine.desk import entry

BUDGET = 20
LEAST, HALF = 4, BUDGET // 2  # tokens beside another batch
A, B, C, D, LONG, BAD = range(6)


class Halves(FakeRunner):
    """Like a CPU: a batch runs on one of two threads, those of A and B until they may end; `looks` are for work."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = Shards(8, THREADS)
        self.looks = threading.Semaphore(0)
        self.may_end = {id: threading.Event() for id in (A, B)}
        self.began = {id: threading.Event() for id in (A, B)}
        self.checks = 0

    @property
    def ahead(self) -> int:
        return THREADS if self.shards.busy else 0

    @ahead.setter
    def ahead(self, _: int) -> None:
        """Not to be set."""

    def size(self, demand: Demand) -> Size:
        self.looks.release()
        return Size(LEAST, HALF, HALF) if self.shards.busy else Size(1, demand.budget, ANY)

    def wait_for_room(self, timeout: float) -> bool:
        return self.shards.wait(THREADS - 1, timeout)

    def tell(self, wake: Callable[[], None]) -> bool:
        self.shards.wake = wake
        return True

    def check(self) -> None:
        self.checks += 1

    def launch(self, batch: Batch, demand: Demand = NONE) -> Started:
        futures = self.shards.start(self.run, [batch])
        return Started(lambda: results(futures)[0], lambda: all(future.done() for future in futures))

    def run(self, batch: Batch) -> Sequence[Arrays | TeiError]:
        self.batches.append(list(batch.entries))
        for each in batch.entries:
            if each.id in self.began:
                self.began[each.id].set()
                self.may_end[each.id].wait(10)
        return [self.answer(each) for each in batch.entries]

    def leave(self, id: int) -> None:
        """Let a batch go on."""
        self.may_end[id].set()

    @property
    def ids(self) -> list[list[int]]:
        """Of the entries of all batches that have begun."""
        return [sorted(each.id for each in batch) for batch in self.batches]


@pytest.fixture
def runner():
    threads = torch.get_num_threads()
    made = Halves()
    yield made
    made.leave(A)
    made.leave(B)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def only_by_events(monkeypatch):
    """Nothing happens because time passes."""
    monkeypatch.setattr(worker, "ROOM_SECONDS", 1000)
    monkeypatch.setattr(flight, "LONG_NS", 10**15)


async def run_held(device: FakeDevice, runner: Halves, *ids: int) -> None:
    """Start batches of one entry each, which stay."""
    for id in ids:
        device.submit(entry(id, LEAST))
        assert await asyncio.to_thread(runner.began[id].wait, 10)


async def looked(device: FakeDevice, runner: Halves) -> None:
    """Return when the device has looked at all that waits now."""
    while runner.looks.acquire(blocking=False):
        pass
    device._queue.wake()
    assert await asyncio.to_thread(runner.looks.acquire, timeout=10)


async def test_enough_tokens_are_answered_while_another_batch_runs(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A)
        for round in range(3):
            device.submit(entry(10 + round, LEAST))
            await desk.until(lambda round=round: 10 + round in desk.results)
        assert A not in desk.results
        runner.leave(A)
        await desk.until(lambda: A in desk.results)


async def test_fewer_wait_for_what_may_join_them(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A)
        device.submit(entry(C, LEAST - 1))
        await looked(device, runner)
        assert runner.ids == [[A]]
        device.submit(entry(D, 1))
        await desk.until(lambda: {C, D} <= desk.results.keys())
        assert runner.ids == [[A], [C, D]]
        runner.leave(A)


async def test_short_text_is_answered_when_the_other_half_is_done_at_the_latest(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A)
        device.submit(entry(C, 1))
        await looked(device, runner)
        runner.leave(A)
        await desk.until(lambda: {A, C} <= desk.results.keys())
        assert runner.ids == [[A], [C]]


async def test_long_text_waits_for_all_cores_and_is_not_overtaken(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A)
        device.submit(entry(LONG, HALF + 1))
        device.submit(entry(C, LEAST))
        device.submit(entry(D, HALF))
        await looked(device, runner)
        assert runner.ids == [[A]]
        runner.leave(A)
        await desk.until(lambda: {LONG, C, D} <= desk.results.keys())
        assert runner.ids == [[A], sorted([LONG, C]), [D]]


async def test_batch_beside_another_keeps_to_its_limits(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET, max_batch_requests=2) as (device, desk):
        await run_held(device, runner, A, B)
        for id in range(10, 16):
            device.submit(entry(id, 4))
        runner.leave(B)
        await desk.until(lambda: 15 in desk.results)
        assert runner.ids == [[A], [B], [10, 11], [12, 13], [14, 15]]
        runner.leave(A)


async def test_nothing_is_started_while_both_halves_are_at_work(device_over, runner, monkeypatch):
    monkeypatch.setattr(worker, "ROOM_SECONDS", 0.001)
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A, B)
        device.submit(entry(C, HALF))
        for _ in range(3):
            await looked(device, runner)
        assert (device.waiting, runner.shards.busy) == (1, 2)
        runner.leave(B)
        await desk.until(lambda: {B, C} <= desk.results.keys())
        runner.leave(A)


async def test_entry_whose_deadline_passes_while_it_waits_is_told_when_the_other_half_is_done(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A)
        device.submit(entry(C, 1, deadline_ns=time.monotonic_ns()))
        await looked(device, runner)
        runner.leave(A)
        await desk.until(lambda: {A, C} <= desk.results.keys())
        assert desk.errors() == {C: DeadlineError}
        assert runner.ids == [[A]]


async def test_long_text_that_is_cancelled_is_waited_for_no_longer(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A)
        device.submit(entry(LONG, HALF + 1))
        device.submit(entry(C, LEAST))
        await looked(device, runner)
        device.cancel(LONG)
        await desk.until(lambda: C in desk.results)
        assert runner.ids == [[A], [C]]
        runner.leave(A)


@pytest.mark.parametrize("waits", [LEAST - 1, HALF + 1])
async def test_half_that_hangs_is_noticed_whatever_arrives(device_over, runner, impatient, monkeypatch, waits):
    ids = count(10)
    monkeypatch.setattr(worker, "ROOM_SECONDS", 0.02)
    async with device_over(runner, max_batch_tokens=BUDGET, **impatient) as (device, desk):
        await run_held(device, runner, A)
        device.submit(entry(LONG, waits))
        monkeypatch.setattr(flight, "LONG_NS", 10_000_000)
        async with asyncio.timeout(10):
            while not desk.states:
                device.submit(entry(next(ids), 1))
                await asyncio.sleep(0)
        await desk.until(lambda: {A, LONG} <= desk.results.keys())
        assert desk.errors()[A] is InferenceError


async def test_hang_is_told_to_all_and_everything_goes_on_after_it(device_over, runner, impatient, monkeypatch):
    monkeypatch.setattr(worker, "ROOM_SECONDS", 0.01)
    async with device_over(runner, max_batch_tokens=BUDGET, **impatient) as (device, desk):
        await run_held(device, runner, A, B)
        device.submit(entry(C, LEAST))
        monkeypatch.setattr(flight, "LONG_NS", 10_000_000)
        await desk.until(lambda: len(desk.results) == 3)
        assert desk.errors() == {A: InferenceError, B: InferenceError, C: UnavailableError}
        runner.leave(A)
        runner.leave(B)
        await desk.until(lambda: desk.states == [False, True])
        device.submit(entry(D))
        await desk.until(lambda: D in desk.results)
        assert isinstance(desk.results[D], Output)


async def test_bad_entry_fails_alone_while_another_batch_runs(device_over, runner):
    def fussy(each):
        if each.id == BAD:
            raise torch.OutOfMemoryError("no room")
        return answer(each)

    runner.answer = fussy
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A, B)
        for id in (C, BAD, D):
            device.submit(entry(id))
        runner.leave(B)
        await desk.until(lambda: {B, C, BAD, D} <= desk.results.keys())
        assert desk.errors() == {BAD: InferenceError}
        assert A not in desk.results
        runner.leave(A)
        await desk.until(lambda: A in desk.results)
        assert (desk.errors(), desk.states) == ({BAD: InferenceError}, [])


async def test_stopping_finishes_both_halves_and_fails_what_waits(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A, B)
        device.submit(entry(C))
        stopping = asyncio.ensure_future(device.stop())
        await desk.until(lambda: C in desk.results)
        runner.leave(A)
        runner.leave(B)
        assert await stopping
        await desk.until(lambda: {A, B} <= desk.results.keys())
        assert desk.errors() == {C: UnavailableError}


async def test_device_that_is_well_is_not_checked_whenever_something_ends(device_over, runner):
    async with device_over(runner, max_batch_tokens=BUDGET) as (device, desk):
        for id in range(10, 30):
            device.submit(entry(id, LEAST))
            await desk.until(lambda id=id: id in desk.results)
            await looked(device, runner)
        assert runner.checks == 0


async def test_times_are_those_of_each_batch_and_the_runner_is_not_busier_than_the_clock(device_over, runner):
    metrics, began = Metrics(), time.monotonic()
    async with device_over(runner, metrics, max_batch_tokens=BUDGET) as (device, desk):
        await run_held(device, runner, A)
        held = time.monotonic()
        for id in range(10, 20):
            device.submit(entry(id, HALF))
            await desk.until(lambda id=id: id in desk.results)
        ran = time.monotonic() - held
        runner.leave(A)
        await desk.until(lambda: A in desk.results)
        passed = time.monotonic() - began
        assert ran <= sample(metrics, "te_runner_busy_seconds_total") <= passed
        assert desk.results[A].inference_ns >= ran * 1e9
        assert desk.results[A].queue_ns + desk.results[A].inference_ns <= passed * 1e9
        assert sample(metrics, "te_batch_fill_sum") == LEAST / BUDGET + 10  # of all and of half, which those fill
