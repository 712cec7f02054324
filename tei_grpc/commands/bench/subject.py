"""What is measured: the model in one dtype, batch by batch as the server forms them, without gRPC."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tei_grpc.commands.bench.texts import SHORT
from tei_grpc.commands.verify.progress import Progress
from tei_grpc.commands.verify.texts import QUERY
from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import fill, pack
from tei_grpc.engine.runner import Runner
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Batch, Entry, Input, Kind, ModelType, Pooling

BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)  # tokens
ROUNDS = 3
LATENCIES = 20
PROBE_TOKENS = 256


@dataclass(frozen=True)
class Encoded:
    """The texts as the model sees them, one short text, and the seconds that tokenizing takes per text."""

    entries: Sequence[Entry]
    short: Entry
    seconds: float


@dataclass(frozen=True)
class Speed:
    """One dtype. Texts and seconds are medians."""

    dtype: str
    texts_per_second: dict[int, float]  # by budget
    batch_seconds: dict[int, float]  # of the longest batch, by budget
    latency: float  # seconds for one short text, tokenizing not counted


def encode(model: ModelConfig, config: EngineConfig, texts: Sequence[str]) -> Encoded:
    """Tokenize on one thread, cutting what is too long. Raises TeiError."""
    tokenizer = Tokenizer(model, config)
    try:
        started = time.perf_counter()
        entries = asyncio.run(_entries(tokenizer, model, texts))
        seconds = (time.perf_counter() - started) / len(texts)
        (short,) = asyncio.run(_entries(tokenizer, model, [SHORT]))
    finally:
        tokenizer.close()
    return Encoded(entries, short, seconds)


async def _entries(tokenizer: Tokenizer, model: ModelConfig, texts: Sequence[str]) -> list[Entry]:
    kind, entries = _kind(model), []
    for row, text in enumerate(texts):
        is_pair = model.kind is ModelType.RERANKER
        input = Input(QUERY, text, truncate=True) if is_pair else Input(text, truncate=True)
        encoding = await tokenizer.encode(input)
        entries.append(Entry(row, kind, encoding.input_ids, encoding.token_type_ids, encoding.prompt_tokens))
    return entries


def _kind(model: ModelConfig) -> Kind:
    if model.kind is not ModelType.EMBEDDING or not model.pooling:
        return Kind.PREDICT
    return Kind.EMBED_SPARSE if Pooling.SPLADE in model.pooling else Kind.EMBED


def measure(model: ModelConfig, config: EngineConfig, encoded: Encoded, seconds: float) -> Speed:
    """Load the model and run it; each measurement takes about that many seconds. Raises StartupError."""
    with Progress(str(config.dtype), len(BUDGETS) * ROUNDS) as progress:
        runner = Runner(model, config)
        runner.warm_up()
        entries = affordable(encoded.entries, seconds * _tokens_per_second(runner, encoded.entries))
        batches = {budget: form_batches(entries, budget) for budget in BUDGETS}
        rounds: dict[int, list[list[float]]] = {budget: [] for budget in BUDGETS}
        for _ in range(ROUNDS):
            for budget in BUDGETS:
                rounds[budget].append([_seconds(runner, batch) for batch in batches[budget]])
                progress.step()
        short = pack([encoded.short])
        return Speed(
            str(config.dtype),
            {budget: len(entries) / statistics.median(map(sum, some)) for budget, some in rounds.items()},
            {budget: statistics.median(map(max, some)) for budget, some in rounds.items()},
            statistics.median(_seconds(runner, short) for _ in range(LATENCIES)),
        )


def affordable(entries: Sequence[Entry], tokens: float) -> list[Entry]:
    """The first entries, until they have that many tokens together."""
    taken: list[Entry] = []
    for entry in entries:
        if tokens <= 0:
            break
        taken.append(entry)
        tokens -= len(entry)
    return taken


def form_batches(entries: Sequence[Entry], budget: int) -> list[Batch]:
    """As the server's queue would, were all of them waiting."""
    left, batches = list(entries), []
    while left:
        taken = set(fill(map(len, left), budget, None))
        batches.append(pack(sorted((entry for row, entry in enumerate(left) if row in taken), key=len)))
        left = [entry for row, entry in enumerate(left) if row not in taken]
    return batches


def _tokens_per_second(runner: Runner, entries: Sequence[Entry]) -> float:
    batch = pack(affordable(entries, PROBE_TOKENS))
    _seconds(runner, batch)  # the first run makes kernels
    return len(batch.input_ids) / _seconds(runner, batch)


def _seconds(runner: Runner, batch: Batch) -> float:
    started = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - started
