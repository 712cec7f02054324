"""Encrypted ports: who is let in, with which certificate and key, and what stays in plaintext."""

import asyncio
import ssl

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.commands import health
from tei_grpc.errors import StartupError
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.certificates import Authority
from tests.grpc.conftest import serve_fake, write_checkpoint

Code = grpc.StatusCode
KEY = (("authorization", "Bearer key-1"),)
ONE_OF_EACH_KIND = ["/tei.v1.Embed/Embed", "/tei.v1.Embed/EmbedStream", "/tei.v1.Rerank/RerankStream"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority):
    """The server's options."""
    pair = authority.issue("server")
    return {"tls_cert": pair.cert, "tls_key": pair.key}


@pytest.fixture
def connect(authority):
    """A channel that trusts the authority, and shows the certificate of `pair`."""

    def open_channel(address, pair=None):
        shown = (None, None) if pair is None else (pair.key.read_bytes(), pair.cert.read_bytes())
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority.ca.read_bytes(), *shown))

    return open_channel


async def code_of(channel, metadata=()):
    call = tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=metadata, timeout=20)
    return await call.code()


async def test_client_that_trusts_the_authority_is_served(serve, files, connect):
    async with serve(**files) as served, connect(served.address) as channel:
        assert await code_of(channel) is Code.OK


async def test_client_without_tls_is_not_served(serve, files):
    async with serve(**files) as served:
        assert await code_of(served.channel) is Code.UNAVAILABLE


async def test_certificate_has_the_name_that_clients_check(serve, files, connect):
    async with serve(**files) as served, connect(f"localhost:{served.address.rpartition(':')[2]}") as channel:
        assert await code_of(channel) is Code.OK


async def test_further_tcp_listeners_are_encrypted_and_unix_sockets_are_not(serve, files, connect, tmp_path):
    async with serve(**files, listen=("127.0.0.1:0", f"unix:{tmp_path}/tei.sock")) as served:
        _, tcp, unix = (address.local for address in served.addresses.serving)
        async with connect(tcp) as channel:
            assert await code_of(channel) is Code.OK
        async with grpc.aio.insecure_channel(tcp) as channel:
            assert await code_of(channel) is Code.UNAVAILABLE
        async with grpc.aio.insecure_channel(unix) as channel:
            assert await code_of(channel) is Code.OK


async def test_http_2_is_agreed_on(serve, files, authority):
    async with serve(**files) as served:
        host, port = served.address.split(":")
        context = ssl.create_default_context(cafile=authority.ca)
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        writer.close()


@pytest.fixture
async def mutual(embedding_model, authority, files):
    """A server that wants to see a certificate of the authority."""
    async with serve_fake(embedding_model, **files, tls_client_ca=authority.ca, health_port=0) as served:
        yield served


async def test_client_with_a_certificate_of_the_authority_is_served(mutual, authority, connect):
    async with connect(mutual.address, authority.issue("client")) as channel:
        assert await code_of(channel) is Code.OK


async def test_client_without_a_certificate_is_not_let_in(mutual, connect):
    async with connect(mutual.address) as channel:
        assert await code_of(channel) is Code.UNAVAILABLE


async def test_client_of_another_authority_is_not_let_in(mutual, connect, tmp_path):
    async with connect(mutual.address, Authority(tmp_path / "other").issue("client")) as channel:
        assert await code_of(channel) is Code.UNAVAILABLE


async def test_health_port_needs_no_certificate(mutual, capsys):
    address = mutual.addresses.health[0].local
    assert await asyncio.to_thread(health.check, address, "", 5.0) == 0
    assert capsys.readouterr().out == f"{address}: SERVING\n"


@pytest.mark.parametrize("path", ONE_OF_EACH_KIND)
async def test_key_is_wanted_on_encrypted_ports_before_anything_is_sent(serve, files, connect, path):
    async with serve(**files, api_key="key-1") as served, connect(served.address) as channel:
        call = channel.stream_stream(path)()
        assert await asyncio.wait_for(call.code(), 10) is Code.UNAUTHENTICATED
        assert await code_of(channel, KEY) is Code.OK


async def test_probes_on_an_encrypted_port_need_no_key(serve, files, connect):
    async with serve(**files, api_key="key-1") as served, connect(served.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_wrong_file_is_found_before_anything_listens(tmp_path, authority, files):
    model = write_checkpoint(tmp_path, "BertModel")
    wrong = {**files, "tls_key": authority.issue("other").key, "uds_listen": tmp_path / "tei.sock"}
    with pytest.raises(StartupError, match="`--tls-key`"):
        async with serve_fake(model, **wrong):
            pass
    assert not (tmp_path / "tei.sock").exists()
