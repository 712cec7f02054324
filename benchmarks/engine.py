"""The engine without gRPC: texts a second, and the fraction of the machine's limit that they are.

    python -m benchmarks.engine [--model bert-base] [--workloads P] [--dtype float32 bfloat16]

`runner` is the model alone: texts tokenized beforehand, sorted by length, in batches of 4,096 tokens. `engine` is what
callers get who know nothing of each other: every text a call of its own, all at once, from text to vector. `engine, as
a list` is what a Python caller gets who has all texts: one call of `embed_many`.
"""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.limit import MEASURED, Gemm, Shape
from benchmarks.measurements import Clock, Measurements, choose_clock
from benchmarks.options import Options, Texts, parser
from benchmarks.results import publish
from benchmarks.workloads import read_tokenizer
from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import fill, pack
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.runner import Runner
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Batch, Caller, Entry, Kind

BATCH_TOKENS = 4096
WAITING = Caller(waits=True)


class Subject:
    """One dtype: its limit, its runner, its engine."""

    def __init__(self, folder: Path, dtype: str, loop: asyncio.Runner) -> None:
        config = EngineConfig(model_id=str(folder), dtype=dtype)
        self._shape = Shape.read(folder)
        self._gemm = Gemm(self._shape, dtype) if dtype in MEASURED else None
        self._runner = Runner(read_model_config(folder, config), config)
        self._loop = loop
        self._engine = Engine(config)
        loop.run(self._engine.start())
        gc.freeze()  # as the server does: what is loaded is not garbage

    def close(self) -> None:
        """End the engine."""
        self._loop.run(self._engine.stop())

    def measure(self, workload: Texts, batches: Sequence[Batch], clock: Clock) -> Iterator[tuple[str, float]]:
        """Texts a second of each part."""
        if self._gemm is not None:
            yield "limit", len(workload) * self._gemm.rate(clock) / self._shape.flops(workload.lengths)
        start = clock()
        for batch in batches:
            self._runner.run(batch)
        yield "runner", len(workload) / (clock() - start)
        start = clock()
        self._loop.run(self._embed(workload.texts))
        yield "engine", len(workload) / (clock() - start)
        start = clock()
        self._loop.run(self._engine.embed_many(workload.texts))
        yield "engine, as a list", len(workload) / (clock() - start)

    async def _embed(self, texts: Sequence[str]) -> None:
        await asyncio.gather(*(self._engine.embed(text, caller=WAITING) for text in texts))


@contextmanager
def started(folder: Path, dtypes: Sequence[str]) -> Iterator[dict[str, Subject]]:
    """A subject for each dtype."""
    with ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner())
        subjects = {}
        for dtype in dtypes:
            subjects[dtype] = Subject(folder, dtype, loop)
            stack.callback(subjects[dtype].close)
        yield subjects


def sorted_batches(folder: Path, texts: Sequence[str], max_tokens: int = BATCH_TOKENS) -> list[Batch]:
    """The texts, tokenized, the shortest first, packed as full as they go."""
    ids = [np.array(encoding.ids, np.int32) for encoding in read_tokenizer(folder).encode_batch(texts)]
    left = [Entry(row, Kind.EMBED, some) for row, some in enumerate(sorted(ids, key=len))]
    batches = []
    while left:
        taken = set(fill(map(len, left), max_tokens, None))
        batches.append(pack([entry for row, entry in enumerate(left) if row in taken]))
        left = [entry for row, entry in enumerate(left) if row not in taken]
    return batches


def measure(options: Options) -> Measurements:
    """All rounds; the first, which makes kernels, is not counted."""
    workloads, clock = options.workloads(), choose_clock(cpu_time=options.cpu_time)
    batches = {name: sorted_batches(options.folder, workload.texts) for name, workload in workloads.items()}
    found = Measurements("texts/s")
    with started(options.folder, options.dtypes) as subjects:
        for counted in [False, *[True] * options.rounds]:
            for name, workload in workloads.items():
                for dtype, subject in subjects.items():
                    for part, rate in subject.measure(workload, batches[name], clock):
                        if counted:
                            found.add(name, f"{dtype} {part}", rate, base_of(dtype, part))
    return found


def base_of(dtype: str, part: str) -> str:
    """What a part is compared with: the limit, where there is one, else the same part in bfloat16."""
    if part == "limit":
        return ""
    return f"{dtype} limit" if dtype in MEASURED else f"bfloat16 {part}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and publish."""
    options = Options(parser(__doc__).parse_args(arguments))
    publish("engine", list(measure(options).rows()), options.output, **options.about)


if __name__ == "__main__":
    main()
