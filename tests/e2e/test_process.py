"""The life of the process: how it starts, what it refuses, what it says, how it ends."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.certificates import Authority
from tests.e2e.servers import TEI_GRPC, Server, clean_environment, free_port

Start = Callable[..., Server]


def embed(address: str, key: str | None = None) -> tei_pb2.EmbedResponse:
    metadata = [("authorization", f"Bearer {key}")] if key else []
    with grpc.insecure_channel(address) as channel:
        return tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="test"), metadata=metadata)


def test_missing_model_is_named() -> None:
    run = subprocess.run([TEI_GRPC], env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("tei-grpc: `--model-id` (MODEL_ID): missing")


def test_sigterm_ends_it_with_exit_code_0(start_server: Start) -> None:
    server = start_server().wait_until_ready()
    assert embed(server.address).embeddings
    assert server.terminate() == 0


def test_sigterm_while_loading_ends_it_with_exit_code_0(start_server: Start) -> None:
    server = start_server()
    while "Listening on" not in (line := server.next_line()):
        assert line, server.lines
    assert server.terminate() == 0


def test_second_server_on_a_port_is_refused_by_name(start_server: Start) -> None:
    first = start_server().wait_until_ready()
    second = start_server("--port", str(first.port))
    assert second.wait() == 1
    assert f"`--port` {first.port}" in second.lines[-1]


def test_second_listener_on_the_metrics_port_is_refused_by_name(start_server: Start) -> None:
    port = str(free_port())
    start_server("--prometheus-port", port).wait_until_ready()
    second = start_server("--prometheus-port", port)
    assert second.wait() == 1
    assert "`--prometheus-port`" in second.lines[-1]


def test_metrics_show_what_was_answered(start_server: Start) -> None:
    port = free_port()
    server = start_server("--prometheus-port", str(port)).wait_until_ready()
    embed(server.address)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    for counter in ("te_request_count", "te_request_success"):
        assert f'{counter}{{method="single"}} 1.0' in lines
    assert "te_embed_success 1.0" in lines
    assert "te_queue_size 0.0" in lines


def test_every_line_is_json_and_none_shows_a_secret(start_server: Start) -> None:
    server = start_server("--api-key", "SESAME", HF_TOKEN="hf_SESAME", LOG_LEVEL="debug").wait_until_ready()
    embed(server.address, key="SESAME")
    with pytest.raises(grpc.RpcError) as refused:
        embed(server.address, key="SESAM")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert server.terminate() == 0
    assert "SESAME" not in "".join(server.lines)
    messages = [json.loads(line)["message"] for line in server.lines]
    assert "Success" in messages


def test_encrypted_server_is_probed_on_its_health_port(start_server: Start, tmp_path: Path) -> None:
    pair, port = Authority(tmp_path).issue("server"), str(free_port())
    options = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--health-port", port)
    server = start_server(*options).wait_until_ready()
    for environment, code in (({"HEALTH_PORT": port}, 0), ({"PORT": str(server.port)}, 1)):
        probe = subprocess.run([TEI_GRPC, "health"], env=clean_environment() | environment, timeout=60)
        assert probe.returncode == code
    assert server.terminate() == 0


def test_hangup_reads_keys_and_certificates_anew(start_server: Start, tmp_path: Path) -> None:
    authority, keys = Authority(tmp_path), tmp_path / "keys"
    keys.write_text("old\n")
    pair = authority.issue("server")
    options = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--api-key-file", str(keys))
    server = start_server(*options).wait_until_ready()
    keys.write_text("new\n")
    server.process.send_signal(signal.SIGHUP)
    lines = [server.next_line(), server.next_line()]
    assert [json.loads(line)["message"] for line in lines] == [
        "The keys have been read anew",
        "The certificates have been read anew",
    ]
    trust = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    with grpc.secure_channel(server.address, trust) as channel:
        metadata = [("authorization", "Bearer new")]
        assert tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="test"), metadata=metadata).embeddings
    assert server.terminate() == 0


def test_hangup_without_such_files_ends_the_process(start_server: Start) -> None:
    server = start_server().wait_until_ready()
    server.process.send_signal(signal.SIGHUP)
    assert server.wait() == -signal.SIGHUP


def test_key_that_does_not_fit_its_certificate_is_one_line(start_server: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server").cert, authority.issue("other").key
    server = start_server("--tls-cert", str(cert), "--tls-key", str(key))
    assert server.wait() == 1
    assert server.lines[-1] == f"tei-grpc: `--tls-key`: '{key}' is not the key of `--tls-cert` '{cert}'\n"
