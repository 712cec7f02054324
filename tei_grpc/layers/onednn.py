"""Owns torch's private oneDNN operators: linear layers whose weight is laid out, once, for the CPU at hand.

torch multiplies float32 matrices with MKL, which reaches less than half of oneDNN's rate on AMD's AVX-512 cores. The
operators are private, so they are proven before they are used: present, numerically equal on a sample, and faster.
"""

import logging
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from tei_grpc.layers.activation import ACTIVATIONS, Activation

logger = logging.getLogger(__name__)

Product = Callable[[Tensor], Tensor]

FUSED: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["gelu_new"]: ("gelu", "tanh"),
    ACTIVATIONS["relu"]: ("relu", ""),
    ACTIVATIONS["tanh"]: ("tanh", ""),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the sample's values, which are about 1
ROUNDS = 5


def prepack(weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Product | None:
    """activation(x W^T + b), for x [rows, in] and weight [out, in], as a function that holds the weight re-laid.

    None when torch's own product is as good: on other devices, in dtypes that oneDNN lacks, or where it is not faster.
    """
    if weight.device.type != "cpu" or not _is_preferred(weight.dtype):
        return None
    return _product(weight, bias, activation)


def _product(weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    attribute, algorithm = FUSED.get(activation, FUSED[None])
    unfused = activation if activation not in FUSED else None

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, attribute, [], algorithm)
        return y if unfused is None else unfused(y)

    return multiply


@cache
def _is_preferred(dtype: torch.dtype) -> bool:
    preferred = dtype in TOLERANCE and _is_right(dtype) and _is_faster(dtype)
    logger.info("linear layers in %s run on %s", dtype, "oneDNN" if preferred else "torch's default")
    return preferred


def _is_right(dtype: torch.dtype) -> bool:
    x, weight, bias = _sample(5, 64, 48, dtype)
    try:
        return all(
            torch.allclose(_product(weight, bias, act)(x), _plain(weight, bias, act)(x), atol=TOLERANCE[dtype], rtol=0)
            for act in FUSED
        )
    except (AttributeError, RuntimeError):  # another torch: no such operator, or other arguments
        return False


def _is_faster(dtype: torch.dtype) -> bool:
    """Best of some rounds, taken in turns, so that another process's burst of work decides nothing."""
    x, weight, bias = _sample(256, 384, 1536, dtype)
    packed, plain = _product(weight, bias, None), _plain(weight, bias, None)
    rounds = [(_seconds(packed, x), _seconds(plain, x)) for _ in range(ROUNDS)]
    return min(ours for ours, _ in rounds) < min(torchs for _, torchs in rounds)


def _plain(weight: Tensor, bias: Tensor, activation: Activation | None) -> Product:
    return lambda x: (activation or (lambda y: y))(functional.linear(x, weight, bias))


def _sample(rows: int, size: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, size), (out, size), (out,)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype), (weight / size**0.5).to(dtype), bias.to(dtype)


def _seconds(product: Product, x: Tensor) -> float:
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start
