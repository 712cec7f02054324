"""Errors as gRPC status: one total table from kinds to codes, and a bland INTERNAL for everything else."""

import logging
from typing import NamedTuple

import grpc

from tei_grpc.errors import ErrorKind, TeiError

logger = logging.getLogger(__name__)

CODES: dict[ErrorKind, grpc.StatusCode] = {
    ErrorKind.VALIDATION: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNDECODABLE: grpc.StatusCode.INTERNAL,
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.MODEL_TYPE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.TOKENIZATION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.INFERENCE: grpc.StatusCode.INTERNAL,
    ErrorKind.STARTUP: grpc.StatusCode.INTERNAL,
}

# The text travels percent-encoded (three bytes for one) in a header, and clients drop headers over 8 KiB.
MAX_TEXT_BYTES = 2048


class Status(NamedTuple):
    """What the client is told."""

    code: grpc.StatusCode
    text: str


def status_of(error: BaseException, call_id: str) -> Status:
    """Return the status for any exception; what is not meant for callers is logged under the id that the text names."""
    if isinstance(error, TeiError):
        text = f"{error.message}, id {call_id}" if error.kind is ErrorKind.INFERENCE else error.message
        return Status(CODES[error.kind], _shorten(text))
    logger.error("Internal error, id %s", call_id, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, f"Internal error, id {call_id}")


def _shorten(text: str) -> str:
    return text.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
