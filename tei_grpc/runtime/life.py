"""The life of a server: listen, load, serve until a signal comes, and end in order."""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from tei_grpc.config import ServerConfig
from tei_grpc.errors import StartupError
from tei_grpc.runtime.listeners import Addresses
from tei_grpc.runtime.signals import StopSignal, end_process, on_hangup

logger = logging.getLogger(__name__)


class Server(Protocol):
    """What has such a life."""

    async def start(self) -> Addresses:
        """Listen, and answer health checks. Raises StartupError."""
        ...

    async def load(self, addresses: Addresses) -> None:
        """Load the model and begin to serve. Raises StartupError."""
        ...

    def reload(self) -> None:
        """Read keys and certificates from their files anew. Raises nothing."""
        ...

    async def stop(self) -> bool:
        """Finish, or cut, the calls under way and end; False when a thread cannot be ended."""
        ...


async def serve(make: Callable[[], Server], config: ServerConfig) -> int:
    """Serve until a signal comes; return the process's exit code. Raises nothing: errors go to stderr."""
    try:
        server = make()
        with StopSignal() as stop, on_hangup(server.reload) if config.has_files_to_reload else nullcontext():
            has_ended = await run(server, stop)
    except StartupError as error:
        for line in error.message.splitlines():
            print(f"tei-grpc: {line}", file=sys.stderr)
        return 1
    if not has_ended:
        end_process(1)  # the interpreter cannot end while a thread computes: it would abort
    return 0


def settle() -> None:
    """Have full garbage collections leave out what is there now, and stays: to walk through it takes 0.1 s."""
    gc.freeze()


async def run(server: Server, stop: StopSignal) -> bool:
    """Listen, load, serve, drain; return what `stop` does. Raises StartupError."""
    addresses = await server.start()
    loading = asyncio.create_task(server.load(addresses))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            end_process(0)  # neither a download nor a load can be interrupted, and no call is lost
        loading.result()
        settle()
        await stopping
    finally:
        stopping.cancel()
        has_ended = await server.stop()
        logger.info("Stopped")
    return has_ended
