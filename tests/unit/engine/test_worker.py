"""The device's thread: what is delivered for an entry, and in which batches."""

import threading

import numpy as np

from tei_grpc.errors import DeadlineError
from tei_grpc.types import Entry
from tests.fakes import FakeRunner, answer, row
from tests.unit.engine.desk import entry, held_back


async def test_each_entry_gets_its_own_output(device_over):
    async with device_over(FakeRunner()) as (device, desk):
        entries = [entry(id, length=id % 5 + 1) for id in range(50)]
        for each in entries:
            device.submit(each)
        await desk.until(lambda: len(desk.results) == 50)
        for each in entries:
            np.testing.assert_array_equal(desk.results[each.id].arrays[0], row(each))


async def test_what_waits_leaves_together(device_over):
    runner = FakeRunner()
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(1), entry(2), entry(3)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 4)
        assert [[each.id for each in batch] for batch in runner.batches] == [[0], [1, 2, 3]]


async def test_batches_keep_to_the_limits_of_the_options(device_over):
    runner = FakeRunner()
    async with device_over(runner, max_batch_tokens=8, max_batch_requests=3) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 9)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 9)
        assert [len(batch) for batch in runner.batches] == [1, 3, 3, 2]


async def test_cancelled_entry_is_not_batched(device_over):
    runner = FakeRunner()
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(1), entry(2)])
        device.cancel(1)
        runner.gate.set()
        await desk.until(lambda: 2 in desk.results)
        assert [each.id for each in runner.batches[-1]] == [2]
        assert 1 not in desk.results


async def test_entry_cancelled_while_it_runs_disturbs_nobody(device_over):
    runner = FakeRunner()
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(1)])
        device.cancel(0)
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 2)
        assert desk.errors() == {}


async def test_expired_entry_is_not_batched(device_over):
    runner = FakeRunner()
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(1, deadline_ns=1), entry(2)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 3)
        assert [each.id for each in runner.batches[-1]] == [2]
        assert desk.errors() == {1: DeadlineError}


async def test_only_one_thread_runs_the_model(device_over):
    runner, threads = FakeRunner(), set()

    def note(each: Entry):
        threads.add(threading.get_ident())
        return answer(each)

    runner.answer = note
    async with device_over(runner) as (device, desk):
        for id in range(20):
            device.submit(entry(id))
        await desk.until(lambda: len(desk.results) == 20)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
