"""Owns linear layers: a plain one, and one that runs several layers of a checkpoint as a single product."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers.activation import Activation
from tei_grpc.layers.onednn import prepack

# Lays weight [out, in], bias and activation out for a machine, as a function of x; None: as good as they are.
Prepack = Callable[[Tensor, Tensor | None, Activation | None], Activation | None]


class Linear(nn.Module):
    """y = activation(x W^T + b), weight [out, in], bias [out] or None."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, activation: Activation | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.activation = activation
        self.product: Activation | None = None

    def prepare(self, prepack: Prepack = prepack) -> None:
        """Lay the loaded weight out for this machine where that is faster; `weight` is gone afterwards."""
        self.product = prepack(self.weight, self.bias, self.activation)
        if self.product is not None:
            del self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self.product is not None:
            return self.product(x)
        y = functional.linear(x, self.weight, self.bias)
        return y if self.activation is None else self.activation(y)


class FusedLinear(Linear):
    """Layers that the checkpoint stores apart and that read the same input, run as one product.

    `parts` maps each layer's on-disk name, relative to this module, to its number of outputs.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = True) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = dict(parts)

    def on_disk(self) -> dict[str, Tensor]:
        """The tensors under this module as the checkpoint names them: views of the fused ones."""
        views, start = {}, 0
        for part, size in self.parts.items():
            views[f"{part}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                views[f"{part}.bias"] = self.bias[start : start + size]
            start += size
        return views
