"""What one client can take at the most: connections, calls, metadata, pings, and time to say what it wants."""

import asyncio
import struct

import grpc
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc

Code = grpc.StatusCode

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ENHANCE_YOUR_CALM = 11
FRAME_HEADER = 9
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def request():
    return tei_pb2.EmbedRequest(inputs="w0")


def frame(kind, payload=b""):
    """A frame of HTTP/2 (RFC 9113, 4.1), of the connection as a whole."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, 0, 0) + payload


async def read_frame(reader):
    header = await reader.readexactly(FRAME_HEADER)
    return header[3], await reader.readexactly(int.from_bytes(header[:3]))


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
    assert int.from_bytes(found[1][4:8]) == ENHANCE_YOUR_CALM
    writer.close()


@pytest.mark.slow
async def test_client_that_never_says_anything_is_sent_away(served):
    host, port = served.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        while await reader.read(100):
            pass
    writer.close()
