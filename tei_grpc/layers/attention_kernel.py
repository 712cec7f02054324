"""Owns how attention over packed texts is written for a CPU: nothing is padded, gathered or grouped.

A thread takes one text and one head of keys after the other. It lays the keys out by head dimension, so that the scores
of a query lie side by side in a vector; then, for some queries at a time, computes scores, their softmax and the sum of
the values. All of it is float32, whatever the states are, and stays in the core's cache. What a text gets depends on
that text alone, to the last bit.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum, auto
from typing import Final, NamedTuple

from tei_grpc.layers.simd import (
    ELEMENTS,
    FLOAT,
    INT32,
    INT64,
    LEAST_LANES,
    MOST_LANES,
    Code,
    Value,
    integer,
    widest,
)

QUERIES: Final = (8, 4)  # at a time: a load of a key serves all; as many sums hide the time that one takes
UNROLLED: Final = 16  # head dimensions


class Slot(IntEnum):
    """The kernel's arguments: addresses, and numbers counted in elements."""

    QUERY = 0
    KEY = auto()
    VALUE = auto()
    OUTPUT = auto()
    BOUNDS = auto()  # int32 [texts + 1]
    ITEMS = auto()  # texts * heads of keys
    HEADS = auto()  # of keys
    SHARED = auto()  # heads of queries for each of them
    QUERY_ROW = auto()  # from a token to the next one
    QUERY_HEAD = auto()  # from a head to the next one
    KEY_ROW = auto()
    KEY_HEAD = auto()
    VALUE_ROW = auto()
    VALUE_HEAD = auto()
    OUTPUT_ROW = auto()
    OUTPUT_HEAD = auto()
    LEFT = auto()  # tokens that a query sees beside its own
    RIGHT = auto()
    SCALE = auto()  # the bits of a float32
    SCRATCH = auto()  # address
    SCRATCH_SIZE = auto()  # floats of each thread
    TAKE = auto()  # items at a time
    NEXT_ITEM = auto()  # counted up by threads
    NEXT_THREAD = auto()  # the same


class Rows(NamedTuple):
    """Rows of a text in memory, at the first head that is meant."""

    first: Value  # pointer
    step: Value  # elements to the next one


class Text(NamedTuple):
    """One text while its kernel is written."""

    length: Value
    padded: Value  # a multiple of the lanes
    left: Value
    right: Value


class Tile(NamedTuple):
    """Some queries of a text and the keys that they see."""

    queries: Sequence[Value]  # their places in the text; the last one again where there are no more
    first: Value  # key that one of them sees, rounded down to the lanes
    stop: Value  # one past the last key that one of them sees


class Kernel:
    """Writes the kernel for heads of `head_dim` values; `is_windowed` if not all keys are seen."""

    def __init__(self, dtype: str, head_dim: int, *, is_windowed: bool) -> None:
        lanes = widest() if head_dim % widest() == 0 else LEAST_LANES
        self._code = Code(f"attention_{dtype}_{head_dim}{'_windowed' * is_windowed}", lanes)
        self._element, self._head_dim, self._is_windowed = ELEMENTS[dtype], head_dim, is_windowed
        self._parts = range(0, head_dim, lanes)

    def compile(self) -> int:
        """The address of the kernel."""
        self._write()
        return self._code.finish()

    def _write(self) -> None:
        code = self._code
        self._scale = code.float_argument(Slot.SCALE)
        thread = code.count(Slot.NEXT_THREAD, 1)
        scratch = code.pointer(code.argument(Slot.SCRATCH), FLOAT)
        self._keys = code.at(scratch, code.multiply(thread, code.argument(Slot.SCRATCH_SIZE)))  # see _lay_out_keys
        with code.taken(code.argument(Slot.ITEMS), code.argument(Slot.TAKE), Slot.NEXT_ITEM) as item:
            self._attend(item)

    def _attend(self, item: Value) -> None:
        """One text, one head of keys, and the heads of queries that share it."""
        code, build = self._code, self._code.build
        heads, shared = code.argument(Slot.HEADS), code.argument(Slot.SHARED)
        text, head = build.sdiv(item, heads), build.srem(item, heads)
        bounds = code.pointer(code.argument(Slot.BOUNDS), INT32)
        start, stop = (build.sext(build.load(code.at(bounds, text, more)), INT64) for more in (0, 1))
        length = build.sub(stop, start)
        this = Text(length, code.round_up(length), code.argument(Slot.LEFT), code.argument(Slot.RIGHT))
        self._scores = code.at(self._keys, code.multiply(this.padded, self._head_dim))  # [queries, padded]
        self._queries = code.at(self._scores, code.multiply(this.padded, QUERIES[0]))  # [queries, head_dim]
        value = self._states(Slot.VALUE, Slot.VALUE_ROW, start, head)
        self._lay_out_keys(self._states(Slot.KEY, Slot.KEY_ROW, start, head), this)
        first_query = code.multiply(head, shared)
        with code.loop(first_query, code.add(first_query, shared)) as query_head:
            query = self._states(Slot.QUERY, Slot.QUERY_ROW, start, query_head)
            output = self._states(Slot.OUTPUT, Slot.OUTPUT_ROW, start, query_head)
            for queries, (first, last) in zip(QUERIES, self._cut(length), strict=True):
                with code.loop(first, last, queries) as place:
                    tile = self._tile(place, queries, this)
                    self._write_tile(query, value, output, this, tile)

    def _states(self, address: Slot, row: Slot, start: Value, head: Value) -> Rows:
        """Those of a head, from the text's first row on; a head's slot follows its row's."""
        code = self._code
        step = code.argument(row)
        pointer = code.pointer(code.argument(address), self._element)
        offset = code.add(code.multiply(start, step), code.multiply(head, code.argument(Slot(row + 1))))
        return Rows(code.at(pointer, offset), step)

    def _cut(self, length: Value) -> list[tuple[Value | int, Value]]:
        """Where the queries of each size of tile begin and end: a rest that the small ones hold is theirs."""
        build, (many, few) = self._code.build, QUERIES
        rest = build.srem(length, integer(many))
        whole = build.select(build.icmp_signed("<=", rest, integer(few)), build.sub(length, rest), length)
        return [(0, whole), (whole, length)]

    def _tile(self, place: Value, queries: int, text: Text) -> Tile:
        code = self._code
        last = code.add(text.length, -1)
        places = [code.least(code.add(place, more), last) for more in range(queries)]
        if not self._is_windowed:
            return Tile(places, integer(0), text.length)
        first = code.round_down(code.most(code.add(place, code.build.neg(text.left)), integer(0)))
        return Tile(places, first, code.least(code.add(places[-1], text.right, 1), text.length))

    def _lay_out_keys(self, keys: Rows, text: Text) -> None:
        """[length, head_dim] as float32 [padded / lanes, head_dim, lanes], in the order in which they are used.

        The last key fills up. Rows of all keys would often lie a power of two apart, where a cache keeps few at a time.
        """
        code = self._code
        last = code.add(text.length, -1)
        with code.loop(0, text.padded, code.lanes) as key:
            rows = [code.least(code.add(key, lane), last) for lane in range(code.lanes)]
            pointers = [code.at(keys.first, code.multiply(row, keys.step)) for row in rows]
            for part in self._parts:
                columns = code.transpose([code.load(code.at(pointer, part)) for pointer in pointers])
                for number, column in enumerate(columns, part):
                    code.store(column, self._keys_of(key, number))

    def _write_tile(self, query: Rows, value: Rows, output: Rows, text: Text, tile: Tile) -> None:
        code = self._code
        for row, place in enumerate(tile.queries):
            for part in self._parts:
                states = code.load(code.at(query.first, code.multiply(place, query.step), part))
                to = code.at(self._queries, row * self._head_dim + part)
                code.store(code.build.fmul(states, self._scale), to)
        largest = self._write_scores(text, tile)
        sums = self._write_probabilities(text, tile, largest)
        factors = [code.build.fdiv(code.floats(1.0), each) for each in sums]
        together = (
            2 if code.lanes == MOST_LANES else 1
        )  # vectors of a value whose sums, for all queries, fit the registers
        for start in range(0, len(self._parts), together):
            parts = self._parts[start : start + together]
            for (row, part), total in self._sum_values(value, text, tile, parts):
                to = code.at(output.first, code.multiply(tile.queries[row], output.step), part)
                code.store(code.build.fmul(total, factors[row]), to)

    def _write_scores(self, text: Text, tile: Tile) -> list[Value]:
        """Each query's largest one, in all lanes."""
        code, rows = self._code, range(len(tile.queries))
        largest = code.variables(len(rows), code.floats(float("-inf")))
        with code.loop(tile.first, tile.stop, code.lanes) as key:
            sums = self._multiply(text, tile, key)
            for row in rows:
                scores = code.build.select(self._is_seen(key, row, text, tile), sums[row], code.floats(float("-inf")))
                code.build.store(code.larger(scores, code.build.load(largest[row])), largest[row])
                code.store(scores, self._score(text, row, key))
        return [code.fold(code.build.load(largest[row]), code.larger) for row in rows]

    def _multiply(self, text: Text, tile: Tile, key: Value) -> list[Value]:
        """Each query's products with a vector of keys."""
        code, rows = self._code, range(len(tile.queries))
        sums = code.variables(len(rows), code.floats(0.0))
        with code.loop(0, self._head_dim, min(UNROLLED, code.lanes)) as part:
            totals = [code.build.load(total) for total in sums]
            for more in range(min(UNROLLED, code.lanes)):
                number = code.add(part, more)
                keys = code.load(self._keys_of(key, number))
                for row in rows:
                    factor = code.build.load(code.at(self._queries, number, row * self._head_dim))
                    totals[row] = code.fma(code.spread(factor), keys, totals[row])
            for total, variable in zip(totals, sums, strict=True):
                code.build.store(total, variable)
        return [code.build.load(total) for total in sums]

    def _is_seen(self, key: Value, row: int, text: Text, tile: Tile) -> Value:
        """Lane by lane, whether the query of this row sees the key."""
        code, build = self._code, self._code.build
        keys = build.add(code.spread(key), code.lane_numbers)
        if not self._is_windowed:
            return build.icmp_signed("<", keys, code.spread(text.length))
        place = tile.queries[row]
        stop = code.least(code.add(place, text.right, 1), text.length)
        first = code.most(code.add(place, build.neg(text.left)), integer(0))
        before_stop = build.icmp_signed("<", keys, code.spread(stop))
        return build.and_(before_stop, build.icmp_signed(">=", keys, code.spread(first)))

    def _write_probabilities(self, text: Text, tile: Tile, largest: Sequence[Value]) -> list[Value]:
        """They are e^(score - largest), still to be divided by their sum: each query's, in all lanes."""
        code, rows = self._code, range(len(tile.queries))
        sums = code.variables(len(rows), code.floats(0.0))
        with code.loop(tile.first, tile.stop, code.lanes) as key:
            for row in rows:
                pointer = self._score(text, row, key)
                probabilities = code.exp(code.build.fsub(code.load(pointer), largest[row]))
                code.build.store(code.plus(probabilities, code.build.load(sums[row])), sums[row])
                code.store(probabilities, pointer)
        return [code.fold(code.build.load(total), code.plus) for total in sums]

    def _sum_values(
        self, value: Rows, text: Text, tile: Tile, parts: Sequence[int]
    ) -> Iterator[tuple[tuple[int, int], Value]]:
        """For each query and part of the head: the sum of the values by their probabilities."""
        code, rows = self._code, range(len(tile.queries))
        places = [(row, part) for row in rows for part in parts]
        totals = dict(zip(places, code.variables(len(places), code.floats(0.0)), strict=True))
        with code.loop(tile.first, tile.stop) as key:
            pointer = code.at(value.first, code.multiply(key, value.step))
            values = {part: code.load(code.at(pointer, part)) for part in parts}
            for row in rows:
                probability = code.spread(code.build.load(self._score(text, row, key)))
                for part in parts:
                    total = totals[row, part]
                    code.build.store(code.fma(probability, values[part], code.build.load(total)), total)
        for place, total in totals.items():
            yield place, code.build.load(total)

    def _keys_of(self, key: Value, number: Value | int) -> Value:
        """This head dimension of a vector of keys, the first of which is `key`."""
        code = self._code
        return code.at(self._keys, code.multiply(key, self._head_dim), code.multiply(integer(number), code.lanes))

    def _score(self, text: Text, row: int, key: Value) -> Value:
        return self._code.at(self._scores, self._code.multiply(text.padded, row), key)
