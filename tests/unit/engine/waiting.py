"""Waits for what an engine does."""

import asyncio
from collections.abc import Callable

from tests.fakes import FakeRunner


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until `condition` holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def held(runner: FakeRunner, work) -> asyncio.Task:
    """Start `work` and let the runner keep it."""
    runner.gate.clear()
    runner.running.clear()
    task = asyncio.ensure_future(work)
    await asyncio.to_thread(runner.running.wait, 10)
    return task
