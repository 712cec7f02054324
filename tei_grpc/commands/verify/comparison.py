"""How far two sides are apart, and whether that is near enough. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tei_grpc.commands.verify.answers import Answers, Task
from tei_grpc.types import Floats


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is near enough."""

    difference: float  # of any two numbers, times the largest value where that is above 1
    cosine: float | None  # of any two vectors; None for scores


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measures, and the names of those that are out of bounds."""

    bounds: Bounds
    equal_token_ids: int  # texts
    texts: int
    differences: Floats  # [texts] the largest absolute difference of each text
    cosines: Floats | None  # [texts]
    in_order: bool | None  # for rerankers
    allowed: float  # largest difference within the bounds
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Everything is within the bounds."""
        return not self.failures


FLOAT32 = {
    Task.EMBED: Bounds(1e-5, 0.99999),
    Task.EMBED_SPARSE: Bounds(1e-4, 0.99999),
    Task.PREDICT: Bounds(1e-4, None),
    Task.RERANK: Bounds(1e-4, None),
}
NARROW = {  # 16-bit numbers against float32
    Task.EMBED: Bounds(0.05, 0.999),
    Task.EMBED_SPARSE: Bounds(0.1, 0.999),
    Task.PREDICT: Bounds(0.1, None),
    Task.RERANK: Bounds(0.1, None),
}
INT8 = {  # linear layers in int8 against float32
    Task.EMBED: Bounds(0.1, 0.97),
    Task.EMBED_SPARSE: Bounds(0.3, 0.97),
    Task.PREDICT: Bounds(0.3, None),
    Task.RERANK: Bounds(0.3, None),
}


def compare(task: Task, ours: Answers, expected: Answers) -> Comparison:
    """Hold our answers against the expected ones, with the bounds for our dtype."""
    bounds = {"float32": FLOAT32, "int8": INT8}.get(ours.dtype, NARROW)[task]
    equal = sum(list(a) == list(b) for a, b in zip(ours.token_ids, expected.token_ids, strict=True))
    differences = np.array([_difference(a, b) for a, b in zip(ours.values, expected.values, strict=True)])
    allowed = bounds.difference * max(1.0, *(float(np.max(np.abs(values))) for values in expected.values))
    cosines = None
    if bounds.cosine is not None:
        cosines = np.array([_cosine(a, b) for a, b in zip(ours.values, expected.values, strict=True)])
    in_order = _is_in_order(ours.values, expected.values, allowed) if task is Task.RERANK else None
    failures = {
        "token ids": equal < len(ours.token_ids),
        "largest difference": not bool(np.all(differences <= allowed)),
        "cosine": cosines is not None and not bool(np.all(cosines >= bounds.cosine)),
        "order of scores": in_order is False,
    }
    failed = tuple(name for name, failure in failures.items() if failure)
    return Comparison(bounds, equal, len(ours.token_ids), differences, cosines, in_order, allowed, failed)


def _difference(a: Floats, b: Floats) -> float:
    return float(np.max(np.abs(a - b))) if a.shape == b.shape else float("inf")


def _cosine(a: Floats, b: Floats) -> float:
    """1 for two zero vectors, 0 where only one is."""
    if a.shape != b.shape:
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    norms = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    if 0.0 in norms:
        return float(norms[0] == norms[1])
    return float(np.dot(x, y)) / (norms[0] * norms[1])


def _is_in_order(ours: Sequence[Floats], expected: Sequence[Floats], allowed: float) -> bool:
    """No two texts have changed places whose expected scores are further apart than both may err."""
    a, b = (np.array([scores[0] for scores in side], np.float64) for side in (ours, expected))
    apart = b[:, None] - b[None, :] > 2 * allowed
    return bool(np.all((a[:, None] > a[None, :])[apart]))
