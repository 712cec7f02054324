"""Reply bytes to results, for the replies that are not vectors."""

from typing import Literal

from grpc_health.v1 import health_pb2

from tei_client.pb import tei_pb2
from tei_client.types import Prediction, Rank, ServerInfo, Token

MODEL_TYPES: dict[int, Literal["embedding", "classifier", "reranker"]] = {
    tei_pb2.MODEL_TYPE_EMBEDDING: "embedding",
    tei_pb2.MODEL_TYPE_CLASSIFIER: "classifier",
    tei_pb2.MODEL_TYPE_RERANKER: "reranker",
}


def decode_predictions(data: bytes) -> list[Prediction]:
    """Return every label of a PredictResponse."""
    return [Prediction(p.label, p.score) for p in tei_pb2.PredictResponse.FromString(data).predictions]


def decode_ranks(data: bytes) -> list[Rank]:
    """Return every rank of a RerankResponse."""
    ranks = tei_pb2.RerankResponse.FromString(data).ranks
    return [Rank(rank.index, rank.score, rank.text if rank.HasField("text") else None) for rank in ranks]


def decode_tokens(data: bytes) -> list[Token]:
    """Return every token of an EncodeResponse."""
    return [
        Token(t.id, t.text, t.special, t.start if t.HasField("start") else None, t.stop if t.HasField("stop") else None)
        for t in tei_pb2.EncodeResponse.FromString(data).tokens
    ]


def decode_text(data: bytes) -> str:
    """Return the text of a DecodeResponse."""
    return tei_pb2.DecodeResponse.FromString(data).text


def decode_info(data: bytes) -> ServerInfo:
    """Return an InfoResponse with None for what is absent."""
    reply = tei_pb2.InfoResponse.FromString(data)
    return ServerInfo(
        version=reply.version,
        sha=reply.sha if reply.HasField("sha") else None,
        docker_label=reply.docker_label if reply.HasField("docker_label") else None,
        model_id=reply.model_id,
        model_sha=reply.model_sha if reply.HasField("model_sha") else None,
        model_dtype=reply.model_dtype,
        model_type=MODEL_TYPES[reply.model_type],
        max_concurrent_requests=reply.max_concurrent_requests,
        max_input_length=reply.max_input_length,
        max_batch_tokens=reply.max_batch_tokens,
        max_batch_requests=reply.max_batch_requests if reply.HasField("max_batch_requests") else None,
        max_client_batch_size=reply.max_client_batch_size,
        tokenization_workers=reply.tokenization_workers,
    )


def decode_health(data: bytes) -> bool:
    """Return whether a HealthCheckResponse says SERVING."""
    return bool(health_pb2.HealthCheckResponse.FromString(data).status == health_pb2.HealthCheckResponse.SERVING)
