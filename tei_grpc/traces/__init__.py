"""Traces of requests, for an OpenTelemetry collector. OpenTelemetry is imported only where they are asked for."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tei_grpc.config import Settings
from tei_grpc.errors import StartupError
from tei_grpc.types import Caller, Metadata

if TYPE_CHECKING:
    from tei_grpc.traces.recorder import Traces

EXTRA: Final = "`--otlp-endpoint` (OTLP_ENDPOINT) needs packages that are not installed: pip install 'tei-grpc[otel]'"


class AnsweredInput(NamedTuple):
    """When an input's answer was there (ns since 1970), and what it cost."""

    ended_ns: int
    metadata: Metadata


class EndedRequest(NamedTuple):
    """What a trace tells of a request. `error` is the kind of error, or the reason why it was dropped."""

    method: str
    caller: Caller
    inputs: Sequence[AnsweredInput]
    error: str | None


def open_traces(settings: Settings) -> "Traces | None":
    """Return what `--otlp-endpoint` asks for; without it nothing of OpenTelemetry is imported. Raises StartupError."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from tei_grpc.traces.recorder import Traces
    except ImportError:
        raise StartupError(EXTRA) from None
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
