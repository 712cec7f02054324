"""One Rerank request: its texts are scored one by one, in any number, then ranked together."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from tei_grpc.engine import finish, validation
from tei_grpc.engine.request import Request
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Input, Metadata, Output, RerankResult

T = TypeVar("T")


class Answer(NamedTuple):
    """What came back for one input, and what it cost."""

    output: Output
    metadata: Metadata


class Score(NamedTuple):
    """The logit of one pair, and what it cost."""

    logit: float
    metadata: Metadata


class Reranking:
    """Scores pairs and ranks them, as one request in the books. To be used in a `with` statement."""

    def __init__(self, model: ModelConfig, request: Request, answer: Callable[[Input], Awaitable[Answer]]) -> None:
        self._model = model
        self._request = request
        self._answer = answer
        self._started = time.monotonic_ns()

    def __enter__(self) -> Self:
        self._request.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request.__exit__(kind, error, trace)

    async def score(self, input: Input) -> Score:
        """The logit of a query (`input.text`) and a text (`input.pair`)."""
        validation.check_input(self._model, input)
        answer = await self._answer(input)
        self._request.answer_input(answer.metadata)
        return Score(float(answer.output.arrays[0][0]), answer.metadata)

    def rank(self, scores: Sequence[Score], *, raw_scores: bool) -> RerankResult:
        """All scores, best first. Raises ValidationError when there are none."""
        validation.check_some(scores)
        logits = np.array([score.logit for score in scores], np.float32)
        metadata = summarize([score.metadata for score in scores], time.monotonic_ns() - self._started)
        return RerankResult(finish.ranks(logits, raw_scores=raw_scores), metadata)

    def succeed(self, result: RerankResult) -> None:
        """The answer is on its way."""
        self._request.succeed(result.metadata)


def summarize(parts: Sequence[Metadata], total_time_ns: int) -> Metadata:
    """Characters and tokens of all parts together; the average of their times."""
    return Metadata(
        compute_chars=sum(part.compute_chars for part in parts),
        compute_tokens=sum(part.compute_tokens for part in parts),
        total_time_ns=total_time_ns,
        tokenization_time_ns=sum(part.tokenization_time_ns for part in parts) // len(parts),
        queue_time_ns=sum(part.queue_time_ns for part in parts) // len(parts),
        inference_time_ns=sum(part.inference_time_ns for part in parts) // len(parts),
    )


async def all_in_order(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all works, run together. The first in order that fails decides the error; the rest is cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
