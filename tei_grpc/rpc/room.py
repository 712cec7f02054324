"""Owns how much the messages of streams may take while they wait, for the engine or for clients that do not read."""

import asyncio
import math
from typing import Self

# Of the messages of all streams of a server, beside one of each: what does not fit stays with the clients, whom HTTP/2
# flow control stops. The half of it that a stream alone may hold is several batches of vectors per token.
ALL_BYTES = 128 << 20
LEAST_BYTES = 64 << 10  # that each stream may hold in any case, so that a few short messages share a batch
MESSAGE_BYTES = 4 << 10  # a message beside its request and its reply, in flight: task, futures, token ids


class Rooms:
    """What all streams of a server have room for: each may hold as much as is left free.

    So one that fills its room holds half of ALL_BYTES, two hold a third each, and so on, and there is always some left
    for the next (dynamic thresholds, Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
    """

    def __init__(self, window: int) -> None:
        self.window = window  # messages of one stream
        self.free = ALL_BYTES
        self._waiting: dict[Room, int] = {}  # how much must be free before they can go on
        self._least = math.inf  # no more than any of these

    def wait(self, room: "Room", needed: int) -> None:
        """Wake `room` once `needed` bytes are free."""
        self._waiting[room] = needed
        self._least = min(self._least, needed)

    def forget(self, room: "Room") -> None:
        """It waits no longer."""
        self._waiting.pop(room, None)

    def take(self, size: int) -> None:
        """Bytes that are held from now on; negative: that are not any more."""
        self.free -= size
        if self.free >= self._least:
            self._wake()

    def _wake(self) -> None:
        for room in [room for room, needed in self._waiting.items() if needed <= self.free]:
            del self._waiting[room]
            room.wake()
        self._least = min(self._waiting.values(), default=math.inf)


class Room:
    """The messages of one stream. One may always be under way, however large, and whatever others hold."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._slots = asyncio.Semaphore(rooms.window)
        self._held = 0
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give everything back: the stream has ended."""
        self._hold(-self._held)

    async def wait(self) -> None:
        """Take a message's place."""
        await self._slots.acquire()

    async def take(self, size: int) -> None:
        """Take the bytes of a message: at the most, until its reply is there."""
        while self._held and self._held + size > max(LEAST_BYTES, self._rooms.free):
            await self._wait(self._held + size)
        self._hold(size)

    def settle(self, taken: int, size: int) -> None:
        """Give back what a message that had `taken` its bytes does not need: its reply is there, and it has `size`."""
        self._hold(size - taken)

    def give(self, size: int) -> None:
        """Give back bytes and place: the reply has left."""
        self._hold(-size)
        self._slots.release()

    def wake(self) -> None:
        """There is more room than there was."""
        self._changed.set()

    def _hold(self, more: int) -> None:
        self._held += more
        self._rooms.take(more)
        if more < 0:
            self._changed.set()

    async def _wait(self, needed: int) -> None:
        self._changed.clear()
        self._rooms.wait(self, needed)
        try:
            await self._changed.wait()
        finally:
            self._rooms.forget(self)
