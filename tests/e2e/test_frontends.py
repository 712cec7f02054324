"""`tei-grpc --frontends 2` is one server to callers and operators."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.e2e.servers import Server, free_port

Start = Callable[..., Server]
KEY = [("authorization", "Bearer SESAME")]
TEXTS = ["What is Deep Learning?", "a", "many words " * 100]


@pytest.fixture(scope="module")
def fronted(minilm_dir: Path) -> Iterator[Server]:
    """A server with a key, metrics and two front-ends; `metrics` is its port."""
    metrics = str(free_port())
    options = ("--frontends", "2", "--prometheus-port", metrics, "--api-key", "SESAME")
    server = Server("--model-id", str(minilm_dir), *options)
    server.metrics = metrics
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


def embed(channel: grpc.Channel, text: str) -> list[float]:
    request = tei_pb2.EmbedRequest(inputs=text, truncate=True)
    return list(tei_pb2_grpc.EmbedStub(channel).Embed(request, metadata=KEY).embeddings)


def test_vectors_are_those_of_one_process(fronted: Server, server: Server) -> None:
    vectors = []
    for each in (server, fronted, fronted, fronted):
        with grpc.insecure_channel(each.address) as channel:
            vectors.append([embed(channel, text) for text in TEXTS])
    assert vectors[1:] == [vectors[0]] * 3


def test_callers_without_the_key_are_refused(fronted: Server) -> None:
    with grpc.insecure_channel(fronted.address) as channel, pytest.raises(grpc.RpcError) as refused:
        tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest())
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_metrics_have_one_port_and_are_sums(fronted: Server) -> None:
    def embedded() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{fronted.metrics}/metrics", timeout=10) as response:
            lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines())
        assert lines["te_permits"] == "512.0"
        return float(lines["te_embed_success"])

    before = embedded()
    for _ in range(8):  # each has a connection of its own
        with grpc.insecure_channel(fronted.address) as channel:
            embed(channel, "a")
    assert embedded() == before + 8


@pytest.mark.parametrize("frontends", ["0", "2"])
def test_second_server_on_a_shared_port_is_refused_by_name(
    start_server: Start, fronted: Server, frontends: str
) -> None:
    second = start_server("--port", str(fronted.port), "--frontends", frontends)
    assert second.wait() == 1
    assert f"`--port` {fronted.port}" in second.lines[-1]


def test_log_is_that_of_one_server(fronted: Server) -> None:
    with grpc.insecure_channel(fronted.address) as channel:
        embed(channel, "a")
    children = psutil.Process(fronted.process.pid).children()
    assert fronted.terminate() == 0
    assert not any(child.is_running() for child in children)
    assert "SESAME" not in "".join(fronted.lines)
    messages = [json.loads(line)["message"] for line in fronted.lines]
    for beginning in ("Starting", "Listening on", "Serving on", "Stopped"):
        assert len([message for message in messages if message.startswith(beginning)]) == 1
    assert "Success" in messages
