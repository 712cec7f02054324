"""A streaming RPC is its unary method under a window: messages run together, answers come out in request order."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

from tei_grpc.rpc.context import Context, confirm_caller, stream_caller
from tei_grpc.types import Caller

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Answer = Callable[[Request, Caller], Coroutine[Any, Any, Reply]]
Cost = Callable[[Request], int]  # bytes of the reply, at the most

REPLY_BYTES = 64 << 20  # of one stream's replies under way or waiting for a client that does not read them


class Pending(NamedTuple, Generic[Reply]):
    """A reply under way, in its place in the order."""

    reply: Awaitable[Reply]
    cost: int


class Room:
    """What is left of `window` messages and REPLY_BYTES. One message may always be under way, however large."""

    def __init__(self, window: int) -> None:
        self._slots = asyncio.Semaphore(window)
        self._bytes = 0
        self._freed = asyncio.Event()

    async def wait(self) -> None:
        """Take a message's place."""
        await self._slots.acquire()

    async def take(self, cost: int) -> None:
        """Take the bytes of its reply."""
        while self._bytes and self._bytes + cost > REPLY_BYTES:
            self._freed.clear()
            await self._freed.wait()
        self._bytes += cost

    def give(self, cost: int) -> None:
        """Give both back: the reply has left."""
        self._bytes -= cost
        self._freed.set()
        self._slots.release()


async def answer_in_order(
    answer: Answer[Request, Reply], context: Context, *, window: int, cost: Cost[Request] = lambda _: 0
) -> None:
    """Answer every message of a stream with `answer`, each as soon as it is ready and all earlier ones have left.

    At most `window` messages are read and not yet answered, and no more than fit REPLY_BYTES by what `cost` says of
    each; then nothing more is read, so that a client that sends without reading is stopped by HTTP/2 flow control.
    The first message that fails ends the stream with its error, after all earlier answers; what is still under way is
    cancelled, as it is when the client leaves.
    """
    async with aclosing(_answers(answer, context, Room(window), cost)) as replies:
        async for reply in replies:
            await context.write(reply)


async def collect_in_order(answer: Answer[Request, Reply], context: Context, *, window: int) -> list[Reply]:
    """Answer every message of a stream that gets a single reply, under the same window; return when all are in."""
    async with aclosing(_answers(answer, context, Room(window), lambda _: 0)) as replies:
        collected = [reply async for reply in replies]
    if not collected:
        await confirm_caller(context)
    return collected


async def _answers(
    answer: Answer[Request, Reply], context: Context, room: Room, cost: Cost[Request]
) -> AsyncGenerator[Reply, None]:
    queue: asyncio.Queue[Pending[Reply] | None] = asyncio.Queue()
    reader = asyncio.create_task(_read(answer, context, queue, room, cost))
    try:
        while (pending := await queue.get()) is not None:
            yield await pending.reply
            room.give(pending.cost)
    finally:
        await _cancel(reader, queue)


async def _read(
    answer: Answer[Request, Reply],
    context: Context,
    queue: asyncio.Queue[Pending[Reply] | None],
    room: Room,
    cost: Cost[Request],
) -> None:
    """Start one task per message; a message that cannot be read fails at its place in the order."""
    caller = stream_caller(context)
    try:
        while True:
            await room.wait()
            if (request := await context.read()) is grpc.aio.EOF:
                break
            await room.take(size := cost(request))
            queue.put_nowait(Pending(asyncio.create_task(answer(request, caller)), size))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(Pending(_failed(error), 0))


def _failed(error: Exception) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


async def _cancel(reader: asyncio.Task[None], queue: asyncio.Queue[Pending[Any] | None]) -> None:
    """End the stream's tasks and wait until they are gone."""
    reader.cancel()
    tasks: list[asyncio.Future[Any]] = [reader]
    while not queue.empty():
        left = queue.get_nowait()
        if left is not None and isinstance(left.reply, asyncio.Future):
            left.reply.cancel()
            tasks.append(left.reply)
    await asyncio.gather(*tasks, return_exceptions=True)
