"""The device's thread in a batch or a check that does not end: who is told, and when that is a hang."""

import asyncio
import threading
import time

import pytest

from tei_grpc.errors import InferenceError, UnavailableError
from tei_grpc.types import Batch, Entry
from tests.fakes import FakeRunner, answer
from tests.unit.engine.desk import entry, held_back
from tests.unit.engine.runners import BAD, Overlapping, fussy


async def test_hanging_batch_fails_for_good_what_waits_for_now_and_health_turns(device_over, impatient):
    runner = FakeRunner()
    async with device_over(runner, **impatient) as (device, desk):
        await held_back(device, runner, [entry(1), entry(2)])
        await desk.until(lambda: len(desk.results) == 3)
        assert desk.errors() == {0: InferenceError, 1: UnavailableError, 2: UnavailableError}
        assert {str(result.error) for result in desk.results.values()} == {"The model runner does not answer"}
        assert desk.states == [False]
        with pytest.raises(UnavailableError, match="The model runner does not answer"):
            device.submit(entry(3))


async def test_batch_that_ends_after_all_turns_health_back_and_is_not_delivered_again(device_over, impatient):
    runner = FakeRunner()
    async with device_over(runner, **impatient) as (device, desk):
        await held_back(device, runner, [])
        await desk.until(lambda: desk.states == [False])
        runner.gate.set()
        await desk.until(lambda: desk.states == [False, True])
        device.submit(entry(1))
        await desk.until(lambda: 1 in desk.results)
        assert desk.errors() == {0: InferenceError}


async def test_batch_may_take_many_times_what_its_tokens_took_at_start(device_over, impatient):
    runner = FakeRunner()
    runner.seconds_per_token = 10
    async with device_over(runner, **impatient) as (device, desk):
        await held_back(device, runner, [])
        await asyncio.sleep(0.2)  # many times the timeout
        runner.gate.set()
        await desk.until(lambda: 0 in desk.results)
        assert (desk.errors(), desk.states) == ({}, [])


async def test_short_batches_one_after_the_other_do_not_add_up_to_a_hang(device_over, impatient):
    runner = FakeRunner()

    def take_a_moment(each: Entry):
        time.sleep(0.02)
        return answer(each)

    runner.answer = take_a_moment
    async with device_over(runner, max_batch_requests=1, runner_timeout=0.5) as (device, desk):
        for id in range(40):
            device.submit(entry(id))
        await desk.until(lambda: len(desk.results) == 40)
        assert (desk.errors(), desk.states) == ({}, [])


async def test_check_that_hangs_turns_health_too(device_over, impatient):
    runner = FakeRunner()
    runner.answer = fussy

    def hang():
        runner.gate.clear()
        runner.gate.wait()

    runner.check = hang
    async with device_over(runner, **impatient) as (device, desk):
        device.submit(entry(BAD))
        await desk.until(lambda: desk.states == [False])
        assert desk.errors() == {BAD: InferenceError}


@pytest.mark.parametrize(("step", "on_the_device"), [("launch", {1}), ("collect", {1, 2})])
async def test_what_is_on_a_device_that_hangs_fails_for_good(device_over, impatient, step, on_the_device):
    runner, submitted = Overlapping(), threading.Event()

    def hang(at: str, batch: Batch):
        submitted.wait()
        if (at, batch.entries[0].id) == (step, 1):
            runner.gate.clear()
            runner.gate.wait()

    runner.failing = hang
    async with device_over(runner, max_batch_requests=1, **impatient) as (device, desk):
        for id in (1, 2, 3):
            device.submit(entry(id))
        submitted.set()
        await desk.until(lambda: len(desk.results) == 3)
        expected = {id: InferenceError if id in on_the_device else UnavailableError for id in (1, 2, 3)}
        assert desk.errors() == expected


async def test_device_that_hangs_can_be_stopped(device_over, impatient):
    runner = FakeRunner()
    async with device_over(runner, **impatient) as (device, _):
        await held_back(device, runner, [])
        async with asyncio.timeout(10):
            assert not await device.stop()
