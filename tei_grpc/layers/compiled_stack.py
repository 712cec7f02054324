"""Owns calls of the compiled code for post-norm layers (see `stack_code`): what it gets once, and for each batch."""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from tei_grpc.layers import int8
from tei_grpc.layers.attention import FULL, States
from tei_grpc.layers.c_interface import Handles, address_of
from tei_grpc.layers.compiled_products import FloatProducts, Int8Products
from tei_grpc.layers.cpu_kernels import COMPILED, CpuKernels, find_kernel
from tei_grpc.layers.native import call, float_bits, parallel
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rows import find
from tei_grpc.layers.stack import Parts
from tei_grpc.layers.stack_code import PostNorm, Slot


class CompiledStack:
    """The code, and layers that it runs: with products of oneDNN, and kernels for all that is between them."""

    def __init__(self, x: Tensor, layers: Sequence[Parts], heads: int) -> None:
        """For hidden states like `x` [tokens, hidden]. Raises ValueError, or what the lack of an interface raises."""
        self._heads, self._hidden, self._dtype = heads, x.shape[1], x.dtype
        up = layers[0].up.product
        self._products = Int8Products(x, len(up.scales)) if isinstance(up, int8.Product) else FloatProducts(x)
        attention = find_kernel(x.dtype, self._hidden // heads, is_windowed=False)
        norm = find("add_norm", x.dtype)
        if attention is None or norm is None or not norm.takes(self._hidden):
            raise ValueError("not all between their products is compiled")
        self._attention, self._norm = attention, norm
        self._layers = layers
        numbers = [number for layer in layers for number in self._numbers(layer)]
        self._table = (ctypes.c_int64 * len(numbers))(*numbers)
        self._code = _compile(self._products.code)
        self._given = {
            Slot.LAYERS: len(layers),
            Slot.PARTS: ctypes.addressof(self._table),
            Slot.DATA: address_of("aoti_torch_get_data_ptr"),
            Slot.DELETE: address_of("aoti_torch_delete_tensor_object"),
            Slot.PARALLEL: ctypes.cast(parallel(), ctypes.c_void_p).value or 0,
            Slot.ATTENTION: attention.kernel.address,
            Slot.NORM: norm.address,
            **self._products.given,
        }

    def takes(self, x: Tensor, inputs: PackedInputs) -> bool:
        """Whether it can run them: attention over long texts may be faster in blocks."""
        return x.dtype == self._dtype and inputs.max_seqlen < self._attention.blocks_from

    def __call__(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """`x` [tokens, hidden], as the last layer leaves it. Raises RuntimeError where a product fails."""
        handles, attended = Handles(), torch.empty_like(x)
        query, key, value = self._states(len(x)).unbind(1)
        states = States(query, key, value, attended.view(query.shape))
        texts, scale = slice(0, len(inputs.offsets) - 1), query.shape[2] ** -0.5
        attention = self._attention.kernel.arguments(states, inputs, texts, scale, FULL)
        rows = self._norm.arguments(*x.shape)
        numbers = _arguments(
            {
                **self._given,
                Slot.HIDDEN: handles.add(x),
                Slot.ATTENDED: handles.add(attended),
                Slot.KEY: key.data_ptr(),
                Slot.VALUE: value.data_ptr(),
                Slot.ATTENTION_ARGUMENTS: ctypes.addressof(attention.numbers),
                Slot.ATTENTION_THREADS: attention.threads,
                Slot.NARROW: ctypes.addressof(rows.numbers),
                Slot.NARROW_THREADS: rows.threads,
            }
        )
        kept = self._products.prepare(numbers, len(x), handles)
        call(self._code, numbers, threads=1)
        del kept
        if numbers[Slot.HAS_FAILED]:
            raise RuntimeError("a product of a compiled layer failed, perhaps for want of memory")
        if isinstance(inputs.attend, CpuKernels):
            inputs.attend.names[COMPILED] = None
        return x

    def _states(self, tokens: int) -> Tensor:
        """What the first product gives, without its values: addresses in it are offsets."""
        shape = tokens, 3, self._heads, self._hidden // self._heads
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def _numbers(self, layer: Parts) -> Iterator[int]:
        for linear in layer.products:
            yield from self._products.numbers(linear.product)
        for norm in layer.norms:
            yield from _norm_numbers(norm, self._dtype)


def _norm_numbers(norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[int, ...]:
    if not all(values.dtype == dtype and values.is_contiguous() for values in (norm.weight, norm.bias)):
        raise ValueError("a norm has numbers of another kind")
    return norm.weight.data_ptr(), norm.bias.data_ptr(), float_bits(norm.eps)


def _arguments(given: dict[Slot, int]) -> "ctypes.Array[ctypes.c_int64]":
    numbers = (ctypes.c_int64 * len(Slot))()
    for slot, number in given.items():
        numbers[slot] = number
    return numbers


@cache
def _compile(code: type[PostNorm]) -> int:
    return code().compile()
