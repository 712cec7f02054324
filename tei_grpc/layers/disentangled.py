"""Owns DeBERTa's disentangled attention: content and relative position, each with projections of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tei_grpc.layers.attention import FULL, Mask, attention
from tei_grpc.layers.bias import DisentangledBias
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.packed import PackedInputs


@dataclass(frozen=True, slots=True)
class Buckets:
    """Which row of the relative position table a distance has. Source: https://github.com/microsoft/DeBERTa, v2."""

    half: int  # rows on each side of the middle
    longest: int  # relative position at which the logarithmic rows end
    logarithmic: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Buckets":
        """What `position_buckets` and `max_relative_positions` say; neither is set below 1."""
        longest, buckets = (config.get(key, -1) for key in ("max_relative_positions", "position_buckets"))
        if longest < 1:
            longest = config["max_position_embeddings"]
        return cls(buckets, longest, logarithmic=True) if buckets > 0 else cls(longest, longest, logarithmic=False)

    def __call__(self, distance: Tensor) -> Tensor:
        """Distance (key - query) -> row, any shape, int64 -> int64."""
        relative = -distance
        if self.logarithmic:
            relative = self._logarithmic(relative)
        return (relative + self.half).clamp(0, 2 * self.half - 1)

    def _logarithmic(self, relative: Tensor) -> Tensor:
        """Exact on the inner half of each side, logarithmic beyond; in float32, which decides how the edges round."""
        exact, away = self.half // 2, relative.abs()
        far = torch.log(away.clamp(min=1) / exact)
        range_ = torch.log(torch.full((), (self.longest - 1) / exact, device=far.device))
        rows = torch.ceil(far / range_ * (exact - 1)) + exact
        return torch.where(away <= exact, relative, rows.long() * relative.sign())


@dataclass(frozen=True, slots=True)
class Positions:
    """What one layer makes of the relative position table; the attention scale is in it."""

    key: Tensor | None  # [buckets, heads, head_dim], met by queries: content to position
    query: Tensor | None  # [buckets, heads, head_dim], met by keys: position to content

    def mask(self, query: Tensor, key: Tensor, buckets: Tensor) -> Mask:
        """The mask that adds the scores of `query` and `key`, both [tokens, heads, head_dim]."""
        if self.key is None and self.query is None:
            return FULL
        return Mask(bias=DisentangledBias(query, key, self.key, self.query, buckets))


class DisentangledSelfAttention(FusedLinear):
    """DeBERTa's self-attention; `config` is config.json with DeBERTa's defaults."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        hidden = config["hidden_size"]
        super().__init__(hidden, {"query_proj": hidden, "key_proj": hidden, "value_proj": hidden})
        kinds = config["pos_att_type"]
        self.heads = config["num_attention_heads"]
        self.head_dim = hidden // self.heads
        self.scale: float = (self.head_dim * (1 + len(kinds))) ** -0.5
        self.share_att_key = config["share_att_key"]
        self.content_to_position = config["relative_attention"] and "c2p" in kinds
        self.position_to_content = config["relative_attention"] and "p2c" in kinds
        if self.content_to_position and not self.share_att_key:
            self.pos_key_proj = Linear(hidden, hidden)
        if self.position_to_content and not self.share_att_key:
            self.pos_query_proj = Linear(hidden, hidden)

    def project(self, table: Tensor) -> Positions:
        """Project the relative position table, [buckets, hidden]."""
        shared = self(table).chunk(3, dim=1) if self.share_att_key else None
        key = query = None
        if self.content_to_position:
            key = self._scaled(shared[1] if shared else self.pos_key_proj(table))
        if self.position_to_content:
            query = self._scaled(shared[0] if shared else self.pos_query_proj(table))
        return Positions(key, query)

    def attend(self, x: Tensor, inputs: PackedInputs, positions: Positions, buckets: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        query, key, value = self(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        mask = positions.mask(query, key, buckets)
        return attention(query, (key, value), inputs, scale=self.scale, mask=mask)

    def _scaled(self, projected: Tensor) -> Tensor:
        return (projected * self.scale).view(-1, self.heads, self.head_dim)
