"""Both Python clients, behind one face, so that each test holds for both."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tei_client import AsyncClient, Client, RetryPolicy
from tei_client.pb import tei_pb2, tei_pb2_grpc

from tests.grpc.conftest import Served, serve_fake, write_checkpoint

QUICK = RetryPolicy(initial_delay=0.001, max_delay=0.002)

Ask = Callable[..., Awaitable[Any]]
Connect = Callable[..., AbstractAsyncContextManager[Ask]]


@pytest.fixture(params=[Client, AsyncClient])
def connect(request: pytest.FixtureRequest) -> Connect:
    """Connect one of the clients; `await ask("embed", texts)` calls its method `embed`."""

    @asynccontextmanager
    async def connect(address: str, **options: Any) -> AsyncIterator[Ask]:
        client = request.param(address, **{"retries": QUICK, "timeout": 30, **options})

        async def ask(method: str, *args: Any, **kwargs: Any) -> Any:
            if isinstance(client, Client):
                return await asyncio.to_thread(getattr(client, method), *args, **kwargs)
            return await getattr(client, method)(*args, **kwargs)

        try:
            yield ask
        finally:
            await ask("close")

    return connect


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """The real server with an embedding model without weights."""
    async with serve_fake(write_checkpoint(tmp_path, "BertModel")) as served:
        yield served


@dataclass
class Failure:
    """End a call with `code`, a stream after `answers`."""

    code: grpc.StatusCode
    answers: int = 0
    text: str = "as scripted"


class Scripted(tei_pb2_grpc.EmbedServicer):
    """Answers a number with itself, except where the script has a failure for the call; keeps what it was sent."""

    def __init__(self) -> None:
        self.address = ""
        self.script: deque[Failure] = deque()
        self.calls: list[list[str]] = []
        self.keys: list[str | None] = []

    async def Embed(self, request: tei_pb2.EmbedRequest, context: Any) -> tei_pb2.EmbedResponse:
        failure = self._begin(context)
        self.calls[-1].append(request.inputs)
        if failure is not None:
            await context.abort(failure.code, failure.text)
        return tei_pb2.EmbedResponse(embeddings=[float(request.inputs)])

    async def EmbedStream(
        self, requests: AsyncIterator[tei_pb2.EmbedRequest], context: Any
    ) -> AsyncIterator[tei_pb2.EmbedResponse]:
        failure = self._begin(context)
        seen = self.calls[-1]
        async for request in requests:
            seen.append(request.inputs)
            if failure is not None and len(seen) > failure.answers:
                await context.abort(failure.code, failure.text)
            yield tei_pb2.EmbedResponse(embeddings=[float(request.inputs)])

    def _begin(self, context: Any) -> Failure | None:
        self.calls.append([])
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return self.script.popleft() if self.script else None


@asynccontextmanager
async def serve_embed(
    servicer: tei_pb2_grpc.EmbedServicer, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """Serve on a free port of the loopback; yield the address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    tei_pb2_grpc.add_EmbedServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    servicer = Scripted()
    async with serve_embed(servicer) as servicer.address:
        yield servicer
