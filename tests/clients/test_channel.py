import subprocess

import grpc
import pytest
from tei_client import AsyncClient, Client, TlsOptions
from tei_client.channel import make_options

from tests.clients.conftest import Scripted, serve_embed


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    kind = ["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    name = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *kind, *name, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_with_and_without_a_client_certificate(certificate, connect, mutual):
    cert, key = certificate
    pair = (key.read_bytes(), cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], cert.read_bytes() if mutual else None, mutual)
    tls = TlsOptions(ca=cert, cert=cert, key=str(key)) if mutual else TlsOptions(ca=str(cert))
    async with serve_embed(Scripted(), credentials) as address, connect(address, tls=tls) as ask:
        assert (await ask("embed", ["7"])).tolist() == [[7]]


@pytest.mark.parametrize("half", [{"cert": "cert.pem"}, {"key": "key.pem"}])
def test_certificate_and_key_go_together(half):
    with pytest.raises(ValueError, match="`cert` and `key` go together"):
        TlsOptions(**half)


def test_callers_options_override_ours():
    options = make_options("host:80", -1, [("grpc.keepalive_time_ms", 7), ("grpc.primary_user_agent", "mine")])
    assert options.count(("grpc.keepalive_time_ms", 7)) == 1
    assert ("grpc.primary_user_agent", "mine") in options
    assert len(dict(options)) == len(options)


def test_keepalive_is_given_in_seconds():
    assert ("grpc.keepalive_time_ms", 7500) in make_options("host:80", -1, [], keepalive=7.5)


async def test_dns_targets_are_called_in_turn(connect):
    service_config = dict(make_options("dns:///embeddings:80", -1, []))["grpc.service_config"]
    one, two = Scripted(), Scripted()
    async with serve_embed(one) as first, serve_embed(two) as second:
        # a list of addresses stands for a name that has several
        target = f"ipv4:{first},{second}"
        async with connect(target, options=[("grpc.service_config", service_config)]) as ask:
            while not (one.calls and two.calls):  # the second connection may come a little later
                assert len(one.calls) + len(two.calls) < 1000
                await ask("embed", "7")
            one.calls.clear(), two.calls.clear()
            for _ in range(10):
                await ask("embed", "7")
    assert (len(one.calls), len(two.calls)) == (5, 5)


async def test_dns_target_is_resolved(scripted, connect):
    async with connect(f"dns:///{scripted.address}") as ask:
        assert (await ask("embed", "7")).tolist() == [7]


async def test_clients_are_context_managers(scripted):
    async with AsyncClient(scripted.address) as client:
        await client.embed("7")
    with Client(scripted.address) as closed:
        pass
    with pytest.raises(ValueError, match="closed channel"):
        closed.embed("7")


def test_key_is_not_shown():
    with Client("127.0.0.1:1", api_key="secret") as client:
        assert "secret" not in repr(client)
