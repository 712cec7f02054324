"""Keeps servers at saturation with all that callers do, for minutes, and says whether they are as they were.

`python tests/chaos/soak.py --minutes 10` prints a table and ends with 0 when memory, descriptors and latency stand
still and every counter balances.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.chaos.abuse import Finding, Report, settle
from tests.chaos.attacks import (
    METHODS,
    Attack,
    Victim,
    ask,
    be_impatient,
    bring_a_wrong_key,
    cancel_in_the_middle,
    damage_a_message,
    is_bug,
    leave_a_stream_half_open,
    message,
    name_an_unknown_enum,
)
from tests.chaos.patients import PERMITS, Patient, patients

WORKERS = 2 * PERMITS  # for each server: more than it lets in
SAMPLE_SECONDS = 1.0
GROWTH = 0.02  # of memory, in the second half
DRIFT = 1.2  # of the last minute's 99th percentile over that of the second
CHECK = "/grpc.health.v1.Health/Check"


async def ask_one(victim: Victim, rng: random.Random) -> str:
    """A call that fits, or does not fit, the model."""
    method = rng.choice([name for name in METHODS if not name.endswith("Stream")])
    return await ask(victim, rng, method, message(rng, method).SerializeToString())


async def send_a_stream(victim: Victim, rng: random.Random) -> str:
    """Some messages, all answered."""
    method = rng.choice([name for name in METHODS if name.endswith("Stream")])
    return await ask(
        victim, rng, method, *(message(rng, method).SerializeToString() for _ in range(rng.randrange(2, 30)))
    )


async def set_a_deadline(victim: Victim, rng: random.Random) -> str:
    """One that a busy server may well miss."""
    method = rng.choice(METHODS)
    outcome = await ask(victim, rng, method, message(rng, method).SerializeToString(), patience=rng.random() / 20)
    return "gone" if outcome == "DEADLINE_EXCEEDED" else outcome


async def probe_health(victim: Victim, rng: random.Random) -> str:
    """Never shed."""
    return await ask(victim, rng, CHECK, b"")


# how often, against each other
LOAD: dict[Attack, int] = {
    ask_one: 50,
    send_a_stream: 20,
    set_a_deadline: 8,
    be_impatient: 4,
    cancel_in_the_middle: 8,
    leave_a_stream_half_open: 1,
    damage_a_message: 4,
    name_an_unknown_enum: 2,
    bring_a_wrong_key: 2,
    probe_health: 5,
}


class Sample(NamedTuple):
    """A server at one moment."""

    at: float
    memory: int
    descriptors: int


class Log:
    """What came of all calls to one server, and what the server was like meanwhile."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.latencies: list[tuple[float, float]] = []  # when a probe ended, and the seconds that it took
        self.samples: list[Sample] = []


async def soak(servers: Sequence[Patient], *, seconds: float, seed: int) -> Report:
    """Load all servers for so long; look at them all the while, and at the end."""
    logs = [Log() for _ in servers]
    ends = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for number, (server, log) in enumerate(zip(servers, logs, strict=True)):
            victim = Victim(server.address)
            for worker in range(WORKERS):
                group.create_task(_work(victim, random.Random(f"{seed} {number} {worker}"), log, ends))
            group.create_task(_time_probes(server, log, ends))
            group.create_task(_take_samples(server, log, ends))
    findings = [
        found for server, log in zip(servers, logs, strict=True) for found in await examine(server, log, seconds)
    ]
    return Report(sum((log.outcomes for log in logs), Counter()), findings)


async def _work(victim: Victim, rng: random.Random, log: Log, ends: float) -> None:
    while time.monotonic() < ends:
        (way,) = rng.choices(list(LOAD), list(LOAD.values()))
        log.outcomes[way.__name__, await way(victim, rng)] += 1


async def _time_probes(server: Patient, log: Log, ends: float) -> None:
    """The latency that a caller sees: a call that waits its turn, over and over."""
    channel = Victim(server.address).connect()
    while (started := time.monotonic()) < ends:
        await server.probe(channel, waits=True)
        log.latencies.append((time.monotonic(), time.monotonic() - started))
        await asyncio.sleep(0.01)
    await channel.close()


async def _take_samples(server: Patient, log: Log, ends: float) -> None:
    while time.monotonic() < ends:
        log.samples.append(Sample(time.monotonic(), server.memory, server.descriptors))
        await asyncio.sleep(SAMPLE_SECONDS)


async def examine(server: Patient, log: Log, seconds: float) -> list[Finding]:
    """What must stand still, and what must balance. Shorter than four minutes, neither memory nor latency is judged."""
    metrics = await settle(server)
    is_long = seconds >= 240
    growth, descriptors, drift = (
        memory_growth(log.samples),
        descriptor_growth(log.samples),
        latency_drift(log.latencies),
    )
    bad = [outcome for _, outcome in log.outcomes if is_bug(*outcome.split(": ", 1)) or outcome == "DEADLINE_EXCEEDED"]
    looked = [
        ("process", "alive" if server.is_alive else "dead", server.is_alive),
        ("hung or unforeseen", f"{len(bad)} {bad[:1] or ''}", not bad),
        ("memory in the second half", f"{growth:+.2%} of {log.samples[-1].memory / 2**20:.0f} MiB", growth < GROWTH),
        ("memory by the minute, MiB", minutes(log.samples), True),
        ("descriptors in the second half", f"{descriptors:+d} of {log.samples[-1].descriptors}", descriptors <= 0),
        ("p99, last minute / second", f"{drift:.2f}", drift <= DRIFT),
        *((f"balance: {name}", text, is_even) for name, text, is_even in balances(metrics)),
        ("complaints in the log", f"{len(server.complaints())}", not server.complaints()),
    ]
    timed = {"memory in the second half", "p99, last minute / second", "descriptors in the second half"}
    return [Finding(server.name, what, text, good or (what in timed and not is_long)) for what, text, good in looked]


def memory_growth(samples: Sequence[Sample]) -> float:
    """The last eighth's median over that of the eighth behind the middle, less 1: peaks of batches do not bend it."""
    eighth = max(1, len(samples) // 8)
    half = len(samples) // 2
    early = [sample.memory for sample in samples[half : half + eighth]]
    late = [sample.memory for sample in samples[-eighth:]]
    return median(late) / median(early) - 1


def minutes(samples: Sequence[Sample]) -> str:
    """The median of each minute."""
    found: dict[int, list[int]] = {}
    for sample in samples:
        found.setdefault(int(sample.at - samples[0].at) // 60, []).append(sample.memory)
    return " ".join(f"{median(values) / 2**20:.0f}" for values in found.values())


def descriptor_growth(samples: Sequence[Sample]) -> int:
    """The least of the last quarter over the least of the third: connections come and go, leaks only come."""
    quarter = max(1, len(samples) // 4)
    half = len(samples) // 2
    early, late = samples[half : half + quarter], samples[-quarter:]
    return min(sample.descriptors for sample in late) - min(sample.descriptors for sample in early)


def latency_drift(latencies: Sequence[tuple[float, float]]) -> float:
    """The 99th percentile of the last minute over that of the second; of fifths, where there are no minutes."""
    begin, end = latencies[0][0], latencies[-1][0]
    window = min(60.0, (end - begin) / 5)
    second = [value for at, value in latencies if begin + window <= at < begin + 2 * window]
    last = [value for at, value in latencies if at >= end - window]
    return _p99(last) / _p99(second)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def balances(metrics: dict[str, float]) -> list[tuple[str, str, bool]]:
    """Every counter that must even out at rest: name, text, whether it does."""
    started = metrics["te_request_count"]
    endings = {name: metrics[f"te_request_{name}"] for name in ("success", "failure", "dropped")}
    parts = " + ".join(f"{value:.0f} {name}" for name, value in endings.items())
    found = [("requests", f"{started:.0f} = {parts}", started == sum(endings.values()))]
    for kind in ("embed", "predict"):
        count, success = metrics[f"te_{kind}_count"], metrics[f"te_{kind}_success"]
        found.append((f"{kind} inputs", f"{success:.0f} of {count:.0f} answered", success <= count))
    found += [(name, f"{metrics[name]:.0f}", metrics[name] == 0) for name in ("te_queue_size", "te_permits_in_use")]
    answered = metrics["te_request_duration_count"]
    found.append(("durations", f"{answered:.0f} recorded", answered == endings["success"]))
    return found


def main() -> int:
    """Soak, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with patients() as servers:
        report = asyncio.run(soak(servers, seconds=60 * options.minutes, seed=options.seed))
        complaints = [line for server in servers for line in server.complaints()]
    print(*report.lines(), *complaints[:3], sep="\n")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
