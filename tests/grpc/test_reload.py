"""SIGHUP: new keys and certificates without a restart. Calls and connections go on; what is wrong changes nothing."""

import asyncio
import logging
import os
import shutil
import signal
import ssl

import grpc
import pytest
from cryptography import x509

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.runtime.signals import on_hangup
from tests.certificates import Authority

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("old\n")
    return file


@pytest.fixture
def files(authority, tmp_path):
    """The server's certificate and key; `install` puts others in their place."""
    options = {"tls_cert": tmp_path / "tls.crt", "tls_key": tmp_path / "tls.key"}
    install(options, authority.issue("first"))
    return options


def install(options, pair):
    shutil.copy(pair.cert, options["tls_cert"])
    shutil.copy(pair.key, options["tls_key"])


async def name_shown(address):
    """The common name of the certificate that a new connection is shown."""
    host, port = address.rsplit(":", 1)
    pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
    (name,) = x509.load_pem_x509_certificate(pem.encode()).subject
    return name.value


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


async def code_of(channel, key=None):
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    call = tei_pb2_grpc.EmbedStub(channel).Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=metadata, timeout=20)
    return await call.code()


async def test_new_key_is_taken_and_the_old_one_refused(serve, key_file):
    async with serve(api_key_file=key_file) as served:
        assert await code_of(served.channel, "old") is Code.OK
        key_file.write_text("new\n")
        assert await code_of(served.channel, "new") is Code.UNAUTHENTICATED
        served.server.reload()
        assert await code_of(served.channel, "new") is Code.OK
        assert await code_of(served.channel, "old") is Code.UNAUTHENTICATED


async def test_key_that_is_no_file_stays(serve, key_file):
    async with serve(api_key="always", api_key_file=key_file) as served:
        key_file.write_text("new\n")
        served.server.reload()
        assert await code_of(served.channel, "always") is Code.OK


async def test_call_under_way_outlives_its_key(serve, key_file):
    async with serve(api_key_file=key_file) as served:
        served.runner.gate.clear()
        held = asyncio.create_task(code_of(served.channel, "old"))
        await asyncio.to_thread(served.runner.running.wait)
        key_file.write_text("new\n")
        served.server.reload()
        served.runner.gate.set()
        assert await held is Code.OK


@pytest.mark.parametrize("content", ["", "\n \n", "schlüssel\n", None])
async def test_file_without_keys_is_an_error_in_the_log_and_the_old_keys_stay(serve, key_file, caplog, content):
    async with serve(api_key_file=key_file) as served:
        key_file.unlink() if content is None else key_file.write_text(content)
        caplog.clear()
        served.server.reload()
        (text,) = errors_in(caplog)
        assert text.startswith("`--api-key-file`")
        assert text.endswith("; the keys stay as they were")
        assert await code_of(served.channel, "old") is Code.OK


async def test_new_connections_are_shown_the_new_certificate_on_every_port(serve, files, authority):
    async with serve(**files, listen=("127.0.0.1:0",)) as served:
        ports = [address.local for address in served.addresses.serving]
        assert [await name_shown(port) for port in ports] == ["first", "first"]
        install(files, authority.issue("second"))
        assert await name_shown(ports[0]) == "first"
        served.server.reload()
        assert [await name_shown(port) for port in ports] == ["second", "second"]


async def test_connection_and_call_outlive_their_certificate(serve, files, authority):
    trust = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with serve(**files) as served, grpc.aio.secure_channel(served.address, trust) as channel:
        served.runner.gate.clear()
        held = asyncio.create_task(code_of(channel))
        await asyncio.to_thread(served.runner.running.wait)
        install(files, authority.issue("second"))
        served.server.reload()
        assert await name_shown(served.address) == "second"
        served.runner.gate.set()
        assert await held is Code.OK
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        assert await code_of(channel) is Code.OK


async def test_client_is_let_in_by_the_new_authority_only(serve, files, authority, tmp_path):
    other, trusted = Authority(tmp_path / "other"), tmp_path / "clients.pem"
    shutil.copy(authority.ca, trusted)

    async def let_in(address, issuer):
        pair = issuer.issue("client")
        shown = grpc.ssl_channel_credentials(authority.ca.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes())
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, shown, options) as channel:
            return await code_of(channel) is Code.OK

    async with serve(**files, tls_client_ca=trusted) as served:
        assert [await let_in(served.address, issuer) for issuer in (authority, other)] == [True, False]
        shutil.copy(other.ca, trusted)
        served.server.reload()
        assert [await let_in(served.address, issuer) for issuer in (authority, other)] == [False, True]


@pytest.mark.parametrize(("option", "content"), [("tls_cert", "text"), ("tls_key", "text"), ("tls_key", None)])
async def test_file_without_a_certificate_is_an_error_in_the_log_and_the_old_one_stays(
    serve, files, caplog, option, content
):
    async with serve(**files) as served:
        files[option].unlink() if content is None else files[option].write_text(content)
        caplog.clear()
        served.server.reload()
        (text,) = errors_in(caplog)
        assert text.startswith(f"`--{option.replace('_', '-')}`")
        assert text.endswith("; the certificates stay as they were")
        assert await name_shown(served.address) == "first"


async def test_wrong_certificate_does_not_keep_a_new_key_back(serve, files, key_file, authority):
    trust = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with serve(**files, api_key_file=key_file) as served:
        files["tls_cert"].write_text("text")
        key_file.write_text("new\n")
        served.server.reload()
        async with grpc.aio.secure_channel(served.address, trust) as channel:
            assert await code_of(channel, "new") is Code.OK


async def test_hangup_reloads_and_the_process_goes_on():
    came = asyncio.Event()
    with on_hangup(came.set):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(came.wait(), 10)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
