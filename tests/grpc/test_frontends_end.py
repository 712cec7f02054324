"""How a server with front-ends ends: in order, at once, or killed; no process of it stays."""

import asyncio
import signal
import sys

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.grpc.conftest import write_checkpoint
from tests.grpc.test_drain import SERVER, embed_request, process

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse


def front_ends(started):
    return psutil.Process(started.pid).children()


async def ended(processes):
    """Whether all of them are gone, soon."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=10)
    return not alive


@pytest.fixture
async def shut(tmp_path):
    """A server whose first batch never ends, and a channel to it."""
    async with process(tmp_path, "0", "shut", "2", until="Serving on") as started:
        yield started


async def test_all_who_wait_are_told_at_once_when_the_runner_is_killed(shut):
    started, channel = shut
    children, embed = front_ends(started), tei_pb2_grpc.EmbedStub(channel)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == Status.SERVING
    calls = [embed.Embed(embed_request()) for _ in range(5)]
    stream = embed.EmbedStream()
    await stream.write(embed_request())
    await tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest())  # the others, sent before, have arrived
    started.send_signal(signal.SIGKILL)
    async with asyncio.timeout(5):
        assert (await watch.read()).status == Status.NOT_SERVING
        for call in (*calls, stream):
            assert (await call.code(), await call.details()) == (Code.UNAVAILABLE, "The model runner is gone")
    assert await ended(children)


async def test_second_signal_ends_all_processes_at_once(shut):
    started, channel = shut
    children = front_ends(started)
    call = tei_pb2_grpc.EmbedStub(channel).Embed(embed_request())
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    started.send_signal(signal.SIGTERM)
    assert (await asyncio.wait_for(watch.read(), 10)).status == Status.NOT_SERVING
    started.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(started.wait(), 5) == 128 + signal.SIGTERM
    assert await ended(children)
    assert await call.code() is Code.UNAVAILABLE


async def test_signal_to_all_processes_is_one_to_the_server(tmp_path):
    async with process(tmp_path, "0", "", "2", until="Serving on") as (started, channel):
        children = front_ends(started)
        call = tei_pb2_grpc.EmbedStub(channel).EmbedStream()
        await call.write(embed_request())
        assert (await call.read()).embeddings
        for each in (*children, started):
            each.send_signal(signal.SIGINT)
        await call.write(embed_request("w1"))
        assert (await call.read()).embeddings
        await call.done_writing()
        assert await call.code() is Code.OK
        assert await asyncio.wait_for(started.wait(), 20) == 0
        assert await ended(children)


async def test_signal_during_loading_ends_all_processes_at_once(tmp_path):
    async with process(tmp_path, "0", "held", "2", until="Listening on") as (started, channel):
        children, probe = front_ends(started), health_pb2_grpc.HealthStub(channel)
        assert (await probe.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING
        started.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(started.wait(), 5) == 0
        assert await ended(children)


async def test_tokenizer_that_cannot_be_read_is_one_line(tmp_path):
    model = write_checkpoint(tmp_path, "BertModel")
    (tmp_path / "tokenizer.json").write_text("{}")
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        SERVER,
        model,
        "0",
        "",
        "2",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=SERVER.parents[2],
    )
    _, errors = await asyncio.wait_for(started.communicate(), 60)
    assert started.returncode == 1
    (line,) = errors.decode().splitlines()
    assert line.startswith(f"tei-grpc: `{tmp_path / 'tokenizer.json'}` cannot be read")
