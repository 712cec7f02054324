"""Prometheus: the instruments of one server, and the HTTP listener that shows them."""

from tei_grpc.metrics.listener import MetricsListener
from tei_grpc.metrics.server import METHODS, Metrics

__all__ = ["METHODS", "Metrics", "MetricsListener"]
