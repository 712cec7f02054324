"""Prometheus instruments, and the HTTP listener that shows them.

Names, labels and buckets are those of the `te_*` metrics that dashboards for text-embeddings-inference already read.
Every request ends in exactly one of: success, failure (by kind of error), dropped (cancelled or expired).
Each instrument has few label values, so their children are resolved once and a call costs about a microsecond.
"""

import logging
import re
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tei_grpc.errors import ErrorKind, StartupError
from tei_grpc.types import Kind, Metadata

logger = logging.getLogger(__name__)

DURATION_BUCKETS: Final = tuple(1e-5 * 1.5**k for k in range(1, 36))
METHODS: Final = ("single", "batch", "stream")
REASONS: Final = ("cancelled", "expired")
NS: Final = 1e-9

# prometheus_client's text says `te_x_total` for a counter `te_x`, and adds creation times: dashboards know neither
_TOTAL: Final = re.compile(rb"^((?:# (?:HELP|TYPE) )?te_\w+)_total(?=[ {])", re.MULTILINE)
_CREATED: Final = re.compile(rb"^(?:# (?:HELP|TYPE) )?te_\w+_created[ {].*\n", re.MULTILINE)


def powers_of_two(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 4, ... up to `limit`."""
    return tuple(float(2**k) for k in range(limit.bit_length()))


class _Durations:
    """The four times of an answer, in seconds, as histograms `te_{group}_*`."""

    def __init__(self, group: str, registry: CollectorRegistry) -> None:
        def histogram(part: str, text: str) -> Histogram:
            return Histogram(f"te_{group}_{part}", text, buckets=DURATION_BUCKETS, registry=registry)

        self.total = histogram("duration", "Seconds from arrival to answer")
        self.tokenization = histogram("tokenization_duration", "Seconds in the tokenizer")
        self.queue = histogram("queue_duration", "Seconds in the queue")
        self.inference = histogram("inference_duration", "Seconds in the model")

    def observe(self, metadata: Metadata) -> None:
        self.total.observe(metadata.total_time_ns * NS)
        self.tokenization.observe(metadata.tokenization_time_ns * NS)
        self.queue.observe(metadata.queue_time_ns * NS)
        self.inference.observe(metadata.inference_time_ns * NS)


class _Group:
    """`te_embed_*` or `te_predict_*`: what is counted per kind of work."""

    def __init__(self, group: str, registry: CollectorRegistry) -> None:
        self.count = Counter(f"te_{group}_count", f"Inputs to {group}", registry=registry)
        self.success = Counter(f"te_{group}_success", f"Inputs to {group} that were answered", registry=registry)
        self.durations = _Durations(group, registry)


class Metrics:
    """All instruments of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        count = Counter("te_request_count", "Requests that arrived", ["method"], registry=registry)
        success = Counter("te_request_success", "Requests that were answered", ["method"], registry=registry)
        dropped = Counter("te_request_dropped", "Requests whose caller left first", ["reason"], registry=registry)
        failure = Counter("te_request_failure", "Requests that ended in an error", ["err"], registry=registry)
        self._count = {method: count.labels(method=method) for method in METHODS}
        self._success = {method: success.labels(method=method) for method in METHODS}
        self._dropped = {reason: dropped.labels(reason=reason) for reason in REASONS}
        self._failures = {str(kind): failure.labels(err=kind) for kind in ErrorKind if kind != ErrorKind.STARTUP}
        self._durations = _Durations("request", registry)
        embed, predict = _Group("embed", registry), _Group("predict", registry)
        self._groups = {kind: predict if kind is Kind.PREDICT else embed for kind in Kind}
        self._batch_size = Histogram(
            "te_batch_next_size", "Inputs in a batch", buckets=powers_of_two(4096), registry=registry
        )
        self._batch_tokens = Histogram(
            "te_batch_next_tokens", "Tokens in a batch", buckets=powers_of_two(2**20), registry=registry
        )
        self._queue_size = Gauge("te_queue_size", "Inputs in the queue", registry=registry)
        self._input_length: Histogram | None = None

    def serve_model(self, max_input_length: int) -> None:
        """Start to record input lengths, once the model has told its limit (tokens)."""
        buckets = powers_of_two(max_input_length)
        self._input_length = Histogram(
            "te_request_input_length", "Tokens of an input", buckets=buckets, registry=self.registry
        )

    def request_started(self, method: str) -> None:
        """Count a request ("single", "batch" or "stream")."""
        self._count[method].inc()

    def request_succeeded(self, method: str, metadata: Metadata) -> None:
        """Count an answered request and record its times."""
        self._success[method].inc()
        self._durations.observe(metadata)

    def request_failed(self, kind: str) -> None:
        """Count a request that ended in an error of this kind."""
        self._failures[kind].inc()

    def request_dropped(self, reason: str) -> None:
        """Count a request whose caller left ("cancelled") or whose deadline passed ("expired")."""
        self._dropped[reason].inc()

    def input_started(self, kind: Kind) -> None:
        """Count an input, of which a request may have several."""
        self._groups[kind].count.inc()

    def input_succeeded(self, kind: Kind, metadata: Metadata) -> None:
        """Count an answered input and record its times."""
        self._groups[kind].success.inc()
        self._groups[kind].durations.observe(metadata)

    def batch_formed(self, requests: int, tokens: int) -> None:
        """Record the size of a batch that goes to the model."""
        self._batch_size.observe(requests)
        self._batch_tokens.observe(tokens)

    def queue_size(self, entries: int) -> None:
        """Set how many entries wait."""
        self._queue_size.set(entries)

    def input_length(self, tokens: int) -> None:
        """Record the tokens of one input."""
        if self._input_length is not None:
            self._input_length.observe(tokens)

    def render(self) -> bytes:
        """Return all values in Prometheus's text format."""
        return _TOTAL.sub(rb"\1", _CREATED.sub(b"", generate_latest(self.registry)))


class MetricsListener:
    """Serves `Metrics` over HTTP from a thread: `/health` says OK, every other path shows the metrics."""

    def __init__(self, metrics: Metrics, hostname: str, port: int) -> None:
        """Bind; raises StartupError when the address is taken or not ours."""
        try:
            self._server = _server_class(hostname)((hostname, port), _handler_class(metrics))
        except OSError as error:
            raise StartupError(
                f"`--prometheus-port` (PROMETHEUS_PORT): cannot listen on {hostname}:{port}: {error.strerror}"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def address(self) -> str:
        """The address really bound, as `host:port`."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _server_class(hostname: str) -> type[socketserver.ThreadingTCPServer]:
    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            logger.debug("A scrape was not finished", exc_info=True)

    return Server


def _handler_class(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds; a peer that sends nothing must not keep its thread

        def do_GET(self) -> None:
            body = b"OK" if self.path == "/health" else metrics.render()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    return Handler
