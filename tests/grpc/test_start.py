"""What the log says at start."""

import logging

import pytest

from tests.certificates import Authority


@pytest.fixture
def start(serve, caplog):
    """Serve with options, and return what was logged."""

    async def start(**options):
        with caplog.at_level(logging.INFO, logger="tei_grpc"):
            async with serve(load=False, pooling="cls", **options) as served:
                await served.server.load(served.addresses)
                return [(record.levelname, record.getMessage()) for record in caplog.records], served.addresses

    return start


def warnings_in(said):
    return [text for level, text in said if level == "WARNING"]


async def test_every_address_is_named(start, tmp_path):
    said, addresses = await start(listen=(f"unix:{tmp_path}/tei.sock",), health_port=0)
    everywhere = f"{addresses.serving[0].bound}, unix:{tmp_path}/tei.sock"
    assert ("INFO", f"Listening on {everywhere}, loading the model") in said
    assert ("INFO", f"Answering health checks on {addresses.health[0].bound}") in said
    assert said[-1][1].startswith(f"Serving on {everywhere}. Try: grpcurl ")


async def test_server_that_other_machines_reach_without_key_and_tls_is_warned_of(start):
    (warning,) = warnings_in((await start(hostname="0.0.0.0"))[0])
    assert warning.startswith("Everybody who can reach 0.0.0.0:")


async def test_nobody_is_warned_on_the_loopback(start):
    assert warnings_in((await start())[0]) == []


async def test_server_whose_key_travels_unencrypted_is_warned_of(start):
    (warning,) = warnings_in((await start(hostname="0.0.0.0", api_key="key-1"))[0])
    assert warning.startswith("Keys and inputs travel to 0.0.0.0:")


async def test_nobody_is_warned_of_a_key_on_the_loopback(start):
    assert warnings_in((await start(api_key="key-1"))[0]) == []


async def test_nobody_is_warned_of_a_server_with_tls(start, tmp_path):
    pair = Authority(tmp_path / "authority").issue("server")
    said, _ = await start(hostname="0.0.0.0", api_key="key-1", tls_cert=pair.cert, tls_key=pair.key)
    assert warnings_in(said) == []
    assert " -cacert CA.pem " in said[-1][1]


async def test_reply_that_the_server_will_not_send_is_announced(start):
    (warning,) = warnings_in((await start(max_send_message_size=100))[0])
    assert "`--max-send-message-size` is 100 bytes" in warning
