"""A streaming RPC is its unary method under a window: messages run together, answers come out in request order."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from tei_grpc.rpc.context import Context, confirm_caller, stream_caller
from tei_grpc.rpc.room import MESSAGE_BYTES, Room, Rooms
from tei_grpc.types import Caller

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply")
Answer = Callable[[Request, Caller], Coroutine[Any, Any, Reply]]
Cost = Callable[[Request], int]  # bytes of the reply, at the most
Pending: TypeAlias = asyncio.Queue[Awaitable[Reply] | None]  # replies under way, in order


class Largest:
    """A cost for replies whose size only the model knows: that of the largest one so far."""

    def __init__(self, size: int = 0) -> None:
        """Begin with `size`."""
        self._size = size

    def __call__(self, _: object) -> int:
        """Return it, whatever the request."""
        return self._size

    def hear(self, reply: bytes) -> bytes:
        """Return `reply`, which may be larger than all before."""
        self._size = max(self._size, len(reply))
        return reply


async def answer_in_order(
    answer: Answer[Request, bytes], context: Context, *, rooms: Rooms, cost: Cost[Request]
) -> None:
    """Answer every message of a stream with `answer`, each as soon as it is ready and all earlier ones have left.

    No more messages are read and not yet answered than there is room for, by what `cost` says of each until it is
    answered; then nothing more is read, so that a client that sends without reading is stopped by HTTP/2 flow control.
    The first message that fails ends the stream with its error, after all earlier answers; what is still under way is
    cancelled, as it is when the client leaves.
    """
    with Room(rooms) as room:
        async with aclosing(_answers(answer, context, room, cost)) as replies:
            async for reply in replies:
                await context.write(reply)


async def collect_in_order(answer: Answer[Request, Reply], context: Context, *, rooms: Rooms) -> list[Reply]:
    """Answer every message of a stream that gets a single reply, in the same room; return when all are in."""
    with Room(rooms) as room:
        async with aclosing(_answers(answer, context, room, lambda _: 0)) as replies:
            collected = [reply async for reply in replies]
    if not collected:
        await confirm_caller(context)
    return collected


async def _answers(
    answer: Answer[Request, Reply], context: Context, room: Room, cost: Cost[Request]
) -> AsyncGenerator[Reply, None]:
    queue: Pending[Reply] = asyncio.Queue()
    reader = asyncio.create_task(_read(answer, context, queue, room, cost))
    try:
        while (pending := await queue.get()) is not None:
            reply = await pending
            yield reply
            room.give(_size(reply))
    finally:
        await _cancel(reader, queue)


async def _read(
    answer: Answer[Request, Reply], context: Context, queue: Pending[Reply], room: Room, cost: Cost[Request]
) -> None:
    """Start one task per message; a message that cannot be read fails at its place in the order."""
    caller = stream_caller(context)
    try:
        while True:
            await room.wait()
            if (request := await context.read()) is grpc.aio.EOF:
                break
            await room.take(size := MESSAGE_BYTES + request.ByteSize() + cost(request))
            queue.put_nowait(asyncio.create_task(_settled(answer, request, caller, room, size)))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(_failed(error))


async def _settled(answer: Answer[Request, Reply], request: Request, caller: Caller, room: Room, taken: int) -> Reply:
    reply = await answer(request, caller)
    room.settle(taken, _size(reply))
    return reply


def _size(reply: object) -> int:
    return MESSAGE_BYTES + (len(reply) if isinstance(reply, bytes) else 0)


def _failed(error: Exception) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


async def _cancel(reader: asyncio.Task[None], queue: Pending[Any]) -> None:
    """End the stream's tasks and wait until they are gone."""
    reader.cancel()
    tasks: list[asyncio.Future[Any]] = [reader]
    while not queue.empty():
        left = queue.get_nowait()
        if isinstance(left, asyncio.Future):
            left.cancel()
            tasks.append(left)
    await asyncio.gather(*tasks, return_exceptions=True)
