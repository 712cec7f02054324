"""Owns the mixture of experts: a feed-forward block of which each token uses a part. The names are MegaBlocks'."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tei_grpc.layers.activation import Activation
from tei_grpc.layers.linear import Linear, Prepack
from tei_grpc.layers.onednn import prepack


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sizes of a mixture of experts."""

    hidden: int
    intermediate: int  # of each expert
    experts: int
    chosen: int  # experts per token
    activation: Activation


class Router(nn.Module):
    """Chooses a few experts for each token."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.chosen = mixture.chosen
        self.layer = Linear(mixture.hidden, mixture.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> weights, float32, and experts, int64, both [tokens, chosen].

        The weights are shares of all experts, so those of the chosen ones add up to less than 1.
        """
        shares = torch.softmax(self.layer(x), dim=-1, dtype=torch.float32)
        weights, experts = shares.topk(self.chosen, dim=-1)
        return weights, experts


class ExpertMLP(nn.Module):
    """All experts, one below the other: expert e is activation(x w1[e]^T) w2[e]."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        rows = mixture.experts * mixture.intermediate
        self.w1 = nn.Parameter(torch.empty(rows, mixture.hidden), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(rows, mixture.hidden), requires_grad=False)
        self._products: list[tuple[Activation, Activation]] = []

    def prepare(self, prepack: Prepack = prepack) -> None:
        """As `Linear.prepare`."""
        act = self.mixture.activation
        products = [(prepack(w1, None, act), prepack(w2.T.contiguous(), None, None)) for w1, w2 in self._weights()]
        self._products = [(up, down) for up, down in products if up and down]
        if self._products:
            del self.w1, self.w2

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """Rows sorted by expert, `counts` of them for each: [rows, hidden] -> [rows, hidden]."""
        parts = torch.split(x, counts)
        if self._products:
            pairs = zip(parts, self._products, strict=True)
            return torch.cat([down(up(rows)) for rows, (up, down) in pairs if len(rows)])
        act = self.mixture.activation
        return torch.cat([act(rows @ w1.T) @ w2 for rows, (w1, w2) in zip(parts, self._weights(), strict=True)])

    def _weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.w1.chunk(self.mixture.experts), self.w2.chunk(self.mixture.experts), strict=True)


class Experts(nn.Module):
    """The weighted sum of each token's experts, plus one bias for all."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.count = mixture.experts
        self.mlp = ExpertMLP(mixture)
        self.bias = nn.Parameter(torch.empty(mixture.hidden), requires_grad=False)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, chosen], [tokens, chosen] -> [tokens, hidden]."""
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.count).tolist()
        by_expert = self.mlp(x[order // experts.shape[1]], counts)
        by_token = torch.empty_like(by_expert)
        by_token[order] = by_expert
        # summed per token, not scattered: the order of the sum must not depend on the batch
        summed = (by_token.view(*experts.shape, -1) * weights[..., None]).sum(1)
        return summed.to(x.dtype).add_(self.bias)


class MixtureOfExperts(nn.Module):
    """Router and experts, as one block."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.router = Router(mixture)
        self.experts = Experts(mixture)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.experts(x, *self.router(x))
        return y
