"""States and masks of every kind, for the tests of attention."""

import torch
from torch import Tensor

from tei_grpc.layers.attention import CAUSAL, FULL, Mask
from tei_grpc.layers.bias import DisentangledBias, DistanceBias, alibi_bias, distances
from tests.unit.layers.batches import packed_inputs

LENGTHS = (1, 7, 8, 9, 30, 2, 17, 30)
TOKENS = sum(LENGTHS)


def states(heads: int, *, seed: int, head_dim: int = 8) -> Tensor:
    return torch.randn(TOKENS, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def masks() -> dict[str, Mask]:
    generator = torch.Generator().manual_seed(9)
    inputs = packed_inputs(*LENGTHS)
    away = distances(inputs)
    learned = DistanceBias(torch.randn(4, len(away), generator=generator))
    query, key = states(4, seed=3), states(4, seed=4)
    positions = [torch.randn(9, 4, 8, generator=generator) for _ in range(2)]
    buckets = away.clamp(-4, 4) + 4
    return {
        "full": FULL,
        "causal": CAUSAL,
        "window": Mask(left=3, right=3),
        "lopsided window": Mask(left=5, right=1),
        "causal window": Mask(left=5, right=0),
        "self only": Mask(left=0, right=0),
        "alibi": Mask(bias=alibi_bias(4, inputs)),
        "distances": Mask(bias=learned),
        "causal distances": Mask(right=0, bias=learned),
        "content to position": Mask(bias=DisentangledBias(query, key, positions[0], None, buckets)),
        "position to content": Mask(bias=DisentangledBias(query, key, None, positions[1], buckets)),
        "disentangled": Mask(bias=DisentangledBias(query, key, *positions, buckets)),
    }
