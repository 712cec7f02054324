"""What metrics, logs and traces cost: a weightless runner behind one server per way to watch it, called in turns.

    python benchmarks/telemetry.py [--rounds 100] [--calls 160]

All servers live in one process, because two processes that do the same differ by more than what is measured here. Every
round makes the same unary calls to each server. Reported is the CPU time of their process per call, and its ratio to
that of the server which has all but the thing in question: the median over the rounds, since calls of one round meet
much the same machine. CPU time, because the rate of a server that computes nothing is that of its client, too. At
saturation the one is the other's inverse.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import IO, NamedTuple

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tei_grpc import logs
from tei_grpc.config import Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.serve.grpc_server import GrpcServer
from tei_grpc.traces import open_traces
from tests.collector import collecting
from tests.fakes import FakeDevice, FakeRunner
from tests.grpc.conftest import write_checkpoint

AT_A_TIME = 16


class Way(NamedTuple):
    """A way to watch a server, and what its cost is compared with."""

    metrics: bool = True
    level: str = "warning"
    json: bool = False
    sampled: str | None = None  # fraction of traces
    base: str = "metrics"
    target: float = 1.0


WAYS = {
    "nothing": Way(metrics=False, base="nothing"),
    "metrics": Way(base="nothing", target=1.04),
    "logs at info": Way(level="info", target=1.05),
    "logs at info, JSON": Way(level="info", json=True, target=1.05),
    "traces, 10 % sampled": Way(sampled="0.1", target=1.10),
    "traces, none sampled": Way(sampled="0", target=1.02),
    "metrics, again": Way(),
}


class NoMetrics(Metrics):
    """Counts nothing of what happens per request, input or batch."""

    def _ignore(self, *_arguments: object, **_keywords: object) -> None: ...

    request_started = request_succeeded = input_started = input_encoded = input_succeeded = _ignore
    batch_formed = batch_ended = _ignore


async def serve(model: str, collector: str) -> None:
    """Say one address for each way, then go each way that is named on stdin, and say the CPU time so far."""
    async with AsyncExitStack() as stack:
        for way in WAYS.values():
            server, address = await start(way, model, collector)
            stack.push_async_callback(server.stop)
            print(address, flush=True)
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            logs.configure(WAYS[name].level, json_output=WAYS[name].json, disable_spans=False, stream=sys.stderr)
            print(time.process_time_ns() / 1e3, flush=True)


async def start(way: Way, model: str, collector: str) -> tuple[GrpcServer, str]:
    """One server, and its address."""
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = way.sampled or "0"
    endpoint = None if way.sampled is None else collector
    settings = Settings(model_id=model, hostname="127.0.0.1", port=0, otlp_endpoint=endpoint)
    metrics = Metrics() if way.metrics else NoMetrics()
    device = FakeDevice(read_model_config(Path(model), settings), settings, metrics, FakeRunner())
    device.runner.batches = Forgetful()
    engine = Engine(settings, device, metrics, open_traces(settings))
    server = GrpcServer(settings, engine)
    addresses = await server.start()
    await engine.start()
    return server, addresses.serving[0].local


class Forgetful(list):  # type: ignore[type-arg]
    """A list that stays empty."""

    def append(self, _: object) -> None:
        """Forget it."""


class Servers:
    """The process with all servers, and their addresses by way."""

    def __init__(self, model: Path, collector: str, log: IO[str] | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--model", str(model), "--collector", collector],
            env=os.environ | {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self.addresses = {name: self._read() for name in WAYS}

    def go(self, name: str) -> float:
        """Set what the whole process shares: the log. The last one is written to its end.

        Returns microseconds of CPU time that the process has had so far.
        """
        print(name, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        return "" if self._process.stdout is None else self._process.stdout.readline().strip()


async def call(address: str, calls: int) -> None:
    """Make that many calls, AT_A_TIME together."""
    async with grpc.aio.insecure_channel(address) as channel:
        embed = tei_pb2_grpc.EmbedStub(channel).Embed
        request = tei_pb2.EmbedRequest(inputs="w1 w2 w3 w4 w5 w6 w7 w8")

        async def work() -> None:
            for _ in range(calls // AT_A_TIME):
                await embed(request)

        await asyncio.gather(*(work() for _ in range(AT_A_TIME)))


def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds of CPU time per call, by way and round."""
    costs: dict[str, list[float]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        model = write_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory())), "BertModel")
        collector = stack.enter_context(collecting())
        reader = stack.enter_context(
            subprocess.Popen("cat", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        )  # a container's log is a pipe, too
        servers = Servers(model, collector.url, reader.stdin)
        stack.callback(servers.close)
        for _ in range(rounds + 1):
            for name, way in random.sample(list(WAYS.items()), len(WAYS)):
                before = servers.go(name)
                asyncio.run(call(servers.addresses[name], calls))
                costs[name].append((servers.go(way.base) - before) / calls)
    return {name: values[1:] for name, values in costs.items()}  # the first round warms up


def report(costs: dict[str, list[float]]) -> Iterator[str]:
    """The table; `+-` is how far the ratio may be off, as the rounds differ (two standard errors)."""
    yield f"{'':24}{'us/call':>9}{'ratio':>9}{'+-':>8}{'target':>9}"
    for name, way in WAYS.items():
        ratios = [mine / theirs for mine, theirs in zip(costs[name], costs[way.base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = 2 * 0.93 * (high - low) / len(ratios) ** 0.5  # of a median
        yield f"{name:24}{statistics.median(costs[name]):9.1f}{middle:9.3f}{error:8.3f}{way.target:9.2f}"


def main() -> None:
    """Measure and print; or serve, as the process that measures asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=160)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--collector", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        asyncio.run(serve(options.model, options.collector))
    else:
        print(*report(measure(options.rounds, options.calls)), sep="\n")


if __name__ == "__main__":
    main()
