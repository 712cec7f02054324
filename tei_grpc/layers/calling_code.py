"""Owns the instructions of compiled code that calls C functions: 64-bit numbers in memory, addresses, and calls."""

from llvmlite import ir  # type: ignore[import-untyped]

from tei_grpc.layers.simd import INT32, INT64, Code, Value, integer


class CallingCode(Code):
    """A function under construction that calls others."""

    def number(self, start: int) -> Value:
        """A 64-bit number that changes, in memory."""
        with self.build.goto_entry_block():
            found = self.build.alloca(INT64)
            self.build.store(integer(start), found)
        return found

    def load_number(self, pointer: Value, place: int) -> Value:
        """The 64-bit number at this place."""
        return self.build.load(self.at(pointer, place))

    def store_number(self, value: Value | int, pointer: Value) -> None:
        """A 64-bit number to memory."""
        self.build.store(integer(value), pointer)

    def address(self, pointer: Value) -> Value:
        """The pointer as a number."""
        return self.build.ptrtoint(pointer, INT64)

    def call(self, address: Value, *arguments: Value | int) -> Value:
        """What the C function at this address returns, an int32: it takes 64-bit numbers, addresses and doubles."""
        values = list(map(integer, arguments))
        type = ir.FunctionType(INT32, [value.type for value in values])
        return self.build.call(self.build.inttoptr(address, type.as_pointer()), values)

    def double(self, value: float) -> Value:
        """A constant of 64 bits."""
        return ir.Constant(ir.DoubleType(), value)
