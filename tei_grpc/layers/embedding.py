"""Owns lookup tables."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers.packed import PackedInputs


class Embedding(nn.Module):
    """Rows of a table by index. Unlike torch's own it initialises nothing, for which torch imports its compiler."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)

    def forward(self, indices: Tensor) -> Tensor:
        """[tokens] -> [tokens, size]. Raises IndexError for an index outside the table."""
        return functional.embedding(indices, self.weight)


class WordAndTypeEmbedding(nn.Module):
    """word + token type, where positions come in later. Without token types it is the word alone."""

    def __init__(self, vocabulary: int, types: int, hidden: int) -> None:
        super().__init__()
        self.word_embeddings = Embedding(vocabulary, hidden)
        self.token_type_embeddings = Embedding(types, hidden) if types else None

    def forward(self, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden]. With a single token type the ids that came with the text are ignored."""
        x: Tensor = self.word_embeddings(inputs.input_ids)
        types = self.token_type_embeddings
        if types is None:
            return x
        return x.add_(types.weight[0] if len(types.weight) == 1 else types(inputs.token_type_ids))


def positions_after_pad(inputs: PackedInputs, pad_token_id: int) -> Tensor:
    """Position ids that count from `pad_token_id` + 1 over each text's tokens, as fairseq's models do: int64 [tokens].

    A pad token inside a text has position `pad_token_id` and is not counted.
    """
    counted = (inputs.input_ids != pad_token_id).long()
    counts = counted.cumsum(0)
    before = (counts - counted)[inputs.first_rows]
    return (counts - before[inputs.text_ids]) * counted + pad_token_id
