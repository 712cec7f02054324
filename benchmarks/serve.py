"""Our server over gRPC: throughput of callers that wait, latency at fixed rates, and what a call costs.

    python -m benchmarks.serve [--callers 1 16 64] [--loads 0.3 0.6 0.9] [--server-options --max-batch-tokens 4096]

This process is the client, the server is another one on the same cores. Four parts:

closed    every caller sends its next text when it has its answer; against the engine in this process, offline
open      texts come at random (Poisson) at a fraction of the rate that the most callers reached; latencies count from
          when a text was due
single    one text of 16 tokens at a time: p50, that of an echo of the same messages, and the forward pass alone
mixed     queries of ten tokens and passages, half and half, at 30 % of the rate that the two together reached; p99 of
          the queries against p50 of passages alone at the same load
"""

import asyncio
import gc
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.client import Client, Requests, percentiles, requests_of
from benchmarks.engine import sorted_batches
from benchmarks.measurements import Measurements, Row, choose_clock
from benchmarks.options import Options, Texts, parser
from benchmarks.results import publish
from benchmarks.servers import Server, started
from benchmarks.workloads import write_texts
from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.runner import Runner
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Caller

WAITING = Caller(waits=True)
SINGLE_TOKENS, SINGLE_CALLS = 16, 200
QUERY_TOKENS = 10
MIXED_LOAD = 0.3
CALLS = 64  # at most, of each caller


class Side(NamedTuple):
    """Everything that takes part."""

    options: Options
    server: Server
    client: Client
    echo: Client
    engine: Engine
    runner: Runner


class Part:
    """What the parts of the benchmark add to, round by round."""

    def __init__(self, callers: Sequence[int], loads: Sequence[float]) -> None:
        self.callers = sorted(callers)
        self.loads = loads
        self.rates = Measurements("texts/s")
        self.latencies = Measurements("ms")
        self.memory = Measurements("MB")

    def rows(self) -> list[Row]:
        """Rates first."""
        return [*self.rates.rows(), *self.latencies.rows(), *self.memory.rows()]


async def run_closed(side: Side, part: Part, name: str, workload: Texts) -> float:
    """Returns the texts per second of the most callers."""
    requests = requests_of(workload.texts)
    clock = choose_clock(cpu_time=side.options.cpu_time, pids=[side.server.pid])
    start = clock()
    await asyncio.gather(*(side.engine.embed(text, caller=WAITING) for text in workload.texts))
    part.rates.add(name, "engine, offline", len(requests) / (clock() - start))
    rate = 0.0
    for callers in part.callers:
        start, wall = clock(), time.perf_counter()
        latencies = await side.client.closed_loop(requests[: callers * CALLS], callers)
        rate = len(latencies) / (time.perf_counter() - wall)
        part.rates.add(name, f"{callers} callers", len(latencies) / (clock() - start), "engine, offline")
        for percentile, value in percentiles(latencies):
            part.latencies.add(name, f"{callers} callers, {percentile}", value)
    return rate


async def run_open(side: Side, part: Part, name: str, workload: Texts, rate: float) -> None:
    """Latencies at each load; `rate` is the texts per second at load 1."""
    requests = requests_of(workload.texts)
    for load in part.loads:
        latencies = await side.client.open_loop(requests, rate * load)
        for percentile, value in percentiles(latencies):
            part.latencies.add(name, f"{load:.0%} load, {percentile}", value)


async def run_single(side: Side, part: Part, calls: int) -> None:
    """One text at a time, in turns with its echo and with the bare forward pass."""
    text = write_texts(side.options.folder, [SINGLE_TOKENS])
    requests, batch = requests_of(text), sorted_batches(side.options.folder, text)[0]
    served, echoed, computed = [], [], []
    for _ in range(calls):
        served += await side.client.closed_loop(requests, 1)
        echoed += await side.echo.closed_loop(requests, 1)
        start = time.perf_counter()
        side.runner.run(batch)
        computed.append(time.perf_counter() - start)
    medians = [statistics.median(values) * 1e3 for values in (served, echoed, computed)]
    for subject, value in zip(("over gRPC, p50", "echo, p50", "forward pass, p50"), medians, strict=True):
        part.latencies.add("single", subject, value)
    part.latencies.add("single", "left: gRPC - echo - forward", medians[0] - medians[1] - medians[2])


async def run_mixed(side: Side, part: Part, passages: Texts) -> None:
    """Queries among passages, and passages alone, at the same load."""
    queries = write_texts(side.options.folder, [QUERY_TOKENS] * len(passages))
    mixed = [text for pair in zip(queries, passages.texts, strict=True) for text in pair]
    alone = await _percentiles_at(side.client, requests_of(passages.texts), 1)
    among = await _percentiles_at(side.client, requests_of(mixed), 2)
    part.latencies.add("mixed", "passages alone, p50", alone["p50"])
    part.latencies.add("mixed", "queries among passages, p50", among["p50"], "passages alone, p50")
    part.latencies.add("mixed", "queries among passages, p99", among["p99"], "passages alone, p50")


async def _percentiles_at(client: Client, requests: Requests, every: int) -> dict[str, float]:
    """Of every first, third, ... of the requests, at MIXED_LOAD."""
    start = time.perf_counter()
    await client.closed_loop(requests, 64)
    rate = len(requests) / (time.perf_counter() - start)
    latencies = await client.open_loop(requests, rate * MIXED_LOAD)
    return dict(percentiles(latencies[::every]))


async def measure(side: Side, part: Part) -> None:
    """All rounds; a first one, of calls in a closed loop, warms up."""
    workloads = side.options.workloads()
    part.memory.add("memory", "resident, idle", resident_mb(side.server.pid))
    for workload in workloads.values():
        await side.client.closed_loop(requests_of(workload.texts), 64)
    for _ in range(side.options.rounds):
        await run_single(side, part, SINGLE_CALLS // side.options.divisor)
        for name, workload in workloads.items():
            rate = await run_closed(side, part, name, workload)
            await run_open(side, part, name, workload, rate)
        if "P" in workloads:
            await run_mixed(side, part, workloads["P"])
    part.memory.add("memory", "resident, after all", resident_mb(side.server.pid))


def resident_mb(pid: int) -> float:
    """Resident memory of a process, in MB of 10^6 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@asynccontextmanager
async def sides(options: Options, server: Server, echo: Server) -> AsyncIterator[Side]:
    """Clients of both servers, an engine and a runner of our own."""
    config = EngineConfig(model_id=str(options.folder), dtype=options.dtypes[0])
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(config))
        runner = Runner(read_model_config(options.folder, config), config)
        client, echoing = Client(server.address), Client(echo.address)
        stack.push_async_callback(client.close)
        stack.push_async_callback(echoing.close)
        gc.freeze()  # as the server does: what is loaded is not garbage
        yield Side(options, server, client, echoing, engine, runner)


async def run(options: Options, part: Part, server: Server, echo: Server) -> None:
    """Measure with both servers running."""
    async with sides(options, server, echo) as side:
        await measure(side, part)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and publish."""
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--callers", nargs="+", type=int, default=[1, 16, 64])
    arguments_parser.add_argument("--loads", nargs="*", type=float, default=[0.3, 0.6, 0.9])
    arguments_parser.add_argument("--server-options", nargs="...", default=[], help="flags of tei-grpc; comes last")
    given = arguments_parser.parse_args(arguments)
    options, part = Options(given), Part(given.callers, given.loads)
    flags = ["--dtype", options.dtypes[0], *given.server_options]
    with started("echo", options.folder) as echo, started("real", options.folder, *flags) as server:
        asyncio.run(run(options, part, server, echo))
    publish("serve", part.rows(), options.output, dtype=options.dtypes[0], **options.about)


if __name__ == "__main__":
    main()
