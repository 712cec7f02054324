"""Every operation as data: which RPC, which requests, how replies become the result. No I/O: both clients share it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from grpc_health.v1 import health_pb2

from tei_client.pb import tei_pb2
from tei_client.replies import decode_health, decode_info, decode_predictions, decode_ranks, decode_text, decode_tokens
from tei_client.types import Floats, Pair, Prediction, Rank, ServerInfo, SparseVector, Token, TruncationDirection
from tei_client.wire import decode_embedding, decode_sparse_embedding, decode_token_embeddings

Item = TypeVar("Item")
Reply = TypeVar("Reply")
Result = TypeVar("Result")
TextRequest: TypeAlias = (
    tei_pb2.EmbedRequest | tei_pb2.EmbedAllRequest | tei_pb2.EmbedSparseRequest | tei_pb2.EncodeRequest
)

DIRECTIONS: dict[TruncationDirection, tei_pb2.TruncationDirection] = {
    "right": tei_pb2.TRUNCATION_DIRECTION_RIGHT,
    "left": tei_pb2.TRUNCATION_DIRECTION_LEFT,
}


class Shape(Enum):
    """How requests and replies of an RPC belong together."""

    UNARY = auto()  # one request, one reply
    STREAM = auto()  # each request has its reply, in order
    CLIENT_STREAM = auto()  # one reply to all requests


@dataclass(frozen=True)
class Call(Generic[Reply, Result]):
    """One operation: send the serialized `requests` to `path`, `decode` each reply, `finish` them all."""

    path: str
    shape: Shape
    requests: Sequence[bytes]
    decode: Callable[[bytes], Reply]
    finish: Callable[[list[Reply]], Result]


def embed(
    texts: str | Sequence[str],
    *,
    normalize: bool,
    truncate: bool,
    dimensions: int | None,
    prompt_name: str | None,
    truncation_direction: TruncationDirection,
) -> Call[Floats, Floats]:
    """Embed for one text, giving [dim]; EmbedStream for a list, giving [texts, dim]."""
    template = tei_pb2.EmbedRequest(
        truncate=truncate,
        normalize=normalize,
        truncation_direction=_direction(truncation_direction),
        prompt_name=prompt_name,
        dimensions=dimensions,
    )
    if isinstance(texts, str):
        return Call("/tei.v1.Embed/Embed", Shape.UNARY, _per_text(template, [texts]), decode_embedding, _own)
    return Call("/tei.v1.Embed/EmbedStream", Shape.STREAM, _per_text(template, texts), decode_embedding, _stack)


def embed_all(
    texts: Sequence[str], *, truncate: bool, prompt_name: str | None, truncation_direction: TruncationDirection
) -> Call[Floats, list[Floats]]:
    """EmbedAllStream."""
    template = tei_pb2.EmbedAllRequest(
        truncate=truncate, truncation_direction=_direction(truncation_direction), prompt_name=prompt_name
    )
    requests = _per_text(template, _list_of(texts, "texts"))
    return Call("/tei.v1.Embed/EmbedAllStream", Shape.STREAM, requests, decode_token_embeddings, list)


def embed_sparse(
    texts: Sequence[str], *, truncate: bool, prompt_name: str | None, truncation_direction: TruncationDirection
) -> Call[SparseVector, list[SparseVector]]:
    """EmbedSparseStream."""
    template = tei_pb2.EmbedSparseRequest(
        truncate=truncate, truncation_direction=_direction(truncation_direction), prompt_name=prompt_name
    )
    requests = _per_text(template, _list_of(texts, "texts"))
    return Call("/tei.v1.Embed/EmbedSparseStream", Shape.STREAM, requests, decode_sparse_embedding, list)


def predict(
    inputs: Sequence[str | Pair], *, truncate: bool, raw_scores: bool, truncation_direction: TruncationDirection
) -> Call[list[Prediction], list[list[Prediction]]]:
    """PredictPairStream, which takes single texts too."""
    direction = _direction(truncation_direction)
    requests = [
        tei_pb2.PredictPairRequest(
            inputs=[texts] if isinstance(texts, str) else texts,
            truncate=truncate,
            raw_scores=raw_scores,
            truncation_direction=direction,
        ).SerializeToString()
        for texts in _list_of(inputs, "inputs")
    ]
    return Call("/tei.v1.Predict/PredictPairStream", Shape.STREAM, requests, decode_predictions, list)


def rerank(
    query: str,
    texts: Sequence[str],
    *,
    limit: int,
    truncate: bool,
    raw_scores: bool,
    return_text: bool,
    truncation_direction: TruncationDirection,
) -> Call[list[Rank], list[Rank]]:
    """Rerank for up to `limit` texts, RerankStream for more."""
    request = tei_pb2.RerankRequest(
        query=query,
        texts=_list_of(texts, "texts"),
        truncate=truncate,
        raw_scores=raw_scores,
        return_text=return_text,
        truncation_direction=_direction(truncation_direction),
    )
    if len(texts) <= limit:
        return Call("/tei.v1.Rerank/Rerank", Shape.UNARY, [request.SerializeToString()], decode_ranks, _only)
    return Call("/tei.v1.Rerank/RerankStream", Shape.CLIENT_STREAM, _split(request), decode_ranks, _only)


def tokenize(
    texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
) -> Call[list[Token], list[list[Token]]]:
    """TokenizeStream."""
    template = tei_pb2.EncodeRequest(add_special_tokens=add_special_tokens, prompt_name=prompt_name)
    requests = _per_text(template, _list_of(texts, "texts"))
    return Call("/tei.v1.Tokenize/TokenizeStream", Shape.STREAM, requests, decode_tokens, list)


def decode(ids: Sequence[Iterable[int]], *, skip_special_tokens: bool) -> Call[str, list[str]]:
    """DecodeStream."""
    requests = [
        tei_pb2.DecodeRequest(ids=ids_of_text, skip_special_tokens=skip_special_tokens).SerializeToString()
        for ids_of_text in ids
    ]
    return Call("/tei.v1.Tokenize/DecodeStream", Shape.STREAM, requests, decode_text, list)


def info() -> Call[ServerInfo, ServerInfo]:
    """Info."""
    request = tei_pb2.InfoRequest().SerializeToString()
    return Call("/tei.v1.Info/Info", Shape.UNARY, [request], decode_info, _only)


def health(service: str) -> Call[bool, bool]:
    """Check of grpc.health.v1."""
    request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return Call("/grpc.health.v1.Health/Check", Shape.UNARY, [request], decode_health, _only)


def _direction(name: TruncationDirection) -> tei_pb2.TruncationDirection:
    if name not in DIRECTIONS:
        raise ValueError(f"`truncation_direction` must be 'right' or 'left'. Given: {name!r}")
    return DIRECTIONS[name]


def _list_of(items: Sequence[Item], name: str) -> Sequence[Item]:
    if isinstance(items, str):  # a sequence too, of its characters
        raise TypeError(f"`{name}` must be a list, not one text")
    return items


def _per_text(template: TextRequest, texts: Iterable[str]) -> list[bytes]:
    requests = []
    for text in texts:
        template.inputs = text
        requests.append(template.SerializeToString())
    return requests


def _split(request: tei_pb2.RerankRequest) -> list[bytes]:
    template = tei_pb2.RerankStreamRequest(
        query=request.query,
        truncate=request.truncate,
        raw_scores=request.raw_scores,
        return_text=request.return_text,
        truncation_direction=request.truncation_direction,
    )
    requests = []
    for text in request.texts:
        template.text = text
        requests.append(template.SerializeToString())
    return requests


def _only(replies: list[Reply]) -> Reply:
    return replies[0]


def _own(replies: list[Floats]) -> Floats:
    return replies[0].copy()  # a reply's bytes are read-only


def _stack(replies: list[Floats]) -> Floats:
    return np.stack(replies) if replies else np.empty((0, 0), np.float32)
