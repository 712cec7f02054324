"""A server process without weights: python fake_server.py MODEL [PORT [held]]; "held" never ends loading."""

import asyncio
import logging
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tei_grpc.config import Settings
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.serve.grpc_server import serve
from tests.fakes import FakeDevice, FakeRunner


class HeldRunner(FakeRunner):
    """Warms up for ever."""

    def warm_up(self) -> None:
        threading.Event().wait()


async def main(model: str, port: str = "0", held: str = "") -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    settings = Settings(model_id=model, hostname="127.0.0.1", port=int(port))
    try:
        runner = HeldRunner() if held else FakeRunner()
        device = FakeDevice(read_model_config(Path(model), settings), settings, runner=runner)
    except StartupError:
        device = None  # the engine meets the same error while it loads
    return await serve(settings, Engine(settings, device))


sys.exit(asyncio.run(main(*sys.argv[1:])))
