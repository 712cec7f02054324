"""Owns what compiled layers need to call torch's products: by number, for the layers once, and for each batch."""

import ctypes
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from tei_grpc.layers import int8, onednn
from tei_grpc.layers.activation import Activation
from tei_grpc.layers.c_interface import Handles, address_of, dtype_number
from tei_grpc.layers.rows import ZERO, RowKernel, dequantizer, find
from tei_grpc.layers.stack_code import FloatPostNorm, Int8PostNorm, Slot

Numbers = ctypes.Array[ctypes.c_int64]

TEXTS: Final = {text: ctypes.c_char_p(text.encode()) for names in onednn.FUSED.values() for text in names}


class FloatProducts:
    """Those of `onednn`."""

    code = FloatPostNorm

    def __init__(self, x: Tensor) -> None:
        """For rows like `x`."""
        self._dtype = x.dtype
        self._handles = Handles()
        self._addresses: list[ctypes.c_int64] = []
        self.given = {Slot.PRODUCT: address_of("aoti_torch_cpu__linear_pointwise")}

    def numbers(self, product: Activation | None) -> Iterator[int]:
        """A layer's. Raises ValueError where it is no such product."""
        if not isinstance(product, onednn.Product) or not product.is_fused or product.packed.dtype != self._dtype:
            raise ValueError("a product is not oneDNN's")
        activation, form = product.fused
        yield self._handles.add(product.packed)
        yield 0 if product.bias is None else self._point(self._handles.add(product.bias))
        yield _address(TEXTS[activation])
        yield ctypes.addressof(TEXTS[form])

    def prepare(self, numbers: Numbers, tokens: int, handles: Handles) -> object:
        """Fill in what a batch needs; it holds as long as what is returned."""
        return None

    def _point(self, number: int) -> int:
        self._addresses.append(ctypes.c_int64(number))
        return ctypes.addressof(self._addresses[-1])


class Int8Products:
    """Those of `int8`."""

    code = Int8PostNorm

    def __init__(self, x: Tensor, wide: int) -> None:
        """For rows like `x` [tokens, hidden]; the intermediate size is `wide`. Raises ValueError."""
        self._dtype, self._hidden, self._wide = x.dtype, x.shape[1], wide
        self._quantize = self._checked(find("quantize", x.dtype), self._hidden, wide)
        self._handles = Handles()
        self._output = ctypes.c_int32(dtype_number(x.dtype))
        self.given = {
            Slot.PRODUCT: address_of("aoti_torch_cpu__qlinear_pointwise_tensor"),
            Slot.QUANTIZE: self._quantize.address,
            Slot.ONE: self._handles.add(torch.ones(1)),
            Slot.ZERO: self._handles.add(torch.full((1,), ZERO, dtype=torch.int32)),
            Slot.DTYPE: ctypes.addressof(self._output),
            Slot.NONE: _address(TEXTS["none"]),
        }

    def numbers(self, product: Activation | None) -> Iterator[int]:
        """A layer's. Raises ValueError where it is no such product."""
        if not isinstance(product, int8.Product):
            raise ValueError("a product is not of integers")
        kernel = dequantizer(self._dtype, product.bias, product.activation)
        dequantize = self._checked(kernel, len(product.scales))
        yield from map(self._handles.add, (product.packed, product.scales, product.zeros))
        yield 0 if product.bias is None else product.bias.data_ptr()
        yield dequantize.address

    def prepare(self, numbers: Numbers, tokens: int, handles: Handles) -> object:
        """Fill in what a batch needs; it holds as long as what is returned."""
        narrow, wide = (torch.empty(tokens, size, dtype=torch.uint8) for size in (self._hidden, self._wide))
        scales = torch.empty(tokens)
        numbers[Slot.NARROW_BYTES], numbers[Slot.WIDE_BYTES] = handles.add(narrow), handles.add(wide)
        numbers[Slot.SCALES] = scales.data_ptr()
        kept = []
        for slot, size in ((Slot.TRIPLE, 3 * self._hidden), (Slot.WIDE, self._wide)):
            rows = self._quantize.arguments(tokens, size)
            numbers[slot], numbers[slot + 1] = ctypes.addressof(rows.numbers), rows.threads
            kept.append(rows)
        return scales, kept

    def _checked(self, kernel: RowKernel | None, *sizes: int) -> RowKernel:
        if kernel is None or not all(kernel.takes(size) for size in sizes):
            raise ValueError("rows are not quantized by a kernel")
        return kernel


def _address(text: ctypes.c_char_p) -> int:
    return ctypes.cast(text, ctypes.c_void_p).value or 0
