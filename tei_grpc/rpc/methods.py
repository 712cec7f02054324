"""What happens around every call: it has to pass the gate, its messages are decoded, and errors become a status.

Each method of a server is wrapped once. grpc.aio's interceptors would do that anew, with several coroutines, for each
call.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import grpc

from tei_grpc.errors import TeiError, UnavailableError, UndecodableError
from tei_grpc.metrics import Metrics
from tei_grpc.rpc.calls import RunningCalls
from tei_grpc.rpc.context import Context, confirm_caller, current_call, enter_call
from tei_grpc.rpc.gate import Gate, is_exempt
from tei_grpc.rpc.status import Status, status_of

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]
Work = Callable[[Any, Context], Coroutine[Any, Any, Any]]

logger = logging.getLogger(__name__)

PROBES = "grpc.health.v1.Health"
SHUTTING_DOWN = "The server is shutting down"


class Surroundings(NamedTuple):
    """What the calls of one server share. Without a gate all may begin; if `traced`, trace contexts are read."""

    calls: RunningCalls
    metrics: Metrics
    gate: Gate | None = None
    traced: bool = False


class Methods:
    """A server, as generated code knows it: services that are added here are wrapped, and added to the real one."""

    def __init__(self, server: grpc.aio.Server, surroundings: Surroundings) -> None:
        self._server = server
        self._surroundings = surroundings

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add a service.

        In gRPC each registered method has a queue of its own for calls that wait to be taken over, and for each call
        grpc.aio looks at all the queues. Probes shall not wait behind other calls; all others share one.
        """
        wrapped = {name: wrap(f"/{service}/{name}", handler, self._surroundings) for name, handler in handlers.items()}
        if service == PROBES:
            self._server.add_registered_method_handlers(service, wrapped)
        else:
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, wrapped)])

    def add_generic_rpc_handlers(self, _: Sequence[object]) -> None:
        """Generated code adds all services in both ways."""


def wrap(path: str, handler: Any, surroundings: Surroundings) -> Handler:
    """Return a handler that answers every call of the method with a status.

    Requests are decoded and unary replies encoded in here, where a failure can be answered without its internals.
    A call that fails before the engine has heard of it is counted here.
    """
    calls, metrics, gate, traced = surroundings
    decode, encode = _decoder(handler.request_deserializer), _encoder(handler.response_serializer)
    work = _worker(handler, decode, encode)
    check = None if gate is None or is_exempt(path) else gate.check
    failures = _Failures(calls, metrics, counted_method(path))

    async def behaviour(requests: object, context: Context) -> Any:
        enter_call(context.invocation_metadata() if traced else None)
        try:
            with calls:
                if check is not None:
                    check(context)
                return await work(requests, context)
        except grpc.aio.BaseError:  # the status is on its way already, or the client is gone
            raise
        except (asyncio.CancelledError, Exception) as error:
            status = failures.status_of(error)
        return await context.abort(*status)

    # A unary request is taken as a stream of one: grpc.aio leaves a client that sends none without any status.
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(behaviour, decode if handler.request_streaming else None, encode)
    return grpc.stream_unary_rpc_method_handler(behaviour, decode if handler.request_streaming else None)


class _Failures:
    """Of one method."""

    def __init__(self, calls: RunningCalls, metrics: Metrics, method: str | None) -> None:
        self._calls = calls
        self._metrics = metrics
        self._method = method

    def status_of(self, error: BaseException) -> Status:
        """Return what a call that failed ends with. Raises CancelledError where nobody is left to be told."""
        if isinstance(error, asyncio.CancelledError):
            error = self._cause_of(error)
        if self._method is not None and isinstance(error, TeiError) and not error.is_counted:
            self._count(self._method, error)
        return status_of(error, current_call().id)

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

    def _count(self, method: str, error: TeiError) -> None:
        """Count, and log, a request that failed before the engine could."""
        logger.error("%s", error.message, extra={"method": method})
        self._metrics.request_started(method)
        self._metrics.request_failed(method, error.kind)


def counted_method(path: str) -> str | None:
    """Say as what the metrics count requests of a method (full path); None: not at all."""
    if path.startswith("/tei.v1.Rerank/"):
        return "batch"
    if path.startswith(("/tei.v1.Embed/", "/tei.v1.Predict/")):
        return "stream" if path.endswith("Stream") else "single"
    return None


def _worker(handler: Any, decode: Decode, encode: Encode) -> Work:
    """Return what a call does, as one coroutine, for any kind of handler."""
    behaviour = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary

    async def generate(requests: Any, context: Context) -> None:
        request = requests if handler.request_streaming else await _read_one(context, decode)
        async for reply in behaviour(request, context):
            await context.write(reply)

    async def work(requests: Any, context: Context) -> Any:
        request = requests if handler.request_streaming else await _read_one(context, decode)
        reply = await behaviour(request, context)
        return None if handler.response_streaming else encode(reply)

    return generate if inspect.isasyncgenfunction(behaviour) else work


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
