"""A server of this package as its users start it, and what one of many client processes does to it."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.client import Client, requests_of

CALLERS = 64  # of a process
CHANNELS = 4  # of a process, so that all of them together reach every front-end


@contextmanager
def server(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server, once it serves; `options` are flags of `tei-grpc`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--hostname", "127.0.0.1", "--port", str(port), "--prometheus-port", "0", "--log-level", "warn"]
    command = [sys.executable, "-m", "tei_grpc", "--model-id", str(folder), *where, *options]
    with subprocess.Popen(command) as process:
        try:
            asyncio.run(_serving(f"127.0.0.1:{port}", process))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


async def _serving(address: str, process: "subprocess.Popen[bytes]") -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while process.poll() is None:
            try:
                if (await health.Check(health_pb2.HealthCheckRequest())).status == 1:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit("the server did not start")


def call(address: str, texts: Sequence[str], seconds: float) -> int:
    """Unary calls from many callers for that long; how many were answered."""

    async def run() -> int:
        client, answered = Client(address, CHANNELS), 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            answered += len(await client.closed_loop(requests_of(texts), CALLERS))
        await client.close()
        return answered

    return asyncio.run(run())
