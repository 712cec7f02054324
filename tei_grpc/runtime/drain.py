"""The end of a server: nothing new comes in, calls finish or are cut."""

import asyncio
import logging

import grpc

from tei_grpc.rpc.calls import RunningCalls

logger = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # for calls that were cut to send their status
QUIET_SECONDS = 0.03  # without a call that begins: all that had arrived have
ARRIVAL_SECONDS = 0.5  # for callers who go on calling


async def drain(server: grpc.aio.Server, calls: RunningCalls, *, grace: float) -> None:
    """Refuse new connections and calls, give those under way `grace` seconds, then end them with UNAVAILABLE."""
    await _let_arrived_begin(calls)
    stopping = asyncio.create_task(server.stop(grace + CUT_SECONDS))
    await asyncio.wait({stopping}, timeout=grace)
    if calls:
        logger.warning("Cutting %d calls after %g seconds", len(calls), grace)
        calls.cut()
    await stopping


async def _let_arrived_begin(calls: RunningCalls) -> None:
    """Wait for the calls that gRPC has, and hands over one by one: a server that stops ends them with CANCELLED."""
    loop = asyncio.get_running_loop()
    until, begun = loop.time() + ARRIVAL_SECONDS, -1
    while begun != calls.begun and loop.time() < until:
        begun = calls.begun
        await asyncio.sleep(QUIET_SECONDS)
