"""What counts as a difference."""

import numpy as np
import pytest

from tei_grpc.commands.verify.answers import Answers, Task
from tei_grpc.commands.verify.comparison import compare


def answers(*values: list[float], dtype: str = "float32", token_ids: list[int] | None = None) -> Answers:
    return Answers([token_ids or [1, 2]] * len(values), [np.array(value, np.float32) for value in values], dtype, {})


@pytest.mark.parametrize(
    ("task", "dtype", "difference", "passes"),
    [
        (Task.EMBED, "float32", 0.9e-5, True),
        (Task.EMBED, "float32", 1.1e-5, False),
        (Task.RERANK, "float32", 0.9e-4, True),
        (Task.RERANK, "float32", 1.1e-4, False),
        (Task.PREDICT, "bfloat16", 0.09, True),
        (Task.PREDICT, "bfloat16", 0.11, False),
        (Task.EMBED, "float16", 0.02, True),
    ],
)
def test_bound_depends_on_task_and_dtype(task: Task, dtype: str, difference: float, passes: bool) -> None:
    found = compare(task, answers([difference, 1.0], dtype=dtype), answers([0.0, 1.0]))
    assert found.passed is passes


def test_bound_grows_with_values_above_one() -> None:
    assert compare(Task.RERANK, answers([50.004]), answers([50.0])).passed
    assert not compare(Task.RERANK, answers([50.006]), answers([50.0])).passed


def test_not_a_number_is_a_difference() -> None:
    found = compare(Task.EMBED, answers([float("nan"), 1.0]), answers([0.0, 1.0]))
    assert found.failures == ("largest difference", "cosine")


def test_vectors_of_another_size_differ() -> None:
    found = compare(Task.EMBED, answers([1.0]), answers([1.0, 0.0]))
    assert found.failures == ("largest difference", "cosine")


def test_direction_counts_where_16_bit_differences_do_not_show() -> None:
    ours, expected = answers([0.06, 0.998], dtype="bfloat16"), answers([0.011, 0.99994])
    assert compare(Task.EMBED, ours, expected).failures == ("cosine",)


def test_two_empty_sparse_vectors_are_equal() -> None:
    assert compare(Task.EMBED_SPARSE, answers([0.0, 0.0]), answers([0.0, 0.0])).passed
    assert compare(Task.EMBED_SPARSE, answers([0.0, 0.0]), answers([1e-5, 0.0])).failures == ("cosine",)


def test_texts_that_change_places_are_found() -> None:
    ours, expected = answers([2.0], [1.0], [3.0], dtype="bfloat16"), answers([2.0], [3.0], [1.0])
    assert compare(Task.RERANK, ours, expected).in_order is False


def test_ties_within_the_bound_may_change_places() -> None:
    ours, expected = answers([1.00002], [1.0]), answers([1.0], [1.00002])
    assert compare(Task.RERANK, ours, expected).passed


def test_one_other_token_is_a_failure() -> None:
    found = compare(Task.EMBED, answers([1.0], token_ids=[1, 3]), answers([1.0]))
    assert (found.equal_token_ids, found.failures) == (0, ("token ids",))
