"""Calls a server ten times as often as it can bear, and probes it meanwhile, as Kubernetes would.

    python tests/chaos/overload.py --model .models/all-MiniLM-L6-v2 --seconds 20

Ten times as many callers as there are permits, in processes of their own, each calling again as soon as it is answered
or refused. Probes come from this process, a new connection for each, for the service of each kind of probe, at the port
that serves and at the health port. Prints how long they took, and ends with 0 if all were SERVING, and 99 in 100 within
100 ms.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tei_grpc.pb import tei_pb2
from tests.e2e.servers import Server, free_port

TIMES = 10
CROWDS = 2  # processes of callers: one alone would be slower than the server
TARGET_MS = 100
PAUSE = 0.05  # seconds between probes
SERVICES = ("", "liveness", "tei.v1.Embed")
TEXT = "What is deep learning, and what is it not? " * 3
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class Probe(NamedTuple):
    """What one probe was told, after how many milliseconds."""

    status: str
    ms: float


class Report(NamedTuple):
    """Probes before and during the overload, and what became of the calls."""

    quiet: list[Probe]
    loaded: list[Probe]
    calls: Counter[str]

    def lines(self) -> Iterator[str]:
        """The table."""
        for name, probes in (("quiet", self.quiet), ("overloaded", self.loaded)):
            times = [f"{what} {percentile(probes, share):.1f} ms" for what, share in (("median", 0.5), ("p99", 0.99))]
            statuses = dict(Counter(probe.status for probe in probes))
            worst = max(probe.ms for probe in probes)
            yield f"{name:10}  {len(probes)} probes  {', '.join(times)}, max {worst:.1f} ms  {statuses}"
        yield f"calls       {dict(self.calls)}"

    @property
    def is_good(self) -> bool:
        """Whether the probes are as they should be."""
        return {probe.status for probe in self.loaded} == {"SERVING"} and percentile(self.loaded, 0.99) <= TARGET_MS


def percentile(probes: Sequence[Probe], share: float) -> float:
    times = sorted(probe.ms for probe in probes)
    return times[int(share * (len(times) - 1))]


def overload(model: Path, *, permits: int, seconds: float) -> Report:
    """Start a server, and find out."""
    health_port = free_port()
    options = ("--max-concurrent-requests", str(permits), "--health-port", str(health_port))
    server = Server("--model-id", str(model), *options)
    targets = [(address, service) for address in (server.address, f"127.0.0.1:{health_port}") for service in SERVICES]
    try:
        server.wait_until_ready()
        quiet = probe_for(seconds / 4, targets)
        calls: Counter[str] = Counter()
        with crowds(server.address, TIMES * permits, calls):
            loaded = probe_for(seconds, targets)
        return Report(quiet, loaded, calls)
    finally:
        server.kill()


def probe_for(seconds: float, targets: Sequence[tuple[str, str]]) -> list[Probe]:
    """Probe the targets in turns."""
    probes: list[Probe] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        probes.append(probe(*targets[len(probes) % len(targets)]))
        time.sleep(PAUSE)
    return probes


def probe(address: str, service: str) -> Probe:
    """Connect, ask, and leave."""
    began = time.monotonic()
    with grpc.insecure_channel(address, OWN_CONNECTION) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=10
            )
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        except grpc.RpcError as error:
            status = error.code().name
    return Probe(status, (time.monotonic() - began) * 1000)


@contextmanager
def crowds(address: str, callers: int, calls: Counter[str]) -> Iterator[None]:
    """Processes that call while the block runs; what became of their calls is added to `calls`."""
    command = [sys.executable, __file__, "--crowd", address, "--callers", str(callers // CROWDS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(CROWDS)]
    try:
        for process in processes:
            process.stdout.readline()  # it calls
        yield
        for process in processes:
            calls.update(json.loads(process.communicate(timeout=60)[0]))  # the end of its stdin ends it
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def call_in_crowds(address: str, callers: int) -> Counter[str]:
    """Call until stdin ends."""
    channels = [grpc.aio.insecure_channel(address, OWN_CONNECTION) for _ in range(8)]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    request = tei_pb2.EmbedRequest(inputs=TEXT, truncate=True).SerializeToString()
    calls: Counter[str] = Counter()

    async def keep_calling(channel: grpc.aio.Channel) -> None:
        embed = channel.unary_unary("/tei.v1.Embed/Embed")
        while not over.done():
            calls[(await embed(request).code()).name] += 1

    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    print("calling", flush=True)
    await asyncio.gather(*(keep_calling(channels[number % len(channels)]) for number in range(callers)))
    return calls


def main() -> int:
    """Find out, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".models/all-MiniLM-L6-v2"))
    parser.add_argument("--permits", type=int, default=512, help="--max-concurrent-requests [default: %(default)s]")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--crowd", help=argparse.SUPPRESS)
    parser.add_argument("--callers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.crowd is not None:
        print(json.dumps(asyncio.run(call_in_crowds(given.crowd, given.callers))))
        return 0
    report = overload(given.model, permits=given.permits, seconds=given.seconds)
    print(*report.lines(), sep="\n")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
