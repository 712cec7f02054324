"""The end of a server, in order: health says so, nothing new comes in, calls finish or are cut, the engine stops."""

import asyncio
import logging

import grpc

from tei_grpc.engine.engine import Engine
from tei_grpc.rpc.calls import RunningCalls
from tei_grpc.rpc.health import HealthServicer

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


async def shut_down(
    server: grpc.aio.Server, engine: Engine, health: HealthServicer, calls: RunningCalls, *, delay: float, grace: float
) -> None:
    """Turn health, go on serving for `delay` seconds so that load balancers notice, drain, and stop the engine."""
    health.end()
    await asyncio.sleep(delay)
    engine.drain()
    await drain(server, calls, grace=grace)
    await engine.stop()
