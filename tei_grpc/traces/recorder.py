"""OpenTelemetry: a span per request, with a span per stage below it, sent to a collector over OTLP.

Whether a request is sampled is decided before anything is made or measured for it: by the caller, or by
OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG; by default all that nobody decided on are. Stages are made when the
request has ended, from the times that were measured anyway. A collector that is slow or gone costs nothing but spans:
they wait in a bounded queue (OTEL_BSP_* variables) for a thread of the SDK's.
"""

import re
import threading
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tei_grpc import __version__
from tei_grpc.traces import EndedRequest, stages
from tei_grpc.types import Caller

CLOSE_SECONDS: Final = 5.0  # what is left to send at shutdown may take so long
DRAWN: Final = 64  # traces that begin here, whose sampling is decided at once
MAX_INPUTS: Final = 32  # of one request whose stages get spans of their own
# a `traceparent` (W3C Trace Context, version 00) whose ids are valid and whose flag "sampled" is not set
NOT_SAMPLED: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")
BEGINNING: Final = Context()  # of a trace that nobody has begun


class Ids(RandomIdGenerator):
    """Random ids; a trace's may be chosen before there is a span."""

    chosen: int | None = None

    def generate_trace_id(self) -> int:
        """Return the one that was chosen, once."""
        chosen, self.chosen = self.chosen, None
        return super().generate_trace_id() if chosen is None else chosen


class Traces:
    """Spans of one server on their way to a collector. Requests begin and end on the event loop."""

    def __init__(self, endpoint: str, service_name: str, model_id: str) -> None:
        """Connect in the background."""
        self._ids = Ids()
        self._drawn: list[int | None] = []
        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tei_grpc", __version__)
        self._caller_decides = isinstance(self._provider.sampler, ParentBased)
        self._propagator = TraceContextTextMapPropagator()
        self._model_id = model_id

    def begin(self, kind: str, caller: Caller) -> Span | None:
        """Return the span of a request that begins now, in the trace of its caller; None where it is not sampled."""
        if caller.traceparent is None:
            self._ids.chosen = (self._drawn or self._draw()).pop()
            if self._ids.chosen is None:
                return None
            context = BEGINNING
        elif self._caller_decides and NOT_SAMPLED.fullmatch(caller.traceparent):
            return None
        else:
            context = self._context_of(caller)
        span = self._tracer.start_span(kind, context, kind=SpanKind.SERVER)
        return span if span.is_recording() else None

    def end(self, span: Span, request: EndedRequest) -> None:
        """Tell what became of a request that ends now."""
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
            span.set_status(StatusCode.ERROR)
        self._add_stages(span, request)
        span.end()

    def close(self) -> None:
        """Send what is left, within CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _draw(self) -> list[int | None]:
        """Ask the sampler about the next traces at once, which takes a fraction of the time; None: not sampled."""
        sample = self._provider.sampler.should_sample
        ids = [self._ids.generate_trace_id() for _ in range(DRAWN)]
        decisions = [sample(BEGINNING, id, "request", SpanKind.SERVER).decision for id in ids]
        self._drawn = [None if decision is Decision.DROP else id for id, decision in zip(ids, decisions, strict=True)]
        return self._drawn

    def _context_of(self, caller: Caller) -> Context:
        carrier = {"traceparent": caller.traceparent or ""}
        if caller.tracestate is not None:
            carrier["tracestate"] = caller.tracestate
        return self._propagator.extract(carrier, BEGINNING)

    def _add_stages(self, span: Span, request: EndedRequest) -> None:
        below = set_span_in_context(span, BEGINNING)
        for each in request.inputs[:MAX_INPUTS]:
            for name, started_ns, ended_ns in stages(each):
                stage = self._tracer.start_span(name, below, start_time=started_ns)
                if name == "inference":
                    stage.set_attribute("tei.batch_size", each.metadata.batch_size)
                stage.end(ended_ns)
