"""What a call tells the engine of its caller: who waits, how patiently, until when, and in which trace."""

import secrets
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import grpc

from tei_grpc.types import Caller

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

NS_PER_S = 1_000_000_000
PROCESS_ID = secrets.token_hex(4)

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Call:
    """How to find a call again: under `id` in our logs, under the trace context in its caller's traces."""

    id: str
    traceparent: str | None = None
    tracestate: str | None = None


_call: ContextVar[Call] = ContextVar("call", default=Call(""))  # noqa: B039 - it is frozen


def enter_call(metadata: Metadata | None) -> None:
    """Name the call of the current task, for that task and those it starts; read its trace context from `metadata`."""
    id = f"{PROCESS_ID}-{next(_numbers)}"
    _call.set(Call(id) if metadata is None else Call(id, *_trace_context(metadata)))


def current_call() -> Call:
    """Return what `enter_call` was told."""
    return _call.get()


def unary_caller(context: Context) -> Caller:
    """A caller who is refused when no permit is free."""
    return _caller(context, waits=False)


def stream_caller(context: Context) -> Caller:
    """A caller whose messages wait for permits."""
    return _caller(context, waits=True)


async def confirm_caller(context: Context) -> None:
    """Raise CancelledError if the caller has left: grpc.aio reads that, too, as the end of what the caller sends.

    To be used where the end of the requests means an error, because it sends the initial metadata.
    """
    await context.send_initial_metadata(())


def _caller(context: Context, *, waits: bool) -> Caller:
    call = current_call()
    return Caller(waits, _deadline_ns(context), call.id, call.traceparent, call.tracestate)


def _deadline_ns(context: Context) -> int | None:
    remaining: Any = context.time_remaining()  # None without a deadline, whatever the type stubs say
    return None if remaining is None else time.monotonic_ns() + int(remaining * NS_PER_S)


def _trace_context(metadata: Metadata) -> tuple[str | None, str | None]:
    values = dict(metadata)
    traceparent, tracestate = values.get("traceparent"), values.get("tracestate")
    return (
        traceparent if isinstance(traceparent, str) else None,
        tracestate if isinstance(tracestate, str) else None,
    )
