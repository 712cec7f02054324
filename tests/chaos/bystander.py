"""A well-behaved client beside a fault: what it was told, how long it waited, and from when on all was well again."""

import asyncio
import time
from collections import Counter
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.pb import tei_pb2, tei_pb2_grpc

PACE_SECONDS = 0.02
REQUEST = tei_pb2.EmbedRequest(inputs="w0 w1")


class Bystander:
    """Asks for a vector and for health, by turns, over two connections that were there before the fault."""

    def __init__(self, address: str) -> None:
        self.codes: Counter[str] = Counter()
        self.slowest_probe = 0.0
        self._channels = [connect(address) for _ in range(2)]

    async def __aenter__(self) -> Self:
        await self.ask(self._channels[0])
        await self.is_serving(self._channels[1])
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def _watch(self) -> None:
        while True:
            self.codes[await self.ask(self._channels[0])] += 1
            started = time.monotonic()
            await self.is_serving(self._channels[1])
            self.slowest_probe = max(self.slowest_probe, time.monotonic() - started)
            await asyncio.sleep(PACE_SECONDS)

    @staticmethod
    async def ask(channel: grpc.aio.Channel) -> str:
        """The name of the status of an Embed."""
        call = tei_pb2_grpc.EmbedStub(channel).Embed(REQUEST, timeout=30)
        name: str = (await call.code()).name
        return name

    @staticmethod
    async def is_serving(channel: grpc.aio.Channel) -> bool:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def seconds_until_well(address: str, patience: float) -> float | None:
    """From now on, until a new connection is told SERVING and gets a vector; None: not within `patience` seconds."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < patience:
        async with connect(address) as channel:
            if await Bystander.is_serving(channel) and await Bystander.ask(channel) == "OK":
                return waited
        await asyncio.sleep(PACE_SECONDS)
    return None


def connect(address: str) -> grpc.aio.Channel:
    """A connection of its own: by default grpc lets channels to one address share theirs."""
    return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
