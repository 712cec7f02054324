import pytest
import torch

from tei_grpc.layers.heads import Decoder, text_means
from tests.unit.layers.batches import packed_inputs


def test_mean_is_over_the_text_s_own_tokens() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    assert text_means(x, packed_inputs(2, 1)).tolist() == [[2.0, 3.0], [10.0, 20.0]]


def test_mean_of_a_long_text_does_not_lose_precision_in_half() -> None:
    x = torch.ones(4096, 1, dtype=torch.float16)
    assert text_means(x, packed_inputs(4096)).tolist() == [[1.0]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_tied_decoder_multiplies_by_the_word_embeddings(tied: bool, bias: bool) -> None:
    decoder, words, x = Decoder(3, 5, tied=tied, bias=bias), torch.randn(5, 3), torch.randn(2, 3)
    for parameter in decoder.parameters():
        parameter.fill_(0.5)
    expected = x @ (words.T if tied else torch.full((3, 5), 0.5)) + (0.5 if bias else 0.0)
    torch.testing.assert_close(decoder(x, words), expected)
