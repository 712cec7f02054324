"""The device thread: what is delivered for an entry, whatever the model does."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tei_grpc.config import EngineConfig
from tei_grpc.engine import flight, worker
from tei_grpc.engine.flight import Started
from tei_grpc.errors import DeadlineError, InferenceError, StartupError, UnavailableError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.types import Batch, Entry, Output
from tests import folders
from tests.fakes import FakeDevice, FakeRunner, answer, row
from tests.samples import sample
from tests.unit.engine.desk import entry

BAD = 13


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


def fussy(entry: Entry):
    """Raise for the bad entry, and so for each batch that it is in."""
    if entry.id == BAD:
        raise ValueError("/secret/path")
    return answer(entry)


async def held_back(device: FakeDevice, runner: FakeRunner, entries: Sequence[Entry]) -> None:
    """Let `entries` pile up behind a batch that runs: they can only leave together."""
    runner.gate.clear()
    device.submit(entry(0))
    await asyncio.to_thread(runner.running.wait, 10)
    for waiting in entries:
        device.submit(waiting)


async def test_facts_of_the_model_are_reported_at_the_start(tmp_path):
    folder, runner = folders.embedder(tmp_path), FakeRunner()
    config = EngineConfig(model_id=str(folder))
    device = FakeDevice(read_model_config(folder, config), config, runner=runner)
    assert await device.start(lambda _: None, lambda _: None) == runner.facts
    await device.stop()


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


async def test_bad_entry_fails_alone(device_over):
    runner = FakeRunner()
    runner.answer = fussy
    async with device_over(runner) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 20)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 20)
        assert desk.errors() == {BAD: InferenceError}


class Overlapping(FakeRunner):
    """Like a CUDA device: a batch is only started by `launch`. `log` is what it was asked, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 1
        self.log: list[str] = []
        self.crowds: list[bool] = []
        self.failing: Callable[[str, Batch], None] = lambda step, batch: None
        self.is_done: Callable[[Batch], bool] = lambda batch: True

    def launch(self, batch: Batch, *, crowded: bool = False):
        name = "+".join(str(each.id) for each in batch.entries)
        self.log.append(f"launch {name}")
        self.crowds.append(crowded)
        self.failing("launch", batch)

        def collect():
            self.log.append(f"collect {name}")
            self.failing("collect", batch)
            return self.run(batch)

        return Started(collect, lambda: self.is_done(batch))


async def test_next_batch_is_started_before_the_one_that_runs_is_awaited(device_over):
    runner = Overlapping()
    async with device_over(runner, max_batch_requests=2) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 5)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 5)
        assert runner.log == ["launch 0", "collect 0", "launch 1+2", "launch 3+4", "collect 1+2", "collect 3+4"]
        for id in range(5):
            np.testing.assert_array_equal(desk.results[id].arrays[0], row(entry(id)))


async def test_runner_is_told_whether_others_wait(device_over):
    runner = Overlapping()
    async with device_over(runner, max_batch_requests=2) as (device, desk):
        await held_back(device, runner, [entry(id) for id in range(1, 6)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 6)
        assert runner.crowds == [False, True, True, False]


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


async def test_queue_gauge_follows_the_queue(device_over):
    runner, metrics = FakeRunner(), Metrics()

    def size() -> float | None:
        return metrics.registry.get_sample_value("te_queue_size")

    async with device_over(runner, metrics) as (device, desk):
        await held_back(device, runner, [entry(1), entry(2), entry(3)])
        assert size() == 3
        device.cancel(1)
        assert size() == 2
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 3)
        assert size() == 0


async def test_batches_are_counted_by_requests_and_tokens(device_over):
    runner, metrics = FakeRunner(), Metrics()
    async with device_over(runner, metrics) as (device, desk):
        await held_back(device, runner, [entry(1, 3), entry(2, 4)])
        runner.gate.set()
        await desk.until(lambda: len(desk.results) == 3)
    assert metrics.registry.get_sample_value("te_batch_next_size_sum") == 3
    assert metrics.registry.get_sample_value("te_batch_next_tokens_sum") == 9


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


@pytest.mark.parametrize(("runner_class", "options"), [(FakeRunner, {}), (Overlapping, {"max_batch_requests": 1})])
async def test_stopping_finishes_what_runs_and_fails_what_waits(device_over, runner_class, options):
    runner = runner_class()
    async with device_over(runner, **options) as (device, desk):
        await held_back(device, runner, [entry(1), entry(2)])
        stopping = asyncio.ensure_future(device.stop())
        await desk.until(lambda: len(desk.results) == 2)
        runner.gate.set()
        await stopping
        assert desk.errors() == {1: UnavailableError, 2: UnavailableError}
        assert isinstance(desk.results[0], Output)
        assert desk.states == []


async def test_stopped_device_has_no_thread(device_over):
    async with device_over(FakeRunner()) as (device, _):
        pass
    assert not device._thread.is_alive()


async def test_device_that_never_started_can_be_stopped(tmp_path):
    config = EngineConfig(model_id=str(folders.embedder(tmp_path)))
    await FakeDevice(read_model_config(tmp_path, config), config).stop()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StartupError("`layer.0` is missing"), "`layer.0` is missing"),
        (MemoryError("no room"), "The model could not be loaded: MemoryError: no room"),
    ],
)
async def test_model_that_does_not_load_is_a_startup_error(tmp_path, error, text):
    class Broken(FakeDevice):
        def _load_runner(self):
            raise error

    config = EngineConfig(model_id=str(folders.embedder(tmp_path)))
    device = Broken(read_model_config(tmp_path, config), config)
    with pytest.raises(StartupError) as raised:
        await device.start(lambda _: None, lambda _: None)
    assert raised.value.message == text
    await device.stop()


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


async def test_runner_is_busy_while_it_runs_and_its_recoveries_are_counted(device_over):
    runner, metrics = FakeRunner(), Metrics()

    def recover(entry: Entry):
        time.sleep(0.01)
        runner.recoveries += 1
        return answer(entry)

    runner.answer = recover
    async with device_over(runner, metrics) as (device, desk):
        device.submit(entry(1))
        await desk.until(lambda: 1 in desk.results)
        assert sample(metrics, "te_runner_recoveries_total") == 1
        assert 0.01 <= sample(metrics, "te_runner_busy_seconds_total") < 10
        assert desk.results[1].batch_size == 1


async def test_batch_fill_is_its_share_of_the_token_budget(device_over):
    metrics = Metrics()
    async with device_over(FakeRunner(), metrics, max_batch_tokens=8) as (device, desk):
        device.submit(entry(1, length=2))
        await desk.until(lambda: 1 in desk.results)
        assert sample(metrics, "te_batch_fill_sum") == 0.25
