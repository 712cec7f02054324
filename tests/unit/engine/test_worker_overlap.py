"""The device's thread over a device that is only told to start a batch: the next is started meanwhile."""

import asyncio
import threading
import weakref

import numpy as np
import pytest
import torch

from tei_grpc.engine import flight, worker
from tei_grpc.errors import InferenceError
from tei_grpc.types import Batch
from tests.fakes import row
from tests.unit.engine.desk import entry, held_back
from tests.unit.engine.runners import BAD, Overlapping


async def test_next_batch_is_started_before_the_one_that_runs_is_awaited(device_over):
    runner = Overlapping()
    async with device_over(runner, max_batch_requests=2) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 5)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 5)
        assert runner.log == ["launch 0", "collect 0", "launch 1+2", "launch 3+4", "collect 1+2", "collect 3+4"]
        for id in range(5):
            np.testing.assert_array_equal(desk.results[id].arrays[0], row(entry(id)))


async def test_runner_is_told_how_much_waits(device_over):
    runner = Overlapping()
    async with device_over(runner, max_batch_requests=2) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 6)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 6)
        assert runner.waiting == [0, 3 * 2, 2, 0]  # each has two tokens


async def test_lonely_batch_is_awaited_at_once(device_over):
    runner = Overlapping()
    async with device_over(runner) as (device, desk):
        for id in range(3):
            device.submit(entry(id))
            await desk.until(lambda id=id: id in desk.results)
        assert runner.log == [f"{step} {id}" for id in range(3) for step in ("launch", "collect")]


async def test_what_comes_while_a_batch_runs_is_started_beside_it(device_over):
    runner, landed = Overlapping(), threading.Event()
    runner.is_done = lambda batch: landed.is_set()
    async with device_over(runner) as (device, desk):
        device.submit(entry(0))
        async with asyncio.timeout(10):
            while "launch 0" not in runner.log:
                await asyncio.sleep(0)
        device.submit(entry(1))
        await desk.until(lambda: 0 in desk.results)
        assert runner.log[:3] == ["launch 0", "launch 1", "collect 0"]
        assert 1 not in desk.results
        landed.set()
        await desk.until(lambda: 1 in desk.results)


async def test_device_that_cannot_say_whether_a_batch_is_done_is_asked_for_its_answers(device_over):
    runner = Overlapping()
    runner.is_done = lambda batch: 1 / 0
    async with device_over(runner) as (device, desk):
        device.submit(entry(0))
        await desk.until(lambda: 0 in desk.results)
        assert desk.errors() == {}


async def test_batch_that_is_not_done_in_time_is_waited_for_where_the_watchdog_sees_it(
    device_over, impatient, monkeypatch
):
    monkeypatch.setattr(flight, "LONG_NS", 10_000_000)
    runner = Overlapping()
    runner.is_done = lambda batch: False
    runner.gate.clear()
    async with device_over(runner, **impatient) as (device, desk):
        device.submit(entry(0))
        await desk.until(lambda: desk.states == [False])
        assert 0 in desk.results


async def test_thread_that_dies_while_a_batch_is_started_fails_it(device_over):
    runner = Overlapping()

    def die(step: str, batch: Batch):
        raise SystemExit

    runner.failing = die
    async with device_over(runner) as (device, desk):
        device.submit(entry(0))
        await desk.until(lambda: 0 in desk.results)
        assert desk.states == [False]


@pytest.mark.parametrize("step", ["launch", "collect"])
async def test_bad_entry_fails_alone_among_overlapping_batches(device_over, step):
    runner = Overlapping()

    def fail(at: str, batch: Batch):
        if at == step and any(each.id == BAD for each in batch.entries):
            raise torch.OutOfMemoryError("CUDA out of memory")

    runner.failing = fail
    async with device_over(runner, max_batch_requests=8) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 33)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 33)
        assert desk.errors() == {BAD: InferenceError}
        assert desk.states == []


@pytest.mark.parametrize("step", ["launch", "collect"])
async def test_what_a_failed_batch_held_is_let_go_of_before_its_halves_run(device_over, monkeypatch, step):
    """A traceback holds the frames, and so the tensors, of what raised."""
    monkeypatch.setattr(worker.logger, "disabled", True)  # pytest keeps what is logged
    runner, held = Overlapping(), []

    def fail(at: str, batch: Batch):
        workspace = np.zeros(8)
        if at == step and len(batch.entries) == 4:
            held.append(weakref.ref(workspace))
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert all(each() is None for each in held)

    runner.failing = fail
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 5)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 5)
        assert len(held) == 1
        assert desk.errors() == {}


async def test_nothing_is_tried_again_after_an_error_that_stays(device_over):
    runner = Overlapping()

    def fail(at: str, batch: Batch):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner.check = lambda: fail("check", None)
    async with device_over(runner, max_batch_requests=4) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 9)])
        runner.failing = fail
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 9)
        assert set(desk.errors().values()) == {InferenceError}
        assert runner.log == ["launch 0", "collect 0", "launch 1+2+3+4", "launch 5+6+7+8"]
        assert desk.states == [False]
