"""Metrics as a started server has them."""

import pytest

from tei_grpc.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.serve_model(512)
    return metrics
