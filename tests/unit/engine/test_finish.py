"""The last touches: known values of formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tei_grpc.engine import finish

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
LOGITS = arrays(np.float32, st.integers(1, 8), elements=FLOAT32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def predict(*logits: float, labels: str = "abc", raw_scores: bool = False, multi_label: bool = False):
    return finish.predictions(floats(*logits), labels, raw_scores=raw_scores, multi_label=multi_label)


def test_dimensions_are_cut_before_normalizing():
    vector = finish.embedding(floats(3, 4, 12, 0), normalize=True, dimensions=2)
    np.testing.assert_allclose(vector, [0.6, 0.8], atol=1e-7)


def test_vector_is_raw_when_normalizing_is_off():
    assert finish.embedding(floats(3, 4), normalize=False, dimensions=None).tolist() == [3, 4]


def test_mean_of_known_rows_has_known_direction():
    np.testing.assert_allclose(finish.unit(floats(2, 3)), [0.5547002, 0.8320503], atol=1e-7)


def test_zero_vector_stays_zero():
    assert finish.embedding(floats(0, 0), normalize=True, dimensions=None).tolist() == [0, 0]


@given(arrays(np.float32, st.integers(1, 16), elements=FLOAT32))
def test_every_other_vector_gets_unit_length(vector):
    unit = finish.unit(vector)
    assert unit.dtype == np.float32
    if vector.any():
        assert np.linalg.norm(unit.astype(np.float64)) == pytest.approx(1, abs=1e-6)


def test_softmax_of_known_logits():
    scores = [prediction.score for prediction in predict(2, 1, 0)]
    np.testing.assert_allclose(scores, [0.665241, 0.244728, 0.090031], atol=1e-6)


def test_labels_come_best_first():
    assert [prediction.label for prediction in predict(0, 2, 1)] == ["b", "c", "a"]


def test_multi_label_scores_are_sigmoids():
    scores = [prediction.score for prediction in predict(2, 1, 0, multi_label=True)]
    np.testing.assert_allclose(scores, [0.880797, 0.731059, 0.5], atol=1e-6)


def test_single_logit_is_a_sigmoid():
    assert predict(2, labels="a")[0].score == pytest.approx(0.880797, abs=1e-6)


def test_raw_scores_are_the_logits():
    assert [prediction.score for prediction in predict(-3, 7, 0.5, raw_scores=True)] == [7, 0.5, -3]


def test_softmax_of_a_large_negative_logit_is_finite():
    scores = finish.scores(floats(-100, 5), multi_label=False)
    np.testing.assert_allclose(scores, [0, 1], atol=1e-6)


@given(LOGITS)
def test_softmax_is_a_distribution_whatever_the_logits(logits):
    if len(logits) > 1:
        assert finish.scores(logits, multi_label=False).sum() == pytest.approx(1, abs=1e-5)


@given(LOGITS)
def test_sigmoid_is_finite_and_symmetric(logits):
    up, down = finish.sigmoid(logits), finish.sigmoid(-logits)
    np.testing.assert_allclose(up + down, np.ones_like(up), atol=1e-6)


def test_equal_logits_keep_the_label_order():
    assert [prediction.label for prediction in predict(1, 2, 1)] == ["b", "a", "c"]


def test_ranks_are_by_descending_score_with_input_positions():
    ranks = finish.ranks(floats(0, 3, -1, 2), raw_scores=True)
    assert [(rank.index, rank.score) for rank in ranks] == [(1, 3), (3, 2), (0, 0), (2, -1)]


def test_equal_scores_keep_the_input_order():
    assert [rank.index for rank in finish.ranks(floats(*[1] * 100), raw_scores=False)] == list(range(100))


def test_saturated_scores_are_ranked_by_their_logits():
    ranks = finish.ranks(floats(40, 60, 50), raw_scores=False)
    assert [rank.index for rank in ranks] == [1, 2, 0]
    assert {rank.score for rank in ranks} == {1.0}


def test_rank_score_is_the_sigmoid_unless_raw():
    assert finish.ranks(floats(0), raw_scores=False)[0].score == 0.5
    assert finish.ranks(floats(0), raw_scores=True)[0].score == 0


@pytest.mark.parametrize("normalize", [True, False])
def test_many_vectors_are_finished_like_each_of_them(normalize: bool) -> None:
    found = [floats(3, 4, 12), floats(0, 0, 5), floats(1e-20, 0, 1), floats(1e20, 1e20, 1)]
    together = finish.embeddings(found, normalize=normalize, dimensions=2)
    for vector, row in zip(found, together, strict=True):
        expected = finish.embedding(vector, normalize=normalize, dimensions=2)
        np.testing.assert_allclose(row, expected, rtol=1e-7)


def test_many_vectors_are_scaled_as_each_is_alone() -> None:
    vectors = np.random.default_rng(0).standard_normal((2 * finish.TOGETHER + 1, 7)).astype(np.float32)
    vectors[-1] = 0.0
    found = finish.embeddings([*vectors], normalize=True, dimensions=5)
    expected = [finish.embedding(vector, normalize=True, dimensions=5) for vector in vectors]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-7)
    np.testing.assert_allclose(np.linalg.norm(found[:-1], axis=1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(finish.embeddings([*vectors], normalize=False, dimensions=5), vectors[:, :5])
