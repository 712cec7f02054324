"""Owns attention over packed texts: one function and its masks, and how it is computed without a kernel of its own.

A device brings its kernels along in the packed inputs (see `kernels` and `cpu_kernels`). Without them, texts of equal
length that lie side by side (a `Group`) are handled together, so nothing is gathered, and no text can see another. They
run as batched products over texts and heads. A long text runs head by head, by blocks of queries, and a window leaves
out the keys that none of a block's queries sees.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from tei_grpc.layers.onednn import multiply_transposed
from tei_grpc.layers.packed import Group, PackedInputs

BLOCK_SCORES = 1 << 18  # of float32, computed at a time: they stay in a core's own cache; measured best of 2^17 to 2^20
FEWER_BLOCKS = 4  # times as many scores in 16 bits, where fewer products count for more
BLOCK_ROWS = 1024  # tokens whose copies by head exist at a time, unless one text has more
LONG = 256  # tokens from which a text's heads run one by one; there a product of its own pays for its call
NARROW = 64  # tokens from which products in bfloat16 beat those in float32
REGISTER = {torch.float32: 16, torch.bfloat16: 32}  # values in a vector register
HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class Block:
    """Some scores of a group: of `texts` texts from packed row `start` on, of some heads, queries and keys."""

    start: int
    texts: int
    length: int
    heads: slice
    queries: slice
    keys: slice

    @property
    def rows(self) -> slice:
        """The packed rows of its texts."""
        return slice(self.start, self.start + self.texts * self.length)


ByRow = Callable[[Tensor, Tensor, Tensor], Tensor]  # head, packed row of the query and of the key: the value


class Bias(Protocol):
    """Something added to the scaled scores, per head."""

    def __call__(self, block: Block) -> Tensor:
        """The block's values: float32 [texts or 1, heads, queries, keys]."""
        ...

    def by_row(self) -> ByRow:
        """The same values one by one, for kernels that go through packed rows."""
        ...


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees, and what is added to its scores.

    `left` and `right` count tokens beside the query's own, as flash-attn's window_size does; None is without limit.
    """

    left: int | None = None
    right: int | None = None
    bias: Bias | None = None

    @property
    def is_windowed(self) -> bool:
        """Whether a query may not see all keys."""
        return self.left is not None or self.right is not None

    def keys_seen(self, queries: slice, length: int) -> slice:
        """The keys that at least one of these queries sees."""
        first = 0 if self.left is None else max(0, queries.start - self.left)
        return slice(first, length if self.right is None else min(length, queries.stop + self.right))


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
    """Softmax attention inside each text: softmax(scale * q k^T + bias) v, the softmax summed in float32."""
    attend = inputs.attend or attend_in_blocks
    return attend(query, key_value, inputs, scale=scale, mask=mask)


@dataclass(frozen=True, slots=True)
class States:
    """Rows, [rows, heads, head_dim] each; key and value may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def attend_in_blocks(
    query: Tensor, key_value: tuple[Tensor, Tensor], inputs: PackedInputs, *, scale: float, mask: Mask
) -> Tensor:
    """See `attention`."""
    states = States(query, *key_value, torch.empty(query.shape, dtype=query.dtype, device=query.device))
    for group in inputs.groups:
        attend_to_group(states, group, scale, mask)
    return states.output.flatten(1)


def attend_to_group(states: States, group: Group, scale: float, mask: Mask) -> None:
    """Write the output of a group's rows, by products in blocks; `states` are those of all rows."""
    rows = slice(group.start, group.stop)
    these = States(states.query[rows], states.key[rows], states.value[rows], states.output[rows])
    attend = _attend_long if _is_long(group.length, states.query.dtype) else _attend_short
    attend(these, group, scale, mask)


def _is_long(length: int, dtype: torch.dtype) -> bool:
    return length >= LONG and (dtype == torch.float32 or length**2 > _block_scores(dtype))


def _block_scores(dtype: torch.dtype) -> int:
    return BLOCK_SCORES if dtype == torch.float32 else FEWER_BLOCKS * BLOCK_SCORES


def _attend_short(states: States, group: Group, scale: float, mask: Mask) -> None:
    shared, length = states.query.shape[1] // states.key.shape[1], group.length  # query heads to a key head
    dtype = states.query.dtype if states.query.dtype == torch.bfloat16 and length >= NARROW else torch.float32
    height, width = _padded_sizes(length, dtype)
    every = slice(0, length)
    most = max(1, BLOCK_ROWS // length)
    blocks = _blocks(group.texts, most, states.key.shape[1], shared * height * width, dtype)
    for texts, heads in blocks:
        rows = slice(texts.start * length, texts.stop * length)
        count, query_heads = texts.stop - texts.start, slice(heads.start * shared, heads.stop * shared)
        query = _by_head(states.query[rows, query_heads], count, shared, height, dtype)
        key, value = (_by_head(x[rows, heads], count, 1, width, dtype) for x in (states.key, states.value))
        scores = torch.empty(*query.shape[:2], width, dtype=dtype, device=query.device)
        torch.baddbmm(scores, query, key.transpose(1, 2), beta=0, alpha=scale, out=scores)
        if width > length:
            scores[..., length:] = HIDDEN
        if mask.is_windowed or mask.bias is not None:
            real = scores.view(count, -1, height, width)[..., :length, :length]
            _restrict(real, Block(group.start + rows.start, count, length, query_heads, every, every), mask)
        attended = torch.bmm(torch.softmax(scores, dim=-1), value).view(count, -1, shared, height, value.shape[-1])
        _head_view(states.output[rows, query_heads], count, shared).copy_(attended[..., :length, :])


def _padded_sizes(length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Queries and keys to compute with for a text, by its own length alone; what is too much is hidden or dropped.

    torch's softmax takes up to ten times as long on a row that does not fill its vector registers; for float32 that
    matters only where the row is shorter than one. oneDNN, which multiplies bfloat16, prepares a kernel for every new
    shape, so those are kept few.
    """
    if dtype == torch.float32:
        return length, max(length, REGISTER[dtype])
    padded = -(-length // REGISTER[dtype]) * REGISTER[dtype]
    return padded, padded


def _blocks(texts: int, most: int, heads: int, scores: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """Cut a group of `scores` scores per text and key head: by texts, `most` at the most, and within a text by heads.

    Where oneDNN multiplies, for bfloat16, the numbers of texts are powers of two, so that kernels are few.
    """
    at_once = max(1, _block_scores(dtype) // scores)
    start = 0
    while start < texts:
        size = min(texts - start, most, max(1, at_once // heads))
        if dtype == torch.bfloat16:
            size = _power_of_two(size)
        for head in _cut(heads, at_once):
            yield slice(start, start + size), head
        start += size


def _power_of_two(number: int) -> int:
    """The largest one that is not above `number`."""
    return 1 << (number.bit_length() - 1)


def _cut(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _head_view(states: Tensor, texts: int, shared: int) -> Tensor:
    """[rows, heads, head_dim] -> [texts, key heads, shared, length, head_dim]."""
    rows, heads, head_dim = states.shape
    return states.view(texts, rows // texts, heads // shared, shared, head_dim).permute(0, 2, 3, 1, 4)


def _by_head(states: Tensor, texts: int, shared: int, padded: int, dtype: torch.dtype) -> Tensor:
    """[rows, heads, head_dim] -> [texts * key heads, shared * padded, head_dim], zeros below each text's last row.

    A view where that can be one, else copied once.
    """
    view = _head_view(states, texts, shared)
    length = view.shape[3]
    if padded > length or dtype != view.dtype:
        copied = torch.empty(*view.shape[:3], padded, view.shape[4], dtype=dtype, device=view.device)
        copied[..., :length, :] = view
        copied[..., length:, :] = 0
        view = copied
    return view.flatten(0, 1).flatten(1, 2)


def _restrict(scores: Tensor, block: Block, mask: Mask) -> None:
    """Put the mask on scores [texts, heads, queries, keys], in place."""
    if mask.is_windowed:
        window = _window(mask.left, mask.right, 1 << (block.length - 1).bit_length())
        scores.add_(window[: block.length, : block.length].to(scores))
    if mask.bias is not None:
        scores.add_(mask.bias(block))


@lru_cache(maxsize=64)
def _window(left: int | None, right: int | None, length: int) -> Tensor:
    """0 where the query sees the key, HIDDEN elsewhere: float32 [length, length]; a shorter text takes its corner."""
    return band(left, right, slice(0, length), slice(0, length))


def band(left: int | None, right: int | None, queries: slice, keys: slice) -> Tensor:
    """0 where the query sees the key, HIDDEN elsewhere: float32 [queries, keys], on the CPU."""
    distance = torch.arange(keys.start, keys.stop) - torch.arange(queries.start, queries.stop)[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return torch.zeros(distance.shape).masked_fill_(hidden, HIDDEN)


def _attend_long(states: States, group: Group, scale: float, mask: Mask) -> None:
    for text in range(group.texts):
        rows = slice(text * group.length, (text + 1) * group.length)
        query = _contiguous(states.query[rows].transpose(0, 1)).mul_(scale)  # [heads, padded, head_dim]
        key = _contiguous(states.key[rows].transpose(0, 1))  # [kv_heads, padded, head_dim]
        value = _contiguous(states.value[rows].transpose(0, 1)).transpose(1, 2).contiguous()
        block = Block(group.start + rows.start, 1, group.length, slice(0, len(query)), slice(0, 0), slice(0, 0))
        _attend_text(States(query, key, value, states.output[rows].transpose(0, 1)), block, mask)


def _contiguous(states: Tensor) -> Tensor:
    """[heads, length, head_dim] -> [heads, padded, head_dim]: as few different lengths as for `_padded_sizes`."""
    heads, length, head_dim = states.shape
    padded = states.new_zeros(heads, -(-length // 32) * 32, head_dim)
    padded[:, :length] = states
    return padded


def _attend_text(states: States, block: Block, mask: Mask) -> None:
    shared, padded = len(states.query) // len(states.key), states.key.shape[1]
    for queries in _cut(block.length, max(32, _block_scores(states.query.dtype) // padded)):
        keys = mask.keys_seen(queries, block.length)
        seen = slice(keys.start, padded if keys.stop == block.length else keys.stop)
        height = queries.stop - queries.start
        rows = slice(queries.start, min(queries.start + -(-height // 32) * 32, padded))
        hidden = band(mask.left, mask.right, queries, keys).to(states.query) if mask.is_windowed else None
        for head in range(len(states.query)):
            scores = multiply_transposed(states.query[head, rows], states.key[head // shared, seen])
            scores[:, keys.stop - keys.start :] = HIDDEN
            real = scores[:height, : keys.stop - keys.start]
            if hidden is not None:
                real += hidden
            if mask.bias is not None:
                real += mask.bias(replace(block, heads=slice(head, head + 1), queries=queries, keys=keys))[0, 0]
            probabilities = torch.softmax(scores, dim=-1)
            attended = multiply_transposed(probabilities, states.value[head // shared][:, seen])
            states.output[head, queries] = attended[:height]
