"""A server with two front-ends: real processes, whose parent, with a weightless model, is the test's own process."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from tei_grpc.config import Settings
from tei_grpc.frontends.files import make_files, map_metrics
from tei_grpc.frontends.server import FrontendsServer
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.runtime.listeners import Addresses
from tests.fakes import FakeDevice, FakeRunner

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@dataclass
class Fronted:
    """A running server with front-ends."""

    server: FrontendsServer
    runner: FakeRunner
    device: FakeDevice
    metrics: Metrics
    addresses: Addresses

    @property
    def address(self) -> str:
        """Where all services are."""
        return self.addresses.serving[0].local

    @property
    def health_address(self) -> str:
        """Where health checks are, and nothing else."""
        return self.addresses.health[0].local

    @property
    def pids(self) -> list[int]:
        """The processes that accept calls now."""
        return [frontend.pid for frontend in self.server.frontends]

    def numbers(self, name: str) -> dict[str, float]:
        """The lines of a metric that are not 0, by their labels."""
        lines = [line.rpartition(" ") for line in self.metrics.render().decode().splitlines()]
        pairs = {text: float(value) for text, _, value in lines if text.partition("{")[0] == name}
        return {text.removeprefix(name): value for text, value in pairs.items() if value}

    @asynccontextmanager
    async def channels(self) -> AsyncIterator[dict[int, grpc.aio.Channel]]:
        """One channel to each front-end, by its process: the system decides who gets a connection, so we try."""
        port = int(self.address.rpartition(":")[2])
        async with AsyncExitStack() as stack, asyncio.timeout(20):
            found: dict[int, grpc.aio.Channel] = {}
            seen = {pid: connections(pid, port) for pid in self.pids}
            while len(found) < len(seen):
                channel = grpc.aio.insecure_channel(self.address, options=OWN_CONNECTION)
                await stack.enter_async_context(channel)
                await channel.channel_ready()
                for pid, before in seen.items():
                    now = connections(pid, port)
                    if now - before:
                        found.setdefault(pid, channel)
                    seen[pid] = now
            yield found


def connections(pid: int, port: int) -> set[int]:
    """The client's ports of the connections that a process has on `port`."""
    return {
        each.raddr.port for each in psutil.Process(pid).net_connections("tcp") if each.raddr and each.laddr.port == port
    }


@asynccontextmanager
async def serve_by_frontends(model: Path, **options: object) -> AsyncIterator[Fronted]:
    """Serve a checkpoint by a FakeRunner behind two front-ends, on a free port of the loopback."""
    async with listen_by_frontends(model, **options) as fronted:
        await fronted.server.load(fronted.addresses)
        yield fronted


@asynccontextmanager
async def listen_by_frontends(model: Path, **options: object) -> AsyncIterator[Fronted]:
    """As `serve_by_frontends`, but it has not begun to load."""
    defaults = {"hostname": "127.0.0.1", "port": 0, "shutdown_grace": 5, "frontends": 2, "log_level": "error"}
    settings = Settings.model_validate({"model_id": str(model), **defaults, **options})
    files = make_files()
    metrics = Metrics(others=map_metrics(files.metrics, settings.frontends))
    device = FakeDevice(read_model_config(model, settings), settings, metrics, FakeRunner())
    server = FrontendsServer(settings, files, metrics, device)
    try:
        addresses = await server.start()
        yield Fronted(server, device.runner, device, metrics, addresses)
    finally:
        device.runner.gate.set()
        await server.stop()
        for file in files:
            os.close(file)
