"""Prometheus: the instruments of one server, and the HTTP listener that shows them."""

from tei_grpc.metrics.instruments import Memory
from tei_grpc.metrics.listener import MetricsListener
from tei_grpc.metrics.server import MEMORY_BYTES, METHODS, Metrics

__all__ = ["MEMORY_BYTES", "METHODS", "Memory", "Metrics", "MetricsListener"]
