import pytest
import torch

from tei_grpc.layers.attention import Block
from tei_grpc.layers.bias import DisentangledBias, DistanceBias, alibi_bias, alibi_slopes, distances
from tests.unit.layers.batches import packed_inputs

ALL = slice(0, 3)


def block(heads: int, queries: slice = ALL, keys: slice = ALL, first: int = 0) -> Block:
    """One text of three tokens, the first of its batch."""
    return Block(0, 1, 3, slice(first, heads), queries, keys)


def test_distances_reach_over_the_longest_text() -> None:
    assert distances(packed_inputs(3, 9, 1)).tolist() == list(range(-8, 9))


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-power for power in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)]),
    ],
)
def test_alibi_slopes_are_the_published_ones(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == pytest.approx(slopes)


def test_alibi_falls_with_distance_on_both_sides() -> None:
    bias = alibi_bias(2, packed_inputs(3))(block(2))
    assert bias[0, 0].tolist() == [[-0.0, -(2**-4), -(2**-3)], [-(2**-4), -0.0, -(2**-4)], [-(2**-3), -(2**-4), -0.0]]
    assert bias[0, 1, 0].tolist() == [-0.0, -(2**-8), -(2**-7)]


def test_value_is_that_of_key_minus_query() -> None:
    bias = DistanceBias(torch.arange(-8.0, 9.0)[None])(block(1))
    assert bias[0, 0].tolist() == [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]


def test_disentangled_bias_meets_both_tables_at_the_bucket_of_the_distance() -> None:
    """One value per head: products of whole numbers say which rows met."""
    query, key = torch.tensor([2.0, 3, 5])[:, None, None], torch.tensor([7.0, 11, 13])[:, None, None]
    position_key, position_query = torch.arange(5.0)[:, None, None], torch.arange(5.0, 10)[:, None, None]
    buckets = torch.arange(-3, 4).clamp(-2, 2) + 2  # of the distances -3 to 3
    found = DisentangledBias(query, key, position_key, position_query, buckets)(block(1))
    for q in range(3):
        for k in range(3):
            bucket = k - q + 2
            assert found[0, 0, q, k] == query[q] * position_key[bucket] + key[k] * position_query[bucket]


@pytest.mark.parametrize("queries", [slice(0, 1), slice(1, 3), slice(2, 3)])
@pytest.mark.parametrize("keys", [slice(0, 3), slice(0, 1), slice(1, 3)])
def test_block_is_cut_from_the_whole(queries: slice, keys: slice) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(rows, 2, 4, generator=generator) for rows in (3, 3, 7, 7)]
    for bias in (
        DistanceBias(torch.randn(2, 7, generator=generator)),
        DisentangledBias(*states, torch.arange(7)),
        DisentangledBias(states[0], states[1], states[2], None, torch.arange(7)),
        DisentangledBias(states[0], states[1], None, states[3], torch.arange(7)),
    ):
        whole = bias(block(2))
        torch.testing.assert_close(bias(block(2, queries, keys, first=1)), whole[:, 1:2, queries, keys])
