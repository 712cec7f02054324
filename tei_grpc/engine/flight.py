"""A batch on the device, between its launch and its landing."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tei_grpc.errors import TeiError
from tei_grpc.types import Arrays, Entry

SHARD = "shard"  # what threads that compute for a runner are named, with a number
LONG_NS = 1_000_000_000  # a batch that has run for so long is waited for: only then does the watchdog see it


class Started(NamedTuple):
    """What a runner's `launch` gives."""

    collect: Callable[[], Sequence[Arrays | TeiError]]  # waits for the answers, one per entry
    is_done: Callable[[], bool]  # whether they are there


class Flight(NamedTuple):
    """What the worker knows of it."""

    entries: Sequence[Entry]
    started_ns: int
    most: int  # tokens that it might have had
    run: Started | None = None  # None while it is being started, and when that failed

    @property
    def is_due(self) -> bool:
        """Whether to wait for it now."""
        if self.run is None or time.monotonic_ns() - self.started_ns > LONG_NS:
            return True
        try:
            return self.run.is_done()
        except Exception:  # the device fails: `collect` will say so
            return True
