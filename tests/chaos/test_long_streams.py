"""Streams that are long, many, or badly read, against a server process whose memory is measured from outside."""

import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from tei_grpc.pb import tei_pb2
from tests.chaos.attacks import CREDENTIALS
from tests.chaos.patients import Patient
from tests.contract.targets import Code, Target, outcome_of

MESSAGES = 10_000
DOCUMENTS = 5_000
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    patient = Patient("bert-t", tmp_path_factory.mktemp("bert"))
    try:
        patient.wait_until_ready()
        yield patient
    finally:
        patient.kill()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    patient = Patient("ce-t", tmp_path_factory.mktemp("ce"))
    try:
        patient.wait_until_ready()
        yield patient
    finally:
        patient.kill()


def target_of(patient: Patient) -> Target:
    return Target(patient.address, CREDENTIALS[0][1].removeprefix("Bearer "))


def text(number: int) -> str:
    """Says its number by its length: 1 to 30 letters, in an order that no batch would keep by chance."""
    return " ".join(["a"] * (1 + 7 * number % 30))


def embed_requests(count: int) -> Iterator[tei_pb2.EmbedRequest]:
    return (tei_pb2.EmbedRequest(inputs=text(number)) for number in range(count))


def test_many_messages_keep_their_order_and_do_not_grow_the_server(embedder: Patient) -> None:
    target = target_of(embedder)
    assert len(target.ask("Embed/EmbedStream", *embed_requests(1000)).replies) == 1000
    before = embedder.memory
    number = 0
    for number, reply in enumerate(target.open("Embed/EmbedStream", embed_requests(MESSAGES)), 1):
        assert reply.metadata.compute_chars == len(text(number - 1))
    assert number == MESSAGES
    assert embedder.memory - before < 50 * MEBIBYTE
    target.close()


def test_answers_of_a_long_stream_belong_to_their_messages(embedder: Patient) -> None:
    target = target_of(embedder)
    alone = [target.ask("Embed/Embed", tei_pb2.EmbedRequest(inputs=text(n))).reply.embeddings for n in range(30)]
    for number, reply in enumerate(target.open("Embed/EmbedStream", embed_requests(3000))):
        assert reply.embeddings == pytest.approx(alone[number % 30], abs=1e-6)
    target.close()


def test_thousands_of_documents_are_ranked_in_bounded_memory(reranker: Patient) -> None:
    target = target_of(reranker)
    distinct = [f"{one} {other}" for one in "abcdefghij" for other in "klmnopqrst"]

    def requests() -> Iterator[tei_pb2.RerankStreamRequest]:
        for number in range(DOCUMENTS):
            yield tei_pb2.RerankStreamRequest(query="hello", text=distinct[number * 37 % 100], raw_scores=True)

    alone = {}
    for start in range(0, 100, 20):
        batch = tei_pb2.RerankRequest(query="hello", texts=distinct[start : start + 20], raw_scores=True)
        for rank in target.ask("Rerank/Rerank", batch).reply.ranks:
            alone[distinct[start + rank.index]] = rank.score
    before = reranker.memory
    ranks = outcome_of(target.open("Rerank/RerankStream", requests(), timeout=60)).reply.ranks
    growth = reranker.memory - before
    assert sorted(rank.index for rank in ranks) == list(range(DOCUMENTS))
    scores = [rank.score for rank in ranks]
    assert scores == sorted(scores, reverse=True)
    expected = [alone[distinct[rank.index * 37 % 100]] for rank in ranks]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert growth < 50 * MEBIBYTE
    target.close()


def test_full_streams_do_not_starve_unary_calls(embedder: Patient) -> None:
    target = target_of(embedder)
    done = threading.Event()

    def endless() -> Iterator[tei_pb2.EmbedRequest]:
        while not done.is_set():
            yield tei_pb2.EmbedRequest(inputs=text(7))

    calls = [target.open("Embed/EmbedStream", endless()) for _ in range(8)]
    readers = [threading.Thread(target=outcome_of, args=(call,)) for call in calls]
    for call in calls:
        next(call)  # under way
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            assert target.ask("Embed/Embed", tei_pb2.EmbedRequest(inputs="a"), timeout=30).code is Code.OK
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert {call.code() for call in calls} == {Code.OK}
    target.close()


def test_client_that_never_reads_does_not_grow_the_server(embedder: Patient) -> None:
    """Its requests are not read either, once nobody takes the answers."""
    target = target_of(embedder)
    request = tei_pb2.EmbedAllRequest(inputs=text(17))
    sent = 0

    def requests() -> Iterator[tei_pb2.EmbedAllRequest]:
        nonlocal sent
        for sent in range(100_000):  # noqa: B007
            yield request

    target.ask("Embed/EmbedAllStream", *[request] * 500)
    before = embedder.memory
    call = target.open("Embed/EmbedAllStream", requests())
    seen = -1
    while seen != sent:  # until flow control has stopped it
        seen = sent
        time.sleep(0.5)
    stopped, growth = sent, embedder.memory - before
    call.cancel()
    assert 0 < stopped < 100_000 - 1
    assert growth < 50 * MEBIBYTE
    assert target.ask("Embed/Embed", tei_pb2.EmbedRequest(inputs="a")).code is Code.OK
    target.close()


def test_probe_is_answered_beside_full_streams(embedder: Patient) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    target = target_of(embedder)
    call = target.open("Embed/EmbedStream", embed_requests(2000))
    with grpc.insecure_channel(embedder.address) as channel:
        for _ in range(20):
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert len(outcome_of(call).replies) == 2000
    target.close()
