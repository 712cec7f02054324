"""The error matrix: which status each refused call gets."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from google.protobuf.message import Message

from tei_grpc.pb import tei_pb2
from tests.contract.inputs import count_tokens, text_of
from tests.contract.targets import Code, Target

PREFIX = "Input validation error: "
UINT32_MAX = 2**32 - 1
MAX_MESSAGE = 4 * 1024 * 1024

Make = Callable[[Target], Message]


class Row(NamedTuple):
    """A call to a server of a kind, and what it must get; `text` may name limits as a format string does."""

    kind: str
    method: str
    request: Make | Message | bytes
    code: Code
    text: str | None = None  # None: the text is the server's own


def embed(**fields: object) -> tei_pb2.EmbedRequest:
    return tei_pb2.EmbedRequest(**({"inputs": "a"} | fields))


def pair(*inputs: str) -> tei_pb2.PredictPairRequest:
    return tei_pb2.PredictPairRequest(inputs=inputs)


def rerank(*texts: str, query: str = "a", **fields: object) -> tei_pb2.RerankRequest:
    return tei_pb2.RerankRequest(query=query, texts=texts, **fields)


def too_many_tokens(target: Target) -> str:
    return text_of(target, target.info.max_input_length + 1)


def too_many_chars(target: Target) -> str:
    return "a" * (250 * target.info.max_input_length + 1)


def batch_too_large(target: Target) -> Message:
    return rerank(*["a"] * (target.info.max_client_batch_size + 1))


INVALID, WRONG_MODEL = Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION
EMPTY = PREFIX + "`inputs` cannot be empty"
TOKENS = PREFIX + "`inputs` must have less than {max_input_length} tokens. Given: {tokens}"
CHARS = PREFIX + "`inputs` must have less than {max_chars} characters. Given: {chars}"
ARITY = "`inputs` must have a single or two elements. Given: "
NOT_EMBEDDING = "Backend error: Model is not an embedding model"
NOT_SPLADE = NOT_EMBEDDING + " with SPLADE pooling"
NOT_CLASSIFIER = "Backend error: Model is not a classifier model"
NO_NORMALIZE = "Backend error: `normalize` is not available for SPLADE models"

EMBED_ALL, SPARSE = tei_pb2.EmbedAllRequest(inputs="a"), tei_pb2.EmbedSparseRequest(inputs="a")
PREDICT = tei_pb2.PredictRequest(inputs="a")
RERANK_STREAM = tei_pb2.RerankStreamRequest(query="a", text="b")

ENUM = pytest.mark.difference("value outside an enum: the process dies; here INVALID_ARGUMENT")
DECODE = pytest.mark.difference("undecodable request: INTERNAL with the parser's text; here without it")
OVERSIZE = pytest.mark.difference("message over the limit: OUT_OF_RANGE; here RESOURCE_EXHAUSTED")
PROMPT_FIELD = pytest.mark.difference("unknown prompt: the text blames `default-prompt-name`; here `prompt_name`")
DIMENSIONS = pytest.mark.difference("`dimensions` too large: refused after inference; here before, with both numbers")

ROWS = {
    "empty text, Embed": Row("embedder", "Embed/Embed", embed(inputs=""), INVALID, EMPTY),
    "empty text, EmbedAll": Row("embedder", "Embed/EmbedAll", tei_pb2.EmbedAllRequest(), INVALID, EMPTY),
    "empty text, EmbedSparse": Row("splade", "Embed/EmbedSparse", tei_pb2.EmbedSparseRequest(), INVALID, EMPTY),
    "empty text, Predict": Row("classifier", "Predict/Predict", tei_pb2.PredictRequest(), INVALID, EMPTY),
    "empty text, PredictPair": Row("classifier", "Predict/PredictPair", pair(""), INVALID, EMPTY),
    "empty pair, PredictPair": Row("classifier", "Predict/PredictPair", pair("", ""), INVALID, EMPTY),
    "empty query and text, Rerank": Row("reranker", "Rerank/Rerank", rerank("", query=""), INVALID, EMPTY),
    "empty text, Tokenize": Row("embedder", "Tokenize/Tokenize", tei_pb2.EncodeRequest(), INVALID, EMPTY),
    "no ids, Decode": Row(
        "embedder", "Tokenize/Decode", tei_pb2.DecodeRequest(), INVALID, PREFIX + "`input_ids` cannot be empty"
    ),
    "a token too many, Embed": Row(
        "embedder", "Embed/Embed", lambda target: embed(inputs=too_many_tokens(target)), INVALID, TOKENS
    ),
    "a token too many, Predict": Row(
        "classifier",
        "Predict/Predict",
        lambda target: tei_pb2.PredictRequest(inputs=too_many_tokens(target)),
        INVALID,
        TOKENS,
    ),
    "a character too many, Embed": Row(
        "embedder", "Embed/Embed", lambda target: embed(inputs=too_many_chars(target)), INVALID, CHARS
    ),
    "a character too many, Tokenize": Row(
        "embedder",
        "Tokenize/Tokenize",
        lambda target: tei_pb2.EncodeRequest(inputs=too_many_chars(target)),
        INVALID,
        CHARS,
    ),
    "prompt of a model without prompts": Row(
        "splade", "Embed/EmbedSparse", tei_pb2.EmbedSparseRequest(inputs="a", prompt_name="nope"), INVALID
    ),
    "dimensions 0": Row(
        "embedder", "Embed/Embed", embed(dimensions=0), INVALID, PREFIX + "`dimensions` should be positive"
    ),
    "arity 0": Row("classifier", "Predict/PredictPair", pair(), INVALID, ARITY + "0"),
    "arity 3": Row("classifier", "Predict/PredictPair", pair("a", "b", "c"), INVALID, ARITY + "3"),
    "no texts": Row("reranker", "Rerank/Rerank", rerank(), INVALID, "`texts` cannot be empty"),
    "too many texts": Row(
        "reranker",
        "Rerank/Rerank",
        batch_too_large,
        INVALID,
        "batch size {batch} > maximum allowed batch size {max_client_batch_size}",
    ),
    "Embed, classifier": Row("classifier", "Embed/Embed", embed(), WRONG_MODEL, NOT_EMBEDDING),
    "Embed, reranker": Row("reranker", "Embed/Embed", embed(), WRONG_MODEL, NOT_EMBEDDING),
    "EmbedAll, classifier": Row("classifier", "Embed/EmbedAll", EMBED_ALL, WRONG_MODEL, NOT_EMBEDDING),
    "EmbedAll, reranker": Row("reranker", "Embed/EmbedAll", EMBED_ALL, WRONG_MODEL, NOT_EMBEDDING),
    "EmbedSparse, embedder": Row("embedder", "Embed/EmbedSparse", SPARSE, WRONG_MODEL, NOT_SPLADE),
    "EmbedSparse, classifier": Row("classifier", "Embed/EmbedSparse", SPARSE, WRONG_MODEL, NOT_SPLADE),
    "EmbedSparse, reranker": Row("reranker", "Embed/EmbedSparse", SPARSE, WRONG_MODEL, NOT_SPLADE),
    "Embed, SPLADE": Row("splade", "Embed/Embed", embed(), WRONG_MODEL, NO_NORMALIZE),
    "Embed normalized, SPLADE": Row("splade", "Embed/Embed", embed(normalize=True), WRONG_MODEL, NO_NORMALIZE),
    "EmbedAll, SPLADE": Row(
        "splade",
        "Embed/EmbedAll",
        EMBED_ALL,
        WRONG_MODEL,
        "Backend error: `embed_all` is not available for SPLADE models",
    ),
    "Predict, embedder": Row("embedder", "Predict/Predict", PREDICT, WRONG_MODEL, NOT_CLASSIFIER),
    "Predict, SPLADE": Row("splade", "Predict/Predict", PREDICT, WRONG_MODEL, NOT_CLASSIFIER),
    "PredictPair, embedder": Row("embedder", "Predict/PredictPair", pair("a", "b"), WRONG_MODEL, NOT_CLASSIFIER),
    "Rerank, embedder": Row("embedder", "Rerank/Rerank", rerank("b"), WRONG_MODEL, "model is not a classifier model"),
    "Rerank, SPLADE": Row("splade", "Rerank/Rerank", rerank("b"), WRONG_MODEL, "model is not a classifier model"),
    "Rerank, classifier": Row(
        "classifier", "Rerank/Rerank", rerank("b"), WRONG_MODEL, "model is not a re-ranker model"
    ),
    "RerankStream, embedder": Row(
        "embedder", "Rerank/RerankStream", RERANK_STREAM, WRONG_MODEL, "model is not a classifier model"
    ),
    "RerankStream, classifier": Row(
        "classifier", "Rerank/RerankStream", RERANK_STREAM, WRONG_MODEL, "model is not a re-ranker model"
    ),
    "no texts, classifier": Row("classifier", "Rerank/Rerank", rerank(), INVALID, "`texts` cannot be empty"),
    "unknown method": Row("embedder", "/tei.v1.Embed/Nope", b"", Code.UNIMPLEMENTED),
    "unknown service": Row("embedder", "/tei.v9.Embed/Embed", b"", Code.UNIMPLEMENTED),
}
DIFFERENT_ROWS = [
    pytest.param(
        Row("embedder", "Embed/Embed", lambda target: embed(prompt_name="nope"), INVALID),
        id="unknown prompt",
        marks=PROMPT_FIELD,
    ),
    *(
        pytest.param(
            Row("embedder", "Embed/Embed", embed(truncation_direction=value), INVALID),
            id=f"enum {value}",
            marks=ENUM,
        )
        for value in (2, -1, 2**31 - 1)
    ),
    pytest.param(
        Row("reranker", "Rerank/Rerank", rerank("b", truncation_direction=2), INVALID), id="enum, Rerank", marks=ENUM
    ),
    pytest.param(
        Row("classifier", "Predict/Predict", tei_pb2.PredictRequest(inputs="a", truncation_direction=2), INVALID),
        id="enum, Predict",
        marks=ENUM,
    ),
    pytest.param(
        Row("embedder", "Embed/Embed", b"\xff\xff\xff", Code.INTERNAL, "Request could not be decoded"),
        id="no protobuf",
        marks=DECODE,
    ),
    pytest.param(
        Row("embedder", "Embed/Embed", b"\x0a\x02\xc3\x28", Code.INTERNAL, "Request could not be decoded"),
        id="invalid UTF-8",
        marks=DECODE,
    ),
    pytest.param(
        Row("embedder", "Embed/Embed", embed(inputs="a" * MAX_MESSAGE), Code.RESOURCE_EXHAUSTED),
        id="oversize",
        marks=OVERSIZE,
    ),
    pytest.param(
        Row("embedder", "Embed/Embed", embed(dimensions=UINT32_MAX), INVALID), id="dimensions max", marks=DIMENSIONS
    ),
]


@pytest.mark.parametrize("row", [*(pytest.param(row, id=name) for name, row in ROWS.items()), *DIFFERENT_ROWS])
def test_refused_call_gets_its_status(request: pytest.FixtureRequest, row: Row) -> None:
    target: Target = request.getfixturevalue(row.kind)
    message = row.request(target) if callable(row.request) else row.request
    outcome = target.ask(row.method, message)
    assert (outcome.code, outcome.replies) == (row.code, [])
    if row.text is not None:
        assert outcome.text == row.text.format(**numbers(target, message))


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.code is not Code.UNIMPLEMENTED][::4])
def test_refusal_carries_no_cost_headers(request: pytest.FixtureRequest, row: Row) -> None:
    target: Target = request.getfixturevalue(row.kind)
    outcome = target.ask(row.method, row.request(target) if callable(row.request) else row.request)
    assert not [name for name in outcome.headers if name.startswith("x-")]


@DIMENSIONS
def test_more_dimensions_than_the_vector_has_are_refused(embedder: Target) -> None:
    size = len(embedder.ask("Embed/Embed", embed()).reply.embeddings)
    outcome = embedder.ask("Embed/Embed", embed(dimensions=size + 1))
    assert outcome.code is INVALID
    assert outcome.text.startswith(PREFIX + "`dimensions` should be smaller than the maximum embedding dimension.")


@PROMPT_FIELD
def test_unknown_prompt_is_refused_with_the_names_there_are(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("prompts of the model are not known")
    outcome = embedder.ask("Embed/Embed", embed(prompt_name="nope"))
    assert outcome.text.startswith(PREFIX + "`prompt_name` is set to `nope` but it was not found")
    assert outcome.text.endswith('Available prompts: ["query"]')


@pytest.mark.difference("call without a message: a text of tonic's; here ours")
@pytest.mark.parametrize("method", ["Info/Info", "Embed/Embed", "Predict/Predict", "Rerank/Rerank", "Tokenize/Decode"])
def test_unary_call_without_a_message_is_answered(embedder: Target, method: str) -> None:
    assert embedder.ask(method).status == (Code.INTERNAL, "Missing request message")


def test_message_of_exactly_the_limit_is_accepted(embedder: Target) -> None:
    request = embed(truncate=True, inputs="a")
    request.inputs = "a" * (MAX_MESSAGE - request.ByteSize() - 3)
    request.inputs += "a" * (MAX_MESSAGE - request.ByteSize())
    assert request.ByteSize() == MAX_MESSAGE
    assert embedder.ask("Embed/Embed", request).code is Code.OK


def test_refused_message_leaves_the_connection_intact(embedder: Target) -> None:
    embedder.ask("Embed/Embed", embed(inputs="a" * MAX_MESSAGE))
    assert embedder.ask("Embed/Embed", embed()).code is Code.OK


def numbers(target: Target, message: Message | bytes) -> dict[str, int]:
    """Limits and values that texts name."""
    info, text = target.info, getattr(message, "inputs", "")
    known = {
        "max_input_length": info.max_input_length,
        "max_chars": 250 * info.max_input_length,
        "max_client_batch_size": info.max_client_batch_size,
        "batch": len(getattr(message, "texts", ())),
        "chars": len(text),
    }
    if isinstance(text, str) and 0 < len(text) <= known["max_chars"]:
        known["tokens"] = count_tokens(target, text)
    return known
