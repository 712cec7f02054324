"""What grpc.aio holds for operations is freed, and their outcomes are as ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import psutil
import pytest

from tei_grpc.rpc.operations import send_with_next, take_over_operations

MESSAGE = bytes(200_000)
CALLS = 200
HELD = CALLS * len(MESSAGE)
HEADERS = (("x-cost", "7"),)

Handler = Callable[[object, grpc.aio.ServicerContext], Awaitable[None]]


@asynccontextmanager
async def serve(handler: Handler) -> AsyncIterator[str]:
    """A server with one method; its address."""
    take_over_operations()
    server = grpc.aio.server()
    methods = {"Call": grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def serve_one(handler: Handler) -> AsyncIterator[grpc.aio.StreamStreamMultiCallable]:
    """A server with one method, and that method on a client's side."""
    async with serve(handler) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel.stream_stream("/Test/Call")


def outcome(address: str) -> tuple[grpc.StatusCode, object]:
    """Code and initial metadata of a call, by gRPC's other client: grpc.aio's may take a status for the end of both."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream("/Test/Call")(iter(()))
        return call.code(), call.initial_metadata()


async def memory_after(calls: int, call: Callable[[], Awaitable[None]]) -> int:
    """Bytes more than before, once one call in twenty has set everything up."""
    for _ in range(calls // 20):
        await call()
    before = psutil.Process().memory_info().rss
    for _ in range(calls):
        await call()
    return psutil.Process().memory_info().rss - before


async def give_up_reading(_: object, context: grpc.aio.ServicerContext) -> None:
    """Wait for a message no longer, then for the one behind it; until then there seems to be none."""
    read = asyncio.create_task(context.read())
    await asyncio.sleep(0)
    read.cancel()
    await asyncio.wait([read])
    assert read.cancelled()
    await context.write(b"go on")
    async with asyncio.timeout(30):
        while await context.read() != b"end":
            await asyncio.sleep(0.001)


async def test_message_that_nobody_waits_for_any_more_is_freed():
    async with serve_one(give_up_reading) as method:

        async def call() -> None:
            stream = method()
            assert await stream.read() == b"go on"
            await stream.write(MESSAGE)
            await stream.write(b"end")
            assert await stream.code() is grpc.StatusCode.OK

        assert await memory_after(CALLS, call) < HELD / 2


async def test_message_to_a_client_that_has_left_fails():
    failed = asyncio.Event()

    async def write(_: object, context: grpc.aio.ServicerContext) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with pytest.raises(grpc.aio.InternalError):
            await context.write(b"too late")
        failed.set()

    async with serve_one(write) as method:
        stream = method()
        await stream.wait_for_connection()
        stream.cancel()
        async with asyncio.timeout(10):
            await failed.wait()


def send_at_once(context: grpc.aio.ServicerContext) -> None:
    """Send initial metadata without waiting for anything, not even a turn of the event loop."""
    with pytest.raises(StopIteration):
        send_with_next(context, HEADERS).send(None)


async def test_initial_metadata_travels_with_the_message():
    async def answer(_: object, context: grpc.aio.ServicerContext) -> None:
        send_at_once(context)
        await context.write(b"reply")
        await context.write(b"another")

    async with serve_one(answer) as method:
        call = method()
        assert [await call.read(), await call.read()] == [b"reply", b"another"]
        assert tuple(await call.initial_metadata()) == HEADERS
        assert await call.code() is grpc.StatusCode.OK


async def test_initial_metadata_travels_with_the_status_of_a_call_that_fails_after_all():
    async def fail(_: object, context: grpc.aio.ServicerContext) -> None:
        send_at_once(context)
        await context.abort(grpc.StatusCode.INTERNAL, "no reply")

    async with serve(fail) as address:
        assert await asyncio.to_thread(outcome, address) == (grpc.StatusCode.INTERNAL, HEADERS)


async def test_initial_metadata_that_cannot_be_sent_holds_nothing_back():
    async def send_twice(_: object, context: grpc.aio.ServicerContext) -> None:
        send_at_once(context)
        await context.write(b"reply")
        with pytest.raises(grpc.aio.UsageError):
            await send_with_next(context, HEADERS)
        await context.write(b"another")

    async with serve_one(send_twice) as method:
        call = method()
        assert [await call.read(), await call.read()] == [b"reply", b"another"]
        assert await call.code() is grpc.StatusCode.OK
