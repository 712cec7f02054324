"""A model that hangs: what callers and probes are told, and what comes after it."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.engine import watchdog
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.grpc.conftest import Served, until
from tests.grpc.test_books import is_settled

REQUEST = tei_pb2.EmbedRequest(inputs="w0")
HUNG = (grpc.StatusCode.UNAVAILABLE, "The model runner does not answer")


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
    return await call.code(), await call.details()


async def test_all_who_wait_are_told_and_health_turns(hung):
    calls = [hung.embed.Embed(REQUEST) for _ in range(5)]
    stream = hung.embed.EmbedStream(iter([REQUEST] * 3))
    assert {await outcome(call) for call in (*calls, stream)} == {HUNG}
    assert await status_of(hung) == health_pb2.HealthCheckResponse.NOT_SERVING
    await until(lambda: is_settled(hung))


async def test_calls_that_need_no_model_are_answered_meanwhile(hung):
    assert await outcome(hung.embed.Embed(REQUEST)) == HUNG
    stub = tei_pb2_grpc.TokenizeStub(hung.channel)
    assert (await stub.Decode(tei_pb2.DecodeRequest(ids=[4]))).text == "w0"
    assert await outcome(hung.embed.Embed(REQUEST)) == HUNG


async def test_server_goes_on_when_the_batch_ends_after_all(hung):
    assert await outcome(hung.embed.Embed(REQUEST)) == HUNG
    hung.runner.gate.set()
    watch = health_pb2_grpc.HealthStub(hung.channel).Watch(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(10):
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
    assert (await hung.embed.Embed(REQUEST)).embeddings
