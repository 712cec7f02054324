"""The server as a whole: addresses, limits of the transport, what it logs."""

import logging

import grpc
import numpy as np
import pytest

from tei_grpc.config import describe
from tei_grpc.errors import StartupError
from tei_grpc.pb import tei_pb2


async def test_unix_socket_serves_and_is_removed(serve, tmp_path):
    path = tmp_path / "tei.sock"
    async with serve(uds_listen=path) as served:
        assert served.address == f"unix:{path}"
        assert (await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))).embeddings
    assert not path.exists()


async def test_second_server_on_the_port_refuses_to_start(served, serve):
    with pytest.raises(StartupError, match="is in use"):
        async with serve(port=int(served.address.rpartition(":")[2])):
            pass


async def test_key_never_reaches_the_log(serve, caplog):
    with caplog.at_level(logging.DEBUG, logger="tei_grpc"):
        async with serve(api_key="key-that-stays-secret") as served:
            metadata = [("authorization", "Bearer key-that-stays-secret")]
            await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=metadata)
            assert await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0")).code() is grpc.StatusCode.UNAUTHENTICATED
    assert "secret" not in caplog.text


async def test_secrets_are_in_nothing_that_anybody_reads(serve, tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("key-2-SESAME\n")
    secrets = {"api_key": "key-1-SESAME", "api_key_file": file, "hf_token": "hf_SESAME"}
    with caplog.at_level(logging.DEBUG):
        async with serve(**secrets) as served:
            wrong = [("authorization", "Bearer key-3-SESAME")]
            refused = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), metadata=wrong)
            right = [("authorization", "Bearer key-2-SESAME")]
            info = await served.channel.unary_unary("/tei.v1.Info/Info")(b"", metadata=right)
            told = [await refused.details(), repr(info), served.engine.metrics.render().decode()]
            told += [repr(served.engine.config), str(describe(served.engine.config))]
            file.write_text("schl\u00fcssel-SESAME\n")
            served.server.reload()
    assert "API_KEY_FILE" in caplog.text
    assert "SESAME" not in caplog.text
    assert "SESAME" not in "".join(told)


async def test_reply_larger_than_the_usual_4_mib_is_sent(serve):
    async with serve() as served:
        request = tei_pb2.EmbedAllRequest(inputs=" ".join(["w0"] * 510))
        served.runner.answer = lambda entry: (np.ones((len(entry), 4096), np.float32),)
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(served.address, options=options) as channel:
            call = channel.unary_unary("/tei.v1.Embed/EmbedAll")
            reply = await call(request.SerializeToString())
        assert len(reply) > 512 * 4096 * 4
        assert await served.embed.EmbedAll(request).code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # the client's limit
        assert served.device.free_permits == served.engine.config.max_concurrent_requests
