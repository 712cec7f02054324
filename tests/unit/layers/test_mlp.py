import torch
from torch.nn import functional

from tei_grpc.layers.mlp import GatedMLP


def gated_mlp(*, bias: bool) -> tuple[GatedMLP, dict[str, torch.Tensor]]:
    module, generator = GatedMLP(4, 6, functional.silu, bias=bias), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module, module.on_disk()


def test_gate_is_activated_and_up_is_not() -> None:
    module, disk = gated_mlp(bias=True)
    x = torch.randn(3, 4)
    gate = functional.linear(x, disk["gate_proj.weight"], disk["gate_proj.bias"])
    up = functional.linear(x, disk["up_proj.weight"], disk["up_proj.bias"])
    torch.testing.assert_close(module(x), module.down_proj(functional.silu(gate) * up))


def test_without_biases_zero_stays_zero() -> None:
    module, disk = gated_mlp(bias=False)
    assert sorted(disk) == ["gate_proj.weight", "up_proj.weight"]
    assert torch.equal(module(torch.zeros(2, 4)), torch.zeros(2, 4))
