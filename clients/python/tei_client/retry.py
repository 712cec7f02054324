"""When a failed call is tried again."""

import random
from dataclasses import dataclass

MAX_DOUBLINGS = 30  # keeps the power finite, however many attempts there are


@dataclass(frozen=True)
class RetryPolicy:
    """Try again when the server is gone or has too much to do, at most `attempts` times in all.

    That is UNAVAILABLE, RESOURCE_EXHAUSTED, CANCELLED by a server that stops, and INTERNAL with a reset (RST_STREAM) of
    a stream by a proxy.

    The wait before the n-th retry is drawn evenly from 0 to `initial_delay` * 2^(n-1) seconds, at most `max_delay`
    ("full jitter": https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). An attempt that brought
    an answer starts the count afresh.
    """

    attempts: int = 5
    initial_delay: float = 0.1
    max_delay: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"`attempts` must be at least 1. Given: {self.attempts}")
        if not 0 <= self.initial_delay <= self.max_delay:
            raise ValueError(f"`initial_delay` must be from 0 to `max_delay`. Given: {self.initial_delay}")

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after `failures` >= 1 failures in a row."""
        longest = min(self.max_delay, self.initial_delay * 2 ** min(failures - 1, MAX_DOUBLINGS))
        return random.uniform(0, longest)  # noqa: S311 - spreads load, guards no secret


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(attempts=1)
