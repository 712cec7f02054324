"""A channel to the server and one attempt at a call on it; what both clients run on.

The asyncio client runs on it too, rather than on `grpc.aio`: there, a write that fails because the server has just
ended the stream replaces the server's status by INTERNAL and drops answers, and nobody knows any more which input was
refused, or where to go on.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import grpc

from tei_client.calls import Call, Shape
from tei_client.channel import Metadata, Option, TlsOptions, make_credentials, make_metadata
from tei_client.progress import Progress

Reply = TypeVar("Reply")
Result = TypeVar("Result")

WINDOW = 512  # messages of one stream that are sent and not answered: enough to fill batches, and bounded


class Connection:
    """Opened by the first call. Serves any number of threads."""

    def __init__(self, target: str, api_key: str | None, tls: TlsOptions | None, options: Sequence[Option]) -> None:
        if tls is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, make_credentials(tls), options)
        self._metadata = make_metadata(api_key)

    def close(self) -> None:
        """Cancel what is under way and close."""
        self._channel.close()

    def ask(self, call: Call[Reply, Result], timeout: float | None) -> Reply:
        """Make a unary call. Raises grpc.RpcError."""
        method: grpc.UnaryUnaryMultiCallable[bytes, Reply] = self._channel.unary_unary(call.path, None, call.decode)
        return method(call.requests[0], timeout=timeout, metadata=self._metadata)

    def begin(self, call: Call[Reply, Result], timeout: float | None) -> "grpc.Future[Reply]":
        """Begin a unary call; the future gives its reply or raises grpc.RpcError."""
        method: grpc.UnaryUnaryMultiCallable[bytes, Reply] = self._channel.unary_unary(call.path, None, call.decode)
        return method.future(call.requests[0], timeout=timeout, metadata=self._metadata)

    def open(self, call: Call[Reply, Result], progress: Progress[Reply, Result]) -> "Stream[Reply, Result]":
        """Begin a streaming call with the requests that `progress` has no answers to."""
        return Stream(self._channel, call, progress, self._metadata)


class Stream(Generic[Reply, Result]):
    """One attempt at a streaming call, under way from the start."""

    def __init__(
        self,
        channel: grpc.Channel,
        call: Call[Reply, Result],
        progress: Progress[Reply, Result],
        metadata: Metadata,
    ) -> None:
        self._progress = progress
        self._slots = threading.Semaphore(WINDOW if call.shape is Shape.STREAM else len(call.requests))
        self._ended = False
        method: grpc.StreamStreamMultiCallable[bytes, Reply] = channel.stream_stream(call.path, None, call.decode)
        requests = self._feed(progress.unanswered())
        self._replies = method(requests, timeout=progress.remaining(), metadata=metadata)

    def read(self) -> None:
        """Hand all answers to the progress; blocks until the call has ended. Raises grpc.RpcError."""
        try:
            for reply in self._replies:
                self._progress.add(reply)
                self._slots.release()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the call, from any thread; nothing happens when it has ended."""
        self._replies.cancel()
        self._ended = True
        self._slots.release()  # gRPC's sending thread may be waiting for a slot

    def _feed(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        for request in requests:
            self._slots.acquire()
            if self._ended:
                return
            yield request
