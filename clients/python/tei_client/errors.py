"""What the client raises when a call fails."""

import grpc


class TeiClientError(Exception):
    """A call failed for good: not worth another attempt, or out of attempts or time.

    `code` is the gRPC status code and `message` the server's text. For a list of inputs, `index` is the position of the
    first one without an answer; the server stops at the input that it cannot answer, so with INVALID_ARGUMENT, and with
    INTERNAL from the model, it is the input at fault. None for calls without a list.
    """

    def __init__(self, code: grpc.StatusCode, message: str, index: int | None = None) -> None:
        super().__init__(code, message, index)
        self.code = code
        self.message = message
        self.index = index

    def __str__(self) -> str:
        place = "" if self.index is None else f" (input {self.index})"
        return f"{self.code.name}: {self.message}{place}"


class InvalidInputError(TeiClientError):
    """The server refused an input (INVALID_ARGUMENT): it will be refused again."""


def error_of(code: grpc.StatusCode, message: str, index: int | None) -> TeiClientError:
    """Return the error of the most telling class."""
    kind = InvalidInputError if code is grpc.StatusCode.INVALID_ARGUMENT else TeiClientError
    return kind(code, message, index)
