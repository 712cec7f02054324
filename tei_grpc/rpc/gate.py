"""Who may call, and when: what is looked at before anything of a call is read."""

import hmac
from collections.abc import Callable, Sequence

from tei_grpc.errors import UnauthenticatedError, UnavailableError
from tei_grpc.rpc.context import Context, Metadata
from tei_grpc.types import State

EXEMPT = ("/grpc.health.v1.Health/", "/grpc.reflection.")  # probes and tools: no key, and at any time
STILL_LOADING = "The model is still loading"


class Keys:
    """Wants exactly one `authorization: Bearer KEY`, byte for byte, with one of `keys`."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.accept(keys)

    def accept(self, keys: Sequence[str]) -> None:
        """Take these keys, in place of all before, for calls that begin from now on."""
        self._accepted = [f"Bearer {key}".encode() for key in keys]

    def check(self, metadata: Metadata) -> None:
        """Raise UnauthenticatedError unless a key is in the call's `metadata`."""
        given = [_as_bytes(value) for name, value in metadata if name == "authorization"]
        if len(given) != 1:
            raise UnauthenticatedError
        matches = [hmac.compare_digest(given[0], accepted) for accepted in self._accepted]  # all: time must not tell
        if not any(matches):
            raise UnauthenticatedError


class Gate:
    """Refuses calls without a key, and all while the engine is loading.

    In a drain gRPC takes no more; what it had taken is answered.
    """

    def __init__(self, state: Callable[[], State], keys: Keys | None) -> None:
        self._state = state
        self._keys = keys

    def check(self, context: Context) -> None:
        """Let a call begin. Raises UnauthenticatedError, UnavailableError."""
        if self._keys is not None:
            self._keys.check(context.invocation_metadata() or ())
        if self._state() is State.LOADING:
            raise UnavailableError(STILL_LOADING)


def is_exempt(method: str) -> bool:
    """Say whether `method` (full path) is a probe or a tool that must work at any time."""
    return method.startswith(EXEMPT)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
