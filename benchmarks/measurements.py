"""What a benchmark measured: values by workload and subject, a round at a time; and the clocks that they come from.

The machine may have other work to do, and it comes in bursts. So every round measures all subjects in turns, ratios
are taken within a round, and the medians over the rounds count.
"""

import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

Clock = Callable[[], float]  # seconds
Run = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads that a process has, or had. As clock_getcpuclockid(3), on Linux."""
    return time.clock_gettime(~pid << 3 | 2)


def choose_clock(*, cpu_time: bool, pids: Iterable[int] = ()) -> Clock:
    """The wall's, or the CPU time of this process and of those in `pids`, together."""
    if not cpu_time:
        return time.perf_counter
    processes = [os.getpid(), *pids]
    return lambda: sum(map(cpu_seconds, processes))


class Row(NamedTuple):
    """A line of a result: the median over the rounds, with quartiles, and the median of the ratios to `base`."""

    workload: str
    subject: str
    value: float
    low: float
    high: float
    unit: str
    ratio: float | None = None
    base: str = ""


@dataclass
class Measurements:
    """Values of one unit, by (workload, subject), in the order of the rounds."""

    unit: str
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)  # subject -> the subject that it is compared with

    def add(self, workload: str, subject: str, value: float, base: str = "") -> None:
        """What one round gave."""
        self.values.setdefault((workload, subject), []).append(value)
        if base:
            self.bases[subject] = base

    def rows(self) -> Iterator[Row]:
        """By workload, in the order in which the subjects came."""
        for workload in dict.fromkeys(workload for workload, _ in self.values):
            for subject in (subject for of, subject in self.values if of == workload):
                yield self._row(workload, subject)

    def _row(self, workload: str, subject: str) -> Row:
        values, base = self.values[workload, subject], self.bases.get(subject, "")
        low, high = quartiles(values)
        row = Row(workload, subject, statistics.median(values), low, high, self.unit)
        if (workload, base) not in self.values:
            return row
        ratios = [mine / theirs for mine, theirs in zip(values, self.values[workload, base], strict=True)]
        return row._replace(ratio=statistics.median(ratios), base=base)


def quartiles(values: list[float]) -> tuple[float, float]:
    """The lower and the upper."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def in_turns(runs: Mapping[Key, Run], measure: Callable[[Run], float], rounds: int) -> dict[Key, float]:
    """The median of what each run measures, all of them in every round: what slows the machine down slows all."""
    found = [{key: measure(run) for key, run in runs.items()} for _ in range(rounds)]
    return {key: statistics.median(each[key] for each in found) for key in runs}


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Of the time from the first start to the last end, the part that no interval covers."""
    ordered = sorted(intervals)
    covered, end = 0.0, ordered[0][0]
    for start, stop in ordered:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - covered / (end - ordered[0][0])
