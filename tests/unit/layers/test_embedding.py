"""Word and token type, summed."""

from dataclasses import replace

import pytest
import torch

from tei_grpc.layers.embedding import WordAndTypeEmbedding
from tests.unit.layers.batches import packed_inputs

WORDS = torch.arange(10.0).view(5, 2)
TYPES = torch.tensor([[100.0, 200.0], [300.0, 400.0]])
INPUTS = replace(packed_inputs(3), token_type_ids=torch.tensor([0, 1, 1]))


@pytest.mark.parametrize(
    ("types", "added"),
    [(2, TYPES[[0, 1, 1]]), (1, TYPES[[0, 0, 0]]), (0, torch.zeros(3, 2))],
    ids=["each token its type", "a single type for all", "no types"],
)
def test_type_is_added_to_the_word(types: int, added: torch.Tensor) -> None:
    embedding = WordAndTypeEmbedding(5, types, 2)
    embedding.word_embeddings.weight.copy_(WORDS)
    if types:
        embedding.token_type_embeddings.weight.copy_(TYPES[:types])
    assert torch.equal(embedding(INPUTS), WORDS[:3] + added)
