import math

import pytest
import torch

from tei_grpc.errors import StartupError
from tei_grpc.layers.activation import activation


def test_gelu_is_the_erf_form() -> None:
    assert activation("gelu")(torch.tensor(1.5)).item() == pytest.approx(1.5 * 0.5 * (1 + math.erf(1.5 / math.sqrt(2))))


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"])
def test_these_gelus_are_the_tanh_form(name: str) -> None:
    inner = math.sqrt(2 / math.pi) * (1.5 + 0.044715 * 1.5**3)
    assert activation(name)(torch.tensor(1.5)).item() == pytest.approx(0.75 * (1 + math.tanh(inner)))


def test_unknown_activation_is_named() -> None:
    with pytest.raises(StartupError, match="`gelo`"):
        activation("gelo")
