"""The real worker, started over a weightless runner, and the tokenizer of a small checkpoint."""

from contextlib import asynccontextmanager

import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.engine import watchdog
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tests import folders
from tests.fakes import FakeDevice, FakeRunner
from tests.unit.engine.desk import Desk
from tests.unit.engine.texts import tokenizer_of


@pytest.fixture
def device_over(tmp_path):
    folder = folders.embedder(tmp_path)

    @asynccontextmanager
    async def started(runner: FakeRunner, metrics: Metrics | None = None, **options):
        config = EngineConfig(model_id=str(folder), **options)
        device, desk = FakeDevice(read_model_config(folder, config), config, metrics, runner), Desk()
        await device.start(desk.deliver, desk.follow)
        try:
            yield device, desk
        finally:
            runner.gate.set()
            await device.stop()

    return started


@pytest.fixture
def impatient(monkeypatch):
    """Options and a pace by which a batch hangs after a few hundredths of a second."""
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    return {"runner_timeout": 0.03}


@pytest.fixture
def tokenizer(tmp_path):
    tokenizer = tokenizer_of(folders.embedder(tmp_path))
    yield tokenizer
    tokenizer.close()
