"""SIGTERM and SIGINT: the first asks the server to finish, the second ends the process. SIGHUP: files are read anew."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_process(code: int) -> NoReturn:
    """Exit at once: waits for nothing, neither calls nor threads."""
    logging.shutdown()
    os._exit(code)


@contextmanager
def on_hangup(reload: Callable[[], None]) -> Iterator[None]:
    """Call `reload` on the event loop at every SIGHUP, which otherwise ends the process, while the block runs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


class StopSignal:
    """Set by the first signal. A context manager on the event loop's thread; without it signals do what they did."""

    def __init__(self) -> None:
        self._received = asyncio.Event()

    def __enter__(self) -> "StopSignal":
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    async def wait(self) -> None:
        """Return once a signal has come."""
        await self._received.wait()

    def _receive(self, number: signal.Signals) -> None:
        if self._received.is_set():
            logger.warning("Second signal (%s): ending at once", number.name)
            end_process(128 + number)
        logger.info("%s: finishing the calls under way", number.name)
        self._received.set()
