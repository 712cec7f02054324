"""What happens around every call: errors become a status, keys are checked, and the engine must be ready."""

import asyncio
import hmac
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from tei_grpc.errors import TeiError, UnauthenticatedError, UnavailableError, UndecodableError
from tei_grpc.metrics import Metrics
from tei_grpc.rpc.calls import RunningCalls
from tei_grpc.rpc.context import Context, confirm_caller, current_call, enter_call
from tei_grpc.rpc.status import Status, status_of
from tei_grpc.types import State

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # None: there is no such method
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Found]]
Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

EXEMPT = ("/grpc.health.v1.Health/", "/grpc.reflection.")  # probes and tools: no key, and at any time
SHUTTING_DOWN = "The server is shutting down"
STILL_LOADING = "The model is still loading"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends every failed call with the status of its error; must be the outermost.

    Requests are decoded and unary replies encoded in here, where a failure can be answered without its internals.
    A call that fails before the engine has heard of it is counted here. If `traced`, trace contexts are read.
    """

    def __init__(self, calls: RunningCalls, metrics: Metrics, *, traced: bool = False) -> None:
        self._calls = calls
        self._metrics = metrics
        self._traced = traced

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Found:
        """Wrap the handler, whichever of the four kinds it is."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        decode, encode = _decoder(handler.request_deserializer), _encoder(handler.response_serializer)
        work = _worker(handler, decode, encode)
        metadata = handler_call_details.invocation_metadata if self._traced else None
        method = counted_method(handler_call_details.method)

        async def behaviour(requests: object, context: Context) -> Any:
            enter_call(metadata)
            return await self._answer(work(requests, context), context, method)

        # A unary request is taken as a stream of one: grpc.aio leaves a client that sends none without any status.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                behaviour, decode if handler.request_streaming else None, encode
            )
        return grpc.stream_unary_rpc_method_handler(behaviour, decode if handler.request_streaming else None)

    async def _answer(self, work: Coroutine[Any, Any, Result], context: Context, method: str | None) -> Result:
        try:
            with self._calls.running():
                return await work
        except grpc.aio.BaseError:  # the status is on its way already, or the client is gone
            raise
        except asyncio.CancelledError as error:
            status = self._fail(self._cause_of(error), method)
        except Exception as error:
            status = self._fail(error, method)
        return await context.abort(*status)

    def _cause_of(self, cancellation: asyncio.CancelledError) -> BaseException:
        """Tell apart who cancelled: the drain, the client (nobody to answer), or something inside the server."""
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            return cancellation
        if not self._calls.are_cut:
            raise cancellation
        task.uncancel()
        cause = UnavailableError(SHUTTING_DOWN)
        cause.is_counted = True  # as dropped, if there was a request
        return cause

    def _fail(self, error: BaseException, method: str | None) -> Status:
        """Count, and log, a request that failed before the engine could."""
        if method is not None and isinstance(error, TeiError) and not error.is_counted:
            logger.error("%s", error.message, extra={"method": method})
            self._metrics.request_started(method)
            self._metrics.request_failed(method, error.kind)
        return status_of(error, current_call().id)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Wants exactly one `authorization: Bearer KEY`, byte for byte, with one of `keys`."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.accept(keys)

    def accept(self, keys: Sequence[str]) -> None:
        """Take these keys, in place of all before, for calls that begin from now on."""
        self._accepted = [f"Bearer {key}".encode() for key in keys]

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Found:
        """Check the key before anything is read."""
        handler = await continuation(handler_call_details)
        if handler is None or is_exempt(handler_call_details.method) or self._holds_key(handler_call_details):
            return handler
        return _refuse(UnauthenticatedError)

    def _holds_key(self, details: grpc.HandlerCallDetails) -> bool:
        given = [_as_bytes(value) for name, value in details.invocation_metadata if name == "authorization"]
        if len(given) != 1:
            return False
        matches = [hmac.compare_digest(given[0], accepted) for accepted in self._accepted]  # all: time must not tell
        return any(matches)


class StateInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls while the engine is loading. In a drain gRPC takes no more; what it had taken is answered."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Found:
        """Look at the state once per call."""
        handler = await continuation(handler_call_details)
        if handler is None or self._state() is not State.LOADING or is_exempt(handler_call_details.method):
            return handler
        return _refuse(lambda: UnavailableError(STILL_LOADING))


def counted_method(path: str) -> str | None:
    """Say as what the metrics count requests of a method (full path); None: not at all."""
    if path.startswith("/tei.v1.Rerank/"):
        return "batch"
    if path.startswith(("/tei.v1.Embed/", "/tei.v1.Predict/")):
        return "stream" if path.endswith("Stream") else "single"
    return None


def is_exempt(method: str) -> bool:
    """Say whether `method` (full path) is a probe or a tool that must work at any time."""
    return method.startswith(EXEMPT)


def _refuse(error: Callable[[], TeiError]) -> Handler:
    async def refuse(_requests: object, _context: Context) -> NoReturn:
        raise error()

    # Streaming both ways suits every kind of call, and answers without waiting for a request.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _worker(handler: Any, decode: Decode, encode: Encode) -> Callable[[Any, Context], Coroutine[Any, Any, Any]]:
    """Return what a call does, as one coroutine, for any kind of handler."""
    behaviour = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary

    async def work(requests: Any, context: Context) -> Any:
        request = requests if handler.request_streaming else await _read_one(context, decode)
        if inspect.isasyncgenfunction(behaviour):
            async for reply in behaviour(request, context):
                await context.write(reply)
            return None
        reply = await behaviour(request, context)
        return None if handler.response_streaming else encode(reply)

    return work


async def _read_one(context: Context, decode: Decode) -> Any:
    raw = await context.read()
    if raw is grpc.aio.EOF:
        await confirm_caller(context)
        raise UndecodableError("Missing request message")
    return decode(raw)


def _decoder(decode: Decode | None) -> Decode:
    def decode_safely(raw: bytes) -> Any:
        try:
            return raw if decode is None else decode(raw)
        except Exception:
            raise UndecodableError("Request could not be decoded") from None

    return decode_safely


def _encoder(encode: Encode | None) -> Encode:
    def encode_unless_bytes(reply: Any) -> bytes:
        return reply if isinstance(reply, bytes) or encode is None else encode(reply)

    return encode_unless_bytes


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
