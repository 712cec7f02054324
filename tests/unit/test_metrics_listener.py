"""The metrics' listener: its paths, its address, and scrapes that it has no descriptor for."""

import resource
import socket
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tei_grpc.errors import StartupError
from tei_grpc.metrics import Metrics, MetricsListener


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


def test_listener_without_a_descriptor_for_a_scrape_waits_and_then_serves_it(
    listener: MetricsListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda self: tries.append(1) or accept(self))
    host, _, port = listener.address.rpartition(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as scrape:
        resource.setrlimit(resource.RLIMIT_NOFILE, (scrape.fileno() + 1, limits[1]))
        try:
            scrape.connect((host, int(port)))
            time.sleep(0.5)
            assert 1 <= len(tries) <= 10
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        scrape.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        scrape.settimeout(10)
        assert scrape.recv(100).startswith(b"HTTP/1.0 200")
