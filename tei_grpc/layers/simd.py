"""Owns the instructions that kernels are written in: a few, on integers and on vectors of 8 or 16 floats.

LLVM makes them into those of the CPU, be they AVX2, AVX-512 or NEON (see `native`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir

from tei_grpc.layers.native import compile_module

Value = Any  # of llvmlite, which has no types: what an instruction gives, or a pointer
Type = Any

LEAST_LANES, MOST_LANES = 8, 16
FLOAT, HALF = ir.FloatType(), ir.HalfType()
INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
ELEMENTS = {"float32": FLOAT, "bfloat16": INT16, "float16": HALF}  # what is in memory; LLVM's bfloat is not everywhere

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; products with the first, of few digits, are exact
# exp(r) = 1 + r + r^2 p(r) for |r| <= ln 2 / 2: the coefficients, with those of p from Cephes' expf, the highest first.
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0)
LEAST_EXP = -87.0  # below it exp is taken for 0: soon it leaves the normal floats
ROUND = 1.5 * 2.0**23  # added to a small float, it leaves the nearest integer in the lowest bits


class Code:
    """A function under construction. It takes the address of an array of 64-bit numbers, its arguments."""

    def __init__(self, name: str, lanes: int) -> None:
        """Vectors have `lanes` floats, a power of two."""
        self.lanes = lanes
        self._module = ir.Module(name)
        self._module.triple = llvm.get_default_triple()
        self._floats, self._ints = ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)
        self._function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), [INT64.as_pointer()]), name)
        self.build = ir.IRBuilder(self._function.append_basic_block())
        self.lane_numbers = ir.Constant(self._ints, list(range(lanes)))

    def argument(self, number: int) -> Value:
        """The 64-bit number at this place."""
        return self.build.load(self.argument_address(number))

    def float_argument(self, number: int) -> Value:
        """The float32 whose bits are at this place, in all lanes (see `native.float_bits`)."""
        return self.spread(self.build.bitcast(self.build.trunc(self.argument(number), INT32), FLOAT))

    def argument_address(self, number: int) -> Value:
        """Where it is."""
        return self.build.gep(self._function.args[0], [integer(number)])

    def pointer(self, address: Value, element: Type) -> Value:
        """The address as a pointer."""
        return self.build.inttoptr(address, element.as_pointer())

    def add(self, *terms: Value | int) -> Value:
        """The sum of integers."""
        total, *rest = map(integer, terms)
        for term in rest:
            total = self.build.add(total, term, flags=("nsw",))
        return total

    def multiply(self, one: Value, other: Value | int) -> Value:
        """The product of integers."""
        return self.build.mul(one, integer(other), flags=("nsw",))

    def least(self, one: Value, other: Value) -> Value:
        """The smaller integer."""
        return self.build.select(self.build.icmp_signed("<", one, other), one, other)

    def most(self, one: Value, other: Value) -> Value:
        """The larger integer."""
        return self.build.select(self.build.icmp_signed(">", one, other), one, other)

    def round_up(self, number: Value) -> Value:
        """To a multiple of the lanes."""
        return self.round_down(self.add(number, self.lanes - 1))

    def round_down(self, number: Value) -> Value:
        """To a multiple of the lanes."""
        return self.build.and_(number, integer(-self.lanes))

    def at(self, pointer: Value, *offsets: Value | int) -> Value:
        """The pointer, so many elements further."""
        return self.build.gep(pointer, [self.add(*offsets)])

    def variables(self, count: int, start: Value) -> list[Value]:
        """Vectors that loops change."""
        with self.build.goto_entry_block():
            found = [self.build.alloca(self._floats) for _ in range(count)]
        for variable in found:
            self.build.store(start, variable)
        return found

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """The instructions within, for every `step`th integer from `start` until `stop` is reached."""
        build = self.build
        with build.goto_entry_block():
            counter = build.alloca(INT64)
        build.store(integer(start), counter)
        head, body, end = (build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        number = build.load(counter)
        build.cbranch(build.icmp_signed("<", number, integer(stop)), body, end)
        build.position_at_end(body)
        yield number
        build.store(self.add(number, step), counter)
        build.branch(head)
        build.position_at_end(end)

    @contextmanager
    def taken(self, items: Value, take: Value, counter: int) -> Iterator[Value]:
        """The instructions within, for the items that this thread gets of those from 0 on.

        Threads take so many at a time from a counter that they share, the argument at that place, until none is left.
        """
        build = self.build
        with self.loop(0, self.add(items, 1)):  # more takes there cannot be
            first = self.count(counter, take)
            with self.loop(first, self.least(self.add(first, take), items)) as item:
                yield item
            end, on = build.append_basic_block(), build.append_basic_block()
            build.cbranch(build.icmp_signed("<", first, items), on, end)
            build.position_at_end(end)
            build.ret_void()
            build.position_at_end(on)

    def count(self, counter: int, step: Value | int) -> Value:
        """What a counter that threads share, an argument, was before this thread added to it."""
        return self.build.atomic_rmw("add", self.argument_address(counter), integer(step), "monotonic")

    def floats(self, value: float) -> Value:
        """A vector of a constant."""
        return ir.Constant(self._floats, [value] * self.lanes)

    def spread(self, value: Value) -> Value:
        """A vector of a float, or of an integer's lowest 32 bits."""
        vector = self._floats
        if value.type == INT64:
            value, vector = self.build.trunc(value, INT32), self._ints
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.build.insert_element(undefined, value, INT32(0))
        return self.build.shuffle_vector(first, undefined, ir.Constant(self._ints, [0] * self.lanes))

    def load(self, pointer: Value) -> Value:
        """A vector of elements from memory, as floats."""
        element = pointer.type.pointee
        vector = ir.VectorType(element, self.lanes)
        values = self.build.load(self.build.bitcast(pointer, vector.as_pointer()), align=2)
        if element == HALF:
            return self.build.fpext(values, self._floats)
        if element == INT16:
            wide = self.build.shl(self.build.zext(values, self._ints), self._integers(16))
            return self.build.bitcast(wide, self._floats)
        return values

    def store(self, values: Value, pointer: Value) -> None:
        """A vector of floats to memory, rounded to the nearest, ties to even."""
        element = pointer.type.pointee
        if element == HALF:
            values = self.build.fptrunc(values, ir.VectorType(HALF, self.lanes))
        if element == INT16:
            values = self._bfloat16(values)
        vector = ir.VectorType(element, self.lanes)
        self.build.store(values, self.build.bitcast(pointer, vector.as_pointer()), align=2)

    def store_lowest(self, values: Value, pointer: Value) -> None:
        """The lowest byte of each float's bits to memory."""
        vector = ir.VectorType(INT8, self.lanes)
        lowest = self.build.trunc(self.build.bitcast(values, self._ints), vector)
        self.build.store(lowest, self.build.bitcast(pointer, vector.as_pointer()), align=1)

    def magnitude(self, x: Value) -> Value:
        """Lane by lane without the sign."""
        bits = self.build.and_(self.build.bitcast(x, self._ints), self._integers(0x7FFFFFFF))
        return self.build.bitcast(bits, self._floats)

    def fma(self, one: Value, other: Value, term: Value) -> Value:
        """Lane by lane `one * other + term`, rounded once."""
        return self.build.call(self._intrinsic("llvm.fma", 3), [one, other, term])

    def root(self, x: Value) -> Value:
        """Lane by lane the square root."""
        return self.build.call(self._intrinsic("llvm.sqrt", 1), [x])

    def larger(self, one: Value, other: Value) -> Value:
        """Lane by lane the larger one; `other`, where `one` is NaN."""
        return self.build.select(self.build.fcmp_ordered(">", one, other), one, other)

    def larger_bits(self, one: Value, other: Value) -> Value:
        """Lane by lane the larger one of magnitudes, compared as bits: NaN is above all others."""
        bits = [self.build.bitcast(values, self._ints) for values in (one, other)]
        return self.build.select(self.build.icmp_signed(">", *bits), one, other)

    def plus(self, one: Value, other: Value) -> Value:
        """Their sum."""
        return self.build.fadd(one, other)

    def exp(self, x: Value) -> Value:
        """Lane by lane e^x for x <= 0, to 1 ulp; 0 below LEAST_EXP, NaN for NaN.

        By Cody and Waite's reduction: x = n ln 2 + r, so e^x = 2^n e^r.
        """
        build = self.build
        shifted = self.fma(x, self.floats(LOG2_E), self.floats(ROUND))
        n = build.fsub(shifted, self.floats(ROUND))
        r = self.fma(n, self.floats(-LN2_LOW), self.fma(n, self.floats(-LN2_HIGH), x))
        y = self.floats(EXP[0])
        for coefficient in EXP[1:]:
            y = self.fma(y, r, self.floats(coefficient))
        exponent = build.shl(build.bitcast(shifted, self._ints), self._integers(23))  # 2^n, but for the bias: y has it
        scaled = build.bitcast(build.add(build.bitcast(y, self._ints), exponent), self._floats)
        is_small = build.fcmp_ordered("<", x, self.floats(LEAST_EXP))
        is_number = build.fcmp_ordered("ord", x, x)
        return build.select(is_small, self.floats(0.0), build.select(is_number, scaled, x))

    def fold(self, vector: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """A vector whose lanes all hold what `merge` makes of all lanes."""
        step = self.lanes // 2
        while step:
            order = ir.Constant(self._ints, [lane ^ step for lane in range(self.lanes)])
            vector = merge(vector, self.build.shuffle_vector(vector, vector, order))
            step //= 2
        return vector

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """`lanes` vectors as a matrix: its columns. Squares of 2, 4, ... rows swap their corners."""
        found, step = list(rows), 1
        while step < self.lanes:
            keep = [lane & step == 0 for lane in range(self.lanes)]
            upper = [lane if keep[lane] else self.lanes + lane - step for lane in range(self.lanes)]
            lower = [lane + step if keep[lane] else self.lanes + lane for lane in range(self.lanes)]
            for row in range(self.lanes):
                if keep[row]:
                    pair = found[row], found[row + step]
                    for place, order in ((row, upper), (row + step, lower)):
                        found[place] = self.build.shuffle_vector(*pair, ir.Constant(self._ints, order))
            step *= 2
        return found

    def finish(self) -> int:
        """Compile; the address of the function. Raises RuntimeError where that cannot be done."""
        self.build.ret_void()
        return compile_module(self._module.name, str(self._module))

    def _integers(self, value: int) -> Value:
        return ir.Constant(self._ints, [value] * self.lanes)

    def _intrinsic(self, name: str, arguments: int) -> Value:
        name = f"{name}.v{self.lanes}f32"
        type = ir.FunctionType(self._floats, [self._floats] * arguments)
        return self._module.globals.get(name) or ir.Function(self._module, type, name)

    def _bfloat16(self, values: Value) -> Value:
        """The upper halves, rounded; NaN stays NaN."""
        build, bits = self.build, self.build.bitcast(values, self._ints)
        odd = build.and_(build.lshr(bits, self._integers(16)), self._integers(1))
        rounded = build.add(bits, build.add(odd, self._integers(0x7FFF)))
        is_nan = build.fcmp_unordered("uno", values, values)
        kept = build.select(is_nan, self._integers(0x7FC00000), rounded)
        return build.trunc(build.lshr(kept, self._integers(16)), ir.VectorType(INT16, self.lanes))


def integer(value: Value | int) -> Value:
    """A constant, where it is not an instruction's value already."""
    return ir.Constant(INT64, value) if isinstance(value, int) else value


def widest() -> int:
    """The floats of a vector register of this CPU, or of two."""
    return MOST_LANES if llvm.get_host_cpu_features().get("avx512f") else LEAST_LANES
