"""Keeps the books of one request: it ends as exactly one of success, failure or dropped, in metrics, log and traces."""

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from tei_grpc import logs
from tei_grpc.errors import DeadlineError, ErrorKind, InferenceError, TeiError
from tei_grpc.metrics import Metrics
from tei_grpc.traces import AnsweredInput, EndedRequest
from tei_grpc.types import Caller, Metadata

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from tei_grpc.traces.recorder import Traces

logger = logging.getLogger(__name__)

NS_PER_MS = 1e6
MAX_LOGGED_CHARS = 2048  # of an error; what a caller named in it may be as long as a message


@dataclass(frozen=True, slots=True)
class Books:
    """Where requests are written down."""

    metrics: Metrics
    traces: "Traces | None" = None


class Request:
    """`with Request(...) as request: ...; request.succeed(metadata)`; leaving it by an exception counts that one.

    A future that was cancelled inside the server is not the caller's doing: it leaves as InferenceError, so that the
    caller gets a status.
    """

    def __init__(self, books: Books, caller: Caller, kind: str, method: str | None = None) -> None:
        """Take `kind` as the name of what was asked for: a Kind, or "rerank"."""
        self._metrics = books.metrics
        self._traces = books.traces
        self._caller = caller
        self._kind = kind
        self._method = method or ("stream" if caller.waits else "single")
        self._trace: Span | None = None  # unless it is sampled
        self._inputs: list[AnsweredInput] = []

    def __enter__(self) -> Self:
        self._metrics.request_started(self._method)
        if self._traces is not None:
            self._trace = self._traces.begin(self._kind, self._caller)
        return self

    def answer_input(self, metadata: Metadata) -> None:
        """One of several inputs has its answer."""
        if self._trace is not None:
            self._inputs.append(AnsweredInput(time.time_ns(), metadata))

    def succeed(self, metadata: Metadata) -> None:
        """The answer is on its way."""
        self._metrics.request_succeeded(self._method, metadata)
        if logger.isEnabledFor(logging.INFO):
            logs.defer(SUCCESS, partial(self._success, metadata))
        if self._trace is not None and not self._inputs:
            self.answer_input(metadata)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = None if error is None else self._enter_error(error)
        if self._traces is not None and self._trace is not None:
            self._traces.end(self._trace, EndedRequest(self._method, self._caller, self._inputs, ending))
        if isinstance(error, asyncio.CancelledError) and ending == ErrorKind.INFERENCE:
            failure = InferenceError("Inference failed")
            failure.is_counted = True
            raise failure from None

    def _enter_error(self, error: BaseException) -> str:
        """Count what the request ended with; return the kind of error, or the reason why it was dropped."""
        if isinstance(error, asyncio.CancelledError):
            if not task_is_cancelled():
                return self._fail(ErrorKind.INFERENCE, "cancelled inside the server")
            return self._drop("expired" if self._is_expired() else "cancelled")
        if not isinstance(error, TeiError):
            return self._fail(ErrorKind.INFERENCE, type(error).__name__)
        error.is_counted = True
        return self._drop("expired") if isinstance(error, DeadlineError) else self._fail(error.kind, error.message)

    def _drop(self, reason: str) -> str:
        self._metrics.request_dropped(self._method, reason)
        return reason

    def _fail(self, kind: ErrorKind, message: str) -> str:
        self._metrics.request_failed(self._method, kind)
        logger.error("%s", message[:MAX_LOGGED_CHARS], extra={"span": self._span()})
        return kind

    def _success(self, metadata: Metadata) -> dict[str, object]:
        return {
            **self._span(),
            "total_time": f"{metadata.total_time_ns / NS_PER_MS:.3f}ms",
            "tokenization_time": f"{metadata.tokenization_time_ns / NS_PER_MS:.3f}ms",
            "queue_time": f"{metadata.queue_time_ns / NS_PER_MS:.3f}ms",
            "inference_time": f"{metadata.inference_time_ns / NS_PER_MS:.3f}ms",
            "compute_chars": metadata.compute_chars,
            "compute_tokens": metadata.compute_tokens,
        }

    def _span(self) -> dict[str, object]:
        return {"kind": self._kind, "method": self._method, "request_id": self._caller.request_id}

    def _is_expired(self) -> bool:
        return self._caller.deadline_ns is not None and self._caller.deadline_ns <= time.monotonic_ns()


SUCCESS: Final = logs.Event(logger, "Success", Request.succeed.__code__)


def task_is_cancelled() -> bool:
    """Whether somebody wants the current task itself to end, rather than a future that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
