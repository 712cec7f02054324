"""One call across its attempts: what is answered, what is left to send, how much time remains."""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

import grpc

from tei_client.calls import Call, Shape
from tei_client.errors import TeiClientError, error_of
from tei_client.retry import RetryPolicy

Reply = TypeVar("Reply")
Result = TypeVar("Result")

# CANCELLED is what a gRPC server answers to a call that comes in the moment in which it stops
TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED})
# gRPC's texts for what shares these codes: an oversize message, a channel that the caller closed, a call he cancelled
LASTING = ("larger than max", "Channel closed", "Locally cancelled")
RESET = "RST_STREAM"  # gRPC's text, with INTERNAL, when a proxy lost the server of a stream that had answers already


class Progress(Generic[Reply, Result]):
    """The state of one call; both clients drive it with their own kind of I/O."""

    def __init__(self, call: Call[Reply, Result], policy: RetryPolicy, timeout: float | None) -> None:
        self._call = call
        self._policy = policy
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._expected = len(call.requests) if call.shape is Shape.STREAM else 1
        self._failures = 0
        self._replies: list[Reply] = []

    @property
    def done(self) -> bool:
        """Whether every answer is there."""
        return len(self._replies) == self._expected

    def unanswered(self) -> Iterator[bytes]:
        """Return the requests that an attempt has to send."""
        return islice(self._call.requests, len(self._replies), None)

    def remaining(self) -> float | None:
        """Return the seconds left for this attempt; None without a timeout."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def add(self, reply: Reply) -> None:
        """Take the next answer."""
        self._replies.append(reply)
        self._failures = 0

    def end(self) -> None:
        """Note that an attempt ended well. Raises TeiClientError unless each request has its one answer."""
        if not self.done:
            text = f"the server ended the call after {len(self._replies)} of {self._expected} answers"
            raise TeiClientError(grpc.StatusCode.INTERNAL, text, self._index())

    def fail(self, code: grpc.StatusCode, message: str) -> float:
        """Note that an attempt failed; return the seconds to wait before the next one.

        Raises TeiClientError when there is to be none.
        """
        if self.done:
            return 0.0
        self._failures += 1
        delay = self._policy.delay(self._failures)
        remaining = self.remaining()
        is_late = remaining is not None and delay >= remaining
        if not _is_transient(code, message) or self._failures >= self._policy.attempts or is_late:
            raise error_of(code, message, self._index())
        return delay

    def finish(self) -> Result:
        """Make the call's result out of its answers."""
        return self._call.finish(self._replies)

    def _index(self) -> int | None:
        return len(self._replies) if self._call.shape is Shape.STREAM else None


def _is_transient(code: grpc.StatusCode, message: str) -> bool:
    if code is grpc.StatusCode.INTERNAL:
        return RESET in message
    return code in TRANSIENT and not any(text in message for text in LASTING)
