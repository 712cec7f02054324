"""The device's thread when the runner fails: which entries do, and what becomes of health."""

import pytest

from tei_grpc.engine import worker
from tei_grpc.errors import InferenceError, UnavailableError
from tei_grpc.types import Entry
from tests.fakes import FakeRunner, answer
from tests.unit.engine.desk import entry, held_back
from tests.unit.engine.runners import BAD, fussy


class Sick(FakeRunner):
    """Fails every batch, and its check too, until it is cured."""

    def __init__(self) -> None:
        super().__init__()
        self.cured = False
        self.answer = self._answer

    def check(self) -> None:
        if not self.cured:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def _answer(self, entry: Entry):
        self.check()
        return answer(entry)


async def test_bad_entry_fails_alone(device_over):
    runner = FakeRunner()
    runner.answer = fussy
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 20)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 20)
        assert desk.errors() == {BAD: InferenceError}


async def test_text_of_a_failure_tells_nothing_internal(device_over):
    runner = FakeRunner()
    runner.answer = fussy
    async with device_over(runner) as (device, desk):
        device.submit(entry(BAD))
        await desk.until(lambda: BAD in desk.results)
        assert str(desk.results[BAD].error) == "Inference failed"


async def test_device_stays_healthy_after_a_bad_entry(device_over):
    runner = FakeRunner()
    runner.answer = fussy
    async with device_over(runner) as (device, desk):
        device.submit(entry(BAD))
        device.submit(entry(1))
        await desk.until(lambda: len(desk.results) == 2)
        assert desk.states == []


async def test_error_that_the_runner_returns_reaches_its_entry_only(device_over):
    runner = FakeRunner()
    runner.answer = lambda each: InferenceError("not finite") if each.id == BAD else answer(each)
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(BAD), entry(1)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 3)
        assert desk.errors() == {BAD: InferenceError}
        assert len(runner.batches) == 2


async def test_runner_that_answers_too_few_fails_its_batch_and_lives(device_over):
    runner = FakeRunner()
    async with device_over(runner) as (device, desk):
        runner.run = lambda batch: []
        device.submit(entry(1))
        await desk.until(lambda: 1 in desk.results)
        del runner.run
        device.submit(entry(2))
        await desk.until(lambda: 2 in desk.results)
        assert desk.errors() == {1: InferenceError}


async def test_dead_thread_fails_what_ran_for_good_and_what_waited_for_now(device_over):
    runner = FakeRunner()

    def die(each: Entry):
        raise SystemExit

    runner.answer = die
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(1), entry(2)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 3)
        assert desk.errors() == {0: InferenceError, 1: UnavailableError, 2: UnavailableError}
        assert {str(result.error) for result in desk.results.values()} == {"The model runner is gone"}
        assert desk.states == [False]


async def test_dead_thread_refuses_what_comes_later(device_over):
    runner = FakeRunner()

    def die(each: Entry):
        raise SystemExit

    runner.answer = die
    async with device_over(runner) as (device, desk):
        device.submit(entry(0))
        await desk.until(lambda: len(desk.results) == 1)
        with pytest.raises(UnavailableError, match="The model runner is gone"):
            device.submit(entry(1))


async def test_device_that_no_longer_runs_is_unhealthy_until_it_runs_again(device_over, monkeypatch):
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.01)
    runner = Sick()
    async with device_over(runner) as (device, desk):
        device.submit(entry(1))
        await desk.until(lambda: desk.states == [False])
        runner.cured = True
        await desk.until(lambda: desk.states == [False, True])
        device.submit(entry(2))
        await desk.until(lambda: 2 in desk.results)
        assert desk.errors() == {1: InferenceError}


async def test_batch_is_not_tried_again_on_a_device_that_no_longer_runs(device_over):
    runner = Sick()
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 9)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 9)
        assert [len(batch) for batch in runner.batches] == [1, 8]
        assert set(desk.errors().values()) == {InferenceError}


async def test_batch_that_succeeds_turns_health_back(device_over, monkeypatch):
    monkeypatch.setattr(worker, "RETRY_SECONDS", 1000)
    runner = Sick()
    async with device_over(runner) as (device, desk):
        device.submit(entry(1))
        await desk.until(lambda: desk.states == [False])
        runner.cured = True
        device.submit(entry(2))
        await desk.until(lambda: desk.states == [False, True])
