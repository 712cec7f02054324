"""Owns calls of the kernels that go through rows on a CPU (see `row_kernels`): where they are used, on which threads.

A kernel is compiled and proven when it is first needed, which is at warm-up. Where there is none, or it is wrong,
torch's operators do the same.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers.activation import ACTIVATIONS, Activation
from tei_grpc.layers.native import call, float_bits
from tei_grpc.layers.precision import is_widening

logger = logging.getLogger(__name__)

GELU: Final = ACTIVATIONS["gelu"]
TAKES: Final = 4  # for each thread: how often it takes rows
SHARED_VALUES: Final = 1 << 14  # from which to wake other threads pays
WIDEST: Final = 127  # integer, either way of zero
ZERO: Final = 128  # what stands for it: int8 products are fast for unsigned rows only
TINY: Final = 1e-30  # a row of zeros needs a scale too
SAMPLE: Final = (5, 96)  # rows, and values in each
NORMED: Final = (SAMPLE, SAMPLE, SAMPLE[1:], SAMPLE[1:])
EPS: Final = 1e-5
HALF: Final = 0.5001  # of a step, and rounding
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of values that are about 1

_compiling = threading.Lock()  # two threads may need a kernel at the same time


class Slot(IntEnum):
    """A kernel's arguments: addresses, and numbers."""

    ROWS = 0
    SIZE = auto()  # values in a row
    INPUT = auto()  # [rows, size]
    OTHER = auto()  # [rows, size]
    SCALES = auto()  # float32 [rows]
    WEIGHT = auto()  # [size]
    BIAS = auto()  # [size]
    OUTPUT = auto()  # [rows, size]
    EPS = auto()  # the bits of a float32
    TAKE = auto()  # rows at a time
    NEXT = auto()  # counted up by threads


class Arguments(NamedTuple):
    """What a kernel is called with, and in how many threads."""

    numbers: ctypes.Array[ctypes.c_int64]  # by `Slot`
    threads: int


class RowKernel:
    """A compiled kernel."""

    def __init__(self, address: int, lanes: int) -> None:
        self.address = address
        self._lanes = lanes

    def fits(self, rows: Tensor) -> bool:
        """Whether it takes rows of that size, on that device."""
        return rows.device.type == "cpu" and self.takes(rows.shape[1])

    def takes(self, size: int) -> bool:
        """Whether it takes rows of so many values."""
        return size % self._lanes == 0

    def __call__(self, rows: Tensor, *, eps: float = 0.0, **operands: Tensor) -> None:
        """Go through `rows`; the others, contiguous as well, by their names in `Slot`."""
        numbers, threads = self.arguments(*rows.shape)
        numbers[Slot.INPUT] = rows.data_ptr()
        numbers[Slot.EPS] = float_bits(eps)
        for name, operand in operands.items():
            numbers[Slot[name]] = operand.data_ptr()
        call(self.address, numbers, threads)

    def arguments(self, rows: int, size: int) -> Arguments:
        """Those that the shape of the rows decides."""
        threads = 1 if rows * size < SHARED_VALUES else torch.get_num_threads()
        numbers = (ctypes.c_int64 * len(Slot))()
        numbers[Slot.ROWS], numbers[Slot.SIZE] = rows, size
        numbers[Slot.TAKE] = rows if threads == 1 else max(1, rows // (TAKES * threads))
        return Arguments(numbers, threads)


def add_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm(x + residual), both [rows, size]; `x` is not to be used any more."""
    kernel = find("add_norm", x.dtype) if _are_alike(x, residual, norm.weight, norm.bias) else None
    if kernel is None or not kernel.fits(x):
        y: Tensor = norm(x.add_(residual))
        return y
    kernel(x, eps=norm.eps, OTHER=residual, WEIGHT=norm.weight, BIAS=norm.bias, OUTPUT=x)
    return x


def sums(x: Tensor, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Sums of rows of `x` [rows, size], for each pair from the first up to the second: float32 [pairs, size]."""
    kernel = find("sum", x.dtype) if _are_alike(x) else None
    if kernel is None or not kernel.fits(x):
        return torch.stack([x[first:stop].sum(0, dtype=torch.float32) for first, stop in bounds])
    output = torch.empty(len(bounds), x.shape[1])
    kernel(output, INPUT=x, OTHER=torch.tensor(bounds, dtype=torch.int64), OUTPUT=output)
    return output


def quantize(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """[rows, size] as uint8, ZERO above what they stand for, and scales, float32 [rows, 1]; None: torch is to do it."""
    kernel = find("quantize", x.dtype)
    if kernel is None or not kernel.fits(x):
        return None
    values, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), 1)
    kernel(x.contiguous(), SCALES=scales, OUTPUT=values)
    return values, scales


def dequantize(y: Tensor, scales: Tensor, bias: Tensor | None, activation: Activation | None) -> bool:
    """Make `y` [rows, out], in place, activation(y * scales + bias); False: torch is to do it.

    `scales` are float32 [rows, 1], `bias` float32 [out] or None.
    """
    kernel = dequantizer(y.dtype, bias, activation)
    if kernel is None or not kernel.fits(y) or not y.is_contiguous():
        return False
    kernel(y, SCALES=scales, BIAS=scales if bias is None else bias)  # where there is none, it is not read
    return True


def dequantizer(dtype: torch.dtype, bias: Tensor | None, activation: Activation | None) -> RowKernel | None:
    """The kernel for that, if there is one."""
    if activation not in (None, GELU):
        return None
    return find(f"dequantize{'_bias' * (bias is not None)}{'_gelu' * (activation is GELU)}", dtype)


def _are_alike(x: Tensor, *others: Tensor | None) -> bool:
    """Contiguous numbers of one type in this machine's memory.

    Not so within a `Float32`, where weights are told as wider than they are, nor while torch compiles for a GPU.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or is_widening():
        return False
    return x.is_contiguous() and all(
        other is not None and other.dtype == x.dtype and other.is_contiguous() for other in others
    )


def find(kind: str, dtype: torch.dtype) -> RowKernel | None:
    """The kernel of this name (see `row_kernels`) for rows of `dtype`, proven; None where there is none."""
    with _compiling:
        return _compiled(kind, dtype)


@cache
def _compiled(kind: str, dtype: torch.dtype) -> RowKernel | None:
    if dtype not in TOLERANCES:
        return None
    try:
        from tei_grpc.layers.row_kernels import WRITERS  # brings LLVM along, which other devices do without
        from tei_grpc.layers.simd import widest

        kernel = RowKernel(WRITERS[kind](str(dtype).removeprefix("torch.")), widest())
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # another LLVM, another CPU, no OpenMP
        logger.warning("`%s` is not compiled for this CPU: %s", kind, error)
        return None
    return kernel if PROOFS[kind.split("_", 1)[0]](kernel, kind, dtype) else None


def _is_add_norm(kernel: RowKernel, _: str, dtype: torch.dtype) -> bool:
    x, residual, weight, bias = (_sample(seed, *shape).to(dtype) for seed, shape in enumerate(NORMED))
    expected = functional.layer_norm(x.float() + residual.float(), SAMPLE[1:], weight.float(), bias.float(), EPS)
    kernel(x, eps=EPS, OTHER=residual, WEIGHT=weight, BIAS=bias, OUTPUT=x)
    return _is_close(x, expected)


def _is_quantize(kernel: RowKernel, _: str, dtype: torch.dtype) -> bool:
    x = _sample(0, *SAMPLE).to(dtype)
    values, scales = torch.empty(SAMPLE, dtype=torch.uint8), torch.empty(SAMPLE[0], 1)
    kernel(x, SCALES=scales, OUTPUT=values)
    apart = (x.float() / scales - (values.float() - ZERO)).abs().max()
    return torch.equal(scales, x.float().abs().amax(1, keepdim=True) / WIDEST) and bool(apart <= HALF)


def _is_dequantize(kernel: RowKernel, kind: str, dtype: torch.dtype) -> bool:
    y, scales, bias = _sample(0, *SAMPLE).to(dtype), _sample(1, SAMPLE[0], 1), _sample(2, SAMPLE[1])
    expected = y.float() * scales + (bias if "bias" in kind else 0)
    kernel(y, SCALES=scales, BIAS=bias)
    return _is_close(y, functional.gelu(expected) if "gelu" in kind else expected)


def _sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _is_close(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCES[found.dtype]
    return torch.allclose(found.float(), expected, atol=tolerance, rtol=tolerance)


def _is_sum(kernel: RowKernel, _: str, dtype: torch.dtype) -> bool:
    x, output = _sample(0, *SAMPLE).to(dtype), torch.empty(2, SAMPLE[1])
    kernel(output, INPUT=x, OTHER=torch.tensor([[1, 4], [2, 2]]), OUTPUT=output)
    return _is_close(output, torch.stack([x[1:4].float().sum(0), torch.zeros(SAMPLE[1])]))


PROOFS: Final[dict[str, Callable[[RowKernel, str, torch.dtype], bool]]] = {
    "add": _is_add_norm,
    "sum": _is_sum,
    "quantize": _is_quantize,
    "dequantize": _is_dequantize,
}
