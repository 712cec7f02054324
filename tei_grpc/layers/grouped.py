"""Owns attention by torch's scaled_dot_product_attention, one call for texts of equal length that lie side by side.

It takes every mask, dtype and head size, and no text sees another, since a call holds whole texts only.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tei_grpc.layers.attention import CAUSAL, FULL, Block, Mask, band
from tei_grpc.layers.packed import Group, PackedInputs

MASK_VALUES = 1 << 26  # that exist at a time, 256 MiB in float32, unless one text's row of queries has more


def attend_by_group(
    query: Tensor, key_value: tuple[Tensor, Tensor], inputs: PackedInputs, *, scale: float, mask: Mask = FULL
) -> Tensor:
    """See `attention.attention`. Raises ValueError where lengths are not on the host, as in a graph."""
    if not inputs.groups:
        raise ValueError("attention by groups needs the lengths of the texts")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shared = query.shape[1] // key_value[0].shape[1]
    for group in inputs.groups:
        rows = slice(group.start, group.stop)
        key, value = (_by_text(x[rows], group).repeat_interleave(shared, dim=1) for x in key_value)
        states = _States(_by_text(query[rows], group), key, value, _by_text(output[rows], group))
        if mask in (FULL, CAUSAL):
            attended = scaled_dot_product_attention(states.query, key, value, is_causal=mask == CAUSAL, scale=scale)
            states.output.copy_(attended)
        else:
            _attend_masked(states, group, scale, mask)
    output.add_(query, alpha=0)  # some of torch's kernels answer a query that is NaN with zeros, which would hide it
    return output.flatten(1)


class _States(NamedTuple):
    """A group's, [texts, heads, length, head_dim] each."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def _by_text(states: Tensor, group: Group) -> Tensor:
    """[rows, heads, head_dim] -> [texts, heads, length, head_dim]."""
    return states.view(group.texts, group.length, *states.shape[1:]).transpose(1, 2)


def _attend_masked(states: _States, group: Group, scale: float, mask: Mask) -> None:
    for block in _blocks(group, states.query.shape[1]):
        first = (block.start - group.start) // group.length
        texts = slice(first, first + block.texts)
        query = states.query[texts, :, block.queries]
        states.output[texts, :, block.queries] = scaled_dot_product_attention(
            query, states.key[texts], states.value[texts], attn_mask=_mask_values(mask, block).to(query), scale=scale
        )


def _blocks(group: Group, heads: int) -> Iterator[Block]:
    """The group, in parts for which a mask of all heads is not too large."""
    length = group.length
    rows = max(1, MASK_VALUES // (heads * length))
    texts, height = max(1, rows // length), min(length, rows)
    for first in range(0, group.texts, texts):
        start, count = group.start + first * length, min(texts, group.texts - first)
        for query in range(0, length, height):
            queries = slice(query, min(query + height, length))
            yield Block(start, count, length, slice(0, heads), queries, slice(0, length))


def _mask_values(mask: Mask, block: Block) -> Tensor:
    """What is added to the block's scores: float32 [queries, keys], or [texts or 1, heads, queries, keys]."""
    window = band(mask.left, mask.right, block.queries, block.keys)
    if mask.bias is None:
        return window
    bias = mask.bias(block)
    return bias + window.to(bias.device) if mask.is_windowed else bias
