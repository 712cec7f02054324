"""The vocabulary of vector instructions, against Python's and torch's arithmetic."""

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tei_grpc.layers import native
from tei_grpc.layers.native import call
from tei_grpc.layers.simd import ELEMENTS, FLOAT, INT64, LEAST_EXP, LEAST_LANES, MOST_LANES, Code, Value, integer

LANES = [LEAST_LANES, MOST_LANES]  # a CPU with narrower registers takes several for a vector


def compiled(write: Callable[[Code], None], lanes: int) -> int:
    code = Code("tested", lanes)
    write(code)
    return code.finish()


def run(address: int, *arguments: Tensor | int, threads: int = 1) -> None:
    numbers = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    call(address, (ctypes.c_int64 * len(numbers))(*numbers), threads)


def convert(values: Tensor, dtype: torch.dtype, lanes: int, change: Callable[[Code, Value], Value] | None = None):
    """What `change` makes of the values, which are a multiple of the lanes, in another dtype."""
    names = [str(x).removeprefix("torch.") for x in (values.dtype, dtype)]

    def write(code: Code) -> None:
        source, to = (code.pointer(code.argument(place), ELEMENTS[name]) for place, name in enumerate(names))
        with code.loop(0, code.argument(2), lanes) as number:
            vector = code.load(code.at(source, number))
            code.store(change(code, vector) if change else vector, code.at(to, number))

    found = torch.empty(len(values), dtype=dtype)
    run(compiled(write, lanes), values, found, len(values))
    return found


def exp(values: list[float], lanes: int = MOST_LANES) -> Tensor:
    filled = values + [0.0] * (-len(values) % lanes)
    return convert(torch.tensor(filled), torch.float32, lanes, Code.exp)[: len(values)]


@pytest.mark.parametrize("lanes", LANES)
def test_exp_is_right_to_one_unit_in_the_last_place(lanes: int) -> None:
    x = torch.cat([torch.linspace(LEAST_EXP, 0, 100_000), -torch.logspace(-30, 1.9, 10_000)])
    exact = np.array([math.exp(value) for value in x.tolist()])
    apart = np.abs(exp(x.tolist(), lanes).double().numpy() - exact)
    assert (apart / np.spacing(exact.astype(np.float32))).max() <= 1


def test_exp_of_zero_is_one() -> None:
    assert exp([0.0, -0.0]).tolist() == [1, 1]


def test_exp_is_zero_below_its_range() -> None:
    edge = torch.tensor(LEAST_EXP)
    below = torch.nextafter(edge, torch.tensor(-torch.inf))
    at, *rest = exp([edge.item(), below.item(), -104.0, -1e30, -torch.inf]).tolist()
    assert at == pytest.approx(math.exp(LEAST_EXP), rel=2e-7)
    assert rest == [0, 0, 0, 0]


def test_exp_of_nan_is_nan() -> None:
    assert exp([torch.nan, -torch.nan]).isnan().all()


@pytest.mark.parametrize("lanes", LANES)
def test_transposed_rows_are_columns(lanes: int) -> None:
    def write(code: Code) -> None:
        source, to = (code.pointer(code.argument(place), FLOAT) for place in (0, 1))
        columns = code.transpose([code.load(code.at(source, row * lanes)) for row in range(lanes)])
        for number, column in enumerate(columns):
            code.store(column, code.at(to, number * lanes))

    matrix = torch.arange(float(lanes**2)).view(lanes, lanes)
    found = torch.empty_like(matrix)
    run(compiled(write, lanes), matrix, found)
    assert found.equal(matrix.T)


def halfway(dtype: torch.dtype) -> Tensor:
    """All values of a dtype of 16 bits, those halfway to the next one, and the floats beside these."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    following = (torch.arange(1 << 16, dtype=torch.int32) + 1).to(torch.int16).view(dtype)
    middle = (values.double() + following.double()).div(2).float()
    beside = [torch.nextafter(middle, torch.tensor(towards)) for towards in (-torch.inf, torch.inf)]
    extremes = torch.tensor([3.4028235e38, -3.4028235e38, 65519.99, 65520.0, 65520.01, 1e-45, -1e-45, 0.0])
    return torch.cat([values.float(), middle, *beside, extremes.repeat(2)])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_are_rounded_to_16_bits_as_torch_rounds_them(dtype: torch.dtype, lanes: int) -> None:
    values = halfway(dtype)
    expected, found = values.to(dtype), convert(values, dtype, lanes)
    assert found.isnan().equal(values.isnan())
    numbers = ~values.isnan()
    assert found.view(torch.int16)[numbers].equal(expected.view(torch.int16)[numbers])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_loaded_as_the_floats_they_are(dtype: torch.dtype, lanes: int) -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    found = convert(values, torch.float32, lanes)
    torch.testing.assert_close(found, values.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lanes", LANES)
def test_all_lanes_hold_what_a_vector_folds_to(lanes: int) -> None:
    rows = torch.randn(64, lanes, generator=torch.Generator().manual_seed(0))
    folded = convert(rows.flatten(), torch.float32, lanes, lambda code, x: code.fold(x, code.larger))
    assert folded.equal(rows.max(1, keepdim=True).values.expand(-1, lanes).flatten())
    folded = convert(rows.flatten(), torch.float32, lanes, lambda code, x: code.fold(x, code.plus))
    torch.testing.assert_close(folded, rows.sum(1, keepdim=True).expand(-1, lanes).flatten())


def test_the_largest_number_is_found_beside_nan() -> None:
    row = torch.tensor([torch.nan, 3.0, -torch.inf, torch.nan, 2.0, -1.0, 0.0, 1.0])
    folded = convert(row, torch.float32, 8, lambda code, x: code.fold(code.larger(x, code.floats(-4.0)), code.larger))
    assert folded.tolist() == [3] * 8


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 5, 1), (3, 10, 4), (2, 10, 4), (5, 5, 1), (7, 3, 1), (-3, 2, 2)]
)
def test_loops_are_pythons_ranges(start: int, stop: int, step: int) -> None:
    def write(code: Code) -> None:
        to, count = code.pointer(code.argument(0), INT64), code.argument_address(3)
        with code.loop(code.argument(1), code.argument(2), step) as number:
            code.build.store(number, code.at(to, code.build.atomic_rmw("add", count, integer(1), "monotonic")))

    found = torch.full((8,), 99)
    run(compiled(write, LEAST_LANES), found, start, stop, 0)
    expected = list(range(start, stop, step))
    assert found.tolist() == expected + [99] * (8 - len(expected))


@pytest.mark.parametrize("number", [0, 1, 7, 8, 9, 16, 1000])
def test_integers_are_rounded_to_the_lanes(number: int) -> None:
    def write(code: Code) -> None:
        to, given = code.pointer(code.argument(0), INT64), code.argument(1)
        for place, value in enumerate((code.round_down(given), code.round_up(given))):
            code.build.store(value, code.at(to, place))

    found = torch.empty(2, dtype=torch.int64)
    run(compiled(write, 8), found, number)
    assert found.tolist() == [number // 8 * 8, -(-number // 8) * 8]


def write_count(code: Code) -> None:
    pointer = code.pointer(code.argument(0), INT64)
    code.build.atomic_rmw("add", pointer, integer(1), "monotonic")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_function_runs_once_in_each_thread(threads: int) -> None:
    count = torch.zeros(1, dtype=torch.int64)
    run(compiled(write_count, LEAST_LANES), count, threads=threads)
    assert count.item() == threads


def test_functions_of_one_name_are_compiled_and_called_side_by_side() -> None:
    def count_in_two(_: int) -> int:
        count = torch.zeros(1, dtype=torch.int64)
        run(compiled(write_count, LEAST_LANES), count, threads=2)
        return int(count)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count_in_two, range(12))) == [2] * 12


def test_nothing_is_compiled_where_it_would_keep_cores_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    native.parallel.cache_clear()
    monkeypatch.setattr(native, "ctypes", SimpleNamespace(CDLL=lambda name: object()))
    with pytest.raises(RuntimeError, match="no OpenMP"):
        compiled(write_count, LEAST_LANES)
