"""A weightless device: the real worker, queue and permits around a runner that computes nothing."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.flight import Started
from tei_grpc.engine.queue import ANY, NONE, Demand, Size
from tei_grpc.engine.worker import Worker
from tei_grpc.errors import TeiError
from tei_grpc.loading.model_config import ModelConfig, read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.types import Batch, Entry, Kind, ModelFacts

SIZE = 8

Arrays = tuple[np.ndarray, ...]


def row(entry: Entry) -> np.ndarray:
    """A vector [SIZE] that only this entry's token ids give: what a mix-up between entries would show."""
    ids = entry.input_ids.astype(np.float32)
    return np.array([len(ids), ids.sum(), *(ids[i % len(ids)] for i in range(SIZE - 2))], np.float32)


def answer(entry: Entry) -> Arrays:
    """Arrays of the right shape for the entry's kind."""
    if entry.kind is Kind.EMBED_ALL:
        return (np.repeat(entry.input_ids.astype(np.float32)[:, None], SIZE, axis=1),)
    if entry.kind is Kind.EMBED_SPARSE:
        ids = np.unique(entry.input_ids).astype(np.uint32)
        return ids, np.ones(len(ids), np.float32)
    if entry.kind is Kind.PREDICT:
        return (entry.input_ids[1:2].astype(np.float32),)
    return (row(entry),)


class FakeRunner:
    """Answers at once; `gate` holds batches back, `answer` says what an entry gets, `batches` is what it saw."""

    def __init__(self) -> None:
        self.facts = ModelFacts("float32", "cpu", optimized=True, embedding_size=SIZE, hidden_size=SIZE)
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Event()
        self.answer: Callable[[Entry], Arrays | TeiError] = answer
        self.batches: list[list[Entry]] = []
        self.recoveries = 0
        self.ahead = 0
        self.seconds_per_token = 0.0

    def warm_up(self) -> None:
        """Nothing to warm."""

    def choose_budget(self, max_tokens: int) -> int:
        """All there is: nothing takes any time."""
        return max_tokens

    def check(self) -> None:
        """Always fit."""

    def wait_for_room(self, timeout: float) -> bool:
        """There always is."""
        return True

    def size(self, demand: Demand) -> Size:
        """All there is."""
        return Size(1, demand.budget, ANY)

    def tell(self, wake: Callable[[], None]) -> bool:
        """Batches run one after the other."""
        return False

    def launch(self, batch: Batch, demand: Demand = NONE) -> Started:
        """Like a CPU: the work is done where the answers are asked for."""
        return Started(lambda: self.run(batch), lambda: True)

    def run(self, batch: Batch) -> Sequence[Arrays | TeiError]:
        """One answer for each entry."""
        self.batches.append(list(batch.entries))
        self.running.set()
        self.gate.wait()
        return [self.answer(entry) for entry in batch.entries]


class FakeDevice(Worker):
    """The real worker, running a FakeRunner."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, metrics: Metrics | None = None, runner: FakeRunner | None = None
    ) -> None:
        super().__init__(model, config, metrics or Metrics())
        self.runner = runner or FakeRunner()

    @property
    def free_permits(self) -> int:
        return self._admission.free

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _load_runner(self) -> FakeRunner:  # type: ignore[override]
        return self.runner


@asynccontextmanager
async def fake_engine(
    folder: Path, runner: FakeRunner | None = None, **options: object
) -> AsyncIterator[tuple[Engine, FakeDevice]]:
    """A started engine over a checkpoint folder without weights, and its device; a closed gate is opened at the end."""
    config = EngineConfig(model_id=str(folder), **options)
    metrics = Metrics()
    device = FakeDevice(read_model_config(folder, config), config, metrics, runner)
    async with Engine(config, device, metrics) as engine:
        try:
            yield engine, device
        finally:
            device.runner.gate.set()
