import pytest
import torch

from tei_grpc.layers.norm import RMSNorm


def norm(*weight: float, eps: float = 0.0, offset: float = 0.0) -> RMSNorm:
    module = RMSNorm(len(weight), eps=eps, offset=offset)
    module.weight.copy_(torch.tensor(weight))
    return module


def test_values_are_divided_by_their_root_mean_square() -> None:
    torch.testing.assert_close(norm(1, 1)(torch.tensor([[3.0, 4.0]])), torch.tensor([[3.0, 4.0]]) / 12.5**0.5)


def test_eps_is_added_under_the_root() -> None:
    torch.testing.assert_close(norm(1, 2, eps=3.0)(torch.tensor([[1.0, 1.0]])), torch.tensor([[0.5, 1.0]]))


def test_offset_is_added_to_the_weight() -> None:
    torch.testing.assert_close(norm(0, 1, offset=1.0)(torch.tensor([[1.0, 1.0]])), torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_half_precision_neither_overflows_nor_changes_the_dtype(offset: float) -> None:
    found = norm(1, 1, offset=offset).half()(torch.full((1, 2), 60000.0, dtype=torch.float16))
    torch.testing.assert_close(found, torch.full((1, 2), 1 + offset, dtype=torch.float16))


def test_heads_are_normed_one_by_one() -> None:
    x = torch.tensor([[[3.0, 4.0], [6.0, 8.0]]])
    torch.testing.assert_close(norm(1, 1)(x)[0, 0], norm(1, 1)(x)[0, 1])


def test_a_view_of_a_wider_tensor_stays_as_it_was() -> None:
    wide = torch.arange(12.0).view(3, 4)
    norm(2, 2)(wide[:, :2])
    assert torch.equal(wide, torch.arange(12.0).view(3, 4))
