import torch
from torch.nn import functional

from tei_grpc.layers.linear import FusedLinear, Linear


def filled(linear: Linear) -> Linear:
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return linear


def test_activation_follows_the_bias() -> None:
    linear, x = filled(Linear(4, 3, activation=torch.tanh)), torch.ones(2, 4)
    torch.testing.assert_close(linear(x), torch.tanh(x @ linear.weight.T + linear.bias))


def test_fused_linear_puts_its_parts_side_by_side() -> None:
    fused, x = filled(FusedLinear(4, {"query": 4, "key": 2})), torch.randn(5, 4)
    disk = fused.on_disk()
    query = functional.linear(x, disk["query.weight"], disk["query.bias"])
    key = functional.linear(x, disk["key.weight"], disk["key.bias"])
    torch.testing.assert_close(fused(x), torch.cat([query, key], dim=1))


def test_parts_are_views_of_the_fused_tensors() -> None:
    fused = FusedLinear(4, {"query": 4, "key": 2}, bias=False)
    fused.on_disk()["key.weight"].fill_(7)
    assert (fused.weight[4:] == 7).all()
    assert list(fused.on_disk()) == ["query.weight", "key.weight"]
