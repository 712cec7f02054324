"""One server of the contract, as a caller sees it: an address, perhaps a key, and bytes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from tei_grpc.pb import tei_pb2

TIMEOUT = 60.0  # seconds; a call that takes longer hangs

Code = grpc.StatusCode
Request = Message | bytes


class Outcome(NamedTuple):
    """All that came back from one call."""

    replies: list[Any]
    code: grpc.StatusCode
    text: str
    headers: dict[str, str]

    @property
    def status(self) -> tuple[grpc.StatusCode, str]:
        return self.code, self.text

    @property
    def reply(self) -> Any:
        """The one reply of a call that succeeded."""
        assert self.code is Code.OK, self.status
        (reply,) = self.replies
        return reply


class Target:
    """Calls any method as what it is on the wire: messages one way, messages the other way, a status."""

    def __init__(self, address: str, key: str | None = None, *, is_ours: bool = False) -> None:
        self.address = address
        self.key = key
        self.is_ours = is_ours  # known model, known options
        self.channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
        self.info = self.ask("Info/Info", tei_pb2.InfoRequest()).reply

    def close(self) -> None:
        self.channel.close()

    def open(
        self,
        method: str,
        requests: Iterable[Request],
        metadata: Sequence[tuple[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Start a call and return it; `metadata` takes the place of the key."""
        path = method if method.startswith("/") else f"/tei.v1.{method}"
        call = self.channel.stream_stream(
            path, request_serializer=serialize, response_deserializer=_deserializer(method)
        )
        return call(iter(requests), metadata=self.credentials if metadata is None else metadata, **options)

    def ask(self, method: str, *requests: Request, timeout: float = TIMEOUT, **options: Any) -> Outcome:
        """Send all requests, half-close, and wait for the end."""
        return outcome_of(self.open(method, requests, timeout=timeout, **options))

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        return () if self.key is None else (("authorization", f"Bearer {self.key}"),)


def outcome_of(call: Any) -> Outcome:
    """Read a call to its end."""
    replies = []
    try:
        for reply in call:
            replies.append(reply)
    except grpc.RpcError:
        pass
    return Outcome(replies, call.code(), call.details() or "", dict(call.initial_metadata() or ()))


def serialize(request: Request) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def _deserializer(method: str) -> Callable[[bytes], Any] | None:
    service, _, name = method.partition("/")
    if service not in tei_pb2.DESCRIPTOR.services_by_name:
        return None
    found = tei_pb2.DESCRIPTOR.services_by_name[service].methods_by_name.get(name)
    return found and getattr(tei_pb2, found.output_type.name).FromString
