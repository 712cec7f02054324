"""A token depends on the tokens of its window, on the last one in it and on none beyond, nor on other texts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tei_grpc.types import Kind
from tests.language_models import make_language_model
from tests.models.runners import load_runner, random_ids, run

LAYERS = 2  # what a token depends on reaches this many windows far
LENGTH = 40
MIDDLE = LENGTH // 2
SLIDING = {"num_hidden_layers": LAYERS, "layer_types": ["sliding_attention"] * LAYERS}
BOTH_SIDES = {"is_causal": False}
QWEN2 = {"use_sliding_window": True, "max_window_layers": 0}
GEMMA_BOTH = {"use_bidirectional_attention": True}
MODERNBERT_IDS = {"cls_token_id": 0, "sep_token_id": 2}

# model of transformers, its config, tokens seen on the left and on the right of one's own in one layer
CASES = {
    "mistral": ("MistralModel", {"sliding_window": 6}, 5, 0),
    "mistral-bidirectional": ("MistralModel", {"sliding_window": 6, **BOTH_SIDES}, 6, 6),
    "qwen2": ("Qwen2Model", {"sliding_window": 6, **QWEN2, **SLIDING}, 5, 0),
    "qwen3": ("Qwen3Model", {"sliding_window": 6, **QWEN2, **SLIDING}, 5, 0),
    "gemma3": ("Gemma3TextModel", {"sliding_window": 8, **SLIDING}, 7, 0),
    "gemma3-bidirectional": ("Gemma3TextModel", {"sliding_window": 8, **GEMMA_BOTH, **SLIDING}, 4, 4),
    "modernbert": ("ModernBertModel", {"local_attention": 8, **MODERNBERT_IDS, **SLIDING}, 4, 4),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    model, config, left, right = CASES[request.param]
    folder = make_language_model(tmp_path_factory.mktemp(request.param), model, **config)
    return folder, left * LAYERS, right * LAYERS


def seen(folder: Path, places: Sequence[int], *, length: int = LENGTH) -> list[int]:
    """Those of `places` in a text whose token matters to the vector of the token in the middle."""
    (text,) = random_ids(length)
    others = [text.copy() for _ in places]
    for place, other in zip(places, others, strict=True):
        other[place] = (text[place] + 1) % 90 + 5
    vectors = [found[MIDDLE] for (found,) in run(load_runner(folder, pooling="mean"), Kind.EMBED_ALL, [text, *others])]
    return [place for place, vector in zip(places, vectors[1:], strict=True) if np.any(vector != vectors[0])]


def test_last_token_of_the_window_counts_and_the_one_beyond_does_not(case: tuple[Path, int, int]) -> None:
    folder, left, right = case
    assert seen(folder, range(LENGTH)) == list(range(MIDDLE - left, MIDDLE + right + 1))


def test_window_of_a_long_text_is_the_same(case: tuple[Path, int, int]) -> None:
    folder, left, right = case
    first, last = MIDDLE - left, MIDDLE + right
    assert seen(folder, [first - 1, first, last, last + 1], length=300) == [first, last]


@pytest.mark.parametrize("model", ["LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Gemma3TextModel"])
def test_causal_text_sees_neither_the_text_before_it_nor_the_one_behind(tmp_path: Path, model: str) -> None:
    runner = load_runner(make_language_model(tmp_path, model), pooling="last-token")
    first, second, another = random_ids(7, 7, 7, seed=5)
    ((alone,),) = run(runner, Kind.EMBED_ALL, [second])
    for mates in ([first, second], [another, second], [second, first], [first, second, another]):
        place = next(row for row, text in enumerate(mates) if text is second)
        np.testing.assert_allclose(run(runner, Kind.EMBED_ALL, mates)[place][0], alone, atol=1e-5, rtol=0)


def test_token_of_a_causal_text_does_not_see_the_next(tmp_path: Path) -> None:
    folder = make_language_model(tmp_path, "Qwen3Model")
    assert seen(folder, range(LENGTH)) == list(range(MIDDLE + 1))
