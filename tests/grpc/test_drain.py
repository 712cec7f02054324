import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.types import State
from tests.grpc.conftest import until, write_checkpoint

Code = grpc.StatusCode
SERVER = Path(__file__).with_name("fake_server.py")


def embed_request(text="w0"):
    return tei_pb2.EmbedRequest(inputs=text)


async def test_calls_under_way_finish(serve):
    async with serve(shutdown_grace=20) as served:
        served.runner.gate.clear()
        calls = [served.embed.Embed(embed_request()) for _ in range(50)]
        await asyncio.to_thread(served.runner.running.wait)
        await until(lambda: served.device.free_permits == served.engine.config.max_concurrent_requests - 50)
        stopping = asyncio.create_task(served.server.stop())
        await until(lambda: served.engine.state is State.DRAINING)
        served.runner.gate.set()
        assert {await call.code() for call in calls} == {Code.OK}
        await asyncio.wait_for(stopping, 5)


async def test_calls_that_have_arrived_finish(serve):
    async with serve(shutdown_grace=20) as served:
        assert (await served.embed.Embed(embed_request())).embeddings
        calls = [served.embed.Embed(embed_request()) for _ in range(200)]
        probe = health_pb2_grpc.HealthStub(served.channel)
        await probe.Check(health_pb2.HealthCheckRequest())  # gRPC has all of them, and hands over one by one
        await asyncio.wait_for(served.server.stop(), 10)
        assert {await call.code() for call in calls} == {Code.OK}


async def test_messages_received_on_a_stream_finish(serve):
    async with serve(shutdown_grace=1) as served:
        served.runner.gate.clear()
        call = served.embed.EmbedStream()
        for _ in range(10):
            await call.write(embed_request())
        await until(lambda: served.device.free_permits == served.engine.config.max_concurrent_requests - 10)
        stopping = asyncio.create_task(served.server.stop())
        await until(lambda: served.engine.state is State.DRAINING)
        served.runner.gate.set()
        for _ in range(10):
            assert (await asyncio.wait_for(call.read(), 5)).embeddings
        await call.done_writing()
        assert await call.code() is Code.OK
        await asyncio.wait_for(stopping, 5)


async def test_calls_beyond_the_grace_are_cut(serve):
    async with serve(shutdown_grace=0.2) as served:
        served.runner.gate.clear()
        unary, idle = served.embed.Embed(embed_request()), served.embed.EmbedStream()
        await idle.write(embed_request())
        await asyncio.to_thread(served.runner.running.wait)
        stopping = asyncio.create_task(served.server.stop())
        for call in (unary, idle):
            assert await asyncio.wait_for(call.code(), 10) is Code.UNAVAILABLE
            assert await call.details() == "The server is shutting down"
        served.runner.gate.set()
        await asyncio.wait_for(stopping, 10)


async def test_new_calls_are_refused_while_others_finish(serve):
    async with serve(shutdown_grace=20) as served:
        served.runner.gate.clear()
        held = served.embed.Embed(embed_request())
        await asyncio.to_thread(served.runner.running.wait)
        stopping = asyncio.create_task(served.server.stop())
        while (state := served.channel.get_state()) is grpc.ChannelConnectivity.READY:
            await asyncio.wait_for(served.channel.wait_for_state_change(state), 10)
        assert await served.embed.Embed(embed_request(), timeout=5).code() is Code.UNAVAILABLE
        served.runner.gate.set()
        assert await held.code() is Code.OK
        await asyncio.wait_for(stopping, 10)


async def test_delay_goes_on_serving_with_health_down(serve):
    async with serve(shutdown_delay=0.5) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(served.server.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await served.embed.Embed(embed_request()).code() is Code.OK
        await asyncio.wait_for(stopping, 10)


async def test_watch_goes_on_through_the_delay(serve):
    async with serve(shutdown_delay=0.3) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        stopping = asyncio.create_task(served.server.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert served.engine.state is State.SERVING
        assert await asyncio.wait_for(watch.read(), 10) is grpc.aio.EOF
        assert served.engine.state is State.DRAINING
        await asyncio.wait_for(stopping, 10)


@asynccontextmanager
async def process(folder, *arguments, until):
    """A server in a process of its own that has logged `until`, and a channel to it."""
    model = write_checkpoint(folder, "BertModel")
    started = await asyncio.create_subprocess_exec(
        sys.executable, SERVER, model, *arguments, stdout=asyncio.subprocess.PIPE, cwd=SERVER.parents[2]
    )
    line = ""
    async with asyncio.timeout(60):
        while until not in line:
            line = (await started.stdout.readline()).decode()
            assert line, "the server ended"
    address = next(word.rstrip(".,") for word in line.split() if word.startswith("127.0.0.1:"))
    async with grpc.aio.insecure_channel(address) as channel:
        yield started, channel
    if started.returncode is None:
        started.kill()
    await started.communicate()


@pytest.fixture
async def serving(tmp_path):
    async with process(tmp_path, until="Serving on") as started:
        yield started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_first_signal_ends_with_exit_code_0(serving, number):
    started, _ = serving
    started.send_signal(number)
    assert await asyncio.wait_for(started.wait(), 20) == 0


async def test_second_signal_ends_at_once(serving):
    started, channel = serving
    call = channel.stream_stream("/tei.v1.Embed/EmbedStream")()
    await call.write(embed_request().SerializeToString())
    assert await call.read() is not grpc.aio.EOF
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    started.send_signal(signal.SIGTERM)
    assert (await asyncio.wait_for(watch.read(), 10)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    started.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(started.wait(), 5) == 128 + signal.SIGTERM


async def test_failed_loading_is_one_line_and_frees_the_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "config.json").write_text("{}")
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        SERVER,
        tmp_path,
        str(port),
        stderr=asyncio.subprocess.PIPE,
        cwd=SERVER.parents[2],
        env=os.environ,
    )
    _, errors = await asyncio.wait_for(started.communicate(), 60)
    assert started.returncode == 1
    assert b"Traceback" not in errors
    socket.create_server(("127.0.0.1", port)).close()


async def test_signal_during_loading_ends_at_once(tmp_path):
    async with process(tmp_path, "0", "held", until="Listening on") as (started, channel):
        probe = health_pb2_grpc.HealthStub(channel)
        assert (await probe.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
        started.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(started.wait(), 5) == 0


async def test_server_whose_model_hangs_ends_without_a_crash(tmp_path):
    async with process(tmp_path, "0", "busy", until="Serving on") as (started, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tei_pb2_grpc.EmbedStub(channel).Embed(embed_request(), timeout=30)
        assert caught.value.code() is Code.INTERNAL
        started.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(started.wait(), 30) == 1
