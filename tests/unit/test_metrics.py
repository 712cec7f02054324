"""Metrics: names as dashboards know them, and exact values."""

import re
from dataclasses import replace

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tei_grpc import __version__
from tei_grpc.errors import ErrorKind
from tei_grpc.frontends.files import make_files, map_metrics
from tei_grpc.metrics import Metrics, instruments
from tei_grpc.types import Info, Kind, Metadata, ModelType

METADATA = Metadata(
    compute_chars=4,
    compute_tokens=3,
    total_time_ns=4_000_000,
    tokenization_time_ns=1_000_000,
    queue_time_ns=2_000_000,
    inference_time_ns=500_000,
)
INFO = Info(
    model_id="org/model",
    model_sha="abc",
    model_dtype="float32",
    model_type=ModelType.EMBEDDING,
    device="cpu",
    optimized=True,
    max_concurrent_requests=512,
    max_input_length=512,
    max_batch_tokens=16384,
    max_batch_requests=None,
    max_client_batch_size=32,
    tokenization_workers=1,
    embeds=True,
    embeds_sparse=False,
    embeds_all=True,
    hidden_size=8,
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
    "te_request_truncated",
    "te_runner_busy_seconds",
    "te_runner_recoveries",
}
GAUGES = {"te_queue_size", "te_permits", "te_permits_in_use", "te_build_info"}
HISTOGRAMS = {
    *(f"te_{group}_{part}" for group in ("request", "embed", "predict") for part in PARTS),
    "te_request_input_length",
    "te_batch_next_size",
    "te_batch_next_tokens",
    "te_batch_fill",
}


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
    types = dict(re.findall(r"^# TYPE (te_\S+) (\S+)$", metrics.render().decode(), re.MULTILINE))
    expected = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(HISTOGRAMS, "histogram")
    assert types == expected | dict.fromkeys(GAUGES, "gauge")


def test_samples_have_no_suffix_but_that_of_a_histogram(metrics: Metrics) -> None:
    metrics.describe(INFO)
    text = metrics.render().decode()
    samples = {re.split(r"[ {]", line)[0] for line in text.splitlines() if line.startswith("te_")}
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert samples == COUNTERS | parts | GAUGES


def test_process_is_described_under_prometheus_own_names(metrics: Metrics) -> None:
    assert value(metrics, "process_resident_memory_bytes") > 2**20
    assert value(metrics, "process_cpu_seconds_total") > 0


def test_build_says_what_is_served(metrics: Metrics) -> None:
    metrics.describe(INFO)
    labels = f'version="{__version__}",sha="",model_id="org/model",model_sha="abc",dtype="float32",device="cpu"'
    shown = re.search(r"^te_build_info{(.*)} 1.0$", metrics.render().decode(), re.MULTILINE)
    assert shown is not None
    assert sorted(shown[1].split(",")) == sorted(labels.split(","))


def test_a_scrape_can_be_parsed(metrics: Metrics) -> None:
    names = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert names >= COUNTERS | HISTOGRAMS | GAUGES


def test_histogram_counts_as_that_of_prometheus_client() -> None:
    values, bounds = [0.5, 1, 1.5, 2, 7], [1.0, 2.0, 4.0]
    ours, theirs = instruments.Registry(), CollectorRegistry()
    histogram = instruments.Histogram("x", "text", ours, bounds=bounds, per_unit=1000)
    reference = prometheus_client.Histogram("x", "text", buckets=bounds, registry=theirs)
    for number in values:
        histogram.observe(number * 1000)
        reference.observe(number)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected


def test_metrics_of_several_processes_are_their_sums_and_outlive_them() -> None:
    file = make_files().metrics
    shown = Metrics(others=map_metrics(file, 2))
    shown.serve_model(512)
    for number, requests in ((0, 1), (1, 2), (1, 4)):  # the second process is started anew
        one = Metrics(map_metrics(file, 2)[number])
        one.serve_model(512)
        for _ in range(requests):
            one.request_started("stream")
            one.request_succeeded("stream", METADATA)
            one.input_encoded(3, is_cut=False)
    shown.batch_formed(1, 3, budget=6)
    lines = shown.render().decode().splitlines()
    for line in (
        'te_request_count{method="stream"} 7.0',
        'te_request_success{method="stream"} 7.0',
        "te_request_duration_count 7.0",
        "te_request_duration_sum 0.028",
        'te_request_input_length_bucket{le="2.0"} 0.0',
        'te_request_input_length_bucket{le="4.0"} 7.0',
        "te_batch_next_size_count 1.0",
    ):
        assert line in lines


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


def test_many_answers_count_as_each_of_them_would() -> None:
    one_by_one, together = Metrics(), Metrics()
    times = [0, 9_999, 10_000, 15_000, 15_001, 4_000_000, 10**13]
    answers = [replace(METADATA, total_time_ns=time, queue_time_ns=2 * time) for time in times]
    for answer in answers:
        one_by_one.input_succeeded(Kind.EMBED, answer)
    together.inputs_succeeded(Kind.EMBED, answers)
    together.inputs_succeeded(Kind.EMBED, [])
    assert embed_samples(together) == embed_samples(one_by_one)


def embed_samples(metrics: Metrics) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if line.startswith("te_embed")]


@pytest.mark.parametrize("kind", sorted(set(ErrorKind) - {ErrorKind.STARTUP, ErrorKind.DEADLINE}))
def test_failure_is_counted_by_kind_and_method(metrics: Metrics, kind: ErrorKind) -> None:
    metrics.request_failed("stream", kind)
    assert value(metrics, f'te_request_failure{{err="{kind}",method="stream"}}') == 1


@pytest.mark.parametrize("kind", [ErrorKind.STARTUP, ErrorKind.DEADLINE])
def test_what_never_ends_as_a_failure_has_no_series(metrics: Metrics, kind: ErrorKind) -> None:
    assert f'err="{kind}"' not in metrics.render().decode()


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
def test_dropped_request_is_counted_by_reason_and_method(metrics: Metrics, reason: str) -> None:
    metrics.request_dropped("batch", reason)
    assert value(metrics, f'te_request_dropped{{method="batch",reason="{reason}"}}') == 1


def test_batch_is_recorded_with_its_share_of_the_budget(metrics: Metrics) -> None:
    metrics.batch_formed(3, 40, budget=100)
    assert value(metrics, "te_batch_next_size_sum") == 3
    assert value(metrics, "te_batch_next_tokens_sum") == 40
    assert value(metrics, "te_batch_fill_sum") == pytest.approx(0.4)


def test_time_of_the_runner_adds_up(metrics: Metrics) -> None:
    metrics.batch_ended(0.25, recoveries=0)
    metrics.batch_ended(0.5, recoveries=2)
    assert value(metrics, "te_runner_busy_seconds") == 0.75
    assert value(metrics, "te_runner_recoveries") == 2


def test_input_is_recorded_with_its_length_and_whether_it_was_cut(metrics: Metrics) -> None:
    metrics.input_encoded(8, is_cut=False)
    metrics.input_encoded(512, is_cut=True)
    assert value(metrics, 'te_request_input_length_bucket{le="8.0"}') == 1
    assert value(metrics, "te_request_input_length_sum") == 520
    assert value(metrics, "te_request_truncated") == 1


def test_gauges_ask_when_they_are_scraped(metrics: Metrics) -> None:
    waiting = [1, 2, 3]
    metrics.watch_queue(lambda: len(waiting))
    metrics.watch_permits(lambda: 7, permits=512)
    waiting.pop()
    assert value(metrics, "te_queue_size") == 2
    assert value(metrics, "te_permits_in_use") == 7
    assert value(metrics, "te_permits") == 512


def test_two_servers_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.request_started("single")
    assert value(second, "te_embed_count") == 0
