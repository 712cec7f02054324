"""The seam: everything the engine asks of the side that owns queue, permits and model."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from tei_grpc.types import Entry, Failure, ModelFacts, Output

Deliver = Callable[[Sequence[Output | Failure]], None]


class Device(Protocol):
    """Owns one model on one device. All methods are called on the event loop; none of them blocks."""

    async def start(self, deliver: Deliver, on_state: Callable[[bool], None]) -> ModelFacts:
        """Load the model and warm it up. Raises StartupError.

        Afterwards every submitted entry that is not cancelled is delivered exactly once, on the event loop.
        `on_state` is called there too, with False when the device can no longer run, with True when it can again.
        """
        ...

    def admit(self, *, waits: bool) -> Awaitable[None] | None:
        """Take a permit: at once (None), or by awaiting the returned object when `waits`.

        Raises OverloadedError when none is free and the caller does not wait.
        """
        ...

    def release(self) -> None:
        """Give a permit back."""
        ...

    def submit(self, entry: Entry) -> None:
        """Put an entry into the queue. Raises UnavailableError when the device is gone."""
        ...

    def cancel(self, entry_id: int) -> None:
        """Drop an entry whose caller has left; nothing is delivered for it unless that happened already."""
        ...

    async def stop(self) -> bool:
        """Finish the running batch, fail what waits with UnavailableError, and end; False when the batch hangs."""
        ...
