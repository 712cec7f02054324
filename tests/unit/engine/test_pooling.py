"""Pooling on hand-made tensors, and against sentence-transformers."""

import math

import pytest
import torch
from sentence_transformers.sentence_transformer.modules.pooling import Pooling as ReferencePooling
from torch import Tensor

from tei_grpc.engine.pooling import Span, pool, segment_sums, splade
from tei_grpc.types import Pooling

MODES = {
    Pooling.CLS: "cls",
    Pooling.MEAN: "mean",
    Pooling.LAST_TOKEN: "lasttoken",
    Pooling.MAX: "max",
    Pooling.MEAN_SQRT_LEN: "mean_sqrt_len_tokens",
    Pooling.WEIGHTED_MEAN: "weightedmean",
}
LENGTHS = (4, 1, 7)
HIDDEN = torch.randn(sum(LENGTHS), 5, generator=torch.Generator().manual_seed(0))


def spans(*lengths: int, prompt: int = 0) -> list[Span]:
    stops = torch.tensor(lengths).cumsum(0).tolist()
    return [Span(stop - length, stop, prompt) for length, stop in zip(lengths, stops, strict=True)]


def sentence_transformers(hidden: Tensor, mode: str | tuple[str, ...], prompt: int) -> Tensor:
    module = ReferencePooling(hidden.shape[1], mode, include_prompt=False)
    features = {
        "token_embeddings": hidden[None],
        "attention_mask": torch.ones(1, len(hidden), dtype=torch.int64),
        "prompt_length": prompt,
    }
    return module(features)["sentence_embedding"][0]


@pytest.mark.parametrize("pooling", MODES)
def test_pooling_equals_sentence_transformers(pooling: Pooling) -> None:
    expected = [sentence_transformers(HIDDEN[s.start : s.stop], MODES[pooling], 0) for s in spans(*LENGTHS)]
    torch.testing.assert_close(pool(HIDDEN, spans(*LENGTHS), [pooling]), torch.stack(expected))


@pytest.mark.parametrize("pooling", MODES)
def test_prompt_is_left_out_as_in_sentence_transformers(pooling: Pooling) -> None:
    expected = [sentence_transformers(HIDDEN[s.start : s.stop], MODES[pooling], 3) for s in spans(4, 8)]
    torch.testing.assert_close(pool(HIDDEN, spans(4, 8, prompt=3), [pooling]), torch.stack(expected))


@pytest.mark.parametrize("prompt", [0, 3])
@pytest.mark.parametrize("modes", [(Pooling.CLS, Pooling.MEAN), (Pooling.MEAN, Pooling.CLS), tuple(MODES)])
def test_several_modes_are_concatenated_as_in_sentence_transformers(modes: tuple[Pooling, ...], prompt: int) -> None:
    names = tuple(MODES[mode] for mode in modes)
    expected = [sentence_transformers(HIDDEN[s.start : s.stop], names, prompt) for s in spans(4, 8)]
    torch.testing.assert_close(pool(HIDDEN, spans(4, 8, prompt=prompt), modes), torch.stack(expected))


@pytest.mark.parametrize("pooling", MODES)
def test_text_that_is_all_prompt_gives_something_finite(pooling: Pooling) -> None:
    assert pool(HIDDEN, spans(4, 8, prompt=5), [pooling]).isfinite().all()


@pytest.mark.parametrize("pooling", MODES)
def test_nan_stays_in_its_own_vector(pooling: Pooling) -> None:
    hidden = HIDDEN.clone()
    hidden[4] = torch.nan
    found = pool(hidden, spans(*LENGTHS), [pooling])
    assert found.isnan().all(dim=1).tolist() == [False, True, False]


def test_mean_divides_by_the_texts_own_tokens() -> None:
    hidden = torch.tensor([[1.0, 2], [3, 4], [100, 100], [0, 0], [2, 2]])
    assert pool(hidden, spans(2, 3), [Pooling.MEAN])[0].tolist() == [2, 3]


def test_vectors_are_float32_whatever_the_model_runs_in() -> None:
    for pooling in MODES:
        assert pool(HIDDEN.bfloat16(), spans(*LENGTHS), [pooling]).dtype == torch.float32


def test_splade_is_the_maximum_over_all_tokens() -> None:
    logits = torch.tensor([[1.0, -2, 0], [0.5, 3, -1]])
    (weights,) = splade(logits, spans(2), lambda rows: rows, 10)
    assert weights.tolist() == pytest.approx([0.693147, 1.386294, 0], abs=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 100])
def test_splade_does_not_depend_on_how_tokens_are_cut(rows: int) -> None:
    seen = []

    def logits(tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        return tokens.clone()

    found = torch.stack(list(splade(HIDDEN, spans(*LENGTHS), logits, rows)))
    expected = [torch.log1p(torch.relu(HIDDEN[s.start : s.stop])).amax(0) for s in spans(*LENGTHS)]
    torch.testing.assert_close(found, torch.stack(expected))
    assert max(seen) <= rows
    assert len(seen) == math.ceil(sum(LENGTHS) / rows)


def test_splade_takes_only_the_texts_asked_for() -> None:
    all_three = list(splade(HIDDEN, spans(*LENGTHS), lambda rows: rows, 4))
    first, last = splade(HIDDEN, spans(*LENGTHS)[::2], lambda rows: rows, 4)
    assert first.equal(all_three[0])
    assert last.equal(all_three[2])


@pytest.mark.parametrize("prompt", [0, 2, 9])
@pytest.mark.parametrize("texts", [slice(None), slice(1, None), slice(None, None, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_all_texts_at_once_are_those_of_each(prompt: int, texts: slice, dtype: torch.dtype) -> None:
    hidden, some = HIDDEN.to(dtype), spans(*LENGTHS, prompt=prompt)[texts]
    expected = [hidden[span.first : span.stop].float().sum(0) for span in some]
    torch.testing.assert_close(segment_sums(hidden, some), torch.stack(expected))


def test_nan_stays_in_its_own_sum() -> None:
    hidden = HIDDEN.clone()
    hidden[4] = torch.nan
    assert segment_sums(hidden, spans(*LENGTHS)).isnan().all(dim=1).tolist() == [False, True, False]
