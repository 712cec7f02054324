"""Owns how kernels are written that go through rows on a CPU once, where torch makes several passes over memory.

Like attention's they compute in float32, and what a row gets depends on that row alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from tei_grpc.layers.rows import TINY, WIDEST, ZERO, Slot
from tei_grpc.layers.simd import ELEMENTS, FLOAT, INT8, INT32, INT64, ROUND, Code, Type, Value, widest

SUMS: Final = 4  # at a time: an addition does not wait for the one before it
# erfc(z) = t (a1 + t (a2 + ...)) e^(-z^2) with t = 1 / (1 + p z), for z >= 0, to 1.5e-7: Abramowitz and Stegun, 7.1.26
ERFC: Final = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)  # a5 to a1
ERFC_P: Final = 0.3275911

Merge = Callable[[Value, Value], Value]


class Rows:
    """A kernel under construction, for rows that are a multiple of the lanes long."""

    def __init__(self, name: str) -> None:
        self.code = code = Code(name, widest())
        self.size = code.argument(Slot.SIZE)
        size = code.spread(code.build.sitofp(self.size, FLOAT))
        self.share = code.build.fdiv(code.floats(1.0), size)

    def compile(self, write: Callable[[Value], None]) -> int:
        """The address of the kernel that does for every row what `write` writes."""
        code = self.code
        with code.taken(code.argument(Slot.ROWS), code.argument(Slot.TAKE), Slot.NEXT) as row:
            write(row)
        return code.finish()

    def row(self, slot: Slot, element: Type, row: Value | int = 0) -> Value:
        """Where a row begins."""
        code = self.code
        return code.at(code.pointer(code.argument(slot), element), code.multiply(self.size, row))

    def fold(self, start: Value, step: Merge, merge: Merge) -> Value:
        """In all lanes what `merge` makes of the totals; `step` makes one of a total and the place of a vector."""
        code = self.code
        totals, together = code.variables(SUMS, start), SUMS * code.lanes
        whole = code.build.and_(self.size, code.add(-together))
        for begin, end, count in ((code.add(0), whole, SUMS), (whole, self.size, 1)):
            with code.loop(begin, end, count * code.lanes) as place:
                for number, total in enumerate(totals[:count]):
                    code.build.store(step(code.build.load(total), code.add(place, number * code.lanes)), total)
        one, two, three, four = map(code.build.load, totals)
        return code.fold(merge(merge(one, two), merge(three, four)), merge)


def write_sum(dtype: str) -> int:
    """OUTPUT = for each pair of OTHER, int64 [rows, 2], the sum of INPUT's rows from the first up to the second.

    Here ROWS are those of OUTPUT, in float32.
    """
    rows = Rows(f"sum_{dtype}")
    code, element = rows.code, ELEMENTS[dtype]
    bounds = code.pointer(code.argument(Slot.OTHER), INT64)

    def write(row: Value) -> None:
        first, stop = (code.build.load(code.at(bounds, code.multiply(row, 2), more)) for more in (0, 1))
        output = rows.row(Slot.OUTPUT, FLOAT, row)
        with code.loop(0, rows.size, code.lanes) as place:
            [total] = code.variables(1, code.floats(0.0))
            with code.loop(first, stop) as number:
                values = code.load(code.at(rows.row(Slot.INPUT, element, number), place))
                code.build.store(code.plus(code.build.load(total), values), total)
            code.store(code.build.load(total), code.at(output, place))

    return rows.compile(write)


def write_add_norm(dtype: str) -> int:
    """OUTPUT = LayerNorm(INPUT + OTHER), all of `dtype`. Ba et al., https://arxiv.org/abs/1607.06450, equation 3."""
    rows = Rows(f"add_norm_{dtype}")
    code, element = rows.code, ELEMENTS[dtype]
    eps = code.float_argument(Slot.EPS)
    weight, bias = rows.row(Slot.WEIGHT, element), rows.row(Slot.BIAS, element)

    def write(row: Value) -> None:
        one, other, output = (rows.row(slot, element, row) for slot in (Slot.INPUT, Slot.OTHER, Slot.OUTPUT))

        def sum_at(place: Value) -> Value:
            return code.plus(code.load(code.at(one, place)), code.load(code.at(other, place)))

        def square(total: Value, place: Value) -> Value:
            apart = code.build.fsub(sum_at(place), mean)
            return code.fma(apart, apart, total)

        total = rows.fold(code.floats(0.0), lambda total, place: code.plus(total, sum_at(place)), code.plus)
        mean = code.build.fmul(total, rows.share)
        variance = code.build.fmul(rows.fold(code.floats(0.0), square, code.plus), rows.share)
        factor = code.build.fdiv(code.floats(1.0), code.root(code.plus(variance, eps)))
        with code.loop(0, rows.size, code.lanes) as place:
            normal = code.build.fmul(code.build.fsub(sum_at(place), mean), factor)
            scaled = code.fma(normal, code.load(code.at(weight, place)), code.load(code.at(bias, place)))
            code.store(scaled, code.at(output, place))

    return rows.compile(write)


def write_quantize(dtype: str) -> int:
    """OUTPUT = INPUT / SCALES in uint8, ZERO above what it stands for; SCALES = each row's largest magnitude / WIDEST.

    Magnitudes are compared as the bits that they are: NaN and infinity are above all numbers, and become the scale.
    """
    rows = Rows(f"quantize_{dtype}")
    code, build, element = rows.code, rows.code.build, ELEMENTS[dtype]

    def write(row: Value) -> None:
        values, output = rows.row(Slot.INPUT, element, row), rows.row(Slot.OUTPUT, INT8, row)

        def largest_at(total: Value, place: Value) -> Value:
            return code.larger_bits(code.magnitude(code.load(code.at(values, place))), total)

        largest = rows.fold(code.floats(0.0), largest_at, code.larger_bits)
        is_tiny = build.fcmp_ordered("<", largest, code.floats(TINY))
        scale = build.fdiv(build.select(is_tiny, code.floats(TINY), largest), code.floats(WIDEST))
        scales = code.pointer(code.argument(Slot.SCALES), FLOAT)
        build.store(build.extract_element(scale, INT32(0)), code.at(scales, row))
        factor = build.fdiv(code.floats(1.0), scale)
        with code.loop(0, rows.size, code.lanes) as place:
            shifted = code.fma(code.load(code.at(values, place)), factor, code.floats(ROUND + ZERO))
            code.store_lowest(shifted, code.at(output, place))

    return rows.compile(write)


def write_dequantize(dtype: str, *, has_bias: bool, is_gelu: bool) -> int:
    """INPUT, in place: GELU(INPUT * SCALES + BIAS), without GELU or BIAS where there is none."""
    rows = Rows(f"dequantize_{dtype}{'_bias' * has_bias}{'_gelu' * is_gelu}")
    code, element = rows.code, ELEMENTS[dtype]
    bias = rows.row(Slot.BIAS, FLOAT)

    def write(row: Value) -> None:
        values = rows.row(Slot.INPUT, element, row)
        scale = code.spread(code.build.load(code.at(code.pointer(code.argument(Slot.SCALES), FLOAT), row)))
        with code.loop(0, rows.size, code.lanes) as place:
            term = code.load(code.at(bias, place)) if has_bias else code.floats(0.0)
            y = code.fma(code.load(code.at(values, place)), scale, term)
            code.store(_gelu(code, y) if is_gelu else y, code.at(values, place))

    return rows.compile(write)


def _gelu(code: Code, x: Value) -> Value:
    """Lane by lane x (1 + erf(x / sqrt 2)) / 2, which is max(x, 0) - |x| erfc(|x| / sqrt 2) / 2."""
    build, size = code.build, code.magnitude(x)
    z = build.fmul(size, code.floats(2.0**-0.5))
    t = build.fdiv(code.floats(1.0), code.fma(z, code.floats(ERFC_P), code.floats(1.0)))
    tail = code.floats(ERFC[0])
    for coefficient in ERFC[1:]:
        tail = code.fma(tail, t, code.floats(coefficient))
    tail = build.fmul(build.fmul(tail, t), code.exp(build.fneg(build.fmul(z, z))))
    positive = build.select(build.fcmp_ordered("<", x, code.floats(0.0)), code.floats(0.0), x)
    return code.fma(build.fmul(size, code.floats(-0.5)), tail, positive)


WRITERS: Final[dict[str, Callable[[str], int]]] = {
    "add_norm": write_add_norm,
    "sum": write_sum,
    "quantize": write_quantize,
    **{
        f"dequantize{'_bias' * has_bias}{'_gelu' * is_gelu}": partial(
            write_dequantize, has_bias=has_bias, is_gelu=is_gelu
        )
        for has_bias in (False, True)
        for is_gelu in (False, True)
    },
}
