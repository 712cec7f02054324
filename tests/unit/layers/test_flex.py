"""FlexAttention: the blocks of keys that it visits, and what torch compiles of it."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tei_grpc.engine.runner import WARM_UP
from tei_grpc.layers.attention import CAUSAL, FULL, Mask
from tei_grpc.layers.bias import alibi_bias
from tei_grpc.layers.flex import BLOCK, Flex, key_blocks
from tei_grpc.layers.grouped import attend_by_group
from tei_grpc.layers.kernels import Call
from tests.unit.layers.batches import packed_inputs

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask(left=40, right=40), Mask(left=100, right=0)])
def test_blocks_of_keys_hold_every_key_that_is_seen_and_no_whole_block_more(mask: Mask) -> None:
    offsets = np.cumsum([0, 5, 200, 1, 300, 128, 90])
    first, stop = key_blocks(offsets, mask)
    texts = np.repeat(np.arange(6), np.diff(offsets))
    distance = np.arange(len(texts)) - np.arange(len(texts))[:, None]
    seen = texts == texts[:, None]
    seen &= distance >= -(len(texts) if mask.left is None else mask.left)
    seen &= distance <= (len(texts) if mask.right is None else mask.right)
    for block in range(len(first)):
        keys = np.flatnonzero(seen[block * BLOCK : (block + 1) * BLOCK].any(0))
        assert (first[block], stop[block]) == (keys[0] // BLOCK, keys[-1] // BLOCK + 1)


def test_flex_attention_is_compiled_once_for_all_batches() -> None:
    """By torch's tracer alone, which decides that; the code that a CUDA device would get is not made."""
    torch._dynamo.reset()
    graphs = []

    def count(module: torch.fx.GraphModule, _: object):
        graphs.append(module)
        return module.forward

    flex = Flex(torch.compile(flex_attention, dynamic=True, backend=count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lengths in ([130, 140], [300, 20, 9], [500], [150, 3, 3, 200]):
            inputs = packed_inputs(*lengths)
            query = torch.randn(sum(lengths), 2, 8)
            call = Call(query, (query, query), inputs, 0.3, Mask(bias=alibi_bias(2, inputs)))
            torch.testing.assert_close(call.to(flex), call.to(attend_by_group))
    assert len(graphs) == 1


@pytest.mark.parametrize("heads", [2, 12])
def test_flex_attention_meets_no_size_while_serving_that_warm_up_has_not_compiled(heads: int) -> None:
    torch._dynamo.reset()
    graphs = []

    def count(module: torch.fx.GraphModule, _: object):
        graphs.append(module)
        return module.forward

    def attend(*lengths: int) -> None:
        query = torch.randn(sum(lengths), heads, 8)
        Call(query, (query, query), packed_inputs(*lengths), 0.3, FULL).to(flex)

    flex = Flex(torch.compile(flex_attention, dynamic=True, backend=count))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for lengths in WARM_UP:
            attend(*lengths)
        compiled = len(graphs)
        for lengths in ([5], [100, 20], [1], [500, 3], [2, 2, 2], [700]):
            attend(*lengths)
    assert len(graphs) == compiled
