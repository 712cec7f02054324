"""What breaks inside of a server. Each returns what those who took part were told."""

import asyncio
import signal
from collections import Counter

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.chaos.bystander import connect
from tests.chaos.sick import Codes, Sick, Size, run_texts

LITTLE = 2**28  # bytes: half of what w191 takes


async def model_raises(server: Sick, _: Size) -> Codes:
    return await run_texts(server, ["w1"] * 15 + ["w190"])


async def memory_runs_out(server: Sick, _: Size) -> Codes:
    """For the time between two batches that are the same, and find it."""
    told = await run_texts(server, ["w191"])
    limits = server.usage.rlimit(psutil.RLIMIT_AS)
    server.usage.rlimit(psutil.RLIMIT_AS, (server.usage.memory_info().vms + LITTLE, limits[1]))
    told += await run_texts(server, ["w1"] * 15 + ["w191"])
    server.usage.rlimit(psutil.RLIMIT_AS, limits)
    return told + await run_texts(server, ["w191"])


async def thread_dies(server: Sick, _: Size) -> Codes:
    return await run_texts(server, ["w1"] * 15 + ["w192"])


async def model_hangs(server: Sick, _: Size) -> Codes:
    """For four seconds, where a batch may take one."""
    return await run_texts(server, ["w1"] * 15 + ["w193"])


async def interpreter_hangs(server: Sick, _: Size) -> Codes:
    """For four seconds: a probe of liveness that allows one second fails, which is what restarts a pod."""
    running = asyncio.create_task(run_texts(server, ["w196"]))
    request, probe = health_pb2.HealthCheckRequest(service="liveness"), "never failed"
    async with connect(server.address) as channel:
        while not running.done():
            call = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)
            if await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                probe = "liveness failed"
    return await running + Counter([probe])


async def tokenizer_raises(server: Sick, _: Size) -> Codes:
    return await run_texts(server, ["w1"] * 15 + ["w194"])


async def process_crashes(server: Sick, _: Size) -> Codes:
    """A call is under way."""
    async with connect(server.address) as channel:
        call = tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="w193"), timeout=60)
        await server.is_busy()
        server.process.send_signal(signal.SIGSEGV)
        told = Counter([(await call.code()).name])
    await server.process.wait()
    return told
