"""The engine over a weightless device: before the start, after the stop, and each state in between."""

import asyncio

import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError, UnavailableError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input, ModelType, State
from tests import folders
from tests.fakes import SIZE, FakeDevice, FakeRunner, fake_engine
from tests.unit.engine.waiting import held, until


async def test_nothing_is_served_before_the_start(tmp_path):
    engine = Engine(EngineConfig(model_id=str(folders.embedder(tmp_path))))
    assert engine.state is State.LOADING
    for work in (engine.embed("x"), engine.rerank("x", ["y"]), engine.tokenize("x"), engine.decode([1])):
        with pytest.raises(UnavailableError, match="The model is not loaded"):
            await work
    await engine.stop()


@pytest.mark.parametrize("text", ["hello", "hello " * 1000])
async def test_nothing_is_served_after_the_stop(tmp_path, text):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        pass
    with pytest.raises(UnavailableError):
        await engine.embed(Input(text, truncate=True))


async def test_stopping_fails_what_waits(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, device):
        first = await held(runner, engine.embed("a"))
        waiting = asyncio.ensure_future(engine.embed("b"))
        await until(lambda: device.waiting == 1)
        stopping = asyncio.ensure_future(engine.stop())
        with pytest.raises(UnavailableError, match="The server is shutting down"):
            await waiting
        runner.gate.set()
        await stopping
        assert len((await first).embeddings) == SIZE


async def test_watchers_see_each_change_of_state(tmp_path):
    seen: list[State] = []
    config = EngineConfig(model_id=str(folders.embedder(tmp_path)))
    engine = Engine(config, FakeDevice(read_model_config(tmp_path, config), config))
    engine.on_state(seen.append)
    async with engine:
        engine._follow_device(False)
        engine._follow_device(False)
        engine._follow_device(True)
        engine.drain()
        engine._follow_device(False)
    assert seen == [State.SERVING, State.UNHEALTHY, State.SERVING, State.DRAINING]


async def test_running_calls_go_on_while_draining(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        engine.drain()
        assert len((await engine.embed("hello")).embeddings) == SIZE


async def test_folder_without_a_model_does_not_start(tmp_path):
    with pytest.raises(StartupError, match=r"`config.json` not found"):
        await Engine(EngineConfig(model_id=str(tmp_path))).start()


async def test_info_tells_the_limits_in_force(tmp_path):
    options = {"max_batch_tokens": 100, "max_batch_requests": 7, "max_client_batch_size": 3, "tokenization_workers": 2}
    async with fake_engine(folders.embedder(tmp_path), max_concurrent_requests=9, **options) as (engine, _):
        info = engine.info
    assert {name: getattr(info, name) for name in options} == options
    assert info.max_concurrent_requests == 9
    assert info.max_input_length == 40
    assert info.model_id == str(tmp_path)
    assert info.model_sha is None
    assert (info.model_dtype, info.device, info.optimized) == ("float32", "cpu", True)


@pytest.mark.parametrize(
    ("folder", "kind", "answers"),
    [
        (folders.embedder, ModelType.EMBEDDING, (True, False, True)),
        (folders.splade, ModelType.EMBEDDING, (True, True, False)),
        (folders.reranker, ModelType.RERANKER, (False, False, False)),
        (lambda path: folders.classifier(path, "a", "b"), ModelType.CLASSIFIER, (False, False, False)),
    ],
)
async def test_info_tells_what_the_model_answers(tmp_path, folder, kind, answers):
    async with fake_engine(folder(tmp_path)) as (engine, _):
        info = engine.info
    assert info.model_type is kind
    assert (info.embeds, info.embeds_sparse, info.embeds_all) == answers


@pytest.mark.parametrize("delay", [0, 0.01, 0.1])
async def test_engine_that_is_stopped_while_it_loads_does_not_serve(minilm_dir, delay: float) -> None:
    engine = Engine(EngineConfig(model_id=str(minilm_dir)))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(delay)
    await engine.stop()
    with pytest.raises(StartupError):
        await starting
    with pytest.raises(UnavailableError):
        await engine.embed("a")


async def test_engine_is_started_once(tmp_path) -> None:
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _device):
        with pytest.raises(StartupError, match="once"):
            await engine.start()
