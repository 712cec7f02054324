"""What is done to rows between products, against its formula in float64, whatever computes it."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers import row_kernels, rows
from tei_grpc.layers.activation import ACTIVATIONS
from tei_grpc.layers.precision import Float32
from tei_grpc.layers.rows import add_norm, dequantize, quantize, sums

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of values of about 1: eps / 2 of the last place, a few times
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_norm(size: int, dtype: torch.dtype) -> nn.LayerNorm:
    norm = nn.LayerNorm(size, eps=1e-12).to(dtype).requires_grad_(False)
    norm.weight.copy_(values(size, seed=1))
    norm.bias.copy_(values(size, seed=2))
    return norm


def exact(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
    total = x.double() + residual.double()
    mean = total.mean(1, keepdim=True)
    variance = (total - mean).square().mean(1, keepdim=True)
    return (total - mean) / (variance + norm.eps).sqrt() * norm.weight.double() + norm.bias.double()


@pytest.fixture(autouse=True)
def fresh() -> None:
    rows._compiled.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 8, 16, 48, 64, 80, 384, 1024])
def test_sum_is_normed_as_the_formula_says(dtype: torch.dtype, size: int) -> None:
    x, residual, norm = values(9, size).to(dtype), values(9, size, seed=3).to(dtype), layer_norm(size, dtype)
    expected = exact(x, residual, norm)
    found = add_norm(x, residual, norm)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_mean_far_from_zero_costs_no_precision() -> None:
    x, residual, norm = values(3, 64) + 1000, values(3, 64, seed=3), layer_norm(64, torch.float32)
    expected = exact(x, residual, norm)
    torch.testing.assert_close(add_norm(x, residual, norm).double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_row_does_not_depend_on_its_neighbours_or_on_threads(threads: int) -> None:
    x, residual, norm = values(700, 64), values(700, 64, seed=3), layer_norm(64, torch.float32)
    alone = torch.cat([add_norm(x[row : row + 1].clone(), residual[row : row + 1], norm) for row in range(700)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(add_norm(x, residual, norm), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_row_that_is_not_finite_stays_alone(value: float) -> None:
    x, residual, norm = values(9, 64), values(9, 64, seed=3), layer_norm(64, torch.float32)
    expected = add_norm(x.clone(), residual, norm)
    x[4, 5] = value
    found = add_norm(x, residual, norm)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert found[4].isnan().all()
    assert torch.equal(found[others], expected[others])


def test_narrow_weights_are_widened_within_float32() -> None:
    x, residual, norm = values(9, 64), values(9, 64, seed=3), layer_norm(64, torch.bfloat16)
    expected = exact(x, residual, norm)
    with Float32():
        torch.testing.assert_close(add_norm(x, residual, norm).double(), expected, atol=2e-6, rtol=2e-6)


def test_norm_without_a_bias_is_torchs() -> None:
    x, residual, norm = values(9, 64), values(9, 64, seed=3), nn.LayerNorm(64, bias=False)
    expected = functional.layer_norm(x + residual, (64,))
    torch.testing.assert_close(add_norm(x, residual, norm), expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", [None, "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_become_floats_again(dtype: torch.dtype, name: str | None, biased: bool) -> None:
    y, scales, bias = (values(9, 48) * 3).to(dtype), values(9, 1, seed=1).abs(), values(48, seed=2) if biased else None
    expected = y.double() * scales.double() + (0 if bias is None else bias.double())
    expected = expected if name is None else expected * (1 + torch.erf(expected / 2**0.5)) / 2
    assert dequantize(y, scales, bias, None if name is None else ACTIVATIONS[name])
    torch.testing.assert_close(y.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_gelu_holds_over_its_whole_range() -> None:
    x = torch.linspace(-40, 40, 16_000).view(1000, 16)
    exactly = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    assert dequantize(x, torch.ones(1000, 1), None, ACTIVATIONS["gelu"])
    torch.testing.assert_close(x.double(), exactly, atol=1e-6, rtol=1e-6)


def test_activations_without_a_kernel_are_left_to_torch() -> None:
    assert not dequantize(values(9, 48), torch.ones(9, 1), None, ACTIVATIONS["relu"])


def test_rows_of_other_sizes_are_left_to_torch() -> None:
    assert quantize(values(9, 7)) is None


def test_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(row_kernels.WRITERS, "add_norm", lambda _: row_kernels.write_add_norm("bfloat16"))
    assert rows.find("add_norm", torch.float32) is None


def test_cpu_that_llvm_does_not_know_is_served_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(dtype: str) -> int:
        raise RuntimeError("no such CPU")

    monkeypatch.setitem(row_kernels.WRITERS, "add_norm", fails)
    x, residual, norm = values(9, 64), values(9, 64, seed=3), layer_norm(64, torch.float32)
    expected = exact(x, residual, norm)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(add_norm(x, residual, norm).double(), expected, atol=2e-6, rtol=2e-6)
    assert "`add_norm` is not compiled for this CPU: no such CPU" in caplog.text


@pytest.mark.parametrize("size", [7, 48, 384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_summed_span_by_span(dtype: torch.dtype, size: int) -> None:
    x, bounds = values(40, size).to(dtype), [(0, 1), (1, 9), (12, 12), (12, 40)]
    found = sums(x, bounds)
    expected = torch.stack([x[first:stop].double().sum(0) for first, stop in bounds])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", row_kernels.WRITERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_used_here(kind: str, dtype: torch.dtype) -> None:
    """Else the tests above would only see torch."""
    assert rows.find(kind, dtype) is not None
