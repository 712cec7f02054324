"""Servers as processes of their own: ours, ours without weights, and a bare grpc.aio echo of the same messages.

Run as a program, it is one of the latter two, and says its address on stdout.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import psutil

from tei_grpc.config import Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.worker import Worker
from tei_grpc.frontends.files import make_files, map_metrics
from tei_grpc.frontends.server import FrontendsServer
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.runtime import life
from tei_grpc.serve.grpc_server import GrpcServer
from tei_grpc.types import Batch, ModelFacts
from tests.fakes import FakeDevice, FakeRunner

ROOT = Path(__file__).resolve().parents[1]
SIZE = 384  # values of a vector, as all-MiniLM-L6-v2 has
VECTOR = np.full(SIZE, SIZE**-0.5, np.float32)
METADATA = tei_pb2.Metadata(compute_chars=1, compute_tokens=1, total_time_ns=1, tokenization_time_ns=1)


class Server(NamedTuple):
    """A running server."""

    address: str
    pid: int

    @property
    def pids(self) -> list[int]:
        """The process, and its front-ends."""
        return [self.pid, *(child.pid for child in psutil.Process(self.pid).children())]


@contextmanager
def started(kind: str, folder: Path, *options: str) -> Iterator[Server]:
    """`real`, `weightless` or `echo`, ready for calls; `options` are flags of `tei-grpc`."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.servers", kind, str(folder), *options],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        if process.stdout is None or not (address := process.stdout.readline().strip()):
            raise SystemExit(f"the {kind} server did not start")
        try:
            yield Server(address, process.pid)
        finally:
            process.communicate(timeout=60)  # the end of its stdin ends it


class WeightlessRunner(FakeRunner):
    """Answers at once, the same vector for all, and forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = ModelFacts("float32", "cpu", optimized=True, embedding_size=SIZE, hidden_size=SIZE)

    def run(self, batch: Batch) -> Sequence[tuple[np.ndarray]]:
        """One vector for each entry."""
        return [(VECTOR,)] * len(batch.entries)


class Echo(tei_pb2_grpc.EmbedServicer):
    """Answers every request with a vector that was there before."""

    async def Embed(self, request: tei_pb2.EmbedRequest, context: object) -> tei_pb2.EmbedResponse:
        """One vector."""
        return tei_pb2.EmbedResponse(embeddings=VECTOR, metadata=METADATA)

    async def EmbedStream(
        self, requests: AsyncIterator[tei_pb2.EmbedRequest], context: object
    ) -> AsyncIterator[tei_pb2.EmbedResponse]:
        """One vector per message."""
        async for _ in requests:
            yield tei_pb2.EmbedResponse(embeddings=VECTOR, metadata=METADATA)


async def serve_echo() -> None:
    """Until stdin ends."""
    server = grpc.aio.server()
    tei_pb2_grpc.add_EmbedServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await _wait(f"127.0.0.1:{port}")
    await server.stop(None)


async def serve(kind: str, folder: str, options: Sequence[str]) -> None:
    """Until stdin ends."""
    from tei_grpc.cli import _read_flags

    settings = Settings.model_validate(
        {"model_id": folder, "hostname": "127.0.0.1", "port": 0, "shutdown_grace": 0.1, **_read_flags(options)}
    )
    server = _compose(kind, settings)
    addresses = await server.start()
    await server.load(addresses)
    await _wait(addresses.serving[0].local)
    await server.stop()


def _compose(kind: str, settings: Settings) -> life.Server:
    files = make_files()
    metrics = Metrics(others=map_metrics(files.metrics, settings.frontends)) if settings.frontends else Metrics()
    model = read_model_config(Path(settings.model_id), settings)
    runner = WeightlessRunner() if kind == "weightless" else None
    device = Worker(model, settings, metrics) if runner is None else FakeDevice(model, settings, metrics, runner)
    if settings.frontends:
        return FrontendsServer(settings, files, metrics, device)
    return GrpcServer(settings, Engine(settings, device, metrics))


async def _wait(address: str) -> None:
    os.write(1, f"{address}\n".encode())
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    """`servers.py KIND FOLDER [OPTIONS]`"""
    kind, folder, *options = sys.argv[1:]
    asyncio.run(serve_echo() if kind == "echo" else serve(kind, folder, options))


if __name__ == "__main__":
    main()
