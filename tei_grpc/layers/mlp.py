"""Owns feed-forward blocks that several families share, with the tensor names that checkpoints give them."""

from torch import Tensor, nn

from tei_grpc.layers.activation import Activation
from tei_grpc.layers.linear import FusedLinear, Linear


class MLP(nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(
        self, hidden: int, intermediate: int, activation: Activation, *, biases: tuple[bool, bool] = (True, True)
    ) -> None:
        super().__init__()
        self.fc1 = Linear(hidden, intermediate, bias=biases[0], activation=activation)
        self.fc2 = Linear(intermediate, hidden, bias=biases[1])

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.fc2(self.fc1(x))
        return y


class GatedMLP(FusedLinear):
    """down_proj(activation(gate_proj(x)) * up_proj(x)). Gate and up are this module's own product."""

    def __init__(self, hidden: int, intermediate: int, activation: Activation, *, bias: bool = False) -> None:
        super().__init__(hidden, {"gate_proj": intermediate, "up_proj": intermediate}, bias=bias)
        self.gate = activation
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = super().forward(x).chunk(2, dim=-1)
        y: Tensor = self.down_proj(self.gate(gate).mul_(up))
        return y
