"""A server process without weights: python fake_server.py MODEL [PORT [held | busy]].

"held" never ends loading, "busy" never ends its first batch.
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
from tei_grpc.loading.model_config import read_model_config
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


RUNNERS = {"": FakeRunner, "held": HeldRunner, "busy": BusyRunner}


async def main(model: str, port: str = "0", fault: str = "") -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    settings = Settings(model_id=model, hostname="127.0.0.1", port=int(port), runner_timeout=0.1)
    try:
        device = FakeDevice(read_model_config(Path(model), settings), settings, runner=RUNNERS[fault]())
    except StartupError:
        device = None  # the engine meets the same error while it loads
    return await serve(settings, Engine(settings, device))


sys.exit(asyncio.run(main(*sys.argv[1:])))
