"""oneDNN's linear against torch's, whether or not this machine would choose it."""

import pytest
import torch
from torch.nn import functional

from tei_grpc.layers import onednn
from tei_grpc.layers.activation import ACTIVATIONS, activation
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.onednn import prepack


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_is_preferred", onednn._is_right)


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("rows", "out"), [(1, 1), (1, 48), (7, 3), (65, 48)])
def test_product_equals_torchs(name: str | None, rows: int, out: int) -> None:
    act = None if name is None else activation(name)
    x, weight, bias = torch.randn(rows, 32), torch.randn(out, 32) / 32**0.5, torch.randn(out)
    product = prepack(weight, bias, act)
    assert product is not None
    expected = functional.linear(x, weight, bias)
    torch.testing.assert_close(product(x), expected if act is None else act(expected))


def test_rows_need_not_be_contiguous() -> None:
    x, weight = torch.randn(9, 40)[:, 4:36], torch.randn(48, 32) / 32**0.5
    product = prepack(weight, None, None)
    assert product is not None
    torch.testing.assert_close(product(x), x @ weight.T)


def test_nan_stays_in_its_own_row() -> None:
    x = torch.randn(33, 32)
    product = prepack(torch.randn(48, 32), None, None)
    assert product is not None
    x[16, 5] = torch.nan
    assert product(x).isnan().any(dim=1).nonzero().flatten().tolist() == [16]


def test_bfloat16_equals_torch_to_its_precision() -> None:
    x, weight = torch.randn(9, 32).bfloat16(), (torch.randn(48, 32) / 32**0.5).bfloat16()
    product = prepack(weight, None, None)
    assert product is not None
    torch.testing.assert_close(product(x), functional.linear(x, weight), atol=2e-2, rtol=1e-2)


def test_linear_gives_its_weight_up_for_the_packed_one() -> None:
    linear, x = Linear(32, 48), torch.randn(3, 32)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 6)
    expected = linear(x)
    linear.prepare()
    assert "weight" not in dict(linear.named_parameters())
    torch.testing.assert_close(linear(x), expected)


def test_operator_that_torch_lacks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(onednn, "Product", missing)
    assert prepack(torch.randn(48, 32), None, None) is None


def test_operator_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "Product", lambda weight, bias, act: lambda x: functional.linear(x, weight))
    assert prepack(torch.randn(48, 32), None, None) is None


def test_packed_bfloat16_weight_serves_float32_inputs_too() -> None:
    weight, bias, x = torch.randn(48, 32).bfloat16() / 6, torch.randn(48).bfloat16(), torch.randn(3, 32)
    expected = functional.linear(x, weight.float(), bias.float())
    torch.testing.assert_close(onednn.Product(weight, bias, None)(x), expected)
