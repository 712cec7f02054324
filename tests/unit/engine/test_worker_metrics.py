"""What the device's thread tells the metrics."""

import time

from tei_grpc.metrics import Metrics
from tei_grpc.types import Entry
from tests.fakes import FakeRunner, answer
from tests.samples import sample
from tests.unit.engine.desk import entry, held_back


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
