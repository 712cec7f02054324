import pytest
from hypothesis import given
from hypothesis import strategies as st

from tei_grpc.layers.packed import padded_length
from tests.unit.layers.batches import packed_inputs


@pytest.mark.parametrize(
    ("length", "padded"), [(1, 8), (8, 8), (9, 16), (128, 128), (129, 144), (512, 512), (513, 576)]
)
def test_padded_length_is_the_next_step(length: int, padded: int) -> None:
    assert padded_length(length) == padded


@given(st.integers(1, 100_000))
def test_padding_wastes_at_most_an_eighth_of_a_long_text(length: int) -> None:
    assert length <= padded_length(length) <= max(length + 7, length * 9 / 8)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_unpadding_undoes_padding(lengths: list[int]) -> None:
    inputs = packed_inputs(*lengths)
    assert inputs.input_ids[inputs.pad][inputs.unpad].equal(inputs.input_ids)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_padding_never_reaches_into_another_text(lengths: list[int]) -> None:
    inputs = packed_inputs(*lengths)
    for group in inputs.groups:
        owners = inputs.text_ids[group.rows]
        assert (owners == owners[:, :1]).all()


def test_texts_of_equal_padded_length_form_one_group() -> None:
    assert [(group.length, group.texts) for group in packed_inputs(3, 20, 8, 1, 17).groups] == [(8, 3), (24, 2)]
