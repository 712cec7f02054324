"""A server process whose model does what a text says: python sick_server.py FOLDER PORT METRICS_PORT.

It has no weights. w190 raises, w191 takes 512 MiB, w192 ends the thread, w193 hangs for a while, w194 breaks the
tokenizer, w195 takes until there is a file `go` beside the model, w196 hangs for a while with the interpreter's lock.
A batch may take RUNNER_TIMEOUT seconds, one by default.
"""

import asyncio
import ctypes
import logging
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tei_grpc.config import Settings
from tei_grpc.cpus import tune_process
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import TeiError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.metrics import Metrics, MetricsListener
from tei_grpc.serve.grpc_server import serve
from tei_grpc.types import Batch, Input
from tests.fakes import Arrays, FakeDevice, FakeRunner

FIRST_WORD = 4  # the id of w0
HANG_SECONDS = 4
MUCH = 2**29


def wait(seconds: float) -> None:
    """Not by time.sleep, which libfaketime refuses."""
    select.select([], [], [], seconds)


class SickRunner(FakeRunner):
    """Fails as it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._go = folder / "go"

    def run(self, batch: Batch) -> Sequence[Arrays | TeiError]:
        words = {int(id) - FIRST_WORD for id in batch.input_ids}
        if 190 in words:
            raise RuntimeError("the model raises")
        if 191 in words:
            np.empty(MUCH, np.uint8)
        if 192 in words:
            raise SystemExit
        if 193 in words:
            wait(HANG_SECONDS)
        while 195 in words and not self._go.exists():
            wait(0.01)
        if 196 in words:
            ctypes.PyDLL(None).sleep(HANG_SECONDS)  # unlike CDLL it keeps the lock
        return super().run(batch)


class SickTokenizer(Tokenizer):
    """Breaks at w194."""

    def _plain(self, input: Input) -> str | None:
        if "w194" in input.text:
            raise RuntimeError("the tokenizer raises")
        return super()._plain(input)


async def main(folder: str, port: str, metrics_port: str) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    patience = float(os.environ.get("RUNNER_TIMEOUT", "1"))
    settings = Settings(model_id=folder, hostname="127.0.0.1", port=int(port), runner_timeout=patience)
    metrics = Metrics()
    MetricsListener(metrics, "127.0.0.1", int(metrics_port))
    device = FakeDevice(read_model_config(Path(folder), settings), settings, metrics, SickRunner(Path(folder)))
    return await serve(settings, Engine(settings, device, metrics))


if __name__ == "__main__":
    import tei_grpc.engine.engine

    tune_process()
    tei_grpc.engine.engine.Tokenizer = SickTokenizer
    sys.exit(asyncio.run(main(*sys.argv[1:])))
