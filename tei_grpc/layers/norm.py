"""Owns RMSNorm; LayerNorm is torch's own."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), in float32, over the last dimension.

    Zhang and Sennrich, https://arxiv.org/abs/1910.07467, equation 4. Gemma stores weights around 0: its offset is 1.
    """

    def __init__(self, size: int, *, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same, in new memory."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        weight = self.weight.float() + self.offset if self.offset else self.weight
        y: Tensor = (x * scale).mul_(weight)
        return y.to(x.dtype)
