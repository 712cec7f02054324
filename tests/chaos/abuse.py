"""Abuses three servers with thousands of seeded calls, then asks whether they are as they were.

`python tests/chaos/abuse.py --calls 10000 --seed 0` prints a table and ends with 0 when nothing was lost.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.chaos.attacks import ATTACKS, Victim, is_bug
from tests.chaos.patients import PERMITS, Patient, patients

AT_A_TIME = 24  # more calls than there are permits
WARM_UPS = 4  # memory goes up and down by what happens to meet; the highest of them is the baseline
GROWTH = 0.05  # of memory, over the baseline
SETTLE_SECONDS = 20


class Finding(NamedTuple):
    """One thing that was looked at."""

    server: str
    what: str
    value: str
    is_good: bool


class Report(NamedTuple):
    """What was done, and how the servers were afterwards."""

    outcomes: Counter[tuple[str, str]]
    findings: list[Finding]

    @property
    def is_good(self) -> bool:
        return all(finding.is_good for finding in self.findings)

    def lines(self) -> Iterator[str]:
        """The table."""
        for (attack, outcome), count in sorted(self.outcomes.items()):
            yield f"{attack:28} {outcome:40} {count:6}"
        for finding in self.findings:
            yield f"{finding.server:8} {finding.what:34} {finding.value:40} {'ok' if finding.is_good else 'BAD'}"


def main() -> int:
    """Abuse, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with patients() as servers:
        report = asyncio.run(abuse(servers, calls=options.calls, warm_up=options.calls // 2, seed=options.seed))
        complaints = [line for server in servers for line in server.complaints()]
    print(*report.lines(), *complaints[:3], sep="\n")
    return 0 if report.is_good else 1


async def abuse(servers: Sequence[Patient], *, calls: int, warm_up: int, seed: int) -> Report:
    """Abuse to warm up, look, abuse, look again."""
    victims = [Victim(server.address) for server in servers]
    answers = [await server.probe(victim.channels[0]) for server, victim in zip(servers, victims, strict=True)]
    memory = [0] * len(servers)
    for part in range(WARM_UPS):
        await attack(victims, random.Random(seed + 1 + part), warm_up // WARM_UPS)
        memory = [max(pair) for pair in zip(memory, [await settled_memory(server) for server in servers], strict=True)]
    outcomes = await attack(victims, random.Random(seed), calls)
    findings = [_no_bug_shows(outcomes)]
    for server, victim, answer, rss in zip(servers, victims, answers, memory, strict=True):
        findings += await examine(server, victim, answer, rss)
    for victim in victims:
        await victim.close()
    return Report(outcomes, findings)


async def attack(victims: Sequence[Victim], rng: random.Random, calls: int) -> Counter[tuple[str, str]]:
    """Make `calls` calls, chosen by `rng`, AT_A_TIME together; count what came of them."""
    outcomes: Counter[tuple[str, str]] = Counter()
    plan = iter(
        [
            (way, rng.choice(victims), random.Random(rng.random()))
            for way in rng.choices(list(ATTACKS), list(ATTACKS.values()), k=calls)
        ]
    )

    async def work() -> None:
        for way, victim, own_rng in plan:
            outcomes[way.__name__, await way(victim, own_rng)] += 1

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_A_TIME):
            workers.create_task(work())
    return outcomes


async def settled_memory(server: Patient) -> int:
    """Bytes, once all calls are over."""
    await settle(server)
    return server.memory


async def settle(server: Patient) -> dict[str, float]:
    """Wait until what the callers left behind is over; return the metrics."""
    ends = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = await asyncio.to_thread(server.read_metrics)
        if (_lost(metrics) == 0 and metrics["te_queue_size"] == 0) or time.monotonic() > ends:
            return metrics
        await asyncio.sleep(0.1)


async def examine(server: Patient, victim: Victim, answer: bytes, rss: int) -> list[Finding]:
    """All that must be as it was."""
    metrics = await settle(server)
    together = await asyncio.gather(*(server.probe(victim.connect()) for _ in range(PERMITS)), return_exceptions=True)
    growth = server.memory / rss - 1
    started = sum(value for name, value in metrics.items() if name == "te_request_count")
    looked = [
        ("process", "alive" if server.is_alive else "dead", server.is_alive),
        (
            f"{PERMITS} calls at once",
            f"{together.count(answer)} answered bit for bit",
            together.count(answer) == PERMITS,
        ),
        ("requests that never ended", f"{_lost(metrics):.0f} of {started:.0f}", _lost(metrics) == 0),
        ("entries in the queue", f"{metrics['te_queue_size']:.0f}", metrics["te_queue_size"] == 0),
        ("memory", f"{server.memory / 2**20:.0f} MiB, {growth:+.1%}", growth < GROWTH),
        ("complaints in the log", f"{len(server.complaints())}", not server.complaints()),
    ]
    return [Finding(server.name, *found) for found in looked]


def _lost(metrics: dict[str, float]) -> float:
    ended = ("te_request_success", "te_request_failure", "te_request_dropped")
    return metrics["te_request_count"] - sum(metrics[name] for name in ended)


def _no_bug_shows(outcomes: Counter[tuple[str, str]]) -> Finding:
    """No call hung, and none met an error that nobody had foreseen."""
    bad = [outcome for _, outcome in outcomes if is_bug(*outcome.split(": ", 1)) or outcome == "DEADLINE_EXCEEDED"]
    return Finding("all", "hung or unforeseen", f"{len(bad)} {bad[:1] or ''}", not bad)


if __name__ == "__main__":
    sys.exit(main())
