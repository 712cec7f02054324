"""What the metrics say."""

from tei_grpc.metrics import Metrics

ENDINGS = ("te_request_success_total", "te_request_failure_total", "te_request_dropped_total")


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The value of one sample."""
    return metrics.registry.get_sample_value(name, labels)


def endings(metrics: Metrics) -> dict[str, float]:
    """The label of each ending of requests that was counted, and how often."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {
        next(iter(sample.labels.values())): sample.value
        for sample in samples
        if sample.name in ENDINGS and sample.value
    }
