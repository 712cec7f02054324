"""Linear layers in int8 against their formula, whether or not this machine would choose them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tei_grpc.errors import StartupError
from tei_grpc.layers import int8
from tei_grpc.layers.activation import ACTIVATIONS, activation
from tei_grpc.layers.int8 import Product, quantize_rows, quantize_weight

SIZE = 64


def make_rows(count: int, size: int = SIZE) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1)).bfloat16()


def make_weight(out: int, size: int = SIZE) -> Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(2)) / size**0.5


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = quantize_rows(x, torch.full(x.shape[1:], int8.ZERO + 0.5))
    return rows.values.int() - int8.ZERO, rows.scales


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def fresh() -> None:
    int8._refusal.cache_clear()


@pytest.mark.parametrize("size", [1, 31, 32, 67, 384])
def test_rows_are_rounded_to_the_nearest_of_255_steps(size: int) -> None:
    x = make_rows(9, size)
    integers, scales = quantized(x)
    torch.testing.assert_close(scales, x.float().abs().amax(1, keepdim=True) / 127)
    assert integers.abs().amax(1).tolist() == [127] * 9
    assert (integers - x.float() / scales).abs().max() <= 0.5001


def test_weight_is_rounded_per_output() -> None:
    weight = make_weight(48) * torch.logspace(-3, 3, 48)[:, None]
    integers, scales = quantize_weight(weight)
    assert integers.abs().amax(1).tolist() == [127] * 48
    assert (integers - weight / scales[:, None]).abs().max() <= 0.5001


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("rows", "out", "biased"), [(1, 16, True), (7, 19, False), (65, 48, True)])
def test_product_is_that_of_the_integers(name: str | None, rows: int, out: int, biased: bool) -> None:
    act = None if name is None else activation(name)
    x, weight, bias = make_rows(rows), make_weight(out), torch.randn(out) if biased else None
    integers, scales = quantized(x)
    weights, weight_scales = quantize_weight(weight)
    products = (integers.double() @ weights.double().T * weight_scales).bfloat16()  # as the operator gives them
    expected = products.float() * scales
    expected = expected if bias is None else expected + bias
    found = Product(weight, bias, act)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected if act is None else act(expected), atol=1e-3, rtol=1e-2)


def test_product_is_within_two_percent_of_floats() -> None:
    # a rounding error is up to half of 1/127 of the largest of 384 normal values, about 3: 0.7 % each side on average
    x, weight = make_rows(50, 384), make_weight(96, 384)
    assert error(Product(weight, None, None)(x), x.float() @ weight.T) < 0.02


def test_rows_of_any_magnitude_keep_their_precision() -> None:
    x, weight = make_rows(5, 384), make_weight(96, 384)
    x = x * torch.tensor([1e-10, 1e-3, 1.0, 1e3, 1e10])[:, None].bfloat16()
    for found, expected in zip(Product(weight, None, None)(x), x.float() @ weight.T, strict=True):
        assert error(found, expected) < 0.02


def test_row_does_not_depend_on_its_neighbours() -> None:
    x = make_rows(37) * torch.logspace(-3, 3, 37)[:, None].bfloat16()
    product = Product(make_weight(48), torch.randn(48), functional.gelu)
    together = product(x)
    for row in range(37):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_row_that_is_not_finite_stays_alone(value: float) -> None:
    x, product = make_rows(33), Product(make_weight(48), torch.randn(48), None)
    expected = product(x)
    x[16, 5] = value
    found = product(x)
    assert not found[16].isfinite().any()
    assert torch.equal(found[[*range(16), *range(17, 33)]], expected[[*range(16), *range(17, 33)]])


def test_row_of_zeros_gives_the_bias() -> None:
    bias = torch.randn(48)
    found = Product(make_weight(48), bias, None)(torch.zeros(3, SIZE, dtype=torch.bfloat16))
    assert torch.equal(found, bias.bfloat16().expand(3, 48))


def test_rows_need_not_be_contiguous() -> None:
    wide, product = make_rows(9, SIZE + 8), Product(make_weight(48), None, None)
    assert torch.equal(product(wide[:, 4:-4]), product(wide[:, 4:-4].contiguous()))


def test_float32_rows_meet_the_weight_as_it_was_rounded() -> None:
    weight, bias, x = make_weight(48), torch.randn(48), make_rows(5).float()
    integers, scales = quantize_weight(weight)
    expected = functional.gelu(functional.linear(x, integers * scales[:, None], bias))
    torch.testing.assert_close(Product(weight, bias, functional.gelu)(x), expected)


def test_layer_of_few_outputs_stays_in_floats() -> None:
    assert not isinstance(int8.prepack(make_weight(3).bfloat16(), None, None), Product)
    assert isinstance(int8.prepack(make_weight(16).bfloat16(), None, None), Product)


def test_operator_that_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(int8, "Product", missing)
    with pytest.raises(StartupError, match="`dtype` int8 is not possible here: this build of torch lacks"):
        int8.require()


def test_operator_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Product, "multiply", lambda product, values: values.float() @ product.weight().T)
    with pytest.raises(StartupError, match="wrong numbers"):
        int8.require()


def test_machine_without_a_fast_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_is_faster", lambda: False)
    with pytest.raises(StartupError, match="no faster than floats .* AVX512-VNNI"):
        int8.require()


def test_proof_holds_here_where_the_operator_exists() -> None:
    assert int8._is_right()


def test_floats_of_the_proof_are_onednns_or_torchs() -> None:
    x, weight = torch.randn(5, SIZE), make_weight(48)
    torch.testing.assert_close(int8._in_floats(weight)(x), x @ weight.T)
