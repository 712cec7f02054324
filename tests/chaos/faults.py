"""Breaks servers in every way that we know, one after the other; says what clients saw, and how long it took to heal.

`python tests/chaos/faults.py` prints a table and ends with 0 when nothing was lost that could have been answered.
"""

import argparse
import asyncio
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpc
import psutil

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.chaos.attacks import OVER, PREFACE, SETTINGS, frame
from tests.chaos.bystander import Bystander, connect, seconds_until_well
from tests.chaos.patients import read_metrics
from tests.e2e.servers import free_port
from tests.grpc.conftest import write_checkpoint

SERVER = Path(__file__).with_name("sick_server.py")
PATIENCE = 20.0  # seconds in which a server must be well again
SPARE = 3  # descriptors that gRPC may open once, for threads that it starts when there is much to do
PING = 6
GOODBYE = b"too_many_pings"  # the reason in the GOAWAY frame
Codes = Counter[str]


class Size(NamedTuple):
    """How much of everything."""

    connections: int = 5000
    streams: int = 10_000
    pings: int = 100_000
    texts: int = 60


class Sick:
    """A server process that is to be broken."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, metrics_port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.port = port
        self.process = process
        self.usage = psutil.Process(process.pid)
        self._metrics_port = metrics_port

    async def is_busy(self) -> None:
        """Return once an input is under way."""
        while (await asyncio.to_thread(read_metrics, self._metrics_port))["te_permits_in_use"] == 0:
            await asyncio.sleep(0.01)

    async def lost(self) -> float:
        """Requests that have begun and not ended, once all is quiet."""
        for _ in range(100):
            metrics = await asyncio.to_thread(read_metrics, self._metrics_port)
            ended = sum(metrics[f"te_request_{ending}"] for ending in ("success", "failure", "dropped"))
            if metrics["te_request_count"] == ended and metrics["te_permits_in_use"] == 0:
                break
            await asyncio.sleep(0.1)
        return metrics["te_request_count"] - ended


Fault = Callable[[Sick, Size], Awaitable[Codes]]


class Row(NamedTuple):
    """What a fault did. `healed`: seconds from its end on until new connections were served; None: never."""

    fault: str
    told: Codes  # those who took part in the fault
    beside: Codes  # a client beside them
    slowest_probe: float
    healed: float | None
    lost: float  # requests that never ended
    descriptors: int  # more than before
    growth: int  # bytes

    def line(self) -> str:
        """For the table."""
        healed = "restart" if self.healed is None else f"{self.healed:.2f} s"
        return (
            f"{self.fault:24} {_told(self.told):52} {_told(self.beside):32} {self.slowest_probe * 1000:7.0f} ms "
            f"{healed:>9} {self.lost:4.0f} {self.descriptors:+5d} {self.growth / 2**20:+7.1f} MiB"
        )


async def examine(fault: Fault, size: Size) -> Row:
    """Start a server, break it, and look."""
    async with sick() as server:
        await fault_free(server)
        descriptors, memory = server.usage.num_fds(), server.usage.memory_info().rss
        async with Bystander(server.address) as bystander:
            told = await fault(server, size)
            healed = await seconds_until_well(server.address, PATIENCE if fault not in DEADLY else 1.0)
        is_alive = server.process.returncode is None and server.usage.status() != psutil.STATUS_ZOMBIE
        lost = await server.lost() if is_alive else 0
        growth = server.usage.memory_info().rss - memory if is_alive else 0
        fds = await _settled_descriptors(server, descriptors) if is_alive else 0
        return Row(fault.__name__, told, bystander.codes, bystander.slowest_probe, healed, lost, fds, growth)


async def fault_free(server: Sick) -> None:
    """What every server opens once."""
    await run_texts(server, ["w0"] * 50)


async def _settled_descriptors(server: Sick, before: int) -> int:
    for _ in range(100):
        if server.usage.num_fds() <= before:
            break
        await asyncio.sleep(0.05)
    return server.usage.num_fds() - before


async def run_texts(server: Sick, texts: Sequence[str]) -> Codes:
    """The outcomes of as many Embed calls, together."""
    async with connect(server.address) as channel:
        stub = tei_pb2_grpc.EmbedStub(channel)
        calls = [stub.Embed(tei_pb2.EmbedRequest(inputs=text), timeout=60) for text in texts]
        return Counter([(await call.code()).name for call in calls])


async def model_raises(server: Sick, _: Size) -> Codes:
    return await run_texts(server, ["w1"] * 15 + ["w190"])


async def memory_runs_out(server: Sick, _: Size) -> Codes:
    return await run_texts(server, ["w1"] * 15 + ["w191"])


async def thread_dies(server: Sick, _: Size) -> Codes:
    return await run_texts(server, ["w1"] * 15 + ["w192"])


async def model_hangs(server: Sick, _: Size) -> Codes:
    """For four seconds, where a batch may take one."""
    return await run_texts(server, ["w1"] * 15 + ["w193"])


async def tokenizer_raises(server: Sick, _: Size) -> Codes:
    return await run_texts(server, ["w1"] * 15 + ["w194"])


async def process_crashes(server: Sick, _: Size) -> Codes:
    """A call is under way."""
    async with connect(server.address) as channel:
        call = tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="w193"), timeout=60)
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGSEGV)
        told = Counter([(await call.code()).name])
    await server.process.wait()
    return told


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
    """Others hold all connections that the process may have; a client that has one goes on."""
    limits = server.usage.rlimit(psutil.RLIMIT_NOFILE)
    async with connect(server.address) as channel:
        told = Counter([await Bystander.ask(channel)])
        server.usage.rlimit(psutil.RLIMIT_NOFILE, (server.usage.num_fds() + 20, limits[1]))
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            told[await Bystander.ask(channel)] += 1
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


async def readers_are_slow(server: Sick, _: Size) -> Codes:
    """Fifty ask for much and read nothing."""
    channels = [connect(server.address) for _ in range(50)]
    calls = [channel.stream_stream("/tei.v1.Embed/EmbedAllStream")() for channel in channels]
    request = tei_pb2.EmbedAllRequest(inputs="w1 " * 500).SerializeToString()

    async def write(call: grpc.aio.StreamStreamCall) -> str:
        with suppress(*OVER, TimeoutError):
            async with asyncio.timeout(2):
                for _ in range(5000):
                    await call.write(request)
                return "never stopped"
        return "stopped by flow control"

    told = Counter(await asyncio.gather(*map(write, calls)))
    for channel in channels:
        await channel.close()
    return told


async def texts_are_long(server: Sick, size: Size) -> Codes:
    """One stream that wants 64,000 characters tokenized over and over."""
    request = tei_pb2.EncodeRequest(inputs="w1 w2 " * 10_666)
    async with connect(server.address) as channel:
        call = tei_pb2_grpc.TokenizeStub(channel).TokenizeStream(iter([request] * size.texts))
        return Counter([len(reply.tokens) async for reply in call] and [(await call.code()).name])


async def pings_flood(server: Sick, size: Size) -> Codes:
    """One connection, no calls, as many pings as it takes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    heard = b""
    with suppress(ConnectionError):
        for _ in range(0, size.pings, 100):
            writer.write(frame(PING, 0, 0, b"flooding") * 100)
            await writer.drain()
        async with asyncio.timeout(10):
            while GOODBYE not in heard and (more := await reader.read(65536)):
                heard = heard[-len(GOODBYE) :] + more
    writer.close()
    return Counter(["turned away"])


FAULTS: list[Fault] = [
    model_raises,
    memory_runs_out,
    tokenizer_raises,
    model_hangs,
    thread_dies,
    process_crashes,
    clients_come_and_go,
    descriptors_run_out,
    streams_flood,
    readers_are_slow,
    texts_are_long,
    pings_flood,
]
DEADLY = (thread_dies, process_crashes)  # a supervisor must start the process again


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
            yield Sick(process, port, metrics_port)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def _told(codes: Codes) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(codes.items()))


def is_well(row: Row) -> bool:
    """Healed, if that is in its power; and nothing has leaked."""
    healed = row.healed is not None or row.fault in [fault.__name__ for fault in DEADLY]
    return healed and row.lost == 0 and row.descriptors <= SPARE


async def main() -> int:
    """Break, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[fault.__name__ for fault in FAULTS])
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    print(f"{'fault':24} {'who took part':52} {'who was there':32} {'probe':>10} {'healed':>9} lost descr.  memory")
    for fault in FAULTS:
        if fault.__name__ in options.names:
            rows.append(await examine(fault, Size()))
            print(rows[-1].line(), flush=True)
    return 0 if all(map(is_well, rows)) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
