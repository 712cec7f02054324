"""Owns torch's private oneDNN operators: linear layers whose weight is laid out, once, for the CPU at hand.

torch multiplies float32 matrices with MKL, which reaches less than half of oneDNN's rate on AMD's AVX-512 cores. The
operators are private, so they are proven before they are used: present, numerically equal on a sample, and faster.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from tei_grpc.layers.activation import ACTIVATIONS, Activation

logger = logging.getLogger(__name__)

FUSED: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["gelu_new"]: ("gelu", "tanh"),
    ACTIVATIONS["relu"]: ("relu", ""),
    ACTIVATIONS["tanh"]: ("tanh", ""),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the sample's values, which are about 1
ROUNDS = 20


class Product:
    """activation(x W^T + b), holding the weight [out, in] as oneDNN wants it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias
        self.fused = FUSED.get(activation, FUSED[None])
        self._unfused = None if activation in FUSED else activation
        self._activation = activation

    @property
    def is_fused(self) -> bool:
        """Whether the operator does all of it."""
        return self._unfused is None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]; in float32, by a copy of the weight, where `x` is wider than the weight."""
        if x.dtype != self.packed.dtype:
            return _plain(self.packed.to_dense().to(x.dtype), self.bias, self._activation)(x)
        attribute, algorithm = self.fused
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, attribute, [], algorithm)
        return y if self._unfused is None else self._unfused(y)


def prepack(weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Product | None:
    """activation(x W^T + b), for x [rows, in] and weight [out, in], with the weight re-laid.

    None when torch's own product is as good: on other devices, in dtypes that oneDNN lacks, or where it is not faster.
    """
    if weight.device.type != "cpu" or not _is_preferred(weight.dtype):
        return None
    return Product(weight, bias, activation)


def multiply_transposed(x: Tensor, y: Tensor) -> Tensor:
    """Return x y^T of two matrices, [rows, size] and [columns, size]; `x` is contiguous."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and _is_preferred(x.dtype):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, y.contiguous(), None, "none", [], "")
        return product
    return torch.bmm(x[None], y[None].transpose(1, 2))[0]


@cache
def _is_preferred(dtype: torch.dtype) -> bool:
    preferred = dtype in TOLERANCE and _is_right(dtype) and _is_faster(dtype)
    logger.info("linear layers in %s run on %s", dtype, "oneDNN" if preferred else "torch's default")
    return preferred


def _is_right(dtype: torch.dtype) -> bool:
    x, weight, bias = _sample(5, 64, 48, dtype)
    try:
        return all(
            torch.allclose(Product(weight, bias, act)(x), _plain(weight, bias, act)(x), atol=TOLERANCE[dtype], rtol=0)
            for act in FUSED
        )
    except (AttributeError, RuntimeError):  # another torch: no such operator, or other arguments
        return False


def _is_faster(dtype: torch.dtype) -> bool:
    x, weight, bias = _sample(256, 384, 1536, dtype)
    ours, torchs = least_seconds([(Product(weight, bias, None), x), (_plain(weight, bias, None), x)])
    return ours < torchs


def least_seconds(products: Sequence[tuple[Activation, Tensor]]) -> list[float]:
    """Of each product, with its rows, the best of some rounds, taken in turns.

    By one thread's own time on the CPU: another process's work decides nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = [[_seconds(product, x) for product, x in products] for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    return [min(seconds) for seconds in zip(*rounds, strict=True)]


def _plain(weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor) -> Tensor:
        y = functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
        return y if activation is None else activation(y)

    return multiply


def _sample(rows: int, size: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, size), (out, size), (out,)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype), (weight / size**0.5).to(dtype), bias.to(dtype)


def _seconds(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    start = time.thread_time()
    product(x)
    return time.thread_time() - start
