"""The end of a server: nothing new comes in, calls finish or are cut."""

import asyncio
import logging

import grpc

from tei_grpc.rpc.calls import RunningCalls

logger = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # for calls that were cut to send their status


async def drain(server: grpc.aio.Server, calls: RunningCalls, *, grace: float) -> None:
    """Refuse new connections and calls, give those under way `grace` seconds, then end them with UNAVAILABLE."""
    stopping = asyncio.create_task(server.stop(grace + CUT_SECONDS))
    await asyncio.wait({stopping}, timeout=grace)
    if calls:
        logger.warning("Cutting %d calls after %g seconds", len(calls), grace)
        calls.cut()
    await stopping
