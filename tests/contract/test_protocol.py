"""What surrounds the calls: keys, health, reflection, overload, limits, compression."""

import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tei_grpc.pb import tei_pb2
from tests.contract.inputs import text_of
from tests.contract.targets import Code, Outcome, Target, outcome_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "tei.v1.Info", "tei.v1.Tokenize", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank")
FITTING = {
    "embedder": {"tei.v1.Embed"},
    "splade": {"tei.v1.Embed"},
    "classifier": {"tei.v1.Predict"},
    "reranker": {"tei.v1.Predict", "tei.v1.Rerank"},
}
METHODS = [
    f"{service.name}/{method.name}"
    for service in tei_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
EMBED = tei_pb2.EmbedRequest(inputs="a")
NO_KEY = (Code.UNAUTHENTICATED, "No valid auth token")


def check(target: Target, name: str) -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    status: int = health_pb2_grpc.HealthStub(target.channel).Check(request, timeout=10).status
    return status


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", FITTING)
def test_health_tells_what_fits_the_model(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    fits = name in {"", "tei.v1.Info", "tei.v1.Tokenize"} | FITTING[kind]
    assert check(request.getfixturevalue(kind), name) == (SERVING if fits else NOT_SERVING)


def test_check_of_an_unknown_service_is_not_found(embedder: Target) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        check(embedder, "nope")
    assert (caught.value.code(), caught.value.details()) == (Code.NOT_FOUND, "service not registered")


def test_watch_sends_the_present_status(target: Target) -> None:
    watch = health_pb2_grpc.HealthStub(target.channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert next(watch).status == SERVING
    watch.cancel()


@pytest.mark.difference(
    "Health.Watch of an unknown service: NOT_FOUND; here SERVICE_UNKNOWN, and the stream stays open"
)
def test_watch_of_an_unknown_service_says_so(embedder: Target) -> None:
    request = health_pb2.HealthCheckRequest(service="nope")
    watch = health_pb2_grpc.HealthStub(embedder.channel).Watch(request, timeout=10)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def reflect(target: Target, version: str, **question: str) -> reflection_pb2.ServerReflectionResponse:
    ask = target.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = ask(iter([reflection_pb2.ServerReflectionRequest(**question)]), timeout=10)
    return answer


VERSIONS = [
    "v1alpha",
    pytest.param("v1", marks=pytest.mark.difference("reflection: v1alpha; here v1 and v1alpha")),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_reflection_lists_every_service(embedder: Target, version: str) -> None:
    listed = reflect(embedder, version, list_services="").list_services_response.service
    assert {f"tei.v1.{name}" for name in tei_pb2.DESCRIPTOR.services_by_name} <= {service.name for service in listed}


@pytest.mark.parametrize("version", VERSIONS)
def test_reflection_describes_the_contract(embedder: Target, version: str) -> None:
    files = reflect(embedder, version, file_containing_symbol="tei.v1.Embed").file_descriptor_response
    assert any(b"tei.proto" in raw and b"EmbedSparseStream" in raw for raw in files.file_descriptor_proto)


@pytest.fixture
def locked(embedder: Target) -> Target:
    if embedder.key is None:
        pytest.skip("the server wants no key")
    return embedder


@pytest.mark.parametrize("method", METHODS)
def test_every_method_wants_the_key(locked: Target, method: str) -> None:
    assert locked.ask(method, metadata=(), timeout=10).status == NO_KEY


@pytest.mark.parametrize(
    "value",
    ["{key}", "bearer {key}", "BEARER {key}", "Bearer  {key}", "Bearer {key}x", "Bearer ", "", "Basic {key}", "Bearer"],
)
def test_anything_but_the_exact_key_is_refused(locked: Target, value: str) -> None:
    metadata = (("authorization", value.format(key=locked.key)),)
    assert locked.ask("Embed/Embed", EMBED, metadata=metadata).status == NO_KEY


def test_key_under_another_name_is_refused(locked: Target) -> None:
    value = f"Bearer {locked.key}"
    for name, given in (("authorization-bin", value.encode()), ("api-key", value), ("x-api-key", value)):
        assert locked.ask("Embed/Embed", EMBED, metadata=((name, given),)).status == NO_KEY


def test_first_key_that_is_wrong_decides(locked: Target) -> None:
    metadata = (("authorization", "Bearer wrong"), *locked.credentials)
    assert locked.ask("Embed/Embed", EMBED, metadata=metadata).status == NO_KEY


def test_caller_without_a_key_learns_nothing_of_its_mistakes(locked: Target) -> None:
    assert locked.ask("Embed/Embed", b"\xff\xff", metadata=()).status == NO_KEY


def test_probes_and_tools_need_no_key(locked: Target) -> None:
    assert check(locked, "") == SERVING
    assert reflect(locked, "v1alpha", list_services="").list_services_response.service


def flood(target: Target, count: int) -> list[Outcome]:
    """Many calls at once, each as long as the model allows."""
    text = text_of(target, target.info.max_input_length)
    request = tei_pb2.PredictRequest(inputs=text)
    calls = [target.open("Predict/Predict", [request], timeout=60) for _ in range(count)]
    return [outcome_of(call) for call in calls]


@pytest.fixture
def narrow(classifier: Target) -> Target:
    if classifier.info.max_concurrent_requests > 16:
        pytest.skip("the server has too many permits to run out of them in seconds")
    return classifier


def test_calls_beyond_the_permits_are_refused(narrow: Target) -> None:
    refused = [outcome for outcome in flood(narrow, 100) if outcome.code is not Code.OK]
    assert 0 < len(refused) < 100
    assert {outcome.status for outcome in refused} == {(Code.RESOURCE_EXHAUSTED, "Model is overloaded")}


def test_health_and_tokens_are_not_shed(narrow: Target) -> None:
    text = text_of(narrow, narrow.info.max_input_length)
    calls = [narrow.open("Predict/Predict", [tei_pb2.PredictRequest(inputs=text)], timeout=60) for _ in range(50)]
    started = time.monotonic()
    assert check(narrow, "") == SERVING
    assert narrow.ask("Tokenize/Tokenize", tei_pb2.EncodeRequest(inputs="a")).code is Code.OK
    assert time.monotonic() - started < 10  # ten times what is wanted
    for call in calls:
        outcome_of(call)


def test_permits_come_back_after_overload_and_cancelled_calls(narrow: Target) -> None:
    flood(narrow, 20)
    text = text_of(narrow, narrow.info.max_input_length)
    for _ in range(20):
        narrow.open("Predict/Predict", [tei_pb2.PredictRequest(inputs=text)]).cancel()
    waiting = narrow.ask("Predict/PredictStream", *[tei_pb2.PredictRequest(inputs="a")] * 4)  # behind the cancelled
    assert waiting.code is Code.OK
    calls = [
        narrow.open("Predict/Predict", [tei_pb2.PredictRequest(inputs=text)], timeout=60)
        for _ in range(narrow.info.max_concurrent_requests)
    ]
    assert {outcome_of(call).code for call in calls} == {Code.OK}


@pytest.mark.difference("request compressed with gzip: UNIMPLEMENTED; here accepted")
def test_compressed_requests_are_accepted(embedder: Target) -> None:
    request = tei_pb2.EmbedRequest(inputs="cat " * 100)
    assert embedder.ask("Embed/Embed", request, compression=grpc.Compression.Gzip).code is Code.OK


def test_reply_over_the_clients_limit_is_the_clients_failure(embedder: Target) -> None:
    with grpc.insecure_channel(embedder.address, [("grpc.max_receive_message_length", 1000)]) as channel:
        embed_all = channel.unary_unary("/tei.v1.Embed/EmbedAll")
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                embed_all(tei_pb2.EmbedAllRequest(inputs="a").SerializeToString(), metadata=embedder.credentials)
            assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        info = channel.unary_unary("/tei.v1.Info/Info")
        assert info(b"", metadata=embedder.credentials)  # the connection lives


def test_reply_may_be_larger_than_a_request_may(embedder: Target) -> None:
    text = text_of(embedder, embedder.info.max_input_length)
    reply = embedder.ask("Embed/EmbedAll", tei_pb2.EmbedAllRequest(inputs=text)).reply
    assert len(reply.token_embeddings) == embedder.info.max_input_length


def test_half_open_streams_hold_nobody_up(embedder: Target) -> None:
    release = []

    def never_ending():
        yield EMBED
        while not release:
            time.sleep(0.01)

    calls = [embedder.open("Embed/EmbedStream", never_ending()) for _ in range(20)]
    assert embedder.ask("Embed/Embed", EMBED).code is Code.OK
    release.append(True)
    assert {outcome_of(call).code for call in calls} == {Code.OK}
