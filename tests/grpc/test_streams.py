import asyncio
import gc
from contextlib import suppress

import grpc
import psutil
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.rpc import room
from tests.grpc.conftest import until

OK = grpc.StatusCode.OK


def embed_request(text):
    return tei_pb2.EmbedRequest(inputs=text, normalize=False)


async def send(messages):
    for message in messages:
        yield message


async def collect(call):
    """All replies, then the status."""
    replies = []
    try:
        async for reply in call:
            replies.append(reply)
    except grpc.aio.AioRpcError:
        pass
    return replies, await call.code()


async def test_answers_keep_the_order_of_the_messages(served):
    texts = [" ".join(["w1"] * (1 + 7 * i % 40)) for i in range(2000)]
    replies, code = await collect(served.embed.EmbedStream(send(map(embed_request, texts))))
    assert code is OK
    assert [reply.embeddings[0] for reply in replies] == [2 + len(text.split()) for text in texts]


async def test_messages_of_one_stream_share_batches(served):
    served.runner.gate.clear()
    call = served.embed.EmbedStream(send([embed_request("w0")] * 50))
    await asyncio.to_thread(served.runner.running.wait)
    await until(lambda: served.device.waiting + len(served.runner.batches[0]) == 50)
    served.runner.gate.set()
    replies, _ = await collect(call)
    assert len(replies) == 50
    assert len(served.runner.batches) <= 2


async def write_all(served, *texts):
    """A stream with all messages written before any is answered: grpc's client reports writes that come too late."""
    served.runner.gate.clear()
    call = served.embed.EmbedStream()
    for text in texts:
        await call.write(embed_request(text))
    served.runner.gate.set()
    return call


async def test_bad_message_ends_the_stream_after_the_earlier_answers(served):
    call = await write_all(served, "w0", "w1", "", "w2")
    replies, code = await collect(call)
    assert [reply.embeddings[3] for reply in replies] == [4, 5]
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == "Input validation error: `inputs` cannot be empty"


async def test_messages_after_the_failed_one_are_dropped(served):
    call = await write_all(served, "w0", "", "w1", "w2")
    _, code = await collect(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert served.device.free_permits == served.engine.config.max_concurrent_requests


async def test_answers_come_before_the_client_half_closes(served):
    call = served.embed.EmbedStream()
    for text in ("w0", "w1", "w2"):
        await call.write(embed_request(text))
    replies = [await asyncio.wait_for(call.read(), 10) for _ in range(3)]
    assert [reply.embeddings[3] for reply in replies] == [4, 5, 6]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is OK


@pytest.mark.parametrize(
    ("service", "method"),
    [
        ("Embed", "EmbedStream"),
        ("Embed", "EmbedAllStream"),
        ("Embed", "EmbedSparseStream"),
        ("Predict", "PredictStream"),
        ("Predict", "PredictPairStream"),
        ("Tokenize", "TokenizeStream"),
        ("Tokenize", "DecodeStream"),
    ],
)
async def test_no_messages_means_no_answers(served, service, method):
    stub = getattr(tei_pb2_grpc, f"{service}Stub")(served.channel)
    assert await collect(getattr(stub, method)(send([]))) == ([], OK)


async def test_undecodable_message_fails_at_its_place(served):
    call = served.channel.stream_stream("/tei.v1.Embed/EmbedStream")
    messages = [embed_request("w0").SerializeToString(), b"\xff\xff", embed_request("w1").SerializeToString()]
    stream = call(send(messages))
    replies, code = await collect(stream)
    assert len(replies) == 1
    assert (code, await stream.details()) == (grpc.StatusCode.INTERNAL, "Request could not be decoded")


async def test_client_that_leaves_takes_its_messages_along(served):
    served.runner.gate.clear()
    call = served.embed.EmbedStream()
    for _ in range(20):
        await call.write(embed_request("w0"))
    await asyncio.to_thread(served.runner.running.wait)
    call.cancel()
    served.runner.gate.set()
    limit = served.engine.config.max_concurrent_requests
    await until(lambda: served.device.free_permits == limit)
    assert served.device.waiting == 0


async def test_window_bounds_what_is_read_and_not_answered(serve):
    async with serve(grpc_max_parallel_stream_requests=4) as served:
        served.runner.gate.clear()
        call = served.embed.EmbedStream(send([embed_request("w0")] * 40))
        await asyncio.to_thread(served.runner.running.wait)
        unary = await served.embed.EmbedStream(send([])).code()  # the server has had time to read on
        limit = served.engine.config.max_concurrent_requests
        assert unary is OK
        assert limit - served.device.free_permits <= 4
        served.runner.gate.set()
        replies, code = await collect(call)
        assert (len(replies), code) == (40, OK)


async def test_client_that_never_reads_is_stopped(serve):
    """64 KiB replies against a client that takes none: flow control must stop the reading of requests."""
    async with serve(grpc_max_parallel_stream_requests=16) as served:
        text = " ".join(["w0"] * 500)
        request = tei_pb2.EmbedAllRequest(inputs=text)
        call = served.channel.stream_stream(
            "/tei.v1.Embed/EmbedAllStream", request_serializer=tei_pb2.EmbedAllRequest.SerializeToString
        )()
        sent = 0
        try:
            async with asyncio.timeout(0.5):
                while sent < 20000:
                    await call.write(request)
                    sent += 1
        except TimeoutError:
            pass
        call.cancel()
        served_entries = sum(map(len, served.runner.batches))
        assert sent < 20000
        assert served_entries < sent


ROOM = 2**20  # bytes for the messages of all streams
STALLED = 5


@pytest.fixture
async def stalled(monkeypatch, serve):
    """A server with streams whose clients write on and on, and read nothing."""
    monkeypatch.setattr(room, "ALL_BYTES", ROOM)
    async with serve() as served, asyncio.TaskGroup() as group:
        served.calls = [served.channel.stream_stream("/tei.v1.Embed/EmbedAllStream")() for _ in range(STALLED)]
        writers = [group.create_task(write_on(call)) for call in served.calls]
        await until(lambda: len(served.server._rooms._waiting) == STALLED)
        yield served
        for each in (*writers, *served.calls):
            each.cancel()


async def write_on(call):
    request = tei_pb2.EmbedAllRequest(inputs="w0 " * 500).SerializeToString()
    with suppress(asyncio.InvalidStateError):  # the call has ended
        while True:
            await call.write(request)


async def test_streams_that_nobody_reads_hold_no_more_than_there_is_room_for(stalled):
    assert stalled.server._rooms.free >= 0


async def test_other_streams_go_on_beside_those_that_nobody_reads(stalled):
    requests = [embed_request(f"w{number % 200}") for number in range(500)]
    replies, code = await collect(stalled.embed.EmbedStream(send(requests)))
    assert (len(replies), code) == (500, OK)


async def test_streams_that_end_give_their_room_back(stalled):
    for call in stalled.calls:
        call.cancel()
    await until(lambda: stalled.server._rooms.free == ROOM)


async def test_many_messages_do_not_grow_the_server(served):
    await collect(served.embed.EmbedStream(send([embed_request("w0 w1")] * 500)))
    gc.collect()
    before = psutil.Process().memory_info().rss
    texts = (embed_request(" ".join(["w1"] * (1 + i % 8))) for i in range(10_000))
    count = 0
    async for _ in served.embed.EmbedStream(send(texts)):
        count += 1
    assert count == 10_000
    assert psutil.Process().memory_info().rss - before < 50 * 2**20


async def test_rerank_stream_is_refused_before_anything_is_sent(served):
    call = tei_pb2_grpc.RerankStub(served.channel).RerankStream()
    assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.FAILED_PRECONDITION
    assert await call.details() == "model is not a classifier model"
