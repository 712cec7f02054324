"""The mixture of experts equals its definition, token by token."""

import torch
from torch import Tensor
from torch.nn import functional

from tei_grpc.layers.experts import Mixture, MixtureOfExperts

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 16, 24, 4, 2


def make_mixture() -> MixtureOfExperts:
    block = MixtureOfExperts(Mixture(HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, functional.gelu))
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return block


def literal(block: MixtureOfExperts, token: Tensor) -> Tensor:
    shares = torch.softmax(block.router.layer.weight @ token, 0)
    y = block.experts.bias.clone()
    for expert in shares.argsort(descending=True)[:CHOSEN].tolist():
        rows = slice(expert * INTERMEDIATE, (expert + 1) * INTERMEDIATE)
        inner = functional.gelu(block.experts.mlp.w1[rows] @ token)
        y += shares[expert] * (inner @ block.experts.mlp.w2[rows])
    return y


def tokens(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_every_token_gets_the_weighted_sum_of_its_experts() -> None:
    block, x = make_mixture(), tokens(30)
    torch.testing.assert_close(block(x), torch.stack([literal(block, token) for token in x]), atol=1e-5, rtol=0)


def test_experts_that_no_token_chose_are_skipped() -> None:
    block, x = make_mixture(), tokens(1)
    expected = literal(block, x[0])
    torch.testing.assert_close(block(x)[0], expected, atol=1e-5, rtol=0)
    block.experts.mlp.prepare()
    torch.testing.assert_close(block(x)[0], expected, atol=1e-5, rtol=0)


def test_prepared_experts_give_the_same() -> None:
    block, x = make_mixture(), tokens(30)
    expected = block(x)
    block.experts.mlp.prepare()
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=0)
