"""Our side, in this process: the engine as the server would run it."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

import numpy as np

from tei_grpc.commands.verify.answers import Answers, Question, Task, spread
from tei_grpc.commands.verify.progress import Progress
from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Caller, Floats, Input, Scoring

T = TypeVar("T")

WAITING = Caller(waits=True)
SCORING = Scoring(truncate=True, raw_scores=True)


def ask(config: EngineConfig, model: ModelConfig, question: Question, progress: Progress) -> Answers:
    """Load the model and answer all texts, together, as a busy server would. Raises TeiError."""
    return asyncio.run(_ask(config, model, question, progress))


async def _ask(config: EngineConfig, model: ModelConfig, question: Question, progress: Progress) -> Answers:
    async with Engine(config) as engine:
        token_ids = [[token.id for token in await engine.tokenize(text)] for text in question.texts]
        values = await _values(engine, question, progress)
        return Answers(
            token_ids,
            values,
            engine.info.model_dtype,
            {
                "pooling": ", ".join(model.pooling) or "the model's head",
                "modules": ", ".join(module.type for module in model.modules) or "none after pooling",
                "path": "packed" if engine.info.optimized else "generic",
                "longest input": str(engine.info.max_input_length),
            },
        )


async def _values(engine: Engine, question: Question, progress: Progress) -> list[Floats]:
    if question.task is Task.RERANK:
        ranks = (await engine.rerank(question.query, question.texts, scoring=SCORING, caller=WAITING)).ranks
        return [np.array([rank.score], np.float32) for rank in sorted(ranks, key=lambda rank: rank.index)]
    return await _all((_value(engine, question, text) for text in question.texts), progress)


async def _value(engine: Engine, question: Question, text: str) -> Floats:
    if question.task is Task.PREDICT:
        result = await engine.predict(text, scoring=SCORING, caller=WAITING)
        scores = {prediction.label: prediction.score for prediction in result.predictions}
        return np.array([scores[label] for label in question.labels], np.float32)
    input = Input(text, truncate=True)
    if question.task is Task.EMBED_SPARSE:
        sparse = await engine.embed_sparse(input, caller=WAITING)
        return spread(sparse.indices, sparse.values, question.size)
    return (await engine.embed(input, caller=WAITING)).embeddings


async def _all(work: Iterable[Awaitable[T]], progress: Progress) -> list[T]:
    async def stepping(one: Awaitable[T]) -> T:
        result = await one
        progress.step()
        return result

    return await asyncio.gather(*map(stepping, work))
