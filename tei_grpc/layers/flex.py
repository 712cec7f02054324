"""Owns attention by torch's flex_attention: packed texts as documents, every mask of ours, biases too.

The kernel is compiled for the device at hand, so whether it exists is found out by trying (see `kernels`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tei_grpc.layers.attention import Bias, Mask
from tei_grpc.layers.packed import PackedInputs, send

BLOCK = 128  # rows; flex_attention's own

Modify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def compiled() -> Callable[..., Any]:
    """flex_attention, to be compiled at its first call, for any number of tokens."""
    function: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return function


class Flex:
    """Flex attention over packed texts."""

    name = "flex_attention"

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function`: torch's flex_attention, compiled (see `compiled`), or, slow and large, as it is."""
        self._flex_attention = function
        self._inputs: PackedInputs | None = None
        self._masks: dict[tuple[int | None, int | None], BlockMask] = {}

    def __call__(
        self, query: Tensor, key_value: tuple[Tensor, Tensor], inputs: PackedInputs, *, scale: float, mask: Mask
    ) -> Tensor:
        """See `attention.attention`."""
        key, value = key_value
        states = (x.transpose(0, 1)[None] for x in (query, key, value.nan_to_num(0, 0, 0)))
        attended: Tensor = self._flex_attention(
            *states,
            score_mod=None if mask.bias is None else _modify(mask.bias),
            block_mask=self._block_mask(inputs, mask),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[0].transpose(0, 1).flatten(1) + _not_finite(value, inputs)

    def _block_mask(self, inputs: PackedInputs, mask: Mask) -> BlockMask:
        """Layers share it: it is made once per batch and window."""
        if inputs is not self._inputs:
            self._inputs, self._masks = inputs, {}
        key = mask.left, mask.right
        if key not in self._masks:
            self._masks[key] = block_mask(inputs, mask)
        return self._masks[key]


def _not_finite(value: Tensor, inputs: PackedInputs) -> Tensor:
    """NaN for each row of a text whose values are not all finite, 0 for others: [tokens, 1].

    The kernel multiplies by probabilities of 0 across the texts of a block, and 0 times infinity is NaN.
    """
    by_row = (value * 0).sum((1, 2))
    by_text = by_row.new_zeros(len(inputs.cu_seqlens) - 1).index_add_(0, inputs.text_ids, by_row)
    return by_text[inputs.text_ids, None]


def _modify(bias: Bias) -> Modify:
    value = bias.by_row()
    return lambda score, _, head, query, key: score + value(head, query, key)


def block_mask(inputs: PackedInputs, mask: Mask) -> BlockMask:
    """Which blocks of keys each block of queries looks at, worked out on the host: no [tokens, tokens] exists."""
    device, tokens = inputs.input_ids.device, len(inputs.input_ids)
    first, stop = key_blocks(np.asarray(inputs.offsets), mask)
    counts = stop - first
    indices = (first[:, None] + np.arange(-(-tokens // BLOCK))) % -(-tokens // BLOCK)
    return BlockMask.from_kv_blocks(
        send(torch.from_numpy(counts.astype(np.int32))[None, None], device),
        send(torch.from_numpy(indices.astype(np.int32))[None, None], device),
        BLOCK_SIZE=BLOCK,
        mask_mod=_sees(inputs.text_ids, mask),
        seq_lengths=(tokens, tokens),
        compute_q_blocks=False,
    )


def key_blocks(offsets: NDArray[np.int64], mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each block of queries, the first block of keys that any of them sees and the one behind the last."""
    tokens = int(offsets[-1])
    firsts = np.arange(0, tokens, BLOCK)
    lasts = np.minimum(firsts + BLOCK, tokens) - 1
    low = offsets[np.searchsorted(offsets, firsts, side="right") - 1]
    high = offsets[np.searchsorted(offsets, lasts, side="right")]
    if mask.left is not None:
        low = np.maximum(low, firsts - mask.left)
    if mask.right is not None:
        high = np.minimum(high, lasts + mask.right + 1)
    return low // BLOCK, -(-high // BLOCK)


def _sees(text_ids: Tensor, mask: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    left, right = mask.left, mask.right

    def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = text_ids[query] == text_ids[key]
        if left is not None:
            seen = seen & (query - key <= left)
        if right is not None:
            seen = seen & (key - query <= right)
        return seen

    return sees
