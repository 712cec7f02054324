"""The errors that may reach a caller, by kind. Front doors map kinds to codes; nothing here knows gRPC.

TeiError
├── ValidationError         the caller's input is refused, before any work is done
├── UndecodableError        the request's bytes are no message of the expected type, or there are none
├── OverloadedError         no permit is free; try again later
├── ModelTypeError          the loaded model cannot do what was asked
├── TokenizationError       the tokenizer library failed on this input
├── DeadlineError           the caller's deadline passed before the answer was there
├── UnavailableError        loading, draining, or the device is gone
├── UnauthenticatedError    missing or wrong API key
├── InferenceError          the model failed on this input; the text carries no internals
└── StartupError            the server cannot start as asked (never sent to a caller)

Message texts are part of the product: they name the field in backticks, the limit and the value given.
"""

from enum import StrEnum


class ErrorKind(StrEnum):
    """What went wrong, as front doors, metrics and logs name it."""

    VALIDATION = "validation"
    UNDECODABLE = "undecodable"
    OVERLOADED = "overloaded"
    MODEL_TYPE = "model_type"
    TOKENIZATION = "tokenization"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    UNAUTHENTICATED = "unauthenticated"
    INFERENCE = "inference"
    STARTUP = "startup"


class TeiError(Exception):
    """Base of all errors whose text is meant for the caller."""

    kind: ErrorKind
    is_counted = False  # a request that it ended is in the metrics already

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ValidationError(TeiError):
    """The input is refused. `prefixed` texts start as the contract's users know them."""

    kind = ErrorKind.VALIDATION

    def __init__(self, message: str, *, prefixed: bool = True) -> None:
        super().__init__(f"Input validation error: {message}" if prefixed else message)


class UndecodableError(TeiError):
    """The request's bytes are no message of the expected type, or there are none."""

    kind = ErrorKind.UNDECODABLE


class OverloadedError(TeiError):
    """No permit is free."""

    kind = ErrorKind.OVERLOADED

    def __init__(self, message: str = "Model is overloaded") -> None:
        super().__init__(message)


class ModelTypeError(TeiError):
    """The loaded model cannot do this."""

    kind = ErrorKind.MODEL_TYPE


class TokenizationError(TeiError):
    """The tokenizer library failed."""

    kind = ErrorKind.TOKENIZATION


class DeadlineError(TeiError):
    """The deadline passed first."""

    kind = ErrorKind.DEADLINE

    def __init__(self, message: str = "Deadline exceeded") -> None:
        super().__init__(message)


class UnavailableError(TeiError):
    """Nothing is served right now."""

    kind = ErrorKind.UNAVAILABLE


class UnauthenticatedError(TeiError):
    """Missing or wrong API key."""

    kind = ErrorKind.UNAUTHENTICATED

    def __init__(self, message: str = "No valid auth token") -> None:
        super().__init__(message)


class InferenceError(TeiError):
    """The model failed on this input."""

    kind = ErrorKind.INFERENCE


class StartupError(TeiError):
    """The server cannot start; the text says what to change."""

    kind = ErrorKind.STARTUP


def is_failure(error: BaseException) -> bool:
    """Say whether something went wrong, and nobody asked us to stop: an Exception, or the panic of a library in Rust.

    pyo3 raises panics past every `except Exception`; each library has a class of its own for them, and exports none.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def reason_of(error: BaseException) -> str:
    """What a library's error says, for a message of ours: on one line, without the C++ stack that torch appends."""
    return " ".join(str(error).partition("\nException raised from ")[0].split()) or type(error).__name__
