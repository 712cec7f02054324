import asyncio
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.errors import InferenceError
from tei_grpc.pb import tei_pb2

Code = grpc.StatusCode

METHODS = [
    (f"/{service.full_name}/{method.name}", method)
    for service in tei_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
EMBED = "/tei.v1.Embed/Embed"
ONE_OF_EACH_KIND = [EMBED, "/tei.v1.Embed/EmbedStream", "/tei.v1.Rerank/RerankStream", "/tei.v1.Info/Info"]
NO_KEY = (Code.UNAUTHENTICATED, "No valid auth token")


async def call_raw(channel, method, *messages, close=True, metadata=()):
    """Send bytes as they are, to any kind of method; return code and text."""
    call = channel.stream_stream(method)(metadata=metadata)
    try:
        for message in messages:
            await call.write(message)
        if close:
            await call.done_writing()
        async with asyncio.timeout(10):
            while await call.read() is not grpc.aio.EOF:
                pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # answered already
    return await call.code(), await call.details()


def request_of(method):
    return method.input_type._concrete_class()


@pytest.mark.parametrize(("path", "method"), [pair for pair in METHODS if pair[0] != "/tei.v1.Rerank/RerankStream"])
async def test_undecodable_bytes_are_answered_without_parser_text(served, path, method):
    status = await call_raw(served.channel, path, b"\x0a\xff\xff\xff\xff\xff")
    assert status == (Code.INTERNAL, "Request could not be decoded")


async def test_invalid_utf8_is_undecodable(served):
    status = await call_raw(served.channel, EMBED, b"\x0a\x02\xc3\x28")
    assert status == (Code.INTERNAL, "Request could not be decoded")


@pytest.mark.parametrize("path", [path for path, method in METHODS if not path.endswith("Stream")])
async def test_unary_call_without_a_message_gets_a_status(served, path):
    assert await call_raw(served.channel, path) == (Code.INTERNAL, "Missing request message")


@pytest.mark.parametrize("path", ["/tei.v1.Embed/Nope", "/tei.v2.Embed/Embed", "/nope"])
async def test_unknown_methods_are_unimplemented(served, path):
    code, _ = await call_raw(served.channel, path)
    assert code is Code.UNIMPLEMENTED


async def test_exception_text_stays_inside(served, caplog):
    def fail(entry):
        raise RuntimeError("/secret/path")

    served.engine.embed = lambda *_, **__: fail(None)
    with caplog.at_level(logging.ERROR):
        code, text = await call_raw(served.channel, EMBED, b"\x0a\x02w0")
    assert code is Code.INTERNAL
    assert text.startswith("Internal error, id ")
    record = next(r for r in caplog.records if text.removeprefix("Internal error, id ") in r.getMessage())
    assert "/secret/path" in str(record.exc_info[1])


async def test_model_failure_is_internal(served):
    served.runner.answer = lambda entry: InferenceError("Inference failed")
    code, text = await call_raw(served.channel, EMBED, b"\x0a\x02w0")
    assert code is Code.INTERNAL
    assert text.startswith("Inference failed, id ")


@pytest.mark.parametrize("path", [EMBED, "/tei.v1.Embed/EmbedStream"])
async def test_future_cancelled_inside_the_server_is_not_a_silent_end(served, path):
    async def cancelled(*_, **__):
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    served.engine.embed = cancelled
    code, text = await call_raw(served.channel, path, b"\x0a\x02w0")
    assert code is Code.INTERNAL
    assert text.startswith("Internal error, id ")


async def test_reply_that_cannot_be_encoded_is_internal(served):
    async def nonsense(*_, **__):
        return "no tokens at all"

    served.engine.decode = nonsense
    served.engine.tokenize_into = nonsense
    code, text = await call_raw(served.channel, "/tei.v1.Tokenize/Tokenize", b"\x0a\x02w0")
    assert (code, text[:17]) == (Code.INTERNAL, "Internal error, i")


async def test_long_error_texts_reach_the_client(served):
    name = "😀" * 20_000
    request = tei_pb2.EmbedRequest(inputs="w0", prompt_name=name).SerializeToString()
    code, text = await call_raw(served.channel, EMBED, request)
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith("Input validation error: ")


async def test_request_over_the_limit_leaves_the_connection_intact(serve):
    async with serve(max_recv_message_size=1000) as served:
        code, _ = await call_raw(served.channel, EMBED, tei_pb2.EmbedRequest(inputs="w0 " * 500).SerializeToString())
        assert code is Code.RESOURCE_EXHAUSTED
        assert (await call_raw(served.channel, EMBED, b"\x0a\x02w0"))[0] is Code.OK


async def test_message_over_the_limit_ends_its_stream_after_the_earlier_answers(serve):
    async with serve(max_recv_message_size=1000) as served:
        call = served.channel.stream_stream("/tei.v1.Embed/EmbedStream")()
        await call.write(b"\x0a\x02w0")
        assert await call.read() is not grpc.aio.EOF
        await call.write(tei_pb2.EmbedRequest(inputs="w0 " * 500).SerializeToString())
        assert await asyncio.wait_for(call.code(), 10) is Code.RESOURCE_EXHAUSTED


async def test_compressed_requests_are_accepted(served):
    request = tei_pb2.EmbedRequest(inputs="w0 " * 100)
    reply = await served.embed.Embed(request, compression=grpc.Compression.Gzip)
    assert reply.metadata.compute_tokens == 102


@pytest.fixture
async def locked(serve):
    async with serve(api_key="key-1") as running:
        yield running


@pytest.mark.parametrize("path", ONE_OF_EACH_KIND)
async def test_caller_without_a_key_is_refused_before_sending_anything(locked, path):
    assert await call_raw(locked.channel, path, close=False) == NO_KEY


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "key-1")],
        [("authorization", "bearer key-1")],
        [("authorization", "Bearer  key-1")],
        [("authorization", "Bearer key-12")],
        [("authorization", "Bearer key-")],
        [("authorization", "Bearer ")],
        [("authorization", "")],
        [("authorization", "Bearer wrong"), ("authorization", "Bearer key-1")],
        [("authorization", "Bearer key-1"), ("authorization", "Bearer key-1")],
        [("authorization-bin", b"Bearer key-1")],
        [("api-key", "key-1")],
    ],
)
async def test_anything_but_the_exact_key_is_refused(locked, metadata):
    assert await call_raw(locked.channel, EMBED, b"\x0a\x02w0", metadata=metadata) == NO_KEY


@pytest.mark.parametrize("path", [path for path, _ in METHODS])
async def test_every_method_wants_the_key(locked, path):
    assert await call_raw(locked.channel, path) == NO_KEY
    code, _ = await call_raw(locked.channel, path, metadata=[("authorization", "Bearer key-1")])
    assert code is not Code.UNAUTHENTICATED


async def test_probes_and_tools_need_no_key(locked):
    reply = await health_pb2_grpc.HealthStub(locked.channel).Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    for version in ("v1", "v1alpha"):
        code, _ = await call_raw(locked.channel, f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        assert code is Code.OK


async def test_each_key_of_the_file_opens(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("key-2\n\nkey-3\n")
    async with serve(api_key="key-1", api_key_file=keys) as served:
        for key in ("key-1", "key-2", "key-3"):
            metadata = [("authorization", f"Bearer {key}")]
            assert (await call_raw(served.channel, EMBED, b"\x0a\x02w0", metadata=metadata))[0] is Code.OK
        assert await call_raw(served.channel, EMBED, metadata=[("authorization", "Bearer ")]) == NO_KEY


@pytest.mark.parametrize("path", ONE_OF_EACH_KIND)
async def test_calls_during_loading_are_refused_at_once(serve, path):
    async with serve(load=False) as served:
        status = await call_raw(served.channel, path, close=False)
        assert status == (Code.UNAVAILABLE, "The model is still loading")


async def test_calls_that_grpc_still_lets_in_during_draining_are_answered(served):
    served.engine.drain()
    code, _ = await call_raw(served.channel, EMBED, b"\x0a\x02w0")
    assert code is Code.OK
