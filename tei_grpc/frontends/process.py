"""The life of one front-end: a gRPC server around an engine whose device is in another process."""

import asyncio
import json
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

from pydantic import SecretStr

from tei_grpc import logs
from tei_grpc.config import Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError
from tei_grpc.frontends.files import SharedFiles, map_metrics
from tei_grpc.frontends.messages import Broken, Listening, Ready
from tei_grpc.frontends.remote_device import RemoteDevice
from tei_grpc.metrics import Metrics
from tei_grpc.runtime import life
from tei_grpc.runtime.signals import end_process
from tei_grpc.serve.grpc_server import GrpcServer
from tei_grpc.traces import open_traces

if TYPE_CHECKING:
    from tei_grpc.traces.recorder import Traces

GONE_SECONDS = 1.0  # for calls to send their status when the process with the model is gone


class Job(NamedTuple):
    """What a front-end is told at start."""

    settings: Settings
    number: int  # from 0
    files: SharedFiles
    channel: int = -1  # file descriptor of its end
    is_late: bool = False  # others serve already: listen only when ready

    def to_json(self) -> bytes:
        """Return what `from_json` reads, secrets included."""
        settings = self.settings.model_dump(exclude={"hf_api_token"}, exclude_defaults=True)
        return json.dumps([settings, *self[1:]], default=_to_text).encode()

    @staticmethod
    def from_json(text: bytes) -> "Job":
        """Read it."""
        settings, number, files, *rest = json.loads(text)
        return Job(Settings.model_validate(settings), number, SharedFiles(*files), *rest)


def _to_text(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def main() -> int:
    """Read the job from stdin, do it, and return the exit code."""
    text = sys.stdin.buffer.read()
    if not text:
        return 1  # the parent has ended meanwhile
    job = Job.from_json(text)
    settings = job.settings
    logs.configure(settings.log_level, json_output=settings.json_output, disable_spans=settings.disable_spans)
    asyncio.run(_run(job))
    return 0


async def _run(job: Job) -> None:
    device = RemoteDevice(socket.socket(fileno=job.channel), job.files.slots, job.settings.max_concurrent_requests)
    try:
        traces = open_traces(job.settings)
        server = await _begin(job, device, traces)
    except StartupError as error:
        device.tell(Broken(error.message))
        await device.stop()
        end_process(1)
    await device.ending.wait()
    await _end(server, device)
    if traces is not None:
        await asyncio.to_thread(traces.close)


async def _begin(job: Job, device: RemoteDevice, traces: "Traces | None") -> GrpcServer:
    """Listen and load, in the order that leaves callers the least to wait for. Raises StartupError."""
    metrics = Metrics(map_metrics(job.files.metrics, job.settings.frontends)[job.number])
    engine = Engine(job.settings, device, metrics, traces, device.fetch)
    server = GrpcServer(job.settings, engine)
    device.on_reload = server.reload
    if job.is_late:
        await engine.start()
        await server.start()
    else:
        await server.start()
        device.tell(Listening())
        await engine.start()
    life.settle()
    device.tell(Ready())
    return server


async def _end(server: GrpcServer, device: RemoteDevice) -> None:
    """Drain; without the other process there is nothing to wait for but that all calls have their status."""
    stopping = asyncio.create_task(server.stop())
    gone = asyncio.create_task(device.gone.wait())
    if device.gone.is_set():
        await asyncio.wait({stopping}, timeout=GONE_SECONDS)
        end_process(1)
    await asyncio.wait({stopping, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():  # a second signal
        end_process(1)
    gone.cancel()
    stopping.result()
