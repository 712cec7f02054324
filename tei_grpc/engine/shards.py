"""Owns how a CPU runs batches on all its cores: in shards, each on one of two threads that have half of the cores.

Threads that share a product wait for each other after every one of them, and idle through all that is not shared.
Shards wait for nobody: a batch that comes while both threads are idle is cut into two of equal cost, unless enough
waits behind it for the other thread; one that comes while one is at work goes to the other as it is. A lonely batch
that cannot be halved, such as a single text, is run by all cores together.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from tei_grpc.engine.flight import SHARD
from tei_grpc.types import Batch

T = TypeVar("T")
Calls = SimpleQueue[Callable[[], None] | None]  # None is the end

THREADS = 2
LEAST_TOKENS = 64  # of a shard; below it, to wake two threads takes longer than they save
UNEVEN = 1.1  # of half the cost: about what is lost where all products are shared
PIECES = 16  # texts of equal length stay together, but no more of them than make up this part of a batch


class Piece(NamedTuple):
    """Texts of equal length that lie side by side in a batch."""

    rows: range
    cost: int


class Shards:
    """Two threads that run the shards of a batch, and how a batch is cut for them; an odd core is not left out."""

    def __init__(self, hidden: int, threads: int) -> None:
        """Share torch's `threads`; `hidden` is the model's hidden size."""
        self._hidden = hidden
        self.is_used = threads % THREADS == 0
        self._calls: Calls = SimpleQueue()
        self._unfinished: list[int] = []  # tokens of each shard
        self._changed = threading.Condition()
        self.wake: Callable[[], None] = lambda: None  # called whenever one has ended
        if self.is_used:
            self._start(threads // THREADS)
            torch.set_num_threads(threads)  # what was set last holds for every thread to come

    @property
    def busy(self) -> int:
        """How many shards are under way."""
        with self._changed:
            return len(self._unfinished)

    @property
    def tokens(self) -> int:
        """Those under way."""
        with self._changed:
            return sum(self._unfinished)

    def wait(self, most: int, timeout: float | None = None) -> bool:
        """Until at the most so many shards are under way; False when there are more after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.busy <= most, timeout)

    def cut(self, lengths: Sequence[int], *, into: int = THREADS) -> list[list[int]]:
        """The rows of each shard of a batch that has texts of these lengths; none where all cores are to share it.

        Two shards must be about even. `into` 1 leaves the other thread to another batch, as does one that is at work.
        """
        if self.busy or (self.is_used and into == 1):
            return [list(range(len(lengths)))]
        if not self.is_used or sum(lengths) < 2 * LEAST_TOKENS:
            return []
        rows: tuple[list[int], list[int]] = ([], [])
        costs = [0, 0]
        for piece in sorted(self._pieces(lengths), key=lambda piece: piece.cost, reverse=True):
            lighter = costs.index(min(costs))
            rows[lighter].extend(piece.rows)
            costs[lighter] += piece.cost
        return [] if max(costs) > UNEVEN / 2 * sum(costs) else [sorted(shard) for shard in rows]

    def start(self, work: Callable[[Batch], T], shards: Sequence[Batch]) -> list[Future[T]]:
        """Have threads call `work` with each shard; the futures of what it returns."""
        futures: list[Future[T]] = [Future() for _ in shards]
        sizes = [len(shard.input_ids) for shard in shards]
        with self._changed:
            self._unfinished += sizes
        for future, shard, tokens in zip(futures, shards, sizes, strict=True):
            self._calls.put(partial(_settle, future, work, shard, self._ending(tokens)))
        return futures

    @contextmanager
    def _ending(self, tokens: int) -> Iterator[None]:
        """Nobody sees a shard that is under way and has answered, or the other way round."""
        with self._changed:
            yield
            self._unfinished.remove(tokens)
            self._changed.notify_all()
        self.wake()

    def _start(self, threads: int) -> None:
        """Two threads that end with this object, and which no process waits for at its end."""
        met = threading.Barrier(THREADS + 1)
        for number in range(THREADS):
            arguments = self._calls, met, threads
            threading.Thread(target=_serve, args=arguments, name=f"{SHARD}-{number}", daemon=True).start()
        met.wait()
        weakref.finalize(self, _end, self._calls)

    def _pieces(self, lengths: Sequence[int]) -> Iterator[Piece]:
        """Costs are FLOPs of a layer, 24 hidden^2 a token and 4 hidden for each token that it sees, over 12 hidden.

        Attention's are counted three times, as they run at about a third of the rate of the linear layers'.
        """
        costs = [length * (2 * self._hidden + length) for length in lengths]
        most = sum(costs) // PIECES
        for _, group in groupby(range(len(lengths)), key=lengths.__getitem__):
            rows = list(group)
            size = max(1, most // costs[rows[0]])
            for start in range(rows[0], rows[-1] + 1, size):
                piece = range(start, min(start + size, rows[-1] + 1))
                yield Piece(piece, costs[start] * len(piece))


def _serve(calls: Calls, met: threading.Barrier, threads: int) -> None:
    torch.get_num_threads()  # by which a thread takes over what is set elsewhere, once
    torch.set_num_threads(threads)
    met.wait()
    while call := calls.get():
        call()
        del call  # with what it holds


def results(futures: list[Future[T]]) -> list[T]:
    """What all have, when all are done. Raises the first one's error, which nothing here keeps, nor its batch."""
    wait(futures)
    return [futures.pop(0).result() for _ in range(len(futures))]


def _settle(future: Future[T], work: Callable[[Batch], T], shard: Batch, ending: AbstractContextManager[None]) -> None:
    try:
        found = work(shard)
    except BaseException as error:
        with ending:
            future.set_exception(error)
        del future  # which the error would keep, and that it: see `results`
    else:
        with ending:
            future.set_result(found)


def _end(calls: Calls) -> None:
    for _ in range(THREADS):
        calls.put(None)
