"""What serving costs without a model: ours around a runner that computes nothing, against a bare grpc.aio echo.

    python -m benchmarks.overhead [--callers 64] [--texts 2000] [--rounds 9] [--frontends 2] [--channels 4]

`front-ends` is ours, too, behind `--frontends` processes, which share `--channels` connections. All get the same
requests, of ten tokens, and give replies of the same size. `unary` is calls per second, by that many callers in this
process; `stream` is messages per second, of one EmbedStream for each channel. Client and server share the cores, so the
client, too, may be what limits a rate; `server CPU` is what the server, all its processes, spent on it by itself: its
ratio is the inverse of what a server at saturation would handle.
"""

import asyncio
from collections.abc import Sequence

from benchmarks.client import Client, Requests, requests_of
from benchmarks.measurements import Measurements, choose_clock, cpu_seconds
from benchmarks.options import Options, parser
from benchmarks.results import publish
from benchmarks.servers import Server, started
from benchmarks.workloads import write_texts

TOKENS = 10
TEXTS = 2000
CALLERS = 64
BASES = {"echo": "", "weightless": "echo", "front-ends": "weightless"}  # what each is compared with


class Costs:
    """Rates, and CPU time of the server, of all."""

    def __init__(self) -> None:
        self.rates = Measurements("per s")
        self.cpu = Measurements("us of server CPU each")

    def add(self, way: str, kind: str, rate: float, cpu: Sequence[float]) -> None:
        """What one round gave; `cpu` of each process."""
        self.rates.add(way, kind, rate, BASES[kind])
        self.cpu.add(way, kind, sum(cpu), BASES[kind])
        if len(cpu) > 1:
            self.cpu.add(way, f"{kind}, the model's process", cpu[0])


async def measure(
    options: Options, servers: dict[str, Server], requests: Requests, callers: int, channels: int
) -> Costs:
    """All rounds; the first warms up and is not counted."""
    costs, clients = Costs(), {kind: Client(server.address, channels) for kind, server in servers.items()}
    pids = {kind: server.pids for kind, server in servers.items()}
    for counted in [False, *[True] * options.rounds]:
        for way in ("unary", "stream"):
            for kind, client in clients.items():
                clock = choose_clock(cpu_time=options.cpu_time, pids=pids[kind])
                start, before = clock(), [*map(cpu_seconds, pids[kind])]
                await (client.closed_loop(requests, callers) if way == "unary" else client.stream(requests))
                seconds, after = clock() - start, [*map(cpu_seconds, pids[kind])]
                if counted:
                    cpu = [(ended - began) / len(requests) * 1e6 for began, ended in zip(before, after, strict=True)]
                    costs.add(way, kind, len(requests) / seconds, cpu)
    for client in clients.values():
        await client.close()
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and publish."""
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--callers", type=int, default=CALLERS)
    arguments_parser.add_argument("--frontends", type=int, default=2)
    arguments_parser.add_argument("--channels", type=int, default=1)
    given = arguments_parser.parse_args(arguments)
    options = Options(given)
    texts = write_texts(options.folder, [TOKENS] * (given.texts or TEXTS // options.divisor))
    front_ends = ("--frontends", str(given.frontends))
    with (
        started("echo", options.folder) as echo,
        started("weightless", options.folder) as weightless,
        started("weightless", options.folder, *front_ends) as fronted,
    ):
        servers = dict(zip(BASES, (echo, weightless, fronted), strict=True))
        costs = asyncio.run(measure(options, servers, requests_of(texts), given.callers, given.channels))
    publish("overhead", [*costs.rates.rows(), *costs.cpu.rows()], options.output, **options.about)


if __name__ == "__main__":
    main()
