"""What waits for the device: permits for requests (event loop), and the first-in-first-out queue of entries."""

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import NamedTuple

from tei_grpc.engine.batch import fill
from tei_grpc.errors import OverloadedError
from tei_grpc.types import Entry


class Admission:
    """One semaphore of permits, for use on the event loop.

    Callers that do not wait fail at once when none is free. Callers that wait are served in order, and leave the last
    quarter of the permits to the others, so that streams cannot starve unary calls.
    """

    def __init__(self, permits: int) -> None:
        self.permits = permits
        self.free = permits
        self._reserved = permits // 4
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def in_use(self) -> int:
        """Permits that are taken."""
        return self.permits - self.free

    def admit(self, *, waits: bool) -> Awaitable[None] | None:
        """Take a permit now (None), or by awaiting the returned object. Raises OverloadedError."""
        if not waits:
            if self.free == 0:
                raise OverloadedError
            self.free -= 1
            return None
        if self.free > self._reserved and not self._waiting:
            self.free -= 1
            return None
        return self._wait()

    @asynccontextmanager
    async def permit(self, *, waits: bool) -> AsyncIterator[None]:
        """Hold a permit while the block runs. Raises OverloadedError."""
        turn = self.admit(waits=waits)
        if turn is not None:
            await turn
        try:
            yield
        finally:
            self.release()

    async def _wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the permit had been handed over already
                self.release()
            elif turn in self._waiting:  # else `release` has skipped it in the meantime
                self._waiting.remove(turn)
            raise

    def release(self) -> None:
        """Give a permit back; the first waiter, if any may go, gets it."""
        self.free += 1
        while self._waiting and self.free > self._reserved:
            turn = self._waiting.popleft()
            if not turn.done():
                self.free -= 1
                turn.set_result(None)


class Taken(NamedTuple):
    """What leaves the queue at once: entries to run, and entries whose deadline has passed."""

    batch: list[Entry]
    expired: list[Entry]


ANY = sys.maxsize


class Size(NamedTuple):
    """Of a batch, in tokens."""

    least: int  # that must wait for it, together
    most: int
    longest: int  # its first text: a longer one is not overtaken, all wait with it; the others are no longer than fits
    share: int = ANY  # of what waits now; the rest is for others


class Demand(NamedTuple):
    """What there is to do, in tokens."""

    waiting: int
    first: int  # of the text that is next; 0 where none waits
    budget: int  # of a full batch


NONE = Demand(0, 0, 0)


class Queue:
    """Entries in order of arrival, between the event loop and the device's thread."""

    def __init__(self, max_tokens: int, max_requests: int | None) -> None:
        self.max_tokens = max_tokens
        self._max_requests = max_requests
        self._entries: dict[int, Entry] = {}
        self._tokens = 0
        self._changed = threading.Condition()
        self._wanted = Size(1, max_tokens, ANY)  # by who waits for a batch
        self._is_woken = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def demand(self) -> Demand:
        """What waits now."""
        with self._changed:
            first = next(iter(self._entries.values()), ())
            return Demand(self._tokens, len(first), self.max_tokens)

    def put(self, entry: Entry) -> bool:
        """Append an entry; False when the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._entries[entry.id] = entry
            self._tokens += len(entry)
            self._tell()
            return True

    def cancel(self, entry_id: int) -> bool:
        """Remove an entry; False when it has left already."""
        with self._changed:
            entry = self._entries.pop(entry_id, None)
            if entry is None:
                return False
            self._tokens -= len(entry)
            self._tell()  # the next one may be short enough
            return True

    def take(self, timeout: float | None = None, size: Size | None = None) -> Taken | None:
        """The next batch, formed now; by default one of up to `max_tokens`, whatever waits.

        Waits until there is one of that size. None once the queue is closed, after `timeout` s, or when woken.
        """
        size = size or Size(1, self.max_tokens, ANY)
        with self._changed:
            self._wanted = size
            self._changed.wait_for(lambda: self._closed or self._is_woken or self._holds(size), timeout)
            if self._holds(size):
                return self._take(min(size.most, size.share))
            self._is_woken = False
            return None

    def wake(self) -> None:
        """Have who waits for a batch look around."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def clear(self) -> list[Entry]:
        """Hand back what was waiting."""
        with self._changed:
            left = list(self._entries.values())
            self._entries.clear()
            self._tokens = 0
            return left

    def close(self) -> list[Entry]:
        """Take nothing more in; hands back what was waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            return self.clear()

    @property
    def closed(self) -> bool:
        """Whether the queue takes nothing more in."""
        return self._closed

    def _tell(self) -> None:
        if self._holds(self._wanted):
            self._changed.notify()

    def _holds(self, size: Size) -> bool:
        first = next(iter(self._entries.values()), None)
        return first is not None and len(first) <= size.longest and self._tokens >= size.least

    def _take(self, max_tokens: int) -> Taken:
        now = time.monotonic_ns()
        expired = [
            entry for entry in self._entries.values() if entry.deadline_ns is not None and entry.deadline_ns <= now
        ]
        for entry in expired:
            del self._entries[entry.id]
        waiting = list(self._entries.values())
        batch = [waiting[i] for i in fill(map(len, waiting), max_tokens, self._max_requests)]
        for entry in batch:
            del self._entries[entry.id]
        self._tokens -= sum(map(len, expired)) + sum(map(len, batch))
        return Taken(batch, expired)
