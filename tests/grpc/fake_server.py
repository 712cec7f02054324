"""A server process without weights: python fake_server.py MODEL [PORT [FAULT [FRONTENDS]]].

A FAULT "held" never ends loading, "busy" never ends its first batch and counts as hung soon, "shut" never ends it, but
does not count as hung.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tei_grpc.config import Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError, TeiError
from tei_grpc.frontends.files import make_files, map_metrics
from tei_grpc.frontends.server import FrontendsServer
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.runtime import life
from tei_grpc.serve.grpc_server import serve
from tei_grpc.types import Batch
from tests.fakes import Arrays, FakeDevice, FakeRunner


class HeldRunner(FakeRunner):
    """Warms up for ever."""

    def warm_up(self) -> None:
        threading.Event().wait()


class BusyRunner(FakeRunner):
    """Computes for ever, like a kernel that does not end."""

    def run(self, batch: Batch) -> Sequence[Arrays | TeiError]:
        import torch

        while True:
            torch.ones(500, 500) @ torch.ones(500, 500)


class ShutRunner(FakeRunner):
    """Waits for ever."""

    def run(self, batch: Batch) -> Sequence[Arrays | TeiError]:
        self.gate.clear()
        return super().run(batch)


RUNNERS = {"": FakeRunner, "held": HeldRunner, "busy": BusyRunner, "shut": ShutRunner}


async def main(model: str, port: str = "0", fault: str = "", frontends: str = "0") -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    settings = Settings(
        model_id=model,
        hostname="127.0.0.1",
        port=int(port),
        runner_timeout=60 if fault == "shut" else 0.1,
        frontends=int(frontends),
    )
    try:
        device = FakeDevice(read_model_config(Path(model), settings), settings, runner=RUNNERS[fault]())
    except StartupError:
        device = None  # the engine meets the same error while it loads
    if settings.frontends:
        files = make_files()
        metrics = Metrics(others=map_metrics(files.metrics, settings.frontends))
        return await life.serve(lambda: FrontendsServer(settings, files, metrics, device), settings)
    return await serve(settings, Engine(settings, device))


sys.exit(asyncio.run(main(*sys.argv[1:])))
