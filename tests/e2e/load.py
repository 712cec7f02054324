"""Callers that never stop, and what became of each of their calls."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
from tei_client import TeiClientError

CALLERS = 4  # of each kind
PAUSE = 0.01  # seconds between two calls of a caller: servers must start beside it

Outcomes = dict[str, Counter[str]]


@asynccontextmanager
async def load(**kinds: Callable[[], Awaitable[object]]) -> AsyncIterator[Outcomes]:
    """Call while the block runs, each kind by CALLERS at a time; count "OK", or status and text, by kind."""
    outcomes: Outcomes = {name: Counter() for name in kinds}
    over = asyncio.Event()

    async def keep_calling(call: Callable[[], Awaitable[object]], outcomes: Counter[str]) -> None:
        while not over.is_set():
            outcomes[await outcome_of(call)] += 1
            await asyncio.sleep(PAUSE)

    async with asyncio.TaskGroup() as group:
        for name, call in kinds.items():
            for _ in range(CALLERS):
                group.create_task(keep_calling(call, outcomes[name]))
        try:
            yield outcomes
        finally:
            over.set()


async def outcome_of(call: Callable[[], Awaitable[object]]) -> str:
    """Make one call."""
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except TeiClientError as error:
        return str(error)
    return "OK"
