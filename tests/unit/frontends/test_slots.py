import os

import numpy as np
import pytest

from tei_grpc.frontends.slots import ARRAY_WORDS, Slots, to_arrays, to_words
from tei_grpc.types import Entry, Kind

COUNT, LONGEST = 3, 16


@pytest.fixture
def sides():
    """The slots, as two processes have them mapped."""
    file = os.memfd_create("slots")
    yield Slots(file, COUNT, LONGEST), Slots(file, COUNT, LONGEST)
    os.close(file)


def entry(length, types=None):
    return Entry(0, Kind.EMBED, np.arange(1, length + 1, dtype=np.int32), types)


def test_ids_and_types_are_seen_on_the_other_side(sides):
    types = np.arange(LONGEST, dtype=np.int32) % 2
    sides[0].put_ids(2, entry(LONGEST, types))
    ids, found = sides[1].take_ids(2, LONGEST, has_types=True)
    assert ids.tolist() == list(range(1, LONGEST + 1))
    assert found is not None
    assert found.tolist() == types.tolist()
    assert sides[1].take_ids(2, LONGEST, has_types=False)[1] is None


def test_what_was_taken_does_not_change_with_the_slot(sides):
    sides[0].put_ids(0, entry(4))
    sides[0].put_arrays(0, np.full(4, 7, np.int32))
    (ids, _), arrays = sides[1].take_ids(0, 4, has_types=False), sides[1].take_arrays(0, 4)
    sides[0].put_ids(0, Entry(0, Kind.EMBED, np.zeros(4, np.int32)))
    sides[0].put_arrays(0, np.zeros(4, np.int32))
    assert ids.tolist() == [1, 2, 3, 4]
    assert arrays.tolist() == [7] * 4


def test_full_slots_do_not_touch_their_neighbours(sides):
    for slot in range(COUNT):
        sides[0].put_ids(slot, entry(LONGEST, np.full(LONGEST, slot, np.int32)))
        assert sides[0].put_arrays(slot, np.full(ARRAY_WORDS, slot, np.int32))
    for slot in range(COUNT):
        ids, types = sides[1].take_ids(slot, LONGEST, has_types=True)
        assert ids.tolist() == list(range(1, LONGEST + 1))
        assert set(types.tolist()) == set(sides[1].take_arrays(slot, ARRAY_WORDS).tolist()) == {slot}


def test_arrays_that_are_too_large_are_not_written(sides):
    assert not sides[0].put_arrays(0, np.ones(ARRAY_WORDS + 1, np.int32))
    assert not sides[1].take_arrays(0, ARRAY_WORDS).any()


def test_values_of_other_sizes_are_refused():
    with pytest.raises(TypeError):
        to_words([np.ones(4, np.float16)])


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        (Kind.EMBED, (np.array([0.1, -0.0, np.inf, 1e-45], np.float32),)),
        (Kind.PREDICT, (np.array([3.5], np.float32),)),
        (Kind.EMBED_ALL, (np.arange(12, dtype=np.float32).reshape(3, 4),)),
        (Kind.EMBED_ALL, (np.arange(12, dtype=np.float32).reshape(4, 3).T,)),
        (Kind.EMBED_SPARSE, (np.array([1, 2**32 - 1], np.uint32), np.array([0.5, 2], np.float32))),
        (Kind.EMBED_SPARSE, (np.array([], np.uint32), np.array([], np.float32))),
    ],
)
def test_arrays_of_every_kind_come_out_bit_for_bit(kind, arrays):
    found = to_arrays(kind, to_words(arrays), len(arrays[0]))
    assert [(each.dtype, each.shape) for each in found] == [(each.dtype, each.shape) for each in arrays]
    assert [each.tobytes() for each in found] == [each.tobytes() for each in arrays]
