"""The life of a connection: its age, its pings, messages that are too large or compressed."""

import asyncio

import grpc
import pytest

from tei_grpc.pb import tei_pb2

READY = grpc.ChannelConnectivity.READY
IDLE = grpc.ChannelConnectivity.IDLE
Code = grpc.StatusCode


def request(text="w0"):
    return tei_pb2.EmbedRequest(inputs=text)


async def left_ready(channel):
    """Wait until the connection is given up; the next call makes a new one."""
    state = channel.get_state()
    while state is READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state()
    return state


async def test_old_connection_is_given_up_and_the_next_call_makes_a_new_one(serve):
    async with serve(max_connection_age=0.2) as served:
        await served.embed.Embed(request())
        async with asyncio.timeout(10):
            assert await left_ready(served.channel) is IDLE
        assert await served.embed.Embed(request()).code() is Code.OK


async def test_call_on_an_old_connection_finishes(serve):
    async with serve(max_connection_age=0.1) as served:
        await served.embed.Embed(request())
        served.runner.gate.clear()
        held = served.embed.Embed(request())
        async with asyncio.timeout(10):
            await left_ready(served.channel)
        assert not held.done()
        served.runner.gate.set()
        assert await held.code() is Code.OK


async def test_call_on_an_old_connection_is_cut_after_the_grace(serve):
    async with serve(max_connection_age=0.1, max_connection_age_grace=0.1) as served:
        served.runner.gate.clear()
        held = served.embed.Embed(request())
        assert await asyncio.wait_for(held.code(), 10) is Code.UNAVAILABLE
        served.runner.gate.set()


async def test_connection_without_a_limit_stays(serve):
    async with serve() as served:
        await served.embed.Embed(request())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(left_ready(served.channel), 0.5)


@pytest.mark.slow
async def test_pings_every_5_seconds_are_welcome_without_calls(serve):
    options = [
        ("grpc.keepalive_time_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with serve() as served, grpc.aio.insecure_channel(served.address, options=options) as channel:
        call = channel.unary_unary("/tei.v1.Info/Info")
        await call(b"")
        with pytest.raises(TimeoutError):  # the third ping too many would end the connection
            await asyncio.wait_for(left_ready(channel), 23)


async def test_calls_of_a_burst_are_answered_or_told_to_come_back_later(serve):
    async with serve(max_concurrent_requests=500) as served:
        served.runner.gate.clear()
        calls = [served.embed.Embed(request()) for _ in range(2000)]
        refused = asyncio.as_completed([call.code() for call in calls])
        async with asyncio.timeout(30):
            assert {await next(refused) for _ in range(1500)} == {Code.RESOURCE_EXHAUSTED}
            served.runner.gate.set()
            assert {await code for code in refused} == {Code.OK}


async def test_oversize_request_leaves_other_calls_on_its_connection_alone(serve):
    async with serve(max_recv_message_size=1000) as served:
        served.runner.gate.clear()
        held = served.embed.Embed(request())
        await asyncio.to_thread(served.runner.running.wait)
        assert await served.embed.Embed(request("w0 " * 500)).code() is Code.RESOURCE_EXHAUSTED
        assert served.channel.get_state() is READY
        served.runner.gate.set()
        assert await held.code() is Code.OK


@pytest.mark.parametrize("method", ["EmbedAll", "EmbedAllStream"])
async def test_oversize_reply_ends_its_call_only(serve, method):
    async with serve(max_send_message_size=1000) as served:
        call = served.channel.stream_stream(f"/tei.v1.Embed/{method}")()
        await call.write(tei_pb2.EmbedAllRequest(inputs="w0 " * 100).SerializeToString())
        await call.done_writing()
        assert await asyncio.wait_for(call.code(), 10) is Code.RESOURCE_EXHAUSTED
        assert await served.embed.Embed(request()).code() is Code.OK
        assert served.device.free_permits == served.engine.config.max_concurrent_requests


async def test_request_that_grows_over_the_limit_when_decompressed_is_refused(serve):
    async with serve(max_recv_message_size=1000) as served:
        call = served.embed.Embed(request("w0 " * 500), compression=grpc.Compression.Gzip)
        assert await call.code() is Code.RESOURCE_EXHAUSTED


async def test_compressed_stream_is_accepted(served):
    call = served.embed.EmbedStream(compression=grpc.Compression.Gzip)
    await call.write(request("w0 " * 100))
    await call.done_writing()
    assert (await call.read()).metadata.compute_tokens == 102
