"""A model that hangs: what callers and probes are told, and what comes after it."""

import asyncio
import re

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.engine import watchdog
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.grpc.conftest import Served, until
from tests.grpc.test_books import is_settled

REQUEST = tei_pb2.EmbedRequest(inputs="w0")
TEXT = "The model runner does not answer"
HUNG = grpc.StatusCode.INTERNAL, f"{TEXT}, id"  # not tried again by anybody
WAITED = grpc.StatusCode.UNAVAILABLE, TEXT


@pytest.fixture
async def hung(serve, monkeypatch):
    """A server whose next batch hangs, and counts as hung soon."""
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    async with serve(runner_timeout=0.05) as served:
        served.runner.gate.clear()
        yield served


async def status_of(served: Served) -> int:
    return (await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)).status


async def outcome(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    """Its code, and its text up to the value of an id."""
    return await call.code(), re.sub("(?<=, id) .*", "", await call.details())


async def test_only_the_batch_that_hangs_fails_for_good_and_health_turns(hung):
    held = hung.embed.Embed(REQUEST)
    await asyncio.to_thread(hung.runner.running.wait, 10)
    waiting = [hung.embed.Embed(REQUEST) for _ in range(5)]
    stream = hung.embed.EmbedStream(iter([REQUEST] * 3))
    assert await outcome(held) == HUNG
    assert {await outcome(call) for call in (*waiting, stream)} == {WAITED}
    assert await status_of(hung) == health_pb2.HealthCheckResponse.NOT_SERVING
    await until(lambda: is_settled(hung))


async def test_calls_that_need_no_model_are_answered_meanwhile(hung):
    assert await outcome(hung.embed.Embed(REQUEST)) == HUNG
    stub = tei_pb2_grpc.TokenizeStub(hung.channel)
    assert (await stub.Decode(tei_pb2.DecodeRequest(ids=[4]))).text == "w0"
    assert await outcome(hung.embed.Embed(REQUEST)) == WAITED


async def test_server_goes_on_when_the_batch_ends_after_all(hung):
    assert await outcome(hung.embed.Embed(REQUEST)) == HUNG
    hung.runner.gate.set()
    watch = health_pb2_grpc.HealthStub(hung.channel).Watch(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(10):
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
    assert (await hung.embed.Embed(REQUEST)).embeddings
