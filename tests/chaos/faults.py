"""Breaks servers in every way that we know, one after the other; says what clients saw, and how long it took to heal.

`python tests/chaos/faults.py` prints a table and ends with 0 when nothing was lost that could have been answered.
"""

import argparse
import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from tests.chaos import breakdowns, floods
from tests.chaos.bystander import Bystander, seconds_until_well
from tests.chaos.sick import Codes, Sick, Size, run_texts, sick

PATIENCE = 20.0  # seconds in which a server must be well again
SPARE = 3  # descriptors that gRPC may open once, for threads that it starts when there is much to do
GROWTH = 128 * 2**20  # bytes that a process may keep of a fault
STREAM_GROWTH = 48 * 2**10  # for each stream that was open
READERS_GROWTH = 96 * 2**20  # for all who read nothing: what all streams of a server may hold, and some for holes
BAD = {"failed", "never stopped", "never failed", "kept", "new: OK"}

Fault = Callable[[Sick, Size], Awaitable[Codes]]

FAULTS: list[Fault] = [
    breakdowns.model_raises,
    breakdowns.memory_runs_out,
    breakdowns.tokenizer_raises,
    breakdowns.model_hangs,
    breakdowns.interpreter_hangs,
    breakdowns.thread_dies,
    breakdowns.process_crashes,
    floods.clients_come_and_go,
    floods.descriptors_run_out,
    floods.streams_flood,
    floods.readers_are_slow,
    floods.texts_are_long,
    floods.pings_flood,
]
DEADLY = (breakdowns.thread_dies, breakdowns.process_crashes)  # a supervisor must start the process again


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


def _told(codes: Codes) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(codes.items()))


def is_well(row: Row, size: Size) -> bool:
    """Healed, if that is in its power; nobody got what no server should do; and nothing has leaked."""
    healed = row.healed is not None or row.fault in [fault.__name__ for fault in DEADLY]
    has_leaked = row.lost or row.descriptors > SPARE or row.growth > _most_growth(row.fault, size)
    return healed and not has_leaked and not BAD & row.told.keys()


def _most_growth(fault: str, size: Size) -> int:
    """Bytes."""
    more = {"streams_flood": size.streams * STREAM_GROWTH, "readers_are_slow": READERS_GROWTH}
    return GROWTH + more.get(fault, 0)


async def main() -> int:
    """Break, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[fault.__name__ for fault in FAULTS])
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows, size = [], Size()
    print(f"{'fault':24} {'who took part':52} {'who was there':32} {'probe':>10} {'healed':>9} lost descr.  memory")
    for fault in FAULTS:
        if fault.__name__ in options.names:
            rows.append(await examine(fault, size))
            print(rows[-1].line(), flush=True)
    return 0 if all(is_well(row, size) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
