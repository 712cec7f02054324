"""Predict, Rerank and EmbedSparse with models that fit them; the fake model's logits are token ids."""

import math

import grpc
import numpy as np
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.grpc.conftest import serve_fake, write_checkpoint

Code = grpc.StatusCode
MANY = 1000


def text_logit(entry):
    """The id of the first word of a pair's second text: w0 is 4."""
    second = int(np.flatnonzero(entry.input_ids == 3)[0]) + 1
    return (entry.input_ids[second : second + 1].astype(np.float32),)


@pytest.fixture
async def reranker(tmp_path):
    model = write_checkpoint(tmp_path, "BertForSequenceClassification", num_labels=1)
    async with serve_fake(model) as served:
        served.runner.answer = text_logit
        yield tei_pb2_grpc.RerankStub(served.channel)


@pytest.fixture
async def classifier(tmp_path):
    labels = {"0": "low", "1": "mid", "2": "high"}
    model = write_checkpoint(tmp_path, "BertForSequenceClassification", id2label=labels)
    async with serve_fake(model) as served:
        served.runner.answer = lambda entry: (np.array([0, 1, len(entry)], np.float32),)
        yield tei_pb2_grpc.PredictStub(served.channel)


def ranks(reply):
    return [(rank.index, rank.score) for rank in reply.ranks]


async def test_ranks_are_best_first_with_their_positions(reranker):
    reply = await reranker.Rerank(tei_pb2.RerankRequest(query="w9", texts=["w0", "w2", "w1"], raw_scores=True))
    assert ranks(reply) == [(1, 6), (2, 5), (0, 4)]
    assert not any(rank.HasField("text") for rank in reply.ranks)


async def test_scores_are_sigmoids_unless_raw(reranker):
    reply = await reranker.Rerank(tei_pb2.RerankRequest(query="w9", texts=["w0"]))
    assert reply.ranks[0].score == pytest.approx(1 / (1 + math.exp(-4)))


async def test_texts_are_returned_when_asked_for(reranker):
    reply = await reranker.Rerank(tei_pb2.RerankRequest(query="w9", texts=["w0", "w1"], return_text=True))
    assert [rank.text for rank in reply.ranks] == ["w1", "w0"]


async def test_rerank_carries_cost_headers(reranker):
    call = reranker.Rerank(tei_pb2.RerankRequest(query="w9", texts=["w0", "w1"]))
    headers = dict(await call.initial_metadata())
    assert (headers["x-compute-characters"], headers["x-compute-tokens"]) == ("8", "10")


def stream_request(text, **options):
    return tei_pb2.RerankStreamRequest(query="w9", text=text, **options)


async def test_rerank_stream_answers_like_rerank(reranker):
    texts = [f"w{i * 7 % 100}" for i in range(MANY)]
    call = reranker.RerankStream(stream_request(text, raw_scores=True) for text in texts)
    reply = await call
    order = sorted(range(MANY), key=lambda index: (-(index * 7 % 100), index))
    assert [rank.index for rank in reply.ranks] == order


async def test_first_message_says_how_the_stream_is_answered(reranker):
    first = stream_request("w0", raw_scores=True, return_text=True)
    reply = await reranker.RerankStream(iter([first, stream_request("w1")]))
    assert [(rank.score, rank.text) for rank in reply.ranks] == [(5, "w1"), (4, "w0")]


async def test_rerank_stream_without_messages_is_refused(reranker):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reranker.RerankStream(iter(()), timeout=10)
    assert (caught.value.code(), caught.value.details()) == (Code.INVALID_ARGUMENT, "`texts` cannot be empty")


async def test_bad_message_ends_a_rerank_stream(reranker):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reranker.RerankStream(
            iter([stream_request("w0"), stream_request("w0", truncation_direction=5)]), timeout=10
        )
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert "`truncation_direction`" in caught.value.details()


@pytest.mark.parametrize(
    ("texts", "text"),
    [([], "`texts` cannot be empty"), (["w0"] * 33, "batch size 33 > maximum allowed batch size 32")],
)
async def test_rerank_limits_its_texts(reranker, texts, text):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reranker.Rerank(tei_pb2.RerankRequest(query="w9", texts=texts))
    assert (caught.value.code(), caught.value.details()) == (Code.INVALID_ARGUMENT, text)


def labels(reply):
    return [prediction.label for prediction in reply.predictions]


async def test_all_labels_come_best_first(classifier):
    reply = await classifier.Predict(tei_pb2.PredictRequest(inputs="w0"))
    assert labels(reply) == ["high", "mid", "low"]
    assert sum(prediction.score for prediction in reply.predictions) == pytest.approx(1)


async def test_raw_scores_are_the_logits(classifier):
    reply = await classifier.Predict(tei_pb2.PredictRequest(inputs="w0", raw_scores=True))
    assert [prediction.score for prediction in reply.predictions] == [3, 1, 0]


@pytest.mark.parametrize(("inputs", "tokens"), [(["w0"], 3), (["w0", "w1"], 5)])
async def test_predict_pair_takes_one_text_or_two(classifier, inputs, tokens):
    reply = await classifier.PredictPair(tei_pb2.PredictPairRequest(inputs=inputs))
    assert reply.metadata.compute_tokens == tokens


@pytest.mark.parametrize("inputs", [[], ["a", "b", "c"]])
async def test_predict_pair_takes_nothing_else(classifier, inputs):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await classifier.PredictPair(tei_pb2.PredictPairRequest(inputs=inputs))
    text = f"`inputs` must have a single or two elements. Given: {len(inputs)}"
    assert (caught.value.code(), caught.value.details()) == (Code.INVALID_ARGUMENT, text)


async def test_predict_streams_answer_every_message_in_order(classifier):
    texts = ["w0", "w0 w1", "w0 w1 w2"]
    single = classifier.PredictStream(tei_pb2.PredictRequest(inputs=text, raw_scores=True) for text in texts)
    pairs = classifier.PredictPairStream(
        tei_pb2.PredictPairRequest(inputs=[text, "w9"], raw_scores=True) for text in texts
    )
    assert [reply.predictions[0].score async for reply in single] == [3, 4, 5]
    assert [reply.predictions[0].score async for reply in pairs] == [5, 6, 7]


async def test_sparse_entries_ascend_by_index(tmp_path):
    model = write_checkpoint(tmp_path, "BertForMaskedLM")
    async with serve_fake(model, pooling="splade") as served:
        call = served.embed.EmbedSparse(tei_pb2.EmbedSparseRequest(inputs="w5 w1"))
        reply = await call
        stream = served.embed.EmbedSparseStream(iter([tei_pb2.EmbedSparseRequest(inputs="w5 w1")]))
        assert [(value.index, value.value) for value in reply.sparse_embeddings] == [(2, 1), (3, 1), (5, 1), (9, 1)]
        assert [list(reply.sparse_embeddings) async for reply in stream] == [list(reply.sparse_embeddings)]
        assert "x-compute-type" in dict(await call.initial_metadata())
