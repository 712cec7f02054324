"""Front-ends: their answers, beside those of a server that is one process."""

import asyncio

import numpy as np
import pytest

from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.types import Kind
from tests import fakes
from tests.grpc.conftest import serve_fake, write_checkpoint
from tests.grpc.frontends import serve_by_frontends

WIDTH = 64  # 511 tokens of that many values are more than fits a slot
TEXTS = ["w1", "w2 w3", "w4 w5 w6 " * 40, "unknown words", "w7 " * 509]


def wide_answer(entry):
    if entry.kind is Kind.EMBED_ALL:
        return (np.outer(entry.input_ids, np.arange(WIDTH)).astype(np.float32),)
    return fakes.answer(entry)


async def answers_of_embedder(channel):
    embed, tokenize = tei_pb2_grpc.EmbedStub(channel), tei_pb2_grpc.TokenizeStub(channel)
    embeds = [tei_pb2.EmbedRequest(inputs=text, truncate=True) for text in TEXTS]
    alls = [tei_pb2.EmbedAllRequest(inputs=text, truncate=True) for text in TEXTS]
    tokens = [tei_pb2.EncodeRequest(inputs=text) for text in TEXTS]
    ids = [tei_pb2.DecodeRequest(ids=some) for some in ([5, 6], [2, 7, 3], range(4, 200))]
    return [
        *[await embed.Embed(each) for each in embeds],
        *[await embed.EmbedAll(each) for each in alls],
        *[each async for each in embed.EmbedStream(iter(embeds))],
        *[each async for each in embed.EmbedAllStream(iter(alls))],
        *[await tokenize.Tokenize(each) for each in tokens],
        *[each async for each in tokenize.TokenizeStream(iter(tokens))],
        await tokenize.Decode(ids[0]),
        *[each async for each in tokenize.DecodeStream(iter(ids))],
        await tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest()),
    ]


async def answers_of_splade(channel):
    embed = tei_pb2_grpc.EmbedStub(channel)
    requests = [tei_pb2.EmbedSparseRequest(inputs=text, truncate=True) for text in TEXTS]
    return [
        *[await embed.EmbedSparse(each) for each in requests],
        *[each async for each in embed.EmbedSparseStream(iter(requests))],
        await tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest()),
    ]


async def answers_of_reranker(channel):
    predict, rerank = tei_pb2_grpc.PredictStub(channel), tei_pb2_grpc.RerankStub(channel)
    single = [tei_pb2.PredictRequest(inputs=text, truncate=True) for text in TEXTS]
    pairs = [tei_pb2.PredictPairRequest(inputs=["w9", text], truncate=True) for text in TEXTS]
    texts = [tei_pb2.RerankStreamRequest(query="w9", text=text, truncate=True) for text in TEXTS]
    return [
        *[await predict.Predict(each) for each in single],
        *[await predict.PredictPair(each) for each in pairs],
        *[each async for each in predict.PredictStream(iter(single))],
        *[each async for each in predict.PredictPairStream(iter(pairs))],
        await rerank.Rerank(tei_pb2.RerankRequest(query="w9", texts=TEXTS, truncate=True, return_text=True)),
        await rerank.RerankStream(iter(texts)),
        await tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest()),
    ]


def timeless(answers):
    """The answers' bytes without the times that they took."""
    for answer in answers:
        if "metadata" in answer.DESCRIPTOR.fields_by_name:
            for field in ("total_time_ns", "tokenization_time_ns", "queue_time_ns", "inference_time_ns"):
                answer.metadata.ClearField(field)
    return [answer.SerializeToString() for answer in answers]


@pytest.mark.parametrize(
    ("architecture", "options", "ask"),
    [
        ("BertModel", {}, answers_of_embedder),
        ("BertForMaskedLM", {"pooling": "splade"}, answers_of_splade),
        ("BertForSequenceClassification", {}, answers_of_reranker),
    ],
)
async def test_answers_are_those_of_one_process_bit_for_bit(tmp_path, architecture, options, ask):
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if "Classification" in architecture else {}
    model = write_checkpoint(tmp_path, architecture, **labels)
    async with serve_fake(model, **options) as one:
        one.runner.answer = wide_answer
        expected = timeless(await ask(one.channel))
    async with serve_by_frontends(model, **options) as fronted, fronted.channels() as channels:
        fronted.runner.answer = wide_answer
        both = await asyncio.gather(*map(ask, channels.values()))
    assert [timeless(answers) for answers in both] == [expected, expected]
