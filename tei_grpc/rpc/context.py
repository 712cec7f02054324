"""What a call's context tells the engine: who waits, how patiently, and until when."""

import time
from typing import Any, TypeAlias

import grpc

from tei_grpc.types import Caller

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

NS_PER_S = 1_000_000_000


def unary_caller(context: Context) -> Caller:
    """A caller who is refused when no permit is free."""
    return Caller(waits=False, deadline_ns=_deadline_ns(context))


def stream_caller(context: Context) -> Caller:
    """A caller whose messages wait for permits."""
    return Caller(waits=True, deadline_ns=_deadline_ns(context))


def _deadline_ns(context: Context) -> int | None:
    remaining: Any = context.time_remaining()  # None without a deadline, whatever the type stubs say
    return None if remaining is None else time.monotonic_ns() + int(remaining * NS_PER_S)
