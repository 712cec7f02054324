"""Owns the model: loads it, and turns a batch into one answer per entry."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from tei_grpc import cpus
from tei_grpc.config import EngineConfig
from tei_grpc.engine.answers import Answer, Encoded, NotFiniteError, Piece, answerers
from tei_grpc.engine.batch import pack
from tei_grpc.engine.budget import choose_budget, mixed_lengths
from tei_grpc.engine.dense import load_modules
from tei_grpc.engine.flight import Started
from tei_grpc.engine.loader import load_model
from tei_grpc.engine.pipeline import BuildPipeline, Mark, build_pipeline
from tei_grpc.engine.placement import Placement, place_model
from tei_grpc.engine.queue import ANY, NONE, Demand, Size
from tei_grpc.engine.shards import THREADS, Shards, results
from tei_grpc.engine.workspace import Watch, report, workspace
from tei_grpc.errors import ModelTypeError, StartupError, TeiError, reason_of
from tei_grpc.layers.precision import Float32
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Batch, Entry, Kind, ModelFacts, Pooling

CHECK = (11,)  # tokens of each text of a batch
# Flex attention is compiled anew for sizes of 1, and for such as equal the number of heads when it is first compiled:
# so these have two, three and one block of 128 rows, and one row.
WARM_UP = ((11, 32, 128), (32,) * 12, CHECK, (1,))
# Tokens of a batch that is started while another one runs, on half of the cores: fewer wait for what may join them, or
# for the other's end. Below it, the interpreter's work for a batch, which grows little with it, begins to count.
LEAST_BESIDE = 256
LONG_SECONDS = 2.0  # for the longest input that is run at start


class Computed(NamedTuple):
    """What some texts of a batch got."""

    rows: Sequence[int]  # of the batch, all of one kind
    piece: Piece  # on the host


class Runner:
    """One model on one device. Not thread-safe: one thread calls it."""

    def __init__(self, model: ModelConfig, config: EngineConfig, pipeline: BuildPipeline = build_pipeline) -> None:
        """Load the model; `pipeline` makes its way through the device. Raises StartupError saying what to change."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(cpus.available())
        placement = place_model(config, model.hf_config)
        self._model = load_model(model, config, placement)
        self._modules = load_modules(model.modules).to(placement.device)
        self._answerers = answerers(model, self._model, self._modules, placement.device)
        self.kind = next(iter(self._answerers))  # of entries that are run for their time and memory alone
        self._pipeline = pipeline(placement, self._model, model, config)
        self._shards = Shards(self._model.hidden_size, torch.get_num_threads() if self._may_shard(placement) else 1)
        self._max_input_length, self._max_batch_tokens = model.max_input_length, config.max_batch_tokens
        self._vocabulary = model.vocabulary
        self._is_narrow = placement.dtype != "float32"
        self.seconds_per_token = 0.0  # of the largest batch that was measured at start; 0 where none was
        self._tried = 0  # tokens of the largest batch that was run at start on a CPU
        self.workspace = workspace(model, self._model.hidden_size, placement.dtype) if self._model.optimized else None
        self.recoveries = 0  # inputs that 16-bit numbers were too small for, answered in float32
        self._facts = ModelFacts(
            dtype=placement.dtype,
            device=placement.device.type,
            optimized=self._model.optimized,
            embedding_size=self._embedding_size(model),
            hidden_size=self._model.hidden_size,
        )

    def _may_shard(self, placement: Placement) -> bool:
        """Whether threads may share the model: transformers' own may keep things from call to call.

        What runs beside the caller already has a device of its own.
        """
        return placement.device.type == "cpu" and self._model.optimized and not self._pipeline.ahead

    @property
    def ahead(self) -> int:
        """How many batches may run, or wait to, while another one is started."""
        return self._pipeline.ahead or (THREADS if self._shards.busy else 0)

    def size(self, demand: Demand) -> Size:
        """How large the next batch should be.

        Where two may run side by side each takes half of what waits, if that is worth it, and of the budget, or what
        the other one leaves of it, so that both together take no more memory; longer texts wait for all cores.
        """
        waiting, _, budget = demand
        most, share = self._room_beside(self._shards.tokens, budget), max(waiting // THREADS, LEAST_BESIDE)
        if self._shards.busy:
            return Size(min(LEAST_BESIDE, most), most, most, share)
        if self._shards.is_used and waiting >= THREADS * LEAST_BESIDE:
            return Size(1, most, ANY, share)
        return Size(1, budget, ANY)

    def _room_beside(self, tokens: int, budget: int) -> int:
        """The most tokens of a batch beside one that has `tokens`."""
        return min(budget // THREADS, budget - tokens)

    def wait_for_room(self, timeout: float) -> bool:
        """Until a batch that is started would run at once; False when none would after `timeout` seconds."""
        return self._shards.wait(THREADS - 1, timeout)

    def tell(self, wake: Callable[[], None]) -> bool:
        """Have `wake` called when one of the batches that run side by side may have ended.

        False where they run one after the other, and nobody knows when that is.
        """
        self._shards.wake = wake
        return not self._pipeline.ahead

    @property
    def facts(self) -> ModelFacts:
        """What only the loaded model knows; which kernels it runs on, after `warm_up` only."""
        return replace(self._facts, kernels=self._pipeline.kernels)

    def warm_up(self) -> None:
        """Run small batches, so that the first caller does not pay for what kernels set up once.

        On CUDA also record graphs, and run the largest batch that may come. Raises StartupError when the model does not
        run, or the batch does not fit.
        """
        try:
            self._run_small()
            with torch.inference_mode():
                self._pipeline.warm_up(self._max_input_length)
            if self._pipeline.device.type == "cuda":
                self._run_largest()
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"`--max-batch-tokens` (MAX_BATCH_TOKENS): a batch of {self._max_batch_tokens} tokens does not fit "
                f"into the memory of {self._pipeline.device}; lower it"
            ) from error

    def _run_small(self) -> None:
        try:
            for lengths in WARM_UP:
                self._run_random(lengths)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # numbers that fit each other on paper
            raise StartupError(f"the model that `config.json` describes does not run: {reason_of(error)}") from error

    def _run_largest(self) -> None:
        tokens = self._max_batch_tokens
        full, rest = divmod(tokens, self._max_input_length)
        for kind in self._answerers:
            started = time.perf_counter()
            self._run_random([self._max_input_length] * full + [rest] * (rest > 0), kind)
            self.seconds_per_token = (time.perf_counter() - started) / tokens

    def check(self) -> None:
        """Raise what the device raises when it can no longer run. Waits until nothing else does."""
        self._shards.wait(0)
        self._pipeline.reset()
        self._run_random(CHECK)

    def _run_random(self, lengths: Sequence[int], kind: Kind | None = None) -> None:
        """Kernels are proven with these texts, always the same: tokens that are all equal would hide what is wrong."""
        kind, generator = kind or self.kind, np.random.default_rng(0)
        lengths = [min(length, self._max_input_length) for length in lengths]
        ids = [generator.integers(0, self._vocabulary, length, np.int32) for length in lengths]
        recoveries = self.recoveries
        self.run(pack([Entry(row, kind, text) for row, text in enumerate(ids)]))
        self.recoveries = recoveries  # of callers' inputs

    def choose_budget(self, max_tokens: int) -> int:
        """How many tokens a batch should have, found by measuring on a CPU; `max_tokens` at the most."""
        if self._pipeline.device.type != "cpu":
            return max_tokens
        watch = Watch()
        budget = choose_budget(self._seconds, max_tokens)
        if self.workspace is not None:
            self._run_long()
            report(self.workspace, watch, tried=self._tried, most=max(budget, self._max_input_length))
        cpus.give_memory_back()  # batches were tried that are larger than those to come
        return budget

    def _run_long(self) -> None:
        """Run the longest input, or what of it LONG_SECONDS suffice for, unless batches were as large."""
        longest = min(self._max_input_length, int(LONG_SECONDS / self.seconds_per_token))
        if longest > self._tried:
            self._run_random([longest])
            self._tried = longest

    def _seconds(self, tokens: int) -> float:
        started = time.perf_counter()
        self._run_random(mixed_lengths(tokens, self._max_input_length))
        seconds = time.perf_counter() - started
        self.seconds_per_token = seconds / tokens
        self._tried = max(self._tried, tokens)
        return seconds

    def run(self, batch: Batch) -> list[Answer]:
        """Answer every entry, in order, with what `types.Output.arrays` says for its kind, or with its own error.

        Raises whatever the device raises when the batch as a whole cannot be run.
        """
        return list(self.launch(batch).collect())

    def launch(self, batch: Batch, demand: Demand = NONE) -> Started:
        """Start a batch, behind which there is `demand`; `collect` then gives what `run` gives. Either raises the same.

        Where nothing can run beside the caller, the work is done there.
        """
        lengths = [len(entry) for entry in batch.entries]
        shards = self._shards.cut(lengths, into=1 if self._is_half(sum(lengths), demand) else THREADS)
        if shards:
            return self._launch_shards(batch, shards)
        with torch.inference_mode():
            computed = self._compute(batch)
            if self._pipeline.ahead:
                computed = iter(list(computed))
            mark = self._pipeline.mark()
        return Started(partial(self._collect, batch, partial(self._wait_for, batch, computed, mark)), mark.is_done)

    def _is_half(self, tokens: int, demand: Demand) -> bool:
        """Whether the other thread will have what waits behind a batch, if this one has the batch alone."""
        waiting, first, budget = demand
        return (
            waiting >= LEAST_BESIDE
            and tokens <= self._room_beside(0, budget)
            and first <= self._room_beside(tokens, budget)
        )

    def _collect(self, batch: Batch, answer: Callable[[], list[Answer]]) -> list[Answer]:
        answers = answer()
        if self._is_narrow:
            for row, found in enumerate(answers):
                if isinstance(found, NotFiniteError):
                    answers[row] = self._run_again(batch.entries[row])
        return answers

    def _wait_for(self, batch: Batch, computed: Iterator[Computed], mark: Mark) -> list[Answer]:
        mark.wait()
        with torch.inference_mode():
            return self._read(batch, computed)

    def _launch_shards(self, batch: Batch, shards: Sequence[Sequence[int]]) -> Started:
        batches = [pack([batch.entries[row] for row in rows]) for rows in shards]
        futures = self._shards.start(self._answer, batches)
        answer = partial(self._join_shards, batch, shards, futures)
        return Started(partial(self._collect, batch, answer), lambda: all(future.done() for future in futures))

    def _join_shards(
        self, batch: Batch, shards: Sequence[Sequence[int]], futures: list[Future[list[Answer]]]
    ) -> list[Answer]:
        answers = dict(zip(chain(*shards), chain(*results(futures)), strict=True))
        return [answers[row] for row in range(len(batch.entries))]

    def _answer(self, batch: Batch) -> list[Answer]:
        with torch.inference_mode():
            return self._read(batch, self._compute(batch))

    def _compute(self, batch: Batch, *, plain: bool = False) -> Iterator[Computed]:
        """One piece after the other, so that a reader on the same thread holds few of them at a time."""
        inputs, hidden = self._pipeline.encode(batch, plain=plain)
        encoded = Encoded(hidden, inputs, batch.entries)
        for kind, rows in _rows_by_kind(batch.entries).items():
            if kind not in self._answerers:
                continue
            start = 0
            for values, counts in self._answerers[kind].compute(encoded, rows):
                texts = slice(start, start + len(counts))
                yield Computed(rows[texts], Piece(self._pipeline.fetch(values), counts))
                start = texts.stop

    def _read(self, batch: Batch, computed: Iterator[Computed]) -> list[Answer]:
        entries = batch.entries
        answers: list[Answer] = [ModelTypeError(f"the model cannot answer `{entry.kind}`") for entry in entries]
        for rows, piece in computed:
            read = self._answerers[entries[rows[0]].kind].read
            for row, answer in zip(rows, read([entries[row] for row in rows], piece), strict=True):
                answers[row] = answer
        return answers

    def _run_again(self, entry: Entry) -> Answer:
        """An input that 16-bit numbers are too small for, alone and in float32, which takes twice the memory."""
        self._shards.wait(0)
        batch = pack([entry])
        with torch.inference_mode(), Float32():
            computed = list(self._compute(batch, plain=True))
            self._pipeline.mark().wait()
            (answer,) = self._read(batch, iter(computed))
        if not isinstance(answer, TeiError):
            self.recoveries += 1
        return answer

    def _embedding_size(self, model: ModelConfig) -> int:
        if Pooling.SPLADE in model.pooling:
            return model.vocabulary
        try:
            pooled = torch.zeros(1, self._model.hidden_size * max(1, len(model.pooling)), device=self._pipeline.device)
            return int(self._modules(pooled).shape[1])
        except RuntimeError as error:
            raise StartupError(f"the modules after pooling do not fit together: {reason_of(error)}") from error


def _rows_by_kind(entries: Sequence[Entry]) -> dict[Kind, list[int]]:
    rows: dict[Kind, list[int]] = {}
    for row, entry in enumerate(entries):
        rows.setdefault(entry.kind, []).append(row)
    return rows
