"""Owns linear layers in int8: torch's private oneDNN operators for them, and the quantisation of weights and rows.

Each output of a layer has a scale of its own, each row of its input another; all are symmetric and the scale of a row
is found when it comes, so that no calibration is needed and no row depends on another. The operators are private, so
they are proven before they are used: present, numerically equal on a sample, and faster than layers in float.
"""

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tei_grpc.errors import StartupError
from tei_grpc.layers import onednn
from tei_grpc.layers.activation import Activation
from tei_grpc.layers.rows import TINY, WIDEST, ZERO, dequantize, quantize

FEWEST_OUTPUTS = 16  # a layer with fewer is a head or a router: its time is nothing, its numbers are the answer
TOLERANCE = 2e-2  # of the sample's values, which are about 1


class Rows(NamedTuple):
    """Rows as integers: `values` [rows, in] uint8, `ZERO` above what they stand for; `scales` [rows, 1] float32."""

    values: Tensor
    scales: Tensor


class Product:
    """activation(x W^T + b), holding the weight [out, in] as int8 and the bias as float32, for `x` in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> None:
        values, self.scales = quantize_weight(weight)
        self.packed = torch.ops.onednn.qlinear_prepack(values, None)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._half = torch.full(weight.shape[1:], ZERO + 0.5)
        self.bias = None if bias is None else bias.float()
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]; in float32, by a copy of the weight, where `x` is float32."""
        if x.dtype == torch.float32:
            return self._activate(functional.linear(x, self.weight(), self.bias))
        rows = quantize_rows(x, self._half)
        y = self.multiply(rows.values)
        if dequantize(y, rows.scales, self.bias, self.activation):
            return y
        wide = y.float().mul_(rows.scales)
        return self._activate(wide if self.bias is None else wide.add_(self.bias)).to(x.dtype)

    def weight(self) -> Tensor:
        """What the layer multiplies by: float32 [out, in]."""
        dense: Tensor = self.packed.to_dense().T * self.scales[:, None]
        return dense

    def multiply(self, values: Tensor) -> Tensor:
        """Rows' `values`, times the weight: bfloat16 [rows, out]."""
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            values, 1.0, ZERO, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )
        return y

    def _activate(self, y: Tensor) -> Tensor:
        return y if self.activation is None else self.activation(y)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [out, in] -> int8 [out, in] and scales, float32 [out]: weight = int8 * scale."""
    floats = weight.float()
    scales = floats.abs().amax(1).clamp_min_(TINY) / WIDEST
    return (floats / scales[:, None]).round_().to(torch.int8), scales


def quantize_rows(x: Tensor, half: Tensor) -> Rows:
    """bfloat16 [rows, in] -> integers and their scales. `half` is `ZERO` + 0.5, `in` times: torch is fast at that form.

    The largest magnitude is that of the bits without their sign, which torch finds several times faster than that of
    the numbers; NaN and infinity are above all numbers, and make the whole row's scale, and so its output, what they
    are. Adding a half and cutting the fraction off is rounding. The integers reach 255, which as int8 is the same byte.
    """
    if compiled := quantize(x):
        return Rows(*compiled)
    largest = (x.contiguous().view(torch.int16) & 0x7FFF).amax(1, keepdim=True).view(torch.bfloat16)
    scales = largest.float().clamp_min_(TINY).div_(WIDEST)
    values = torch.addcmul(half, x, scales.reciprocal()).to(torch.int8).view(torch.uint8)
    return Rows(values, scales)


def prepack(weight: Tensor, bias: Tensor | None, activation: Activation | None) -> Activation | None:
    """As `onednn.prepack`; in int8 where the layer has enough outputs for that to matter."""
    if len(weight) < FEWEST_OUTPUTS:
        return onednn.prepack(weight, bias, activation)
    return Product(weight, bias, activation)


def require() -> None:
    """Raise StartupError, with the reason, where this machine has no int8 product that is right and fast."""
    reason = _refusal()
    if reason:
        raise StartupError(f"`dtype` int8 is not possible here: {reason}; use float32 or bfloat16")


@cache
def _refusal() -> str | None:
    try:
        if not _is_right():
            return "torch's int8 product gives wrong numbers on this CPU"
    except (AttributeError, RuntimeError):  # another torch: no such operator, or other arguments
        return "this build of torch lacks the int8 product of oneDNN"
    if not _is_faster():
        return "int8 is no faster than floats on this CPU, which probably lacks AVX512-VNNI, AVX-VNNI and AMX"
    return None


def _is_right() -> bool:
    """Against the same integers in float64, at the ends of their range too, where CPUs without VNNI overflow."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 67), (48, 67)))
    x[0], weight[0] = 1.0, 1.0
    bias = torch.randn(48, generator=generator).bfloat16()
    rows = quantize_rows(x, torch.full((67,), ZERO + 0.5))
    integers, scales = quantize_weight(weight)
    exact = (rows.values.double() - ZERO) @ integers.double().T
    expected = exact * rows.scales * scales + bias
    nearest = (x.float() / rows.scales).sub_(rows.values.float() - ZERO).abs().max()
    return bool(nearest <= 0.5 + TOLERANCE) and torch.allclose(
        Product(weight, bias, None)(x).double(), expected, rtol=TOLERANCE, atol=TOLERANCE
    )


def _is_faster() -> bool:
    """The product alone, than that of the faster float: to be wrong would keep a server from starting."""
    x, weight = torch.ones(256, 384), torch.ones(1536, 384)
    samples: list[tuple[Activation, Tensor]] = [(Product(weight, None, None).multiply, x.to(torch.uint8))]
    samples += [(_in_floats(weight.to(dtype)), x.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    integers, *floats = onednn.least_seconds(samples)
    return integers < min(floats)


def _in_floats(weight: Tensor) -> Activation:
    product = onednn.prepack(weight, None, None)
    return partial(functional.linear, weight=weight) if product is None else product
