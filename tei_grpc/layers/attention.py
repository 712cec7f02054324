"""Owns attention over packed texts: one function, its masks, and a literal reference with the same arguments."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tei_grpc.layers.packed import MASKED, Group, PackedInputs

BLOCK_SCORES = 1 << 20  # scores computed at a time: 4 MiB of float32 stay in cache; measured best of 2^16 to 2^22


class Bias(Protocol):
    """Something added to the scaled scores, per head."""

    def __call__(self, rows: Tensor, heads: slice, queries: slice) -> Tensor:
        """Values for a block of texts of one padded length.

        rows: [texts, length] the packed row behind each position. Returns float32 [texts or 1, heads, queries, length].
        """
        ...


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees, and what is added to its scores.

    `left` and `right` count tokens beside the query's own, as flash-attn's window_size does; None is without limit.
    """

    left: int | None = None
    right: int | None = None
    bias: Bias | None = None


FULL = Mask()
CAUSAL = Mask(right=0)


def attention(
    query: Tensor,  # [tokens, heads, head_dim]
    key_value: tuple[Tensor, Tensor],  # two of [tokens, kv_heads, head_dim]
    inputs: PackedInputs,
    *,
    scale: float,
    mask: Mask = FULL,
) -> Tensor:  # [tokens, heads * head_dim]
    """Softmax attention inside each text; softmax(scale * q k^T + bias) v, the softmax in float32.

    Each text is padded, here only, to a length of its own (`padded_length`); texts of equal length form a group.
    """
    heads = query.shape[1]
    padded = [_padded(states, heads, inputs.pad) for states in (query, *key_value)]
    output = torch.empty_like(padded[0])
    for group in inputs.groups:
        shape = (group.texts, group.length, heads, query.shape[2])
        states = [rows[group.start : group.stop].view(shape).transpose(1, 2).contiguous() for rows in padded]
        attended = _attend_group(states, group, scale, mask)
        output[group.start : group.stop].view(shape).copy_(attended.transpose(1, 2))
    return output.flatten(1).index_select(0, inputs.unpad)


def _padded(states: Tensor, heads: int, pad: Tensor) -> Tensor:
    rows = states.index_select(0, pad)
    return rows if rows.shape[1] == heads else rows.repeat_interleave(heads // rows.shape[1], dim=1)


def _attend_group(states: list[Tensor], group: Group, scale: float, mask: Mask) -> Tensor:
    query, key, value = states  # [texts, heads, length, head_dim]
    output = torch.empty_like(query)
    for texts, heads, queries in _blocks(query.shape[0], query.shape[1], query.shape[2]):
        # the slices are contiguous in memory, because a dimension is cut only where those before it are cut to one
        scores = torch.matmul(query[texts, heads, queries], key[texts, heads].transpose(2, 3)).float()
        scores.mul_(scale).add_(group.key_mask[texts])
        _restrict(scores, group.rows[texts], mask, (heads, queries))
        probabilities = torch.softmax(scores, dim=-1).to(value.dtype)
        output[texts, heads, queries] = torch.matmul(probabilities, value[texts, heads])
    return output


def _restrict(scores: Tensor, rows: Tensor, mask: Mask, block: tuple[slice, slice]) -> None:
    heads, queries = block
    if mask.left is not None or mask.right is not None:
        scores.add_(_window(mask, queries, rows))
    if mask.bias is not None:
        scores.add_(mask.bias(rows, heads, queries))


def _window(mask: Mask, queries: slice, rows: Tensor) -> Tensor:
    """0 where the query sees the key, MASKED elsewhere: float32 [queries, length]."""
    positions = torch.arange(rows.shape[1], device=rows.device)
    distance = positions - positions[queries, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if mask.left is not None:
        hidden |= distance < -mask.left
    if mask.right is not None:
        hidden |= distance > mask.right
    return torch.zeros(distance.shape, device=rows.device).masked_fill_(hidden, MASKED)


def _blocks(texts: int, heads: int, length: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut a group so that a block has about BLOCK_SCORES scores: by texts, then by heads, then by queries."""
    rows = BLOCK_SCORES // length**2
    for text in _cut(texts, rows // heads):
        for head in _cut(heads, rows):
            for queries in _cut(length, BLOCK_SCORES // length):
                yield text, head, queries


def _cut(total: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
