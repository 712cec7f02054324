"""Owns how the operations of grpc.aio start and end: in few batches, and so that what they hold is freed.

Each batch is a write to the socket and a turn of the event loop. grpc.aio has one for a reply with the status behind
it, and another one for initial metadata, which `send_with_next` spares.

grpc.aio starts the operations of a call (receive a message, send a status) with buffers that it frees when the task
that waits for them goes on. It does not go on where it was cancelled or the operations failed, as with every client
that leaves early: a hundred bytes are lost then, or a whole message (https://github.com/grpc/grpc/issues/43360).
"""

import asyncio
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # types-grpcio lacks it

from tei_grpc.rpc.context import Context

# Versions 1.76 to 1.85 of grpcio lose them; older ones are not supported. With a newer one, tests say if it does.
LOSING: Final = range(76, 86)

Execute = Callable[[Any, tuple[Any, ...], Any], Coroutine[Any, Any, None]]


class Operations:
    """Operations of one call under way, in the place of the future and the loop that grpc.aio knows.

    grpc.aio's own coroutine, which frees them, waits for this future. It goes on in any case, and as if they had
    succeeded; who waits for `ended` may be cancelled.
    """

    __slots__ = ("_loop", "_steps", "ended")  # some are made for every call

    def __init__(self, call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> None:
        """Start them. Raises grpc.aio's error where that cannot be done."""
        self._loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        self._steps = _EXECUTE(call, operations, self).__await__()
        next(self._steps)

    def create_future(self) -> "Operations":
        """As the loop does."""
        return self

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: object) -> None:
        """Called on the loop that reads grpc.aio's events: that of the call, unless a process has several."""
        if get_running_loop() is self._loop:
            callback(*arguments)
        else:
            self._loop.call_soon_threadsafe(callback, *arguments)

    def __await__(self) -> Generator[None, None, None]:
        yield

    def cancelled(self) -> bool:
        """Never: grpc.aio would not say when a cancelled future's operations end."""
        return False

    def set_result(self, _: None) -> None:
        """The operations have succeeded."""
        self._end(None)

    def set_exception(self, error: Exception) -> None:
        """The operations have failed."""
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        try:
            next(self._steps, None)
        except Exception as raised:  # no memory for the message
            error = error or raised
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class Held:
    """Operations that the next ones of their task take along; who awaits them goes on at once."""

    __slots__ = ("is_open", "operations")

    def __init__(self) -> None:
        self.operations: tuple[Any, ...] = ()
        self.is_open = True

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


async def send_with_next(context: Context, metadata: tuple[tuple[str, str], ...]) -> None:
    """Send initial metadata in one go with what the current task sends next: a message or a status.

    A call that ends without either, as its caller has left, needs none. Where `take_over_operations` has changed
    nothing, they are sent at once.
    """
    held = Held()
    _held.set(held)
    try:
        await context.send_initial_metadata(metadata)
    finally:
        held.is_open = False


def take_over_operations() -> None:
    """Have grpc.aio start and end the operations of all calls of this process by this module, where it loses them."""
    major, minor, *_ = grpc.__version__.split(".")
    if major == "1" and int(minor) in LOSING and cygrpc.execute_batch is _EXECUTE:
        cygrpc.execute_batch = _execute


_EXECUTE: Final[Execute] = cygrpc.execute_batch
_held: ContextVar[Held | None] = ContextVar("held", default=None)


def _execute(call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> Awaitable[None]:
    """As grpc.aio's function of that name."""
    held = _held.get()
    if held is None:
        return Operations(call, operations, loop).ended
    if held.is_open:
        held.operations = operations
        return held
    operations, held.operations = held.operations + operations, ()
    return Operations(call, operations, loop).ended
