"""What the metrics say."""

from collections import Counter

from tei_grpc.metrics import METHODS, Metrics

ENDINGS = ("te_request_success_total", "te_request_failure_total", "te_request_dropped_total")


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The value of one sample."""
    return metrics.registry.get_sample_value(name, labels)


def endings(metrics: Metrics) -> dict[str, float]:
    """The first label of each ending of requests that was counted, and how often."""
    counts: Counter[str] = Counter()
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name in ENDINGS and sample.value:
                counts[next(iter(sample.labels.values()))] += int(sample.value)
    return dict(counts)


def balance(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """For each method: how many requests have begun, and how many have ended."""
    return {
        method: (_total(metrics, ("te_request_count_total",), method), _total(metrics, ENDINGS, method))
        for method in METHODS
    }


def _total(metrics: Metrics, names: tuple[str, ...], method: str) -> float:
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name in names and sample.labels["method"] == method)
