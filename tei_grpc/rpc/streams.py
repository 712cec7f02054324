"""A streaming RPC is its unary method under a window: messages run together, answers come out in request order."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from tei_grpc.rpc.context import Context, stream_caller
from tei_grpc.types import Caller

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Answer = Callable[[Request, Caller], Coroutine[Any, Any, Reply]]
Pending = asyncio.Queue[Awaitable[Reply] | None]


async def answer_in_order(answer: Answer[Request, Reply], context: Context, *, window: int) -> None:
    """Answer every message of a stream with `answer`, each as soon as it is ready and all earlier ones have left.

    At most `window` messages are read and not yet answered; then nothing more is read, so that a client that sends
    without reading is stopped by HTTP/2 flow control. The first message that fails ends the stream with its error,
    after all earlier answers; what is still under way is cancelled, as it is when the client leaves.
    """
    async with aclosing(_answers(answer, context, window)) as replies:
        async for reply in replies:
            await context.write(reply)


async def collect_in_order(answer: Answer[Request, Reply], context: Context, *, window: int) -> list[Reply]:
    """Answer every message of a stream that gets a single reply, under the same window; return when all are in."""
    async with aclosing(_answers(answer, context, window)) as replies:
        return [reply async for reply in replies]


async def _answers(answer: Answer[Request, Reply], context: Context, window: int) -> AsyncGenerator[Reply, None]:
    pending: Pending[Reply] = asyncio.Queue()
    slots = asyncio.Semaphore(window)
    reader = asyncio.create_task(_read(answer, context, pending, slots))
    try:
        while (reply := await pending.get()) is not None:
            yield await reply
            slots.release()
    finally:
        await _cancel(reader, pending)


async def _read(
    answer: Answer[Request, Reply], context: Context, pending: Pending[Reply], slots: asyncio.Semaphore
) -> None:
    """Start one task per message; a message that cannot be read fails at its place in the order."""
    caller = stream_caller(context)
    try:
        while True:
            await slots.acquire()
            if (request := await context.read()) is grpc.aio.EOF:
                break
            pending.put_nowait(asyncio.create_task(answer(request, caller)))
        pending.put_nowait(None)
    except Exception as error:
        pending.put_nowait(_failed(error))


def _failed(error: Exception) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


async def _cancel(reader: asyncio.Task[None], pending: Pending[Reply]) -> None:
    """End the stream's tasks and wait until they are gone."""
    reader.cancel()
    tasks: list[asyncio.Future[Any]] = [reader]
    while not pending.empty():
        if isinstance(left := pending.get_nowait(), asyncio.Future):
            left.cancel()
            tasks.append(left)
    await asyncio.gather(*tasks, return_exceptions=True)
