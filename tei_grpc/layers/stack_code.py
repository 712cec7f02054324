"""Owns the compiled code that runs post-norm layers one after the other, with nothing of Python between their parts.

It calls the kernels of rows and attention, and torch's products by the C interface that torch keeps stable for models
compiled ahead of time (AOTInductor's), where functions return an error or 0, and tensors are known by handles.
"""

from abc import ABC, abstractmethod
from enum import IntEnum, auto
from typing import ClassVar, Final

from tei_grpc.layers.attention_kernel import Slot as Attention
from tei_grpc.layers.calling_code import CallingCode
from tei_grpc.layers.rows import Slot as Row
from tei_grpc.layers.simd import INT64, Value, widest

Given = dict[IntEnum, "Value | int"]


class Slot(IntEnum):
    """The code's arguments: addresses, handles, and numbers."""

    LAYERS = 0
    PARTS = auto()  # int64 [layers, `PARTS`]
    PRODUCT = auto()  # of torch
    DATA = auto()  # of torch: the address of a tensor's values
    DELETE = auto()  # of torch: lets go of a tensor
    PARALLEL = auto()  # of OpenMP (see `native.parallel`)
    HIDDEN = auto()  # handle: the hidden states, [tokens, hidden], which become those of the last layer
    ATTENDED = auto()  # handle: memory for as many
    KEY = auto()  # bytes from a token's queries to its keys
    VALUE = auto()  # and to its values
    ATTENTION = auto()  # kernel; its arguments; threads
    ATTENTION_ARGUMENTS = auto()
    ATTENTION_THREADS = auto()
    NORM = auto()  # kernel
    NARROW = auto()  # arguments of a kernel for rows of `hidden` values; threads
    NARROW_THREADS = auto()
    QUANTIZE = auto()  # kernel; from here on for int8 alone
    TRIPLE = auto()  # for rows of three times `hidden`
    TRIPLE_THREADS = auto()
    WIDE = auto()  # for rows of the intermediate size
    WIDE_THREADS = auto()
    NARROW_BYTES = auto()  # handle: memory for rows as uint8
    WIDE_BYTES = auto()
    SCALES = auto()  # their scales
    ONE = auto()  # handle: a scale of 1
    ZERO = auto()  # handle: what stands for 0
    DTYPE = auto()  # address of torch's number of the dtype that products give
    NONE = auto()  # address of the name of no activation
    HAS_FAILED = auto()  # set to 1 where a function of torch has


NORM_PARTS: Final = (Row.WEIGHT, Row.BIAS, Row.EPS)  # what a layer has of each norm; of each product see below
INPUTS: Final = (Slot.NARROW, Slot.NARROW, Slot.NARROW, Slot.WIDE)  # of a layer's products
OUTPUTS: Final = (Slot.TRIPLE, Slot.NARROW, Slot.WIDE, Slot.NARROW)
QKV, OUT, UP, DOWN = range(len(INPUTS))


class PostNorm(ABC):
    """The code under construction. A layer's parts are numbers: those of its products, then those of its norms."""

    name: ClassVar[str]
    product_parts: ClassVar[int]

    def __init__(self) -> None:
        self._code = code = CallingCode(self.name, widest())
        self._output, self._inner = code.number(0), code.number(0)  # handles of tensors that it holds; 0: of none
        self._end = code.build.append_basic_block()

    @classmethod
    def parts(cls) -> int:
        """Of a layer."""
        return len(INPUTS) * cls.product_parts + 2 * len(NORM_PARTS)

    def compile(self) -> int:
        """The address of the code."""
        code = self._code
        table = code.pointer(code.argument(Slot.PARTS), INT64)
        with code.loop(0, code.argument(Slot.LAYERS)) as layer:
            self._write_layer(code.at(table, code.multiply(layer, self.parts())))
        code.build.branch(self._end)
        code.build.position_at_end(self._end)
        for handle in (self._output, self._inner):
            self._delete(handle)
        return code.finish()

    def _write_layer(self, parts: Value) -> None:
        code = self._code
        hidden, products = code.argument(Slot.HIDDEN), len(INPUTS) * self.product_parts
        self._multiply(hidden, parts, QKV, self._output)
        self._attend(self._data(code.build.load(self._output)))
        self._delete(self._output)
        self._multiply(code.argument(Slot.ATTENDED), parts, OUT, self._output)
        self._add_norm(parts, products)
        self._multiply(hidden, parts, UP, self._inner)
        self._multiply(code.build.load(self._inner), parts, DOWN, self._output)
        self._delete(self._inner)
        self._add_norm(parts, products + len(NORM_PARTS))

    @abstractmethod
    def _multiply(self, x: Value, parts: Value, product: int, output: Value) -> None:
        """Have `output` hold a new tensor, the product of `x`."""

    def _check(self, error: Value) -> None:
        """At an error nothing more is done."""
        code = self._code
        with code.build.if_then(code.build.icmp_signed("!=", error, error.type(0))):
            code.store_number(1, code.argument_address(Slot.HAS_FAILED))
            code.build.branch(self._end)

    def _data(self, handle: Value) -> Value:
        code, data = self._code, self._code.number(0)
        self._check(code.call(code.argument(Slot.DATA), handle, code.address(data)))
        return code.build.load(data)

    def _delete(self, handle: Value) -> None:
        code = self._code
        held = code.build.load(handle)
        with code.build.if_then(code.build.icmp_signed("!=", held, held.type(0))):
            code.call(code.argument(Slot.DELETE), held)
            code.store_number(0, handle)

    def _attend(self, queries: Value) -> None:
        code = self._code
        keys, values = (code.add(queries, code.argument(slot)) for slot in (Slot.KEY, Slot.VALUE))
        given: Given = {Attention.QUERY: queries, Attention.KEY: keys, Attention.VALUE: values}
        counted: Given = {Attention.NEXT_ITEM: 0, Attention.NEXT_THREAD: 0}
        self._run(code.argument(Slot.ATTENTION), Slot.ATTENTION_ARGUMENTS, {**given, **counted})

    def _add_norm(self, parts: Value, first: int) -> None:
        """The hidden states become LayerNorm(output + hidden states)."""
        code = self._code
        hidden, output = self._data(code.argument(Slot.HIDDEN)), self._data(code.build.load(self._output))
        norm: Given = {slot: code.load_number(parts, first + number) for number, slot in enumerate(NORM_PARTS)}
        given: Given = {Row.INPUT: output, Row.OTHER: hidden, Row.OUTPUT: hidden, **norm}
        self._run(code.argument(Slot.NORM), Slot.NARROW, {**given, Row.NEXT: 0})
        self._delete(self._output)

    def _run(self, kernel: Value, arguments: Slot, given: Given) -> None:
        """Call a kernel in its threads, with what is given beside the arguments that it has."""
        code = self._code
        address, threads = code.argument(arguments), code.argument(arguments + 1)
        table = code.pointer(address, INT64)
        for slot, value in given.items():
            code.store_number(value, code.at(table, slot))
        with code.build.if_else(code.build.icmp_signed("==", threads, threads.type(1))) as (alone, together):
            with alone:
                code.call(kernel, address)
            with together:
                code.call(code.argument(Slot.PARALLEL), kernel, address, threads, 0)


class FloatPostNorm(PostNorm):
    """With products in the dtype of the hidden states. See `onednn.Product`."""

    name = "post_norm"
    product_parts = 4  # handle of the weight, address of that of the bias or 0, activation, address of its form

    def _multiply(self, x: Value, parts: Value, product: int, output: Value) -> None:
        code, first = self._code, product * self.product_parts
        weight, bias, activation, form = (code.load_number(parts, first + part) for part in range(self.product_parts))
        arguments = x, weight, bias, activation, 0, 0, form, code.address(output)
        self._check(code.call(code.argument(Slot.PRODUCT), *arguments))


class Int8PostNorm(PostNorm):
    """With products of integers. See `int8.Product`."""

    name = "post_norm_int8"
    product_parts = 5  # handles of weight, scales and zeros, address of the bias, kernel that dequantizes

    def _multiply(self, x: Value, parts: Value, product: int, output: Value) -> None:
        code, first = self._code, product * self.product_parts
        weight, scales, zeros, bias, dequantize = (
            code.load_number(parts, first + part) for part in range(self.product_parts)
        )
        size, rows = INPUTS[product], code.argument(Slot.SCALES)
        values = code.argument(Slot.WIDE_BYTES if size is Slot.WIDE else Slot.NARROW_BYTES)
        given: Given = {Row.INPUT: self._data(x), Row.SCALES: rows, Row.OUTPUT: self._data(values), Row.NEXT: 0}
        self._run(code.argument(Slot.QUANTIZE), size, given)
        one, zero, dtype, none = (code.argument(slot) for slot in (Slot.ONE, Slot.ZERO, Slot.DTYPE, Slot.NONE))
        operands = values, one, zero, weight, scales, zeros, 0
        form = code.double(1.0), 0, dtype, none, 0, 0, none
        self._check(code.call(code.argument(Slot.PRODUCT), *operands, *form, code.address(output)))
        made = self._data(code.build.load(output))
        self._run(dequantize, OUTPUTS[product], {Row.INPUT: made, Row.SCALES: rows, Row.BIAS: bias, Row.NEXT: 0})
