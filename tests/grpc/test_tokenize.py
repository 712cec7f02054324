import threading

import grpc
import pytest

from tei_grpc.engine import tokenizer
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.grpc.conftest import until

LONG = tei_pb2.EncodeRequest(inputs="w0 " * 200)


@pytest.fixture
def stub(served):
    return tei_pb2_grpc.TokenizeStub(served.channel)


async def test_tokens_carry_byte_offsets_and_special_ones_none(stub):
    reply = await stub.Tokenize(tei_pb2.EncodeRequest(inputs="w0 é w1", add_special_tokens=True))
    tokens = [
        (t.id, t.special, t.start if t.HasField("start") else None, t.stop if t.HasField("stop") else None)
        for t in reply.tokens
    ]
    assert tokens == [
        (2, True, None, None),
        (4, False, 0, 2),
        (1, False, 3, 5),
        (5, False, 6, 8),
        (3, True, None, None),
    ]


async def test_special_tokens_are_added_only_when_asked_for(stub):
    reply = await stub.Tokenize(tei_pb2.EncodeRequest(inputs="w0 w1"))
    assert [token.id for token in reply.tokens] == [4, 5]


async def test_streams_answer_every_message(stub):
    texts = ["w0", "w1 w2"]
    tokens = stub.TokenizeStream(iter([tei_pb2.EncodeRequest(inputs=text) for text in texts]))
    ids = [[token.id for token in reply.tokens] async for reply in tokens]
    decoded = stub.DecodeStream(iter([tei_pb2.DecodeRequest(ids=message) for message in ids]))
    assert ids == [[4], [5, 6]]
    assert [reply.text async for reply in decoded] == texts


async def test_calls_under_way_are_limited_apart_from_those_that_need_the_model(serve, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(tokenizer, "simple_tokens", lambda *_: gate.wait(30) and iter(()))
    async with serve(max_concurrent_requests=4) as served:
        stub = tei_pb2_grpc.TokenizeStub(served.channel)
        calls = [stub.Tokenize(LONG) for _ in range(4)]
        await until(lambda: served.engine._tokenizing.in_use == 4)
        assert await stub.Tokenize(LONG).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        waiting = stub.TokenizeStream(iter([LONG] * 9))
        assert (await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))).embeddings
        gate.set()
        assert {await call.code() for call in calls} == {grpc.StatusCode.OK}
        assert len([reply async for reply in waiting]) == 9
        assert served.engine._tokenizing.in_use == 0


async def test_decode_needs_ids(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Decode(tei_pb2.DecodeRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "Input validation error: `input_ids` cannot be empty"


async def test_decode_leaves_special_tokens_out_only_when_asked_to(stub):
    ids = [2, 4, 3]
    assert (await stub.Decode(tei_pb2.DecodeRequest(ids=ids))).text == "[CLS] w0 [SEP]"
    assert (await stub.Decode(tei_pb2.DecodeRequest(ids=ids, skip_special_tokens=True))).text == "w0"


async def test_info_tells_what_is_served(served):
    info = await tei_pb2_grpc.InfoStub(served.channel).Info(tei_pb2.InfoRequest())
    assert info.model_id == served.engine.config.model_id
    assert (info.model_dtype, info.model_type) == ("float32", tei_pb2.MODEL_TYPE_EMBEDDING)
    assert (info.max_input_length, info.max_client_batch_size) == (512, 32)
    assert [info.HasField(f) for f in ("sha", "docker_label", "model_sha", "max_batch_requests")] == [False] * 4
