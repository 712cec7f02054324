"""Keeps the books of one request: it ends as exactly one of success, failure or dropped, in metrics and in the log."""

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from tei_grpc.errors import DeadlineError, ErrorKind, InferenceError, TeiError
from tei_grpc.metrics import Metrics
from tei_grpc.types import Caller, Metadata

logger = logging.getLogger(__name__)


class Request:
    """`with Request(...) as request: ...; request.succeed(metadata)`; leaving it by an exception counts that one.

    A future that was cancelled inside the server is not the caller's doing: it leaves as InferenceError, so that the
    caller gets a status.
    """

    def __init__(self, metrics: Metrics, caller: Caller, method: str | None = None) -> None:
        self._metrics = metrics
        self._caller = caller
        self._method = method or ("stream" if caller.waits else "single")

    def __enter__(self) -> Self:
        self._metrics.request_started(self._method)
        return self

    def succeed(self, metadata: Metadata) -> None:
        """The answer is on its way."""
        self._metrics.request_succeeded(self._method, metadata)
        if logger.isEnabledFor(logging.INFO):
            logger.info("Success", extra={"span": _fields(metadata)})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, asyncio.CancelledError):
            if not _task_is_cancelled():
                self._fail(ErrorKind.INFERENCE, "cancelled inside the server")
                raise InferenceError("Inference failed") from None
            self._metrics.request_dropped("expired" if self._is_expired() else "cancelled")
        elif isinstance(error, DeadlineError):
            self._metrics.request_dropped("expired")
        elif isinstance(error, TeiError):
            self._fail(error.kind, error.message)
        else:
            self._fail(ErrorKind.INFERENCE, type(error).__name__)

    def _fail(self, kind: ErrorKind, message: str) -> None:
        self._metrics.request_failed(kind.value)
        logger.error("%s", message)

    def _is_expired(self) -> bool:
        return self._caller.deadline_ns is not None and self._caller.deadline_ns <= time.monotonic_ns()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _fields(metadata: Metadata) -> dict[str, object]:
    return {
        "total_time": _milliseconds(metadata.total_time_ns),
        "tokenization_time": _milliseconds(metadata.tokenization_time_ns),
        "queue_time": _milliseconds(metadata.queue_time_ns),
        "inference_time": _milliseconds(metadata.inference_time_ns),
        "compute_chars": metadata.compute_chars,
        "compute_tokens": metadata.compute_tokens,
    }


def _milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f}ms"
