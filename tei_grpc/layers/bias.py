"""Owns the additive biases that attention knows: one value per head and distance, and DeBERTa's disentangled scores.

A distance is the position of the key minus the position of the query. What depends on distances alone is worked out
once per batch, for `distances`; a block of attention takes its window from the middle of it.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tei_grpc.layers.attention import Block, ByRow
from tei_grpc.layers.packed import PackedInputs


def distances(inputs: PackedInputs) -> Tensor:
    """Every distance that attention over a batch meets, ascending and with 0 in the middle: int64 [distances]."""
    longest = max(group.length for group in inputs.groups)
    return torch.arange(1 - longest, longest, device=inputs.input_ids.device)


def alibi_slopes(heads: int) -> list[float]:
    """Slope of each head in ALiBi: the powers of 2^(-8 / heads).

    For a number that is no power of two: those of the next lower one, then every other of twice as many.
    Source: Press et al. 2022, "Train Short, Test Long", and its published code.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    return slopes if lower == heads else slopes + alibi_slopes(2 * lower)[0::2][: heads - lower]


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """One value per head and distance: ALiBi, and the learned buckets of T5 and MPNet."""

    values: Tensor  # [heads, distances] float32

    def __call__(self, block: Block) -> Tensor:
        """See `attention.Bias`."""
        values = self.values[block.heads, _window(self.values.shape[1], block)]
        # the block's last query sees the first of these values, one for each key, each query before it one further on
        return values.unfold(1, block.keys.stop - block.keys.start, 1).flip(1)[None]

    def by_row(self) -> ByRow:
        """See `attention.Bias`."""
        values, total = self.values, self.values.shape[1]
        return lambda head, query, key: values[head, _place(total, query, key)]


def alibi_bias(heads: int, inputs: PackedInputs) -> DistanceBias:
    """-slope * |distance|, the symmetric form of ALiBi that bidirectional encoders use."""
    away = distances(inputs)
    return DistanceBias(-_slopes(heads, away.device)[:, None] * away.abs())


@cache
def _slopes(heads: int, device: torch.device) -> Tensor:
    """They stay on the device: to copy them there would have every batch wait for the one before it."""
    return torch.tensor(alibi_slopes(heads), device=device)


@dataclass(frozen=True, slots=True)
class DisentangledBias:
    """DeBERTa's content-to-position and position-to-content scores.

    bias[q, k] = query[q] . position_key[bucket(k - q)] + key[k] . position_query[bucket(k - q)]; either may be absent.
    """

    query: Tensor  # [tokens, heads, head_dim]
    key: Tensor  # [tokens, heads, head_dim]
    position_key: Tensor | None  # [buckets, heads, head_dim], already scaled
    position_query: Tensor | None  # [buckets, heads, head_dim], already scaled
    buckets: Tensor  # [distances] int64, the bucket of each

    def __call__(self, block: Block) -> Tensor:
        """See `attention.Bias`."""
        buckets, heads = self.buckets[_window(len(self.buckets), block)], block.heads
        scores = []
        if self.position_key is not None:
            query = _texts(self.query, block)[:, block.queries, heads]
            scores.append(_scores(query, self.position_key[buckets, heads]))
        if self.position_query is not None:
            key = _texts(self.key, block)[:, block.keys, heads]
            scores.append(_scores(key, self.position_query[buckets.flip(0), heads]).transpose(2, 3))
        return torch.stack(scores).sum(0) if len(scores) > 1 else scores[0]

    def by_row(self) -> ByRow:
        """See `attention.Bias`. What a row could score with each bucket exists at once: [heads, tokens, buckets]."""
        buckets, total = self.buckets, len(self.buckets)
        by_query = _products(self.query, self.position_key)
        by_key = _products(self.key, self.position_query)

        def value(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            bucket = buckets[_place(total, query, key)]
            scores = [] if by_query is None else [by_query[head, query, bucket]]
            scores += [] if by_key is None else [by_key[head, key, bucket]]
            return sum(scores[1:], scores[0]).float()

        return value


def _window(total: int, block: Block) -> slice:
    """Which of `total` distances the block meets: those from its last query's first key to its first query's last."""
    return slice(
        total // 2 + block.keys.start - block.queries.stop + 1, total // 2 + block.keys.stop - block.queries.start
    )


def _place(total: int, query: Tensor, key: Tensor) -> Tensor:
    """Where among `total` distances that of two rows is; rows of two texts may lie further apart than any of them."""
    return (key - query + total // 2).clamp(0, total - 1)


def _products(states: Tensor, positions: Tensor | None) -> Tensor | None:
    """[tokens, heads, head_dim], [buckets, heads, head_dim] -> [heads, tokens, buckets]."""
    return None if positions is None else torch.bmm(states.transpose(0, 1), positions.permute(1, 2, 0))


def _texts(states: Tensor, block: Block) -> Tensor:
    """[tokens, heads, head_dim] -> the block's texts, [texts, length, heads, head_dim]."""
    return states[block.rows].view(block.texts, block.length, *states.shape[1:])


def _scores(states: Tensor, positions: Tensor) -> Tensor:
    """Each row's product with the positions that lie at its own distances from the other side of attention.

    [texts, rows, heads, head_dim], [rows + columns - 1, heads, head_dim] -> float32 [texts, heads, rows, columns].
    One product for all rows; row r then reads on from position rows - 1 - r, a diagonal band of it.
    """
    texts, height, heads, _ = states.shape
    width = len(positions)
    taken = states.flatten(0, 1).transpose(0, 1)  # [heads, texts * rows, head_dim]
    products = torch.bmm(taken, positions.permute(1, 2, 0))
    shape = (texts, heads, height, width - height + 1)
    strides = (height * width, texts * height * width, width - 1, 1)
    return torch.as_strided(products, shape, strides, height - 1).float()
