"""Owns the halves of a post-norm transformer layer that carry BERT's tensor names in several families."""

from torch import Tensor, nn

from tei_grpc.layers.activation import activation
from tei_grpc.layers.linear import Linear


class Residual(nn.Module):
    """LayerNorm(dense(x) + residual)."""

    def __init__(self, in_features: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.dense = Linear(in_features, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[tokens, in], [tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.LayerNorm(self.dense(x).add_(residual))
        return y


class Intermediate(nn.Module):
    """act(dense(x))."""

    def __init__(self, hidden: int, intermediate: int, act: str) -> None:
        super().__init__()
        self.dense = Linear(hidden, intermediate, activation=activation(act))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, intermediate]."""
        y: Tensor = self.dense(x)
        return y
