"""The line over a weightless device: permits that come back, callers that wait or not, and deadlines."""

import asyncio
import time

import pytest

from tei_grpc.errors import DeadlineError, InferenceError, OverloadedError, ValidationError
from tei_grpc.types import Caller
from tests import folders
from tests.fakes import SIZE, FakeRunner, fake_engine
from tests.samples import endings
from tests.unit.engine.waiting import held, until

STREAM = Caller(waits=True)


async def test_permit_comes_back_after_an_answer(tmp_path):
    async with fake_engine(folders.embedder(tmp_path), max_concurrent_requests=2) as (engine, device):
        for _ in range(5):
            await engine.embed("hello")
        assert device.free_permits == 2


async def test_permit_comes_back_after_a_refusal_of_the_tokenizer(tmp_path):
    async with fake_engine(folders.embedder(tmp_path), max_concurrent_requests=2) as (engine, device):
        with pytest.raises(ValidationError, match="tokens"):
            await engine.embed("a " * 100)
        assert device.free_permits == 2


async def test_permit_comes_back_after_a_failure_of_the_model(tmp_path):
    runner = FakeRunner()
    runner.answer = lambda entry: InferenceError("Inference failed")
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, device):
        with pytest.raises(InferenceError):
            await engine.embed("hello")
        assert device.free_permits == 2


async def test_permit_comes_back_when_the_caller_leaves(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, device):
        running = await held(runner, engine.embed("hello"))
        waiting = asyncio.ensure_future(engine.embed("world"))
        await until(lambda: device.waiting == 1)
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait([running, waiting])
        assert device.free_permits == 2
        assert device.waiting == 0
        runner.gate.set()
        await engine.embed("a")
        assert [[entry.input_ids.tolist() for entry in batch] for batch in runner.batches] == [
            [[2, 82, 3]],
            [[2, 5, 3]],
        ]


async def test_overload_fails_fast_and_passes(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, device):
        first = await held(runner, engine.embed("a"))
        second = asyncio.ensure_future(engine.embed("b"))
        await until(lambda: device.free_permits == 0)
        with pytest.raises(OverloadedError, match="Model is overloaded"):
            await engine.embed("c")
        runner.gate.set()
        await asyncio.gather(first, second)
        await engine.embed("c")


async def test_stream_waits_where_a_unary_call_fails(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=1) as (engine, _):
        first = await held(runner, engine.embed("a"))
        streamed = asyncio.ensure_future(engine.embed("b", caller=STREAM))
        await asyncio.sleep(0)
        assert not streamed.done()
        runner.gate.set()
        await first
        assert len((await streamed).embeddings) == SIZE


async def test_caller_whose_deadline_has_passed_is_not_tokenized(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, device):
        with pytest.raises(DeadlineError):
            await engine.embed("far too long " * 100, caller=Caller(deadline_ns=time.monotonic_ns()))
        assert device.runner.batches == []
        assert endings(engine.metrics) == {"expired": 1}


async def test_deadline_that_passes_in_the_queue_is_dropped_there(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, device):
        first = await held(runner, engine.embed("a"))
        late = asyncio.ensure_future(engine.embed("b", caller=Caller(deadline_ns=time.monotonic_ns() + 20_000_000)))
        await until(lambda: device.waiting == 1)
        await asyncio.sleep(0.03)
        runner.gate.set()
        with pytest.raises(DeadlineError):
            await late
        await first
        assert len(runner.batches) == 1
        assert endings(engine.metrics) == {"single": 1, "expired": 1}


async def test_refusal_of_an_overloaded_engine_takes_no_time(tmp_path) -> None:
    """The target is 50 ms; a test on a busy machine asks for ten times that."""
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, _device):
        first = await held(runner, engine.embed("a"))
        second = asyncio.ensure_future(engine.embed("b"))
        await asyncio.sleep(0)
        started = time.monotonic()
        with pytest.raises(OverloadedError):
            await engine.embed("c")
        assert time.monotonic() - started < 0.5
        runner.gate.set()
        await asyncio.gather(first, second)
