"""The `x-*` initial metadata of unary successes: what the call cost, for proxies and load tests."""

from tei_grpc.rpc.context import Context
from tei_grpc.rpc.operations import send_with_next
from tei_grpc.types import Info, Metadata

NS_PER_MS = 1_000_000


async def send_headers(context: Context, metadata: Metadata, info: Info) -> None:
    """Send the initial metadata of a unary call that succeeded, together with its reply."""
    await send_with_next(context, headers_of(metadata, info))


def headers_of(metadata: Metadata, info: Info) -> tuple[tuple[str, str], ...]:
    """Return the header names and values; times in whole milliseconds."""
    total = _milliseconds(metadata.total_time_ns)
    return (
        ("x-compute-type", _compute_type(info)),
        ("x-compute-time", total),
        ("x-total-time", total),
        ("x-compute-characters", str(metadata.compute_chars)),
        ("x-compute-tokens", str(metadata.compute_tokens)),
        ("x-tokenization-time", _milliseconds(metadata.tokenization_time_ns)),
        ("x-queue-time", _milliseconds(metadata.queue_time_ns)),
        ("x-inference-time", _milliseconds(metadata.inference_time_ns)),
    )


def _compute_type(info: Info) -> str:
    return ("cpu" if info.device == "cpu" else "gpu") + ("+optimized" if info.optimized else "")


def _milliseconds(nanoseconds: int) -> str:
    return str(nanoseconds // NS_PER_MS)
