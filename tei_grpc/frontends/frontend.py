"""A front-end as its server sees it: a process, which is started anew when it ends."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence

from tei_grpc.errors import StartupError, reason_of
from tei_grpc.frontends.exchange import Connection, Exchange
from tei_grpc.frontends.process import Job

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "tei_grpc.frontends")
RESTART_SECONDS = 1.0  # between two tries to start it
STARTS = 3  # tries while the model loads


class Frontend:
    """Starts a front-end, and another one whenever it ends."""

    pid: int
    connection: Connection  # at the exchange
    ended: asyncio.Task[int]  # has its exit code

    def __init__(self, job: Job, exchange: Exchange) -> None:
        self._job = job
        self._exchange = exchange

    async def start(self, *, is_late: bool = False) -> None:
        """Start the process. Options come on its stdin, so that secrets are neither in arguments nor environment.

        Raises StartupError.
        """
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = await _run(ours, (*self._job.files, theirs.fileno()))
                job = self._job._replace(channel=theirs.fileno(), is_late=is_late)
        except OSError as error:  # no process, memory or file descriptor is left
            raise StartupError(f"A front-end could not be started: {reason_of(error)}") from error
        self.pid = self._process.pid
        self.connection = self._exchange.connect(ours)
        self.ended = asyncio.create_task(self._process.wait())
        if self._process.stdin is not None:
            self._process.stdin.write(job.to_json())
            self._process.stdin.close()

    async def wait_until(self, step: asyncio.Future[None]) -> None:
        """Wait for a step of `connection`. Raises StartupError when the process ends first."""
        either: list[asyncio.Future[None] | asyncio.Task[int]] = [step, self.ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            code = self.ended.result()
            raise StartupError(self.connection.trouble or f"A front-end ended with exit code {code} while it started")

    async def become_ready(self) -> None:
        """Wait until it is. Raises StartupError for one that says what is wrong; others are replaced a few times."""
        for left in reversed(range(STARTS)):
            try:
                await self.wait_until(self.connection.ready)
                return
            except StartupError as error:
                if self.connection.trouble or not left:
                    raise
                logger.error("%s: starting another", error)
            await self.start()

    async def keep(self) -> None:
        """Replace the process whenever it ends. For a task, which ends only by being cancelled."""
        while True:
            await asyncio.wait([self.ended])
            code = self.ended.result()
            logger.error("Front-end %d ended with exit code %d: starting another", self._job.number, code)
            try:
                await self.start(is_late=True)
                await self.wait_until(self.connection.ready)
                logger.info("Front-end %d serves again", self._job.number)
            except StartupError as error:
                logger.error("%s", error)
                await asyncio.sleep(RESTART_SECONDS)

    async def kill(self) -> None:
        """End the process, if it has not."""
        if not self.ended.done():
            self._process.kill()
            await self.ended


async def _run(ours: socket.socket, files: Sequence[int]) -> asyncio.subprocess.Process:
    """The process, which has `files`; our end of its channel is closed when there is none."""
    try:
        return await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=files,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the same code as here
        )
    except BaseException:
        ours.close()
        raise
