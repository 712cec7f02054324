"""Weightless runners that fail at a bad entry, or only start their batches."""

from collections.abc import Callable

from tei_grpc.engine.flight import Started
from tei_grpc.engine.queue import NONE, Demand
from tei_grpc.types import Batch, Entry
from tests.fakes import FakeRunner, answer

BAD = 13


def fussy(entry: Entry):
    """Raise for the bad entry, and so for each batch that it is in."""
    if entry.id == BAD:
        raise ValueError("/secret/path")
    return answer(entry)


class Overlapping(FakeRunner):
    """Like a CUDA device: a batch is only started by `launch`. `log` is what it was asked, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 1
        self.log: list[str] = []
        self.waiting: list[int] = []
        self.failing: Callable[[str, Batch], None] = lambda step, batch: None
        self.is_done: Callable[[Batch], bool] = lambda batch: True

    def launch(self, batch: Batch, demand: Demand = NONE):
        name = "+".join(str(each.id) for each in batch.entries)
        self.log.append(f"launch {name}")
        self.waiting.append(demand.waiting)
        self.failing("launch", batch)

        def collect():
            self.log.append(f"collect {name}")
            self.failing("collect", batch)
            return self.run(batch)

        return Started(collect, lambda: self.is_done(batch))
