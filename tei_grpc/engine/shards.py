"""Owns how a CPU runs a batch on all its cores: in two shards of equal cost, each on a thread with half of the cores.

Threads that share a product wait for each other after every one of them, and idle through all that is not shared.
Shards meet once, at the end of the batch. What cannot be halved, such as a single text, is run by all cores together.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")

LEAST_TOKENS = 64  # of a shard; below it, to wake two threads takes longer than they save
UNEVEN = 1.1  # of half the cost: about what is lost where all products are shared
PIECES = 16  # texts of equal length stay together, but no more of them than make up this part of a batch


class Piece(NamedTuple):
    """Texts of equal length that lie side by side in a batch."""

    rows: range
    cost: int


class Shards:
    """Two threads that run the shards of a batch, and how a batch is cut for them."""

    def __init__(self, hidden: int, threads: int) -> None:
        """Share torch's `threads`; `hidden` is the model's hidden size."""
        self._hidden = hidden
        self._is_used = threads > 1 and threads != 3  # one core in three is too much to leave out
        self._pool = ThreadPoolExecutor(2, "shard", initializer=_use, initargs=(threads // 2,))
        if self._is_used:
            met = threading.Barrier(2)
            wait([self._pool.submit(met.wait) for _ in range(2)])  # both have started
            torch.set_num_threads(threads)  # what was set last holds for every thread to come

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each shard of a batch that has texts of these lengths; none where it is to be run as one."""
        if not self._is_used or sum(lengths) < 2 * LEAST_TOKENS:
            return []
        rows: tuple[list[int], list[int]] = ([], [])
        costs = [0, 0]
        for piece in sorted(self._pieces(lengths), key=lambda piece: piece.cost, reverse=True):
            lighter = costs.index(min(costs))
            rows[lighter].extend(piece.rows)
            costs[lighter] += piece.cost
        return [] if 2 * max(costs) > UNEVEN * sum(costs) else [sorted(shard) for shard in rows]

    def run(self, work: Callable[[S], T], shards: Sequence[S]) -> list[T]:
        """What `work` returns for each shard, when it has ended for all of them. Raises what it raised first."""
        futures = [self._pool.submit(work, shard) for shard in shards]
        wait(futures)
        return [future.result() for future in futures]

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


def _use(threads: int) -> None:
    """Let torch use so many threads in this one. It takes over what is set elsewhere when it is first asked."""
    torch.get_num_threads()
    torch.set_num_threads(threads)
