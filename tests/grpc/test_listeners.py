"""More than one address: further ones with `--listen`, and health checks on their own port."""

import asyncio
import os
import socket
import stat
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.errors import StartupError
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.grpc.conftest import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
EVERYTHING = health_pb2.HealthCheckRequest()


async def embed(address):
    async with grpc.aio.insecure_channel(address) as channel:
        return await tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="w0"))


@asynccontextmanager
async def with_health_port(serve, **options):
    """A server with a health port, and a channel to that port."""
    async with (
        serve(health_port=0, **options) as served,
        grpc.aio.insecure_channel(served.addresses.health[0].local) as channel,
    ):
        yield served, channel


@pytest.fixture
async def probed(serve):
    """A server with a health port, and a health stub on that port."""
    async with with_health_port(serve) as (served, channel):
        yield served, health_pb2_grpc.HealthStub(channel)


async def test_every_listener_serves(serve, tmp_path):
    path = tmp_path / "tei.sock"
    async with serve(listen=("127.0.0.1:0", f"unix:{path}")) as served:
        addresses = [address.local for address in served.addresses.serving]
        assert len(set(addresses)) == 3
        assert addresses[2] == f"unix:{path}"
        for address in addresses:
            assert (await embed(address)).embeddings
    assert not path.exists()


async def test_listener_that_is_taken_is_named_and_nothing_is_bound(serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"`--listen` {taken} is in use"):
            async with serve(uds_listen=tmp_path / "tei.sock", listen=(taken,)):
                pass
    assert not (tmp_path / "tei.sock").exists()


async def test_unix_socket_asked_for_twice_is_refused(serve, tmp_path):
    path = tmp_path / "tei.sock"
    with pytest.raises(StartupError, match=f"`--listen` unix:{path} is in use"):
        async with serve(uds_listen=path, listen=(f"unix:{path}",)):
            pass


async def test_unix_socket_is_its_owners(serve, tmp_path):
    before = os.umask(0o022)
    try:
        async with serve(uds_listen=tmp_path / "tei.sock"):
            assert stat.S_IMODE((tmp_path / "tei.sock").stat().st_mode) == 0o755  # to connect takes the right to write
    finally:
        os.umask(before)


async def test_health_port_that_is_taken_is_named(serve):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"`--health-port` {port} on `--hostname` 127.0.0.1 is in use"):
            async with serve(health_port=port):
                pass


async def test_health_port_answers_checks(probed):
    _, probe = probed
    assert (await probe.Check(EVERYTHING)).status == SERVING
    assert (await probe.Check(health_pb2.HealthCheckRequest(service="tei.v1.Rerank"))).status == NOT_SERVING


@pytest.mark.parametrize(
    "path",
    ["/tei.v1.Info/Info", "/tei.v1.Embed/EmbedStream", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"],
)
async def test_health_port_answers_nothing_else(serve, path):
    async with with_health_port(serve) as (_, channel):
        call = channel.stream_stream(path)()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_port_answers_while_the_model_loads(serve):
    async with with_health_port(serve, load=False) as (_, channel):
        assert (await health_pb2_grpc.HealthStub(channel).Check(EVERYTHING)).status == NOT_SERVING


async def test_watch_turns_on_both_ports(probed):
    served, probe = probed
    watches = [probe.Watch(EVERYTHING), health_pb2_grpc.HealthStub(served.channel).Watch(EVERYTHING)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    served.engine._follow_device(False)
    for watch in watches:
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING


async def test_health_port_says_not_serving_until_the_last_call_is_done(serve):
    async with with_health_port(serve, shutdown_grace=20) as (served, channel):
        probe = health_pb2_grpc.HealthStub(channel)
        watch = probe.Watch(EVERYTHING)
        assert (await watch.read()).status == SERVING
        served.runner.gate.clear()
        held = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        await asyncio.to_thread(served.runner.running.wait)
        stopping = asyncio.create_task(served.server.stop())
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert (await probe.Check(EVERYTHING)).status == NOT_SERVING
        served.runner.gate.set()
        assert await held.code() is grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 10)
        assert await probe.Check(EVERYTHING, timeout=5).code() is grpc.StatusCode.UNAVAILABLE


async def test_probe_that_sends_nothing_does_not_hold_the_server_up(serve):
    async with with_health_port(serve, shutdown_grace=0.1) as (served, channel):
        silent = channel.stream_stream("/grpc.health.v1.Health/Check")()
        await until(lambda: len(served.server._calls) == 1)
        await asyncio.wait_for(served.server.stop(), 10)
        assert await silent.code() is grpc.StatusCode.UNAVAILABLE
