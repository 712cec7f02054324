"""An OpenTelemetry collector: the real service over gRPC, which keeps what it is sent."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TIMEOUT = 20


class Received(NamedTuple):
    """A span and the service that sent it."""

    service: str
    span: Span

    @property
    def attributes(self) -> dict[str, object]:
        return {each.key: _value(each.value) for each in self.span.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans in the order in which they come. While `gate` is closed it answers nobody."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[Received] = []
        self.gate = threading.Event()
        self.gate.set()
        self._changed = threading.Condition()

    def Export(self, request, context):
        self.gate.wait()
        with self._changed:
            for group in request.resource_spans:
                [service] = [
                    each.value.string_value for each in group.resource.attributes if each.key == "service.name"
                ]
                spans = [span for scope in group.scope_spans for span in scope.spans]
                self.received += [Received(service, span) for span in spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, condition: Callable[[list[Received]], bool]) -> list[Received]:
        """Return all spans, once they fulfil the condition."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.received), TIMEOUT), self.received
            return list(self.received)

    def wait_for_spans(self, count: int) -> list[Received]:
        return self.wait_for(lambda received: len(received) >= count)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of the loopback."""
    collector = Collector()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            collector.gate.set()
            server.stop(None).wait()


def _value(value):
    return getattr(value, value.WhichOneof("value"))
