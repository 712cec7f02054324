"""A front-end as its server sees it: a process, which is started anew when it ends."""

import asyncio
import logging
import os
import socket
import sys

from tei_grpc.errors import StartupError
from tei_grpc.frontends.exchange import Connection, Exchange
from tei_grpc.frontends.process import Job

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "tei_grpc.frontends")
RESTART_SECONDS = 1.0  # between two tries to start it


class Frontend:
    """Starts a front-end, and another one whenever it ends."""

    pid: int
    connection: Connection  # at the exchange
    ended: asyncio.Task[int]  # has its exit code

    def __init__(self, job: Job, exchange: Exchange) -> None:
        self._job = job
        self._exchange = exchange

    async def start(self, *, is_late: bool = False) -> None:
        """Start the process. Options come on its stdin, so that secrets are neither in arguments nor environment."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(*self._job.files, theirs.fileno()),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the same code as here
            )
            job = self._job._replace(channel=theirs.fileno(), is_late=is_late)
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
            except (StartupError, OSError) as error:
                logger.error("%s", error)
                await asyncio.sleep(RESTART_SECONDS)

    async def kill(self) -> None:
        """End the process, if it has not."""
        if not self.ended.done():
            self._process.kill()
            await self.ended
