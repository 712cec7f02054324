"""Fields that several request messages share, as the engine wants them."""

from tei_grpc.errors import ValidationError
from tei_grpc.pb import tei_pb2
from tei_grpc.types import Input, Scoring, TruncationDirection

DIRECTIONS: dict[int, TruncationDirection] = {
    tei_pb2.TRUNCATION_DIRECTION_RIGHT: TruncationDirection.RIGHT,
    tei_pb2.TRUNCATION_DIRECTION_LEFT: TruncationDirection.LEFT,
}


def input_of(request: tei_pb2.EmbedRequest | tei_pb2.EmbedAllRequest | tei_pb2.EmbedSparseRequest) -> Input:
    """Return the input of a request for vectors. Raises ValidationError."""
    return Input(
        request.inputs,
        truncate=request.truncate,
        truncation_direction=direction_of(request.truncation_direction),
        prompt_name=prompt_name_of(request),
    )


def scoring_of(request: tei_pb2.PredictRequest | tei_pb2.PredictPairRequest | tei_pb2.RerankRequest) -> Scoring:
    """Return how a request for scores wants its texts treated. Raises ValidationError."""
    return Scoring(
        truncate=request.truncate,
        truncation_direction=direction_of(request.truncation_direction),
        raw_scores=request.raw_scores,
    )


def direction_of(value: int) -> TruncationDirection:
    """Return the direction; proto3 enums are open, so any int32 may arrive. Raises ValidationError."""
    if value not in DIRECTIONS:
        raise ValidationError(f"`truncation_direction` must be 0 (right) or 1 (left). Given: {value}")
    return DIRECTIONS[value]


def prompt_name_of(
    request: tei_pb2.EmbedRequest | tei_pb2.EmbedAllRequest | tei_pb2.EmbedSparseRequest | tei_pb2.EncodeRequest,
) -> str | None:
    """Return the prompt's name if the caller gave one, even an empty one."""
    return request.prompt_name if request.HasField("prompt_name") else None
