"""Counters and histograms that cost well under a microsecond a call; the registry and the text are prometheus_client's.

Its own ones lock, and walk through the buckets one by one: with a dozen instruments a request that is 20 microseconds.
Here each instrument is written by one thread only, and a scrape, from another thread, reads whole numbers.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counter(Collector):
    """A number for each combination of label values, all of them known from the start."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, **labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(product(*labels.values()), 0)
        registry.register(self)

    def add(self, *labels: str, amount: float = 1) -> None:
        """Add to the number of these label values, which are in the order of the label names."""
        self._values[labels] += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the numbers, for a scrape."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


class Histogram(Collector):
    """Counts of values up to each of `bounds`; values come `per_unit` times as large as they are shown."""

    def __init__(
        self, name: str, text: str, registry: CollectorRegistry, *, bounds: Sequence[float], per_unit: float = 1
    ) -> None:
        self._name, self._text, self._per_unit = name, text, per_unit
        self._shown = [*map(floatToGoString, bounds), "+Inf"]
        self._bounds = [bound * per_unit for bound in bounds]
        self._counts = [0] * len(self._shown)
        self._sum: float = 0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return the counts, for a scrape."""
        buckets = list(zip(self._shown, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum / self._per_unit)
