"""Counters and histograms that cost well under a microsecond a call; the registry and the text are prometheus_client's.

Its own ones lock, and walk through the buckets one by one: with a dozen instruments a request that is 20 microseconds.
Here each instrument is written by one thread only, and a scrape, from another thread, reads whole numbers.

Where several processes serve, each has its numbers in shared memory, and one of them shows the sums.
"""

from bisect import bisect_left
from collections.abc import Iterator, MutableSequence, Sequence
from itertools import accumulate, product
from typing import TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Memory: TypeAlias = "memoryview[float]"  # of doubles, which other processes read or write


class Registry(CollectorRegistry):
    """Instruments, and where their numbers are: in `memory` if it is given.

    `others` are the memories of processes whose numbers are shown with those of this one. All of them make the same
    instruments in the same order, so that the numbers of one instrument have the same place everywhere.
    """

    def __init__(self, memory: "Memory | None" = None, others: Sequence[Memory] = ()) -> None:
        super().__init__()
        self._memory, self._others = memory, others
        self._taken = 0

    def take(self, count: int) -> "Numbers":
        """Return `count` numbers for one instrument."""
        place = slice(self._taken, self._taken + count)
        self._taken += count
        own = [0.0] * count if self._memory is None else self._memory[place]
        if len(own) < count:
            raise RuntimeError("the memory of the metrics is too small")
        return Numbers(own, [other[place] for other in self._others])


class Numbers:
    """The numbers of one instrument: `own` to write, `read` to show."""

    def __init__(self, own: "MutableSequence[float] | Memory", others: Sequence[Memory]) -> None:
        self.own = own
        self._others = others

    def read(self) -> list[float]:
        """Return the sums over all processes."""
        return [sum(values) for values in zip(self.own, *self._others, strict=True)]


class Counter(Collector):
    """A number for each combination of label values, all of them known from the start."""

    def __init__(self, name: str, text: str, registry: Registry, **labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._places = {values: place for place, values in enumerate(product(*labels.values()))}
        self._numbers = registry.take(len(self._places))
        self._own = self._numbers.own
        registry.register(self)

    def add(self, *labels: str, amount: float = 1) -> None:
        """Add to the number of these label values, which are in the order of the label names."""
        self._own[self._places[labels]] += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the numbers, for a scrape."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in zip(self._places, self._numbers.read(), strict=True):
            family.add_metric(labels, value)
        yield family


class Histogram(Collector):
    """Counts of values up to each of `bounds`; values come `per_unit` times as large as they are shown."""

    def __init__(
        self, name: str, text: str, registry: Registry, *, bounds: Sequence[float], per_unit: float = 1
    ) -> None:
        self._name, self._text, self._per_unit = name, text, per_unit
        self._shown = [*map(floatToGoString, bounds), "+Inf"]
        self._bounds = [bound * per_unit for bound in bounds]
        self._numbers = registry.take(len(self._shown) + 1)
        self._own = self._numbers.own  # counts, then the sum of the values
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._own[bisect_left(self._bounds, value)] += 1
        self._own[-1] += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each of many values."""
        places = np.searchsorted(self._bounds, values, side="left")
        for place, count in enumerate(np.bincount(places).tolist()):
            self._own[place] += count
        self._own[-1] += sum(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return the counts, for a scrape."""
        *counts, total = self._numbers.read()
        buckets = list(zip(self._shown, accumulate(counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=total / self._per_unit)
