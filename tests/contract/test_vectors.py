"""Embed, EmbedAll and EmbedSparse: lengths, norms, truncation, independence."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tei_grpc.pb import tei_pb2
from tests.contract.conftest import PROMPT, PROMPT_TEXT
from tests.contract.inputs import WORDS, count_tokens, text_of
from tests.contract.targets import Code, Target

LEFT = tei_pb2.TRUNCATION_DIRECTION_LEFT
TEXT = "What is Deep Learning?"


def embed(target: Target, inputs: str = TEXT, **fields: object) -> np.ndarray:
    request = tei_pb2.EmbedRequest(inputs=inputs, **fields)
    return np.array(target.ask("Embed/Embed", request).reply.embeddings, np.float32)


def embed_all(target: Target, inputs: str = TEXT, **fields: object) -> np.ndarray:
    request = tei_pb2.EmbedAllRequest(inputs=inputs, **fields)
    rows = target.ask("Embed/EmbedAll", request).reply.token_embeddings
    return np.array([row.embeddings for row in rows], np.float32)


def test_absent_normalize_means_true(embedder: Target) -> None:
    assert np.array_equal(embed(embedder), embed(embedder, normalize=True))


def test_normalized_vector_has_unit_length(embedder: Target) -> None:
    assert np.linalg.norm(embed(embedder)) == pytest.approx(1, abs=1e-6)


def test_vector_that_is_not_normalized_points_the_same_way(embedder: Target) -> None:
    raw = embed(embedder, normalize=False)
    assert np.linalg.norm(raw) != pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), embed(embedder), atol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 8, 128])
def test_dimensions_are_cut_before_normalizing(embedder: Target, dimensions: int) -> None:
    head = embed(embedder, normalize=False)[:dimensions]
    np.testing.assert_allclose(embed(embedder, dimensions=dimensions), head / np.linalg.norm(head), atol=1e-6)


def test_dimensions_are_cut_without_normalizing(embedder: Target) -> None:
    whole = embed(embedder, normalize=False)
    assert np.array_equal(embed(embedder, normalize=False, dimensions=8), whole[:8])


def test_all_dimensions_are_the_same_as_none_given(embedder: Target) -> None:
    whole = embed(embedder)
    assert np.array_equal(embed(embedder, dimensions=len(whole)), whole)


def test_white_space_has_a_vector(embedder: Target) -> None:
    assert np.linalg.norm(embed(embedder, " \t\n")) == pytest.approx(1, abs=1e-6)


def test_text_of_exactly_the_longest_input_is_accepted(embedder: Target) -> None:
    longest = text_of(embedder, embedder.info.max_input_length)
    assert len(embed_all(embedder, longest)) == embedder.info.max_input_length


def test_right_truncation_keeps_the_head(embedder: Target) -> None:
    head = text_of(embedder, embedder.info.max_input_length, WORDS[0])
    cut = embed(embedder, f"{head} {WORDS[1]} {WORDS[1]}", truncate=True)
    np.testing.assert_allclose(cut, embed(embedder, head), atol=1e-6)


def test_left_truncation_keeps_the_tail(embedder: Target) -> None:
    tail = text_of(embedder, embedder.info.max_input_length, WORDS[0])
    cut = embed(embedder, f"{WORDS[1]} {WORDS[1]} {tail}", truncate=True, truncation_direction=LEFT)
    np.testing.assert_allclose(cut, embed(embedder, tail), atol=1e-6)


@pytest.mark.difference("very long text, truncated on the left: its head is tokenized; here its tail")
def test_left_truncation_of_a_very_long_text_keeps_its_tail(embedder: Target) -> None:
    tail = text_of(embedder, embedder.info.max_input_length, WORDS[0])
    very_long = f"{WORDS[1]} " * (250 * embedder.info.max_input_length // 4) + tail
    cut = embed(embedder, very_long, truncate=True, truncation_direction=LEFT)
    np.testing.assert_allclose(cut, embed(embedder, tail), atol=1e-6)


def test_prompt_goes_in_front_of_the_text(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("prompts of the model are not known")
    np.testing.assert_allclose(
        embed(embedder, TEXT, prompt_name=PROMPT), embed(embedder, PROMPT_TEXT + TEXT), atol=1e-6
    )


def test_every_token_has_a_vector_special_ones_included(embedder: Target) -> None:
    rows = embed_all(embedder)
    assert rows.shape == (count_tokens(embedder, TEXT), len(embed(embedder)))


def test_token_vectors_are_not_normalized(embedder: Target) -> None:
    assert np.linalg.norm(embed_all(embedder)[0]) != pytest.approx(1, abs=1e-3)


def test_mean_of_the_token_vectors_is_minilms_vector(embedder: Target) -> None:
    if not embedder.is_ours:
        pytest.skip("pooling of the model is not known")
    np.testing.assert_allclose(embed_all(embedder).mean(0), embed(embedder, normalize=False), atol=1e-5)


def test_published_values_of_minilm(embedder: Target) -> None:
    """As text-embeddings-inference pins them for its own kernels, which differ by their GELU."""
    if not embedder.is_ours:
        pytest.skip("the model is not known")
    expected = [-0.59059864, -0.25252345, 0.14972475, 0.05487579, -0.11783009]
    raw = embed(embedder, normalize=False)
    np.testing.assert_allclose(raw[:5], expected, atol=4e-3)
    assert np.linalg.norm(raw) == pytest.approx(7.58091, abs=0.02)


@pytest.mark.difference("who shares a batch: can change a result; here it cannot")
def test_vector_does_not_depend_on_what_runs_beside_it(embedder: Target) -> None:
    texts = [TEXT, "Deep Learning is...", "a", text_of(embedder, 100), TEXT]
    alone = [embed(embedder, text) for text in texts]
    calls = [embedder.open("Embed/EmbedAllStream", [tei_pb2.EmbedAllRequest(inputs=text)] * 3) for text in texts]
    together = embedder.ask("Embed/EmbedStream", *(tei_pb2.EmbedRequest(inputs=text) for text in texts * 4))
    assert together.code is Code.OK
    for call in calls:
        assert len(list(call)) == 3
    for index, reply in enumerate(together.replies):
        np.testing.assert_allclose(reply.embeddings, alone[index % len(texts)], atol=1e-6)


def sparse(target: Target, inputs: str = TEXT, **fields: object) -> Sequence[tei_pb2.SparseValue]:
    request = tei_pb2.EmbedSparseRequest(inputs=inputs, **fields)
    values: Sequence[tei_pb2.SparseValue] = target.ask("Embed/EmbedSparse", request).reply.sparse_embeddings
    return values


def test_sparse_indices_ascend_and_values_are_positive(splade: Target) -> None:
    entries = sparse(splade)
    indices = [entry.index for entry in entries]
    assert indices == sorted(set(indices))
    assert all(entry.value > 0 and math.isfinite(entry.value) for entry in entries)


def test_sparse_vector_holds_the_non_zero_values_of_the_dense_one(splade: Target) -> None:
    dense = embed(splade, normalize=False)
    assert {entry.index: entry.value for entry in sparse(splade)} == {
        int(index): float(dense[index]) for index in np.flatnonzero(dense)
    }


def test_sparse_text_is_truncated_on_either_side(splade: Target) -> None:
    head = text_of(splade, splade.info.max_input_length, WORDS[0])
    for text, direction in ((f"{head} {WORDS[1]}", 0), (f"{WORDS[1]} {head}", LEFT)):
        cut = sparse(splade, text, truncate=True, truncation_direction=direction)
        expected = sparse(splade, head)
        assert [entry.index for entry in cut] == [entry.index for entry in expected]
        np.testing.assert_allclose([e.value for e in cut], [e.value for e in expected], atol=1e-6)
