"""Notices a batch that does not end: a kernel, a driver or a lock on which the device's thread waits for ever."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tei_grpc.engine.flight import SHARD

TICK_SECONDS = 1.0
SLACK = 20  # how much slower than measured at start a batch may be on a machine that is healthy, but busy


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A batch under way, and the seconds that one of its size should take."""

    expected: float


class Watchdog:
    """Watches one thread from the event loop; `is_hung` while a batch takes longer than it may.

    It counts its own ticks and reads no clock: while the whole process was stopped or starved, so was the batch.
    """

    def __init__(self, timeout: float, follow: Callable[[bool], None]) -> None:
        """A batch may take `timeout` seconds and SLACK times what is expected; `follow` hears of every change."""
        self.is_hung = False
        self._timeout = timeout
        self._follow = follow
        self._batch: Running | None = None

    @contextmanager
    def running(self, expected: float) -> Iterator[None]:
        """On the watched thread: a batch runs while the block does."""
        self._batch = Running(expected)
        try:
            yield
        finally:
            self._batch = None

    async def watch(self) -> None:
        """Watch until cancelled."""
        watched, seconds = None, 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            batch = self._batch
            seconds = seconds + TICK_SECONDS if batch is watched else 0.0
            watched = batch
            is_hung = batch is not None and seconds > self._timeout + SLACK * batch.expected
            if is_hung != self.is_hung:
                self.is_hung = is_hung
                self._follow(is_hung)


def stacks(device: threading.Thread) -> str:
    """Where the device's thread is, and all that compute for it."""
    frames = sys._current_frames()
    threads = [each for each in threading.enumerate() if each is device or each.name.startswith(SHARD)]
    found = [(each.name, frames[each.ident]) for each in threads if each.ident in frames]
    return "".join(line for name, frame in found for line in (f"{name}:\n", *traceback.format_stack(frame)))
