import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tei_grpc.engine.batch import pack
from tei_grpc.layers.packed import place, rounded_rows
from tei_grpc.types import Entry, Kind
from tests.unit.layers.batches import packed_inputs


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_groups_cover_all_rows_in_order_and_hold_texts_of_one_length(lengths: list[int]) -> None:
    inputs = packed_inputs(*lengths)
    assert [length for group in inputs.groups for length in [group.length] * group.texts] == lengths
    assert [group.start for group in inputs.groups] == [0, *(group.stop for group in inputs.groups[:-1])]
    assert inputs.groups[-1].stop == len(inputs.input_ids)


def test_texts_of_equal_length_side_by_side_form_one_group() -> None:
    groups = packed_inputs(3, 3, 20, 3).groups
    assert [(group.start, group.texts, group.length) for group in groups] == [(0, 2, 3), (6, 1, 20), (26, 1, 3)]


@given(st.integers(1, 20_000))
def test_rounding_adds_at_most_an_eighth_and_keeps_row_counts_few(tokens: int) -> None:
    rows = rounded_rows(tokens)
    assert tokens <= rows <= max(tokens + 7, tokens * 9 / 8)
    assert rounded_rows(rows) == rows


def test_there_are_at_most_nine_row_counts_to_an_octave() -> None:
    assert len({rounded_rows(tokens) for tokens in range(2049, 4097)}) == 9


def test_just_more_than_a_power_of_two_is_rounded_little() -> None:
    assert [rounded_rows(tokens) for tokens in (2048, 2049, 2112, 2113)] == [2048, 2112, 2112, 2304]


def test_blank_texts_lie_behind_all_others() -> None:
    batch = pack([Entry(0, Kind.EMBED, np.arange(5, 8, dtype=np.int32))])
    inputs = place(batch, torch.device("cpu"), blank=[1] * 5)
    assert inputs.input_ids.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert inputs.position_ids.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert inputs.offsets == (0, 3, 4, 5, 6, 7, 8)
    assert [(group.start, group.texts, group.length) for group in inputs.groups] == [(0, 1, 3), (3, 5, 1)]
