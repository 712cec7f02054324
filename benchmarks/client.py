"""What calls the servers: unary calls at a fixed concurrency or at a fixed rate, and one stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import cycle, islice

import grpc
import numpy as np

from tei_grpc.pb import tei_pb2, tei_pb2_grpc

Requests = Sequence[tei_pb2.EmbedRequest]


def requests_of(texts: Sequence[str]) -> Requests:
    """One request for each text."""
    return [tei_pb2.EmbedRequest(inputs=text) for text in texts]


class Client:
    """One server's caller, over one channel or several, each with a connection of its own."""

    def __init__(self, address: str, channels: int = 1) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(channels)]
        self._stubs = [tei_pb2_grpc.EmbedStub(channel) for channel in self._channels]

    async def close(self) -> None:
        """Hang up."""
        for channel in self._channels:
            await channel.close()

    async def closed_loop(self, requests: Requests, callers: int) -> list[float]:
        """Every caller sends its next request when it has its answer. Returns seconds of each call."""
        left, latencies = iter(requests), []

        async def call(stub: tei_pb2_grpc.EmbedStub) -> None:
            for request in left:
                start = time.perf_counter()
                await stub.Embed(request)
                latencies.append(time.perf_counter() - start)

        await asyncio.gather(*(call(stub) for stub in islice(cycle(self._stubs), callers)))
        return latencies

    async def open_loop(self, requests: Requests, rate: float) -> list[float]:
        """Requests come at random, `rate` a second on average (Poisson), whether or not earlier ones are answered.

        Returns seconds of each call, in the order of `requests`, from when it was due, not from when the client got to
        send it: a client that is held up by a slow server would else hide that.
        """
        due = time.perf_counter() + np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(requests)))

        async def call(request: tei_pb2.EmbedRequest, at: float) -> float:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            await self._stubs[0].Embed(request)
            return time.perf_counter() - at

        return await asyncio.gather(*map(call, requests, due.tolist()))

    async def stream(self, requests: Requests) -> int:
        """All requests in one EmbedStream for each channel. Returns the number of answers."""
        parts = [requests[start :: len(self._stubs)] for start in range(len(self._stubs))]
        return sum(await asyncio.gather(*map(_stream, self._stubs, parts)))


async def _stream(stub: tei_pb2_grpc.EmbedStub, requests: Requests) -> int:
    return len([answer async for answer in stub.EmbedStream(_sent(requests))])


async def _sent(requests: Requests) -> AsyncIterator[tei_pb2.EmbedRequest]:
    for request in requests:
        yield request


def percentiles(seconds: Sequence[float]) -> Iterator[tuple[str, float]]:
    """p50, p90 and p99, in milliseconds."""
    for percent in (50, 90, 99):
        yield f"p{percent}", float(np.percentile(np.array(seconds), percent)) * 1e3
