"""The device's thread at its start and its end."""

import asyncio

import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError, UnavailableError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Output
from tests import folders
from tests.fakes import FakeDevice, FakeRunner
from tests.unit.engine.desk import entry, held_back
from tests.unit.engine.runners import Overlapping


async def test_facts_of_the_model_are_reported_at_the_start(tmp_path):
    folder, runner = folders.embedder(tmp_path), FakeRunner()
    config = EngineConfig(model_id=str(folder))
    device = FakeDevice(read_model_config(folder, config), config, runner=runner)
    assert await device.start(lambda _: None, lambda _: None) == runner.facts
    await device.stop()


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
