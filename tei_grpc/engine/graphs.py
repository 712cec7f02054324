"""Owns CUDA graphs of the encoder for small batches, whose kernels take less time than it takes to launch them.

A graph repeats the very same kernels on the very same memory. So there is one for each of a few shapes, the buckets: a
batch is padded to the smallest that holds it, with blank texts behind its own, copied to where the graph reads, and
its hidden states are copied from where the graph writes. A graph is proven before it is used.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tei_grpc.engine.batch import pack
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.types import Batch, Entry, Kind

logger = logging.getLogger(__name__)

SIZES = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # tokens
SHORT = 128  # tokens of the longest text of a bucket for short ones: a block of flash attention
SHORT_MEAN, LONG_MEAN = 4, 32  # tokens of a text, on average, from which on the texts of a full bucket fit
TOLERANCE = 2e-2  # of the largest value, in 16 bits
FIELDS = ("input_ids", "position_ids", "token_type_ids", "cu_seqlens", "text_ids")

Encode = Callable[[PackedInputs], Tensor]
Place = Callable[[Batch, Sequence[int]], PackedInputs]  # a batch, and the lengths of blank texts behind it
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


class Bucket(NamedTuple):
    """A shape of a batch, blank texts included."""

    tokens: int
    texts: int
    longest: int  # tokens of a text

    def holds(self, batch: Batch) -> bool:
        """With one row or more for blank texts, and enough of those."""
        missing, rest = self._missing(batch)
        return batch.max_seqlen <= self.longest and missing > 0 and 0 < rest <= missing * self.longest

    def blank(self, batch: Batch) -> list[int]:
        """The lengths of the texts that are missing: empty ones, and behind them those that fill the rest.

        The last one is never empty, so that every text, empty or not, starts at a row that exists.
        """
        missing, rest = self._missing(batch)
        full, last = divmod(rest - 1, self.longest)
        return [0] * (missing - full - 1) + [self.longest] * full + [last + 1]

    def _missing(self, batch: Batch) -> tuple[int, int]:
        """Texts and tokens."""
        return self.texts - (len(batch.cu_seqlens) - 1), self.tokens - len(batch.input_ids)


class Graph(NamedTuple):
    """A recorded encoder."""

    inputs: PackedInputs  # where it reads
    replay: Callable[[], object]
    hidden: Tensor  # where it writes


def buckets(most_tokens: int, longest: int) -> list[Bucket]:
    """Those that a batch of up to `most_tokens`, in texts of up to `longest`, may need, the first that holds it first.

    Of each size one is for many short texts, the other for few long ones: what flash attention costs grows with the
    number of texts times the longest that there may be.
    """
    found = []
    for size in SIZES:
        if size // 2 < most_tokens:
            found.append(Bucket(size, size // SHORT_MEAN + 1, min(size, SHORT, longest)))
            if min(size, longest) > SHORT:
                found.append(Bucket(size, size // LONG_MEAN + 1, min(size, longest)))
    return found


class Graphs:
    """The graphs of one model."""

    def __init__(self, encode: Encode, capture: Capture, shapes: Sequence[Bucket], vocabulary: int) -> None:
        """`shapes` as of `buckets`; `vocabulary`: token ids to prove the graphs with."""
        self._encode = encode
        self._capture = capture
        self._shapes = shapes
        self._vocabulary = vocabulary
        self._graphs: dict[Bucket, Graph] = {}

    def record(self, place: Place) -> None:
        """Record a graph for each shape, the last and largest first: the others then live in its memory.

        Some encoders cannot be recorded, because they look at numbers of the batch on the host; they go without.
        Raises torch.OutOfMemoryError.
        """
        graphs: dict[Bucket, Graph] = {}
        for bucket in reversed(self._shapes):
            try:
                graphs[bucket] = self._record(bucket, place)
                apart = self._prove(bucket, graphs[bucket], place)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model does that a graph cannot hold
                logger.info("small batches run without CUDA graphs: %s: %s", type(error).__name__, error)
                return
            if not apart <= TOLERANCE:
                logger.warning("small batches run without CUDA graphs: one of %d tokens is %.2g off", bucket[0], apart)
                return
        self._graphs = dict(reversed(graphs.items()))
        logger.info("%d CUDA graphs, for batches of up to %d tokens", len(graphs), self._shapes[-1].tokens)

    def find(self, batch: Batch) -> Bucket | None:
        """The smallest recorded bucket that holds the batch."""
        return next((bucket for bucket in self._graphs if bucket.holds(batch)), None)

    def encode(self, bucket: Bucket, inputs: PackedInputs) -> Tensor:
        """Hidden states [tokens of the bucket, hidden] of a batch that was placed with the bucket's blank texts."""
        return _replay(self._graphs[bucket], inputs)

    def _record(self, bucket: Bucket, place: Place) -> Graph:
        """What an encoder may not look at is not there: it would be fixed in the graph."""
        batch = sample(bucket, self._vocabulary, seed=0)
        inputs = place(batch, bucket.blank(batch))
        still = {name: getattr(inputs, name).clone() for name in FIELDS}
        inputs = replace(inputs, **still, max_seqlen=bucket.longest, offsets=(), groups=())
        return Graph(inputs, *self._capture(lambda: self._encode(inputs)))

    def _prove(self, bucket: Bucket, graph: Graph, place: Place) -> float:
        """How far it is off for another batch than it was recorded with."""
        batch = sample(bucket, self._vocabulary, seed=1)
        expected = self._encode(place(batch, ()))
        return difference(_replay(graph, place(batch, bucket.blank(batch)))[: len(expected)], expected)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the largest value; NaN where there is one."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _replay(graph: Graph, inputs: PackedInputs) -> Tensor:
    for name in FIELDS:
        getattr(graph.inputs, name).copy_(getattr(inputs, name), non_blocking=True)
    graph.replay()
    return graph.hidden.clone()


def sample(bucket: Bucket, vocabulary: int, seed: int) -> Batch:
    """Texts of random tokens and lengths, as many as the bucket holds."""
    generator = np.random.default_rng(seed)
    shortest = -(-bucket.tokens // bucket.texts)  # with fewer tokens a text, they would not fill the bucket
    texts: list[NDArray[np.int32]] = []
    while True:
        length = int(generator.integers(shortest, bucket.longest, endpoint=True))
        if len(texts) == bucket.texts - 1 or sum(map(len, texts)) + length >= bucket.tokens:
            break
        texts.append(generator.integers(0, vocabulary, length, np.int32))
    texts = texts or [generator.integers(0, vocabulary, 1, np.int32)]
    return pack([Entry(row, Kind.EMBED_ALL, text) for row, text in enumerate(texts)])


def cuda_capture() -> Capture:
    """Records on the current device; all graphs share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side), _no_waiting():
                run()  # what libraries set up at a first call is no part of the graph
        finally:
            torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = run()
        return graph.replay, hidden

    return capture


@contextmanager
def _no_waiting() -> Iterator[None]:
    """An encoder that waits for the device fails in here: a capture that it makes fail leaves torch inside of it."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
