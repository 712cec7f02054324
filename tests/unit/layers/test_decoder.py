import dataclasses

import pytest
import torch

from tei_grpc.errors import StartupError
from tei_grpc.layers.attention import CAUSAL, FULL, Mask
from tei_grpc.layers.decoder import is_causal, last_rows, read_qwen_layers, window_mask
from tei_grpc.layers.rotary import Rope
from tests.unit.layers.batches import packed_inputs

ROPE = Rope(torch.ones(2))
QWEN = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}


def windows(**changes: object) -> list[int | None]:
    return [kind.mask.left for kind in read_qwen_layers({**QWEN, **changes}, ROPE)]


def test_causal_token_sees_a_window_of_tokens_with_itself() -> None:
    assert window_mask(4, causal=True) == Mask(left=3, right=0)


def test_bidirectional_token_sees_a_window_on_either_side() -> None:
    assert window_mask(4, causal=False) == Mask(left=4, right=4)


def test_without_a_window_only_the_direction_counts() -> None:
    assert (window_mask(None, causal=True), window_mask(None, causal=False)) == (CAUSAL, FULL)


@pytest.mark.parametrize("config", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_either_key_makes_a_model_bidirectional(config: dict[str, bool]) -> None:
    assert not is_causal(config)


@pytest.mark.parametrize("config", [{}, {"is_causal": True}, {"is_causal": None, "use_bidirectional_attention": False}])
def test_models_are_causal_unless_told_otherwise(config: dict[str, bool | None]) -> None:
    assert is_causal(config)


def test_qwen_window_begins_with_layer_max_window_layers() -> None:
    assert windows() == [None, None, 3]


def test_qwen_window_is_off_unless_use_sliding_window_is_on() -> None:
    assert windows(use_sliding_window=False) == [None, None, None]


def test_layer_types_decide_where_they_are_given() -> None:
    assert windows(layer_types=["sliding_attention", "full_attention", "sliding_attention"]) == [3, None, 3]


@pytest.mark.parametrize(
    ("types", "named"),
    [
        (["full_attention", "chunked_attention", "full_attention"], "'chunked_attention'"),
        (["full_attention"], "`num_hidden_layers` is 3"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(types: list[str], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        windows(layer_types=types)


def test_sliding_layers_without_a_window_are_refused() -> None:
    with pytest.raises(StartupError, match="`layer_types` has 'sliding_attention'"):
        windows(layer_types=["sliding_attention"] * 3, use_sliding_window=False)


def test_layers_of_a_type_share_one_object() -> None:
    first, second, third = read_qwen_layers(QWEN, ROPE)
    assert first is second
    assert third is not first


@pytest.mark.parametrize(("pad", "rows"), [(None, [2, 4]), (9, [1, 4]), (7, [2, 3])])
def test_last_row_of_a_text_skips_pad_tokens(pad: int | None, rows: list[int]) -> None:
    inputs = dataclasses.replace(packed_inputs(3, 2), input_ids=torch.tensor([5, 6, 9, 6, 7]))
    assert last_rows(inputs, pad).tolist() == rows


def test_text_of_nothing_but_pad_tokens_is_scored_on_its_first() -> None:
    inputs = dataclasses.replace(packed_inputs(1, 3), input_ids=torch.tensor([5, 9, 9, 9]))
    assert last_rows(inputs, 9).tolist() == [0, 1]
