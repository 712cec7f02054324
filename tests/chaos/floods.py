"""More of something than a server can take. Each returns what those who took part were told."""

import asyncio
import socket
import time
from collections import Counter
from contextlib import suppress

import grpc
import psutil

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.chaos.bystander import REQUEST, Bystander, connect
from tests.chaos.sick import Codes, Sick, Size
from tests.http2 import PING, PREFACE, SETTINGS, frame

PATIENCE = 300.0  # seconds in which a flood must be over
STILL_SECONDS = 2.0
GOODBYE = b"too_many_pings"  # the reason in the GOAWAY frame


async def clients_come_and_go(server: Sick, size: Size) -> Codes:
    """Connect, call, close."""
    told: Codes = Counter()
    plan = iter(range(size.connections))

    async def work() -> None:
        for _ in plan:
            async with connect(server.address) as channel:
                told[await Bystander.ask(channel)] += 1

    async with asyncio.TaskGroup() as workers:
        for _ in range(8):
            workers.create_task(work())
    return told


async def descriptors_run_out(server: Sick, _: Size) -> Codes:
    """Others hold all connections that the process may have; a client that has one goes on, a new one waits."""
    limits = server.usage.rlimit(psutil.RLIMIT_NOFILE)
    async with connect(server.address) as channel, connect(server.address) as late:
        told = Counter([await Bystander.ask(channel)])
        server.usage.rlimit(psutil.RLIMIT_NOFILE, (server.usage.num_fds() + 20, limits[1]))
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        newcomer = tei_pb2_grpc.EmbedStub(late).Embed(REQUEST, timeout=2)
        while not newcomer.done():
            told[await Bystander.ask(channel)] += 1
        told["new: " + (await newcomer.code()).name] += 1
        for each in held:
            each.close()
    return told


async def streams_flood(server: Sick, size: Size) -> Codes:
    """All are open at the same time, have one answer, and end properly."""
    channels = [connect(server.address) for _ in range(10)]
    calls = [tei_pb2_grpc.EmbedStub(channels[number % 10]).EmbedStream() for number in range(size.streams)]
    told: Codes = Counter()
    for call in calls:
        await call.write(tei_pb2.EmbedRequest(inputs="w1"))
    for call in calls:
        told["answered" if await call.read() is not grpc.aio.EOF else "ended"] += 1
    for call in calls:
        await call.done_writing()
    for call in calls:
        told[(await call.code()).name] += 1
    for channel in channels:
        await channel.close()
    return told


async def readers_are_slow(server: Sick, size: Size) -> Codes:
    """They ask for much and read nothing."""
    channels = [connect(server.address) for _ in range(size.readers)]
    calls = [channel.stream_stream("/tei.v1.Embed/EmbedAllStream")() for channel in channels]
    request = tei_pb2.EmbedAllRequest(inputs="w1 " * 500).SerializeToString()
    written = [0] * size.readers

    async def write(reader: int) -> None:
        for written[reader] in range(10_000):
            await calls[reader].write(request)

    writers = [asyncio.create_task(write(reader)) for reader in range(size.readers)]
    is_still = await _comes_to_rest(written)
    told = Counter(_outcome(writer) if is_still else "never stopped" for writer in writers)
    for each in (*writers, *calls):
        each.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    for channel in channels:
        await channel.close()
    return told


async def _comes_to_rest(written: list[int]) -> bool:
    """Whether nothing more is written, before patience ends."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        before = list(written)
        await asyncio.sleep(STILL_SECONDS)
        if written == before:
            return True
    return False


def _outcome(writer: asyncio.Task[None]) -> str:
    if not writer.done():
        return "stopped by flow control"
    return "failed" if writer.exception() else "never stopped"


async def texts_are_long(server: Sick, size: Size) -> Codes:
    """One stream that wants 64,000 characters tokenized over and over."""
    request = tei_pb2.EncodeRequest(inputs="w1 w2 " * 10_666)
    async with connect(server.address) as channel:
        call = tei_pb2_grpc.TokenizeStub(channel).TokenizeStream(iter([request] * size.texts))
        return Counter([len(reply.tokens) async for reply in call] and [(await call.code()).name])


async def pings_flood(server: Sick, size: Size) -> Codes:
    """One connection, no calls, as many pings as it takes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    hearing = asyncio.create_task(_hear_goodbye(reader))
    with suppress(ConnectionError):
        writer.write(PREFACE + frame(SETTINGS))
        for _ in range(0, size.pings, 100):
            writer.write(frame(PING, b"flooding") * 100)
            await writer.drain()
    told = Counter([await hearing])
    writer.close()
    return told


async def _hear_goodbye(reader: asyncio.StreamReader) -> str:
    """What the server said last, unless its reset of the connection has overtaken that: then it is cut off."""
    heard = b""
    try:
        async with asyncio.timeout(20):
            while more := await reader.read(65536):
                heard = heard[-len(GOODBYE) :] + more
                if GOODBYE in heard:
                    return "turned away"
    except ConnectionError:
        pass
    except TimeoutError:
        return "kept"
    return "cut off"
