"""Where a device delivers, what it is given, and how that piles up."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from tei_grpc.types import Entry, Failure, Kind, Output
from tests.fakes import FakeDevice, FakeRunner


class Desk:
    """Where a device delivers: nothing may come twice."""

    def __init__(self) -> None:
        self.results: dict[int, Output | Failure] = {}
        self.states: list[bool] = []
        self._changed = asyncio.Event()

    def deliver(self, results: Sequence[Output | Failure]) -> None:
        for result in results:
            assert result.id not in self.results
            self.results[result.id] = result
        self._changed.set()

    def follow(self, healthy: bool) -> None:
        self.states.append(healthy)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def errors(self) -> dict[int, type[Exception]]:
        return {id: type(result.error) for id, result in self.results.items() if isinstance(result, Failure)}


def entry(id: int, length: int = 2, deadline_ns: int | None = None) -> Entry:
    return Entry(id, Kind.EMBED, np.full(length, id, np.int32), deadline_ns=deadline_ns, queued_ns=time.monotonic_ns())


async def held_back(device: FakeDevice, runner: FakeRunner, entries: Sequence[Entry]) -> None:
    """Let `entries` pile up behind a batch that runs: they can only leave together."""
    runner.gate.clear()
    device.submit(entry(0))
    await asyncio.to_thread(runner.running.wait, 10)
    for waiting in entries:
        device.submit(waiting)
