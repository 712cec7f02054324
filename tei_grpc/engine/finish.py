"""The last touches on one entry's arrays: dimensions, normalization, scores, rank order. Pure functions on numpy."""

import math
from collections.abc import Sequence

import numpy as np

from tei_grpc.types import Floats, Prediction, Rank

TOGETHER = 64  # vectors that are scaled in one go: float64 of more would leave the cache


def embedding(vector: Floats, *, normalize: bool, dimensions: int | None) -> Floats:
    """Keep the first `dimensions` values of `vector` [dim], then scale to unit length (Matryoshka order)."""
    if dimensions is not None:
        vector = vector[:dimensions]
    return unit(vector) if normalize else vector


def embeddings(found: Sequence[Floats], *, normalize: bool, dimensions: int | None) -> Floats:
    """`embedding` of each vector [dim], one below the other."""
    vectors: Floats = np.stack([vector[:dimensions] for vector in found])
    if normalize:
        for start in range(0, len(vectors), TOGETHER):
            _scale(vectors[start : start + TOGETHER])
    return vectors


def _scale(vectors: Floats) -> None:
    """`unit` of each of some vectors [vectors, dim], in place."""
    wide = vectors.astype(np.float64)
    lengths = np.sqrt(np.einsum("rd,rd->r", wide, wide))
    lengths[lengths == 0.0] = 1.0
    wide /= lengths[:, None]
    vectors[:] = wide


def unit(vector: Floats) -> Floats:
    """`vector` [dim] / its Euclidean norm, the norm summed in float64; the zero vector stays zero."""
    square = float(np.dot(wide := vector.astype(np.float64), wide))
    if square == 0.0:
        return vector
    wide /= math.sqrt(square)
    scaled: Floats = wide.astype(np.float32)
    return scaled


def scores(logits: Floats, *, multi_label: bool) -> Floats:
    """Probabilities [labels]: softmax over several labels, a sigmoid for each if `multi_label` or there is just one."""
    if multi_label or len(logits) == 1:
        return sigmoid(logits)
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    shares: Floats = (exponentials / exponentials.sum()).astype(np.float32)
    return shares


def sigmoid(logits: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow at either end."""
    small = np.exp(-np.abs(logits.astype(np.float64)))
    return np.where(logits >= 0, 1.0 / (1.0 + small), small / (1.0 + small)).astype(np.float32)


def predictions(logits: Floats, labels: Sequence[str], *, raw_scores: bool, multi_label: bool) -> list[Prediction]:
    """Every label with its score, by descending logit; equal logits keep the label order."""
    values = logits if raw_scores else scores(logits, multi_label=multi_label)
    return [Prediction(float(values[i]), labels[i]) for i in descending(logits)]


def ranks(logits: Floats, *, raw_scores: bool) -> list[Rank]:
    """Positions [texts] by descending logit, not by the score it saturates to; equal logits keep the input order."""
    values = logits if raw_scores else sigmoid(logits)
    return [Rank(i, float(values[i])) for i in descending(logits)]


def descending(values: Floats) -> list[int]:
    """Indices of `values` from largest to smallest, stable."""
    order: list[int] = np.argsort(-values, kind="stable").tolist()
    return order
