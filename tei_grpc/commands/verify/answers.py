"""What is asked of both sides, and the form of their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.types import Floats, ModelType, Pooling


class Task(StrEnum):
    """What the model is asked to do with every text."""

    EMBED = "embed"
    EMBED_SPARSE = "embed sparse"
    PREDICT = "predict"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class Question:
    """The texts, and what to do with each."""

    task: Task
    texts: Sequence[str]
    query: str  # for RERANK
    size: int  # of a sparse vector
    labels: tuple[str, ...]  # for PREDICT
    limit: int  # tokens of the longest input


@dataclass(frozen=True, slots=True)
class Answers:
    """What one side says."""

    token_ids: Sequence[Sequence[int]]  # of each text, special tokens included, not truncated
    values: Sequence[Floats]  # of each text: a unit vector, a sparse vector in full, or the logit of each label
    dtype: str
    about: Mapping[str, str]  # pooling, modules, path and so on, as far as the side tells


def question_of(model: ModelConfig, texts: Sequence[str], query: str) -> Question:
    """The question that fits the kind of the model."""
    return Question(
        task=_task(model),
        texts=texts,
        query=query,
        size=int(model.hf_config.get("vocab_size") or 0),
        labels=model.labels,
        limit=model.max_input_length,
    )


def _task(model: ModelConfig) -> Task:
    if model.kind is ModelType.RERANKER:
        return Task.RERANK
    if model.kind is ModelType.CLASSIFIER:
        return Task.PREDICT
    return Task.EMBED_SPARSE if Pooling.SPLADE in model.pooling else Task.EMBED


def spread(indices: NDArray[np.integer[Any]], values: Floats, size: int) -> Floats:
    """A sparse vector in full, [size]."""
    vector = np.zeros(size, np.float32)
    vector[indices] = values
    return vector
