"""What one client can take at the most: connections, calls, metadata, pings, and time to say what it wants."""

import asyncio

import grpc
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.serve import grpc_server
from tests.http2 import ENHANCE_YOUR_CALM, GOAWAY, PING, PREFACE, SETTINGS, error_of, frame, read_frame

Code = grpc.StatusCode

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def request():
    return tei_pb2.EmbedRequest(inputs="w0")


async def test_connection_over_the_limit_is_refused_until_another_has_gone(serve):
    async with serve(max_connections=1) as served:
        assert await served.embed.Embed(request()).code() is Code.OK
        async with grpc.aio.insecure_channel(served.address, OWN_CONNECTION) as second:
            assert await tei_pb2_grpc.EmbedStub(second).Embed(request(), timeout=20).code() is Code.UNAVAILABLE
            await served.channel.close()
            waiting = tei_pb2_grpc.EmbedStub(second).Embed(request(), timeout=20, wait_for_ready=True)
            assert await waiting.code() is Code.OK


async def test_health_port_does_not_count_connections(serve):
    async with serve(max_connections=1, health_port=0) as served:
        assert await served.embed.Embed(request()).code() is Code.OK
        for _ in range(2):
            async with grpc.aio.insecure_channel(served.addresses.health[0].local, OWN_CONNECTION) as channel:
                assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=20)


async def test_call_over_the_limit_of_its_connection_waits_for_another_to_end(serve):
    async with serve(max_connection_streams=1) as served:
        assert await served.embed.Embed(request()).code() is Code.OK  # now the client knows the limit
        first = served.embed.EmbedStream()
        await first.write(request())
        await first.read()
        second = served.embed.Embed(request(), timeout=20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(second.code()), 0.2)
        await first.done_writing()
        assert await second.code() is Code.OK


async def test_metadata_over_16_kib_is_refused(served):
    call = served.embed.Embed(request(), metadata=(("x-much", "x" * 17_000),))
    assert await call.code() is Code.RESOURCE_EXHAUSTED
    assert await served.embed.Embed(request()).code() is Code.OK


async def test_client_that_pings_without_end_is_sent_away(served):
    host, port = served.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS) + frame(PING, bytes(8)) * 10)
    async with asyncio.timeout(10):
        while (found := await read_frame(reader))[0] != GOAWAY:
            pass
    assert error_of(found[1]) == ENHANCE_YOUR_CALM
    writer.close()


async def test_client_that_never_says_anything_is_sent_away(serve, monkeypatch):
    transport = dict(grpc_server.TRANSPORT)
    assert transport["grpc.server_handshake_timeout_ms"] == 20_000  # gRPC's own limit is two minutes
    transport["grpc.server_handshake_timeout_ms"] = 200
    monkeypatch.setattr(grpc_server, "TRANSPORT", tuple(transport.items()))
    async with serve() as served:
        host, port = served.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(15):
            while await reader.read(100):
                pass
        writer.close()
