"""What a server counts.

Names, labels and buckets are those of the `te_*` metrics that dashboards for text-embeddings-inference already read;
where a label is added, sums over it are what they were. Every request ends in exactly one of: success, failure (by
kind of error), dropped (cancelled or expired). Requests are those of Embed, Predict and Rerank; each message of a
stream is one, but all texts of a Rerank call, unary or stream, are one together ("batch"). A call that is turned away
before it reaches the engine is a request that failed. Tokenize, Decode, Info, health and reflection are not counted.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import Gauge, ProcessCollector, generate_latest

from tei_grpc import GIT_SHA, __version__
from tei_grpc.errors import ErrorKind
from tei_grpc.metrics.instruments import Counter, Histogram, Memory, Registry
from tei_grpc.types import Info, Kind, Metadata

METHODS: Final = ("single", "batch", "stream")
REASONS: Final = ("cancelled", "expired")
# no caller sees a startup error; a deadline that passed is a request dropped as expired
ERRORS: Final = tuple(str(kind) for kind in ErrorKind if kind not in (ErrorKind.STARTUP, ErrorKind.DEADLINE))
NS_PER_S: Final = 1e9
FROM_PERMIT: Final = "Seconds from the permit to the answer"
DURATION_BUCKETS: Final = tuple(1e-5 * 1.5**k for k in range(1, 36))
FILL_BUCKETS: Final = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MEMORY_BYTES: Final = 1 << 14  # of the numbers of one server, with room for more
BUILD_LABELS: Final = ("version", "sha", "model_id", "model_sha", "dtype", "device")

# prometheus_client's text says `te_x_total` for a counter `te_x`: dashboards do not know that name
_TOTAL: Final = re.compile(rb"^((?:# (?:HELP|TYPE) )?te_\w+)_total(?=[ {])", re.MULTILINE)


def powers_of_two(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 4, ... up to `limit`."""
    return tuple(float(2**k) for k in range(limit.bit_length()))


class _Durations:
    """The four times of an answer, in seconds, as histograms `te_{group}_*`."""

    def __init__(self, group: str, registry: Registry, total: str) -> None:
        def histogram(part: str, text: str) -> Histogram:
            return Histogram(f"te_{group}_{part}", text, registry, bounds=DURATION_BUCKETS, per_unit=NS_PER_S)

        self._total = histogram("duration", total)
        self._tokenization = histogram("tokenization_duration", "Seconds in the tokenizer")
        self._queue = histogram("queue_duration", "Seconds in the queue")
        self._inference = histogram("inference_duration", "Seconds in the model")

    def observe(self, metadata: Metadata) -> None:
        self._total.observe(metadata.total_time_ns)
        self._tokenization.observe(metadata.tokenization_time_ns)
        self._queue.observe(metadata.queue_time_ns)
        self._inference.observe(metadata.inference_time_ns)

    def observe_all(self, answers: Sequence[Metadata]) -> None:
        self._total.observe_all([each.total_time_ns for each in answers])
        self._tokenization.observe_all([each.tokenization_time_ns for each in answers])
        self._queue.observe_all([each.queue_time_ns for each in answers])
        self._inference.observe_all([each.inference_time_ns for each in answers])


class _Group:
    """`te_embed_*` or `te_predict_*`: what is counted per kind of work."""

    def __init__(self, group: str, registry: Registry) -> None:
        self.count = Counter(f"te_{group}_count", f"Inputs to {group}", registry)
        self.success = Counter(f"te_{group}_success", f"Inputs to {group} that were answered", registry)
        self.durations = _Durations(group, registry, FROM_PERMIT)


class _Runner:
    """What the device's thread counts."""

    def __init__(self, registry: Registry) -> None:
        self.size = Histogram("te_batch_next_size", "Inputs in a batch", registry, bounds=powers_of_two(4096))
        self.tokens = Histogram("te_batch_next_tokens", "Tokens in a batch", registry, bounds=powers_of_two(2**20))
        self.fill = Histogram(
            "te_batch_fill", "Tokens of a batch over the most that it may have", registry, bounds=FILL_BUCKETS
        )
        self.busy = Counter("te_runner_busy_seconds", "Seconds in which the model ran", registry)
        self.recoveries = Counter(
            "te_runner_recoveries", "Inputs that 16 bits were too small for, answered in float32", registry
        )


class Metrics:
    """All instruments of one server, in a registry of their own.

    Methods that start with `request` or `input` belong to the event loop, those with `batch` to the device's thread.
    """

    def __init__(self, memory: "Memory | None" = None, others: Sequence[Memory] = ()) -> None:
        """See Registry for the memories, of which each has MEMORY_BYTES."""
        self.registry = registry = Registry(memory, others)
        self._count = Counter("te_request_count", "Requests that arrived", registry, method=METHODS)
        self._success = Counter("te_request_success", "Requests that were answered", registry, method=METHODS)
        self._dropped = Counter(
            "te_request_dropped", "Requests whose caller left first", registry, reason=REASONS, method=METHODS
        )
        self._failure = Counter(
            "te_request_failure", "Requests that ended in an error", registry, err=ERRORS, method=METHODS
        )
        self._truncated = Counter("te_request_truncated", "Inputs that were cut to fit", registry)
        self._durations = _Durations("request", registry, f"{FROM_PERMIT}; for Rerank from the start of the call")
        embed, predict = _Group("embed", registry), _Group("predict", registry)
        self._groups = {kind: predict if kind is Kind.PREDICT else embed for kind in Kind}
        self._runner = _Runner(registry)
        self._queue_size = Gauge("te_queue_size", "Inputs in the queue", registry=registry)
        self._permits_in_use = Gauge("te_permits_in_use", "Inputs that hold a permit", registry=registry)
        self._permits = Gauge("te_permits", "Permits: --max-concurrent-requests", registry=registry)
        self._build = Gauge("te_build_info", "What is served, by what", BUILD_LABELS, registry=registry)
        self._input_length: Histogram | None = None
        ProcessCollector(registry=registry)

    def serve_model(self, max_input_length: int) -> None:
        """Start to record input lengths, once the model has told its limit (tokens)."""
        self._input_length = Histogram(
            "te_request_input_length", "Tokens of an input", self.registry, bounds=powers_of_two(max_input_length)
        )

    def describe(self, info: Info) -> None:
        """Show what is served."""
        model = info.model_id, info.model_sha or "", info.model_dtype, info.device
        self._build.labels(__version__, GIT_SHA or "", *model).set(1)

    def watch_queue(self, size: Callable[[], int]) -> None:
        """Ask `size` at every scrape, from the scrape's thread, how many entries wait."""
        self._queue_size.set_function(size)

    def watch_permits(self, in_use: Callable[[], int], *, permits: int) -> None:
        """Ask `in_use` at every scrape, from the scrape's thread, how many of `permits` are taken."""
        self._permits_in_use.set_function(in_use)
        self._permits.set(permits)

    def request_started(self, method: str) -> None:
        """Count a request ("single", "batch" or "stream")."""
        self._count.add(method)

    def request_succeeded(self, method: str, metadata: Metadata) -> None:
        """Count an answered request and record its times."""
        self._success.add(method)
        self._durations.observe(metadata)

    def request_failed(self, method: str, kind: str) -> None:
        """Count a request that ended in an error of this kind."""
        self._failure.add(kind, method)

    def request_dropped(self, method: str, reason: str) -> None:
        """Count a request whose caller left ("cancelled") or whose deadline passed ("expired")."""
        self._dropped.add(reason, method)

    def input_started(self, kind: Kind) -> None:
        """Count an input, of which a request may have several."""
        self._groups[kind].count.add()

    def input_encoded(self, tokens: int, *, is_cut: bool) -> None:
        """Record the tokens of one input, and whether they are all of it."""
        if self._input_length is not None:
            self._input_length.observe(tokens)
        if is_cut:
            self._truncated.add()

    def input_succeeded(self, kind: Kind, metadata: Metadata) -> None:
        """Count an answered input and record its times."""
        self._groups[kind].success.add()
        self._groups[kind].durations.observe(metadata)

    def inputs_succeeded(self, kind: Kind, answers: Sequence[Metadata]) -> None:
        """As `input_succeeded`, for each of many."""
        self._groups[kind].success.add(amount=len(answers))
        self._groups[kind].durations.observe_all(answers)

    def batch_formed(self, requests: int, tokens: int, *, budget: int) -> None:
        """Record the size of a batch that the model answered; `budget` is the most tokens that it may have."""
        self._runner.size.observe(requests)
        self._runner.tokens.observe(tokens)
        self._runner.fill.observe(tokens / budget)

    def batch_ended(self, seconds: float, *, recoveries: int) -> None:
        """Record the time of a batch, failed or not, and how many of its inputs were computed again in float32."""
        self._runner.busy.add(amount=seconds)
        self._runner.recoveries.add(amount=recoveries)

    def render(self) -> bytes:
        """Return all values in Prometheus's text format."""
        return _TOTAL.sub(rb"\1", generate_latest(self.registry))
