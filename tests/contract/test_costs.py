"""What an answer says that it cost: `Metadata` in the message, and the same in `x-*` headers. And Info."""

import re

import pytest

from tei_grpc.pb import tei_pb2
from tests.contract.conftest import PROMPT
from tests.contract.inputs import count_tokens, text_of
from tests.contract.targets import Outcome, Target

TEXT = "Größe 😀 of a café"
NS_PER_MS = 1_000_000

CALLS = {
    "Embed/Embed": ("embedder", tei_pb2.EmbedRequest(inputs=TEXT)),
    "Embed/EmbedAll": ("embedder", tei_pb2.EmbedAllRequest(inputs=TEXT)),
    "Embed/EmbedSparse": ("splade", tei_pb2.EmbedSparseRequest(inputs=TEXT)),
    "Predict/Predict": ("classifier", tei_pb2.PredictRequest(inputs=TEXT)),
    "Predict/PredictPair": ("classifier", tei_pb2.PredictPairRequest(inputs=[TEXT, "b"])),
    "Rerank/Rerank": ("reranker", tei_pb2.RerankRequest(query=TEXT, texts=["b", "c"])),
    "Rerank/RerankStream": ("reranker", tei_pb2.RerankStreamRequest(query=TEXT, text="b")),
}
HEADERS = {
    "x-compute-characters": lambda metadata: metadata.compute_chars,
    "x-compute-tokens": lambda metadata: metadata.compute_tokens,
    "x-tokenization-time": lambda metadata: metadata.tokenization_time_ns // NS_PER_MS,
    "x-queue-time": lambda metadata: metadata.queue_time_ns // NS_PER_MS,
    "x-inference-time": lambda metadata: metadata.inference_time_ns // NS_PER_MS,
    "x-total-time": lambda metadata: metadata.total_time_ns // NS_PER_MS,
    "x-compute-time": lambda metadata: metadata.total_time_ns // NS_PER_MS,
}
WHOLE_CALL = {"x-total-time", "x-compute-time"}  # may be read after `Metadata` was written
RERANK_STREAM = pytest.mark.difference("RerankStream: never answers when all goes well; here it does")


def outcome(request: pytest.FixtureRequest, method: str) -> Outcome:
    kind, message = CALLS[method]
    found: Outcome = request.getfixturevalue(kind).ask(method, message)
    return found


METHODS = [pytest.param(method, marks=RERANK_STREAM if method.endswith("Stream") else ()) for method in CALLS]


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("method", METHODS)
def test_header_says_what_metadata_says(request: pytest.FixtureRequest, method: str, name: str) -> None:
    answered = outcome(request, method)
    header, expected = answered.headers[name], HEADERS[name](answered.reply.metadata)
    assert header.isdecimal()
    assert int(header) >= expected if name in WHOLE_CALL else int(header) == expected


@pytest.mark.difference("`x-compute-type`: always `gpu+optimized`; here what it is")
@pytest.mark.parametrize("method", METHODS)
def test_compute_type_names_the_device(request: pytest.FixtureRequest, method: str) -> None:
    assert re.fullmatch(r"(cpu|gpu)(\+optimized)?", outcome(request, method).headers["x-compute-type"])


def test_calls_without_inference_carry_no_cost_headers(embedder: Target) -> None:
    for method, message in (
        ("Info/Info", tei_pb2.InfoRequest()),
        ("Tokenize/Tokenize", tei_pb2.EncodeRequest(inputs="a")),
        ("Tokenize/Decode", tei_pb2.DecodeRequest(ids=[1])),
    ):
        assert not [name for name in embedder.ask(method, message).headers if name.startswith("x-")]


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_the_time_add_up_to_less_than_the_whole(request: pytest.FixtureRequest, method: str) -> None:
    metadata = outcome(request, method).reply.metadata
    parts = metadata.tokenization_time_ns + metadata.queue_time_ns + metadata.inference_time_ns
    assert 0 < metadata.inference_time_ns <= parts <= metadata.total_time_ns


def embed(target: Target, inputs: str, **fields: object) -> tei_pb2.Metadata:
    metadata: tei_pb2.Metadata = target.ask("Embed/Embed", tei_pb2.EmbedRequest(inputs=inputs, **fields)).reply.metadata
    return metadata


@pytest.mark.parametrize("text", ["a", " ", "\t\n  ", TEXT, "👨‍👩‍👧", "北京", "a\x00b", "שלום"])
def test_characters_are_unicode_scalars_and_tokens_include_special_ones(embedder: Target, text: str) -> None:
    metadata = embed(embedder, text)
    assert (metadata.compute_chars, metadata.compute_tokens) == (len(text), count_tokens(embedder, text))


def test_characters_are_those_before_truncation_and_tokens_those_after(embedder: Target) -> None:
    text = text_of(embedder, embedder.info.max_input_length + 10)
    metadata = embed(embedder, text, truncate=True)
    assert (metadata.compute_chars, metadata.compute_tokens) == (len(text), embedder.info.max_input_length)


def test_prompt_counts_as_tokens_and_not_as_characters(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("prompts of the model are not known")
    metadata = embed(embedder, "hello", prompt_name=PROMPT)
    assert (metadata.compute_chars, metadata.compute_tokens) == (5, 5)  # [CLS] query : hello [SEP]


def test_pair_counts_both_texts(classifier: Target) -> None:
    metadata = classifier.ask("Predict/PredictPair", tei_pb2.PredictPairRequest(inputs=["é", "abc"])).reply.metadata
    assert metadata.compute_chars == 4


def test_rerank_counts_the_query_once_per_text(reranker: Target) -> None:
    def cost(*texts: str) -> tei_pb2.Metadata:
        request = tei_pb2.RerankRequest(query="cat", texts=texts)
        metadata: tei_pb2.Metadata = reranker.ask("Rerank/Rerank", request).reply.metadata
        return metadata

    both, first, second = cost("dog", "a dog"), cost("dog"), cost("a dog")
    assert both.compute_chars == 2 * len("cat") + len("dog") + len("a dog")
    assert both.compute_tokens == first.compute_tokens + second.compute_tokens


MODEL_TYPES = {
    "embedder": tei_pb2.MODEL_TYPE_EMBEDDING,
    "splade": tei_pb2.MODEL_TYPE_EMBEDDING,
    "classifier": tei_pb2.MODEL_TYPE_CLASSIFIER,
    "reranker": tei_pb2.MODEL_TYPE_RERANKER,
}


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_info_names_the_type_of_the_model(request: pytest.FixtureRequest, kind: str) -> None:
    assert request.getfixturevalue(kind).info.model_type == MODEL_TYPES[kind]


def test_info_tells_version_model_and_limits(target: Target) -> None:
    info = target.info
    assert info.version and info.model_id
    assert info.model_dtype in ("float32", "float16", "bfloat16")
    limits = ("max_concurrent_requests", "max_input_length", "max_batch_tokens", "max_client_batch_size")
    assert all(getattr(info, name) > 0 for name in (*limits, "tokenization_workers"))
    assert info.max_input_length <= info.max_batch_tokens


def test_info_leaves_out_what_is_not_known(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("options of the server are not known")
    for field in ("sha", "docker_label", "model_sha", "max_batch_requests"):
        assert not embedder.info.HasField(field)


def test_info_of_minilm_is_known(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("the model is not known")
    info = embedder.info
    assert (info.max_input_length, info.max_batch_tokens, info.max_concurrent_requests) == (256, 16384, 512)
