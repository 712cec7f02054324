import asyncio
import struct

import grpc
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.fakes import SIZE

HEADERS = {
    "x-compute-time",
    "x-total-time",
    "x-compute-characters",
    "x-compute-tokens",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
}


def raw_vector(*ids):
    """What the fake runner answers for the token ids: length, sum, then the ids over and over."""
    return [len(ids), sum(ids), *(ids[i % len(ids)] for i in range(SIZE - 2))]


async def test_vector_is_the_one_of_the_text(served):
    reply = await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0 w1", normalize=False))
    assert list(reply.embeddings) == raw_vector(2, 4, 5, 3)


async def test_absent_normalize_means_unit_length(served):
    reply = await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0 w1"))
    assert sum(value * value for value in reply.embeddings) == pytest.approx(1, abs=1e-6)


async def test_dimensions_keep_the_first_values(served):
    reply = await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0 w1", normalize=False, dimensions=3))
    assert list(reply.embeddings) == raw_vector(2, 4, 5, 3)[:3]


async def test_dimensions_zero_is_not_taken_for_absent(served):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0", dimensions=0))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "Input validation error: `dimensions` should be positive"


async def test_left_truncation_keeps_the_tail(served):
    text = " ".join(["w0"] * 600 + ["w9"])
    left = tei_pb2.TRUNCATION_DIRECTION_LEFT
    request = tei_pb2.EmbedAllRequest(inputs=text, truncate=True, truncation_direction=left)
    reply = await served.embed.EmbedAll(request)
    assert [row.embeddings[0] for row in reply.token_embeddings[-2:]] == [13, 3]


async def test_metadata_counts_characters_and_tokens(served):
    reply = await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0 w1 é😀"))
    assert (reply.metadata.compute_chars, reply.metadata.compute_tokens) == (8, 5)
    assert reply.metadata.total_time_ns >= reply.metadata.inference_time_ns


async def test_every_token_has_a_vector(served):
    reply = await served.embed.EmbedAll(tei_pb2.EmbedAllRequest(inputs="w0 w1"))
    assert [list(row.embeddings) for row in reply.token_embeddings] == [[id] * SIZE for id in (2, 4, 5, 3)]


async def test_unary_success_carries_its_cost_in_initial_metadata(served):
    call = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0 w1"))
    headers = dict(await call.initial_metadata())
    assert headers.pop("x-compute-type") == "cpu+optimized"
    headers = {name: int(value) for name, value in headers.items() if name.startswith("x-")}
    assert headers.keys() == HEADERS
    assert (headers["x-compute-characters"], headers["x-compute-tokens"]) == (5, 4)


async def test_errors_and_streams_carry_no_cost_headers(served):
    failed = served.embed.Embed(tei_pb2.EmbedRequest(inputs=""))
    assert (await failed.code()) is grpc.StatusCode.INVALID_ARGUMENT
    stream = served.embed.EmbedStream(iter([tei_pb2.EmbedRequest(inputs="w0")]))
    assert len([reply async for reply in stream]) == 1
    for call in (failed, stream):
        metadata = [*(await call.initial_metadata() or ()), *(await call.trailing_metadata() or ())]
        assert not [name for name, _ in metadata if name.startswith("x-")]


@pytest.mark.parametrize("value", [2, -1, 2**31 - 1])
async def test_unknown_truncation_direction_is_refused_by_name_and_value(served, value):
    request = tei_pb2.EmbedRequest(inputs="w0", truncation_direction=value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.embed.Embed(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "`truncation_direction`" in caught.value.details() and str(value) in caught.value.details()
    assert (await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))).embeddings  # and the server lives


async def test_sparse_vectors_need_a_splade_model(served):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.embed.EmbedSparse(tei_pb2.EmbedSparseRequest(inputs="w0"))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "Backend error: Model is not an embedding model with SPLADE pooling"


@pytest.mark.parametrize(
    ("service", "method", "request_", "text"),
    [
        ("Predict", "Predict", tei_pb2.PredictRequest(inputs="w0"), "Backend error: Model is not a classifier model"),
        (
            "Predict",
            "PredictPair",
            tei_pb2.PredictPairRequest(inputs=["w0", "w1"]),
            "Backend error: Model is not a classifier model",
        ),
        ("Rerank", "Rerank", tei_pb2.RerankRequest(query="w0", texts=["w1"]), "model is not a classifier model"),
    ],
)
async def test_scores_need_a_classifier(served, service, method, request_, text):
    stub = getattr(tei_pb2_grpc, f"{service}Stub")(served.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(request_)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, text)


async def test_overload_is_refused_at_once(serve):
    async with serve(max_concurrent_requests=1) as served:
        served.runner.gate.clear()
        first = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"))
        await asyncio.to_thread(served.runner.running.wait)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), timeout=5)
        served.runner.gate.set()
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Model is overloaded",
        )
        assert (await first).embeddings


async def test_deadline_ends_the_call_and_frees_its_permit(serve):
    async with serve(max_concurrent_requests=1) as served:
        served.runner.gate.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), timeout=0.2)
        served.runner.gate.set()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w0"), timeout=5)).embeddings


async def test_float_bytes_are_little_endian_on_the_wire(served):
    call = served.channel.unary_unary("/tei.v1.Embed/Embed")
    raw = await call(tei_pb2.EmbedRequest(inputs="w0 w1", normalize=False).SerializeToString())
    assert raw.startswith(b"\x0a" + bytes([4 * SIZE]) + struct.pack(f"<{SIZE}f", *raw_vector(2, 4, 5, 3)))
