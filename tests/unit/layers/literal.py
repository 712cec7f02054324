"""Attention written as its definition, text by text and head by head: slow, and obviously right."""

import torch
from torch import Tensor

from tei_grpc.layers.attention import FULL, Block, Mask
from tei_grpc.layers.packed import PackedInputs


def literal_attention(
    query: Tensor,
    key_value: tuple[Tensor, Tensor],
    inputs: PackedInputs,
    *,
    scale: float,
    mask: Mask = FULL,
) -> Tensor:
    """`attention` written as its definition, text by text and head by head: slow, for comparison."""
    output = torch.empty_like(query)
    for start, stop in zip(inputs.offsets, inputs.offsets[1:], strict=False):
        for head in range(query.shape[1]):
            output[start:stop, head] = _literal_head(
                query[start:stop, head],
                *(x[start:stop, head * x.shape[1] // query.shape[1]] for x in key_value),
                scale=scale,
                seen=_literal_mask(mask, range(start, stop), head, query.device),
            )
    return output.flatten(1)


def _literal_head(query: Tensor, key: Tensor, value: Tensor, *, scale: float, seen: Tensor) -> Tensor:
    scores = query.float() @ key.float().T * scale + seen
    return (torch.softmax(scores, dim=-1) @ value.float()).to(value.dtype)


def _literal_mask(mask: Mask, text: range, head: int, device: torch.device) -> Tensor:
    seen = torch.zeros(len(text), len(text), device=device)
    for query in range(len(text)):
        for key in range(len(text)):
            too_far_left = mask.left is not None and query - key > mask.left
            too_far_right = mask.right is not None and key - query > mask.right
            if too_far_left or too_far_right:
                seen[query, key] = -torch.inf
    if mask.bias is None:
        return seen
    every = slice(0, len(text))
    return seen + mask.bias(Block(text.start, 1, len(text), slice(head, head + 1), every, every))[0, 0]
