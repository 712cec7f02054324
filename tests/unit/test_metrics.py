"""Metrics: names as dashboards know them, exact values, and the listener."""

import re
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tei_grpc.errors import ErrorKind, StartupError
from tei_grpc.metrics import Metrics, MetricsListener
from tei_grpc.types import Kind, Metadata

METADATA = Metadata(
    compute_chars=4,
    compute_tokens=3,
    total_time_ns=4_000_000,
    tokenization_time_ns=1_000_000,
    queue_time_ns=2_000_000,
    inference_time_ns=500_000,
)

PARTS = ("duration", "tokenization_duration", "queue_duration", "inference_duration")
COUNTERS = {
    "te_request_count",
    "te_request_success",
    "te_request_failure",
    "te_request_dropped",
    "te_embed_count",
    "te_embed_success",
    "te_predict_count",
    "te_predict_success",
}
HISTOGRAMS = {
    *(f"te_{group}_{part}" for group in ("request", "embed", "predict") for part in PARTS),
    "te_request_input_length",
    "te_batch_next_size",
    "te_batch_next_tokens",
}


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.serve_model(512)
    return metrics


def value(metrics: Metrics, series: str) -> float:
    """Return the number that a scrape shows for `series`."""
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(f"{series} ")]
    assert len(lines) == 1, series
    return float(lines[0].rpartition(" ")[2])


def bounds(metrics: Metrics, name: str) -> list[float]:
    """Return the upper bounds of a histogram's buckets, without +Inf."""
    texts = re.findall(rf'^{name}_bucket{{le="(.+)"}}', metrics.render().decode(), re.MULTILINE)
    return [float(text) for text in texts if text != "+Inf"]


def test_a_scrape_shows_exactly_the_known_names(metrics: Metrics) -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", metrics.render().decode(), re.MULTILINE))
    expected = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(HISTOGRAMS, "histogram")
    assert types == expected | {"te_queue_size": "gauge"}


def test_samples_have_no_suffix_but_that_of_a_histogram(metrics: Metrics) -> None:
    text = metrics.render().decode()
    samples = {re.split(r"[ {]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert samples == COUNTERS | parts | {"te_queue_size"}


def test_a_scrape_can_be_parsed(metrics: Metrics) -> None:
    assert len(list(text_string_to_metric_families(metrics.render().decode()))) == 24


def test_duration_buckets_grow_by_half_from_15_microseconds(metrics: Metrics) -> None:
    seconds = bounds(metrics, "te_request_queue_duration")
    assert len(seconds) == 35
    assert seconds == pytest.approx([1e-5 * 1.5**k for k in range(1, 36)])
    assert seconds[-1] == pytest.approx(14.561, abs=1e-3)


@pytest.mark.parametrize(("limit", "last"), [(512, 512), (300, 256), (1, 1)])
def test_input_length_buckets_end_at_the_models_limit(limit: int, last: int) -> None:
    metrics = Metrics()
    metrics.serve_model(limit)
    lengths = bounds(metrics, "te_request_input_length")
    assert lengths[0] == 1
    assert lengths[-1] == last


def test_batch_buckets_are_powers_of_two(metrics: Metrics) -> None:
    assert bounds(metrics, "te_batch_next_size") == [2**k for k in range(13)]
    assert bounds(metrics, "te_batch_next_tokens") == [2**k for k in range(21)]


@pytest.mark.parametrize("method", ["single", "batch", "stream"])
def test_request_is_counted_by_method(metrics: Metrics, method: str) -> None:
    metrics.request_started(method)
    metrics.request_succeeded(method, METADATA)
    assert value(metrics, f'te_request_count{{method="{method}"}}') == 1
    assert value(metrics, f'te_request_success{{method="{method}"}}') == 1


@pytest.mark.parametrize(
    ("kind", "group", "other"),
    [
        (Kind.EMBED, "embed", "predict"),
        (Kind.EMBED_ALL, "embed", "predict"),
        (Kind.EMBED_SPARSE, "embed", "predict"),
        (Kind.PREDICT, "predict", "embed"),
    ],
)
def test_input_is_counted_by_kind_of_work(metrics: Metrics, kind: Kind, group: str, other: str) -> None:
    metrics.input_started(kind)
    metrics.input_succeeded(kind, METADATA)
    assert [value(metrics, f"te_{group}_{part}") for part in ("count", "success")] == [1, 1]
    assert [value(metrics, f"te_{other}_{part}") for part in ("count", "success")] == [0, 0]


def test_answered_request_records_its_four_times_in_seconds(metrics: Metrics) -> None:
    metrics.request_succeeded("single", METADATA)
    assert [value(metrics, f"te_request_{part}_sum") for part in PARTS] == pytest.approx([0.004, 0.001, 0.002, 0.0005])


def test_answered_input_records_its_four_times_in_seconds(metrics: Metrics) -> None:
    metrics.input_succeeded(Kind.EMBED, METADATA)
    assert [value(metrics, f"te_embed_{part}_sum") for part in PARTS] == pytest.approx([0.004, 0.001, 0.002, 0.0005])


@pytest.mark.parametrize("kind", [kind for kind in ErrorKind if kind != ErrorKind.STARTUP])
def test_failure_is_counted_by_kind(metrics: Metrics, kind: ErrorKind) -> None:
    metrics.request_failed(kind)
    assert value(metrics, f'te_request_failure{{err="{kind}"}}') == 1


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
def test_dropped_request_is_counted_by_reason(metrics: Metrics, reason: str) -> None:
    metrics.request_dropped(reason)
    assert value(metrics, f'te_request_dropped{{reason="{reason}"}}') == 1


def test_batch_queue_and_length(metrics: Metrics) -> None:
    metrics.batch_formed(3, 40)
    metrics.queue_size(5)
    metrics.input_length(8)
    assert value(metrics, "te_batch_next_size_sum") == 3
    assert value(metrics, "te_batch_next_tokens_sum") == 40
    assert value(metrics, "te_queue_size") == 5
    assert value(metrics, 'te_request_input_length_bucket{le="8.0"}') == 1


def test_two_servers_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.request_started("single")
    assert value(second, "te_embed_count") == 0


@pytest.fixture
def listener(metrics: Metrics) -> Iterator[MetricsListener]:
    listener = MetricsListener(metrics, "127.0.0.1", 0)
    yield listener
    listener.close()


def get(listener: MetricsListener, path: str) -> tuple[str, str]:
    with urllib.request.urlopen(f"http://{listener.address}{path}", timeout=10) as response:
        return response.read().decode(), response.headers["Content-Type"]


@pytest.mark.parametrize("path", ["/metrics", "/", "/any/other"])
def test_every_path_shows_the_metrics(listener: MetricsListener, path: str) -> None:
    text, content_type = get(listener, path)
    assert "# TYPE te_request_count counter\n" in text
    assert content_type.startswith("text/plain")


def test_health_says_ok(listener: MetricsListener) -> None:
    assert get(listener, "/health")[0] == "OK"


def test_address_names_the_port_really_bound(listener: MetricsListener) -> None:
    host, _, port = listener.address.partition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_listens_on_ipv6(metrics: Metrics) -> None:
    listener = MetricsListener(metrics, "::1", 0)
    assert get(listener, "/health")[0] == "OK"
    listener.close()


def test_port_in_use_is_refused_by_name(metrics: Metrics) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"^`--prometheus-port` .* 127\.0\.0\.1:{port}: "):
            MetricsListener(metrics, "127.0.0.1", port)
