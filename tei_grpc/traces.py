"""OpenTelemetry: a span per request, with a span per stage below it, sent to a collector over OTLP.

Spans are made when a request has ended, from the times that were measured anyway. A collector that is slow or gone
costs nothing but spans: they wait in a bounded queue (OTEL_BSP_* variables) for a thread of the SDK's. Sampling is that
of OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG; by default all traces are recorded unless the caller decided
otherwise.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tei_grpc import __version__
from tei_grpc.config import Settings
from tei_grpc.errors import StartupError
from tei_grpc.types import Caller, Metadata

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

CLOSE_SECONDS = 5.0  # what is left to send at shutdown may take so long
MAX_INPUTS = 32  # of one request whose stages get spans of their own
NS_PER_S = 1_000_000_000

EXTRA: Final = "`--otlp-endpoint` (OTLP_ENDPOINT) needs packages that are not installed: pip install 'tei-grpc[otel]'"


class AnsweredInput(NamedTuple):
    """When an input's answer was there (ns since 1970), and what it cost."""

    ended_ns: int
    metadata: Metadata


class EndedRequest(NamedTuple):
    """What a trace tells of a request. `error` is the kind of error, or the reason why it was dropped."""

    kind: str
    method: str
    caller: Caller
    started_ns: int  # since 1970
    inputs: Sequence[AnsweredInput]
    error: str | None


class Traces:
    """Spans of one server on their way to a collector."""

    def __init__(self, endpoint: str, service_name: str, model_id: str) -> None:
        """Connect in the background. Raises StartupError when OpenTelemetry is not installed."""
        self._provider = _provider(endpoint, service_name)
        self._tracer = self._provider.get_tracer("tei_grpc", __version__)
        self._model_id = model_id
        self._load_api()

    def _load_api(self) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._context = Context
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: EndedRequest) -> None:
        """Make the spans of a request that ends now, in the trace of its caller."""
        caller = request.caller
        carrier = {} if caller.traceparent is None else {"traceparent": caller.traceparent}
        if carrier and caller.tracestate is not None:
            carrier["tracestate"] = caller.tracestate
        context = self._propagator.extract(carrier, self._context()) if carrier else self._context()
        span = self._tracer.start_span(
            request.kind, context, kind=self._api.SpanKind.SERVER, start_time=request.started_ns
        )
        if span.is_recording():
            self._describe(span, request)
            span.end(time.time_ns())

    def close(self) -> None:
        """Send what is left, within CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _describe(self, span: "Span", request: EndedRequest) -> None:
        span.set_attributes(
            {
                "gen_ai.request.model": self._model_id,
                "gen_ai.usage.input_tokens": sum(each.metadata.compute_tokens for each in request.inputs),
                "tei.method": request.method,
                "tei.request_id": request.caller.request_id,
                "tei.inputs": len(request.inputs),
            }
        )
        if request.error is not None:
            span.set_attribute("error.type", request.error)
            span.set_status(self._api.StatusCode.ERROR)
        below = self._api.set_span_in_context(span, self._context())
        for each in request.inputs[:MAX_INPUTS]:
            for name, started_ns, ended_ns in stages(each):
                stage = self._tracer.start_span(name, below, start_time=started_ns)
                if name == "inference":
                    stage.set_attribute("tei.batch_size", each.metadata.batch_size)
                stage.end(ended_ns)


def open_traces(settings: Settings) -> Traces | None:
    """Return what `--otlp-endpoint` asks for; without it nothing of OpenTelemetry is imported. Raises StartupError."""
    if settings.otlp_endpoint is None:
        return None
    return Traces(settings.otlp_endpoint, settings.otlp_service_name, settings.model_id)


def stages(input: AnsweredInput) -> Iterator[tuple[str, int, int]]:
    """Return name, start and end of what followed each other since the input had its permit."""
    metadata = input.metadata
    now = input.ended_ns - metadata.total_time_ns
    for name, duration in (
        ("tokenize", metadata.tokenization_time_ns),
        ("queue", metadata.queue_time_ns),
        ("inference", metadata.inference_time_ns),
    ):
        yield name, now, now + duration
        now += duration


def _provider(endpoint: str, service_name: str) -> "TracerProvider":
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise StartupError(EXTRA) from None
    resource = Resource.create({"service.name": service_name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
