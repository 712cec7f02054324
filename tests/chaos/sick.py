"""A server process that is to be broken, with the weightless model of sick_server.py."""

import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.chaos.bystander import connect, seconds_until_well
from tests.chaos.patients import read_metrics
from tests.e2e.servers import free_port
from tests.grpc.conftest import write_checkpoint

SERVER = Path(__file__).with_name("sick_server.py")
Codes = Counter[str]


class Size(NamedTuple):
    """How much of everything."""

    connections: int = 5000
    streams: int = 10_000
    pings: int = 100_000
    texts: int = 60
    readers: int = 50


class Sick:
    """A server process that is to be broken."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, metrics_port: int, folder: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self.port = port
        self.process = process
        self.usage = psutil.Process(process.pid)
        self._metrics_port = metrics_port
        self._folder = folder

    async def is_busy(self) -> None:
        """Return once an input is under way."""
        while (await self.metrics())["te_permits_in_use"] == 0:
            await asyncio.sleep(0.01)

    async def has_begun(self, requests: float) -> None:
        """Return once there have been so many requests."""
        while (await self.metrics())["te_request_count"] < requests:
            await asyncio.sleep(0.01)

    async def metrics(self) -> dict[str, float]:
        """Sums of all samples by name."""
        return await asyncio.to_thread(read_metrics, self._metrics_port)

    def let_go(self) -> None:
        """End the batches of w195."""
        (self._folder / "go").touch()

    async def lost(self) -> float:
        """Requests that have begun and not ended, once all is quiet."""
        for _ in range(100):
            metrics = await self.metrics()
            ended = sum(metrics[f"te_request_{ending}"] for ending in ("success", "failure", "dropped"))
            if metrics["te_request_count"] == ended and metrics["te_permits_in_use"] == 0:
                break
            await asyncio.sleep(0.1)
        return metrics["te_request_count"] - ended


@asynccontextmanager
async def sick(**environment: str) -> AsyncIterator[Sick]:
    """A server, ready."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "BertModel")
        port, metrics_port = free_port(), free_port()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, SERVER, folder, str(port), str(metrics_port)),
            stdout=asyncio.subprocess.DEVNULL,
            env=os.environ | environment,
        )
        try:
            assert await seconds_until_well(f"127.0.0.1:{port}", 60) is not None
            yield Sick(process, port, metrics_port, Path(folder))
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def run_texts(server: Sick, texts: Sequence[str]) -> Codes:
    """The outcomes of as many Embed calls, together."""
    async with connect(server.address) as channel:
        stub = tei_pb2_grpc.EmbedStub(channel)
        calls = [stub.Embed(tei_pb2.EmbedRequest(inputs=text), timeout=60) for text in texts]
        return Counter([(await call.code()).name for call in calls])
