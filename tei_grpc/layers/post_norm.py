"""Owns the parts of a post-norm transformer that carry BERT's tensor names in several families."""

from torch import Tensor, nn

from tei_grpc.layers.activation import activation
from tei_grpc.layers.blueprint import HfConfig
from tei_grpc.layers.embedding import Embedding, WordAndTypeEmbedding, positions_after_pad
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rows import add_norm


class Embeddings(WordAndTypeEmbedding):
    """LayerNorm(word + token type), where positions come in later."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__(config["vocab_size"], config["type_vocab_size"], config["hidden_size"])
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    def forward(self, inputs: PackedInputs) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        normed: Tensor = self.LayerNorm(super().forward(inputs))
        return normed


class PositionedEmbeddings(WordAndTypeEmbedding):
    """LayerNorm(word + token type + position)."""

    def __init__(self, config: HfConfig, pad_token_id: int | None) -> None:
        """Positions count from 0, or as `positions_after_pad` does where there is a `pad_token_id`."""
        super().__init__(config["vocab_size"], config["type_vocab_size"], config["hidden_size"])
        self.position_embeddings = Embedding(config["max_position_embeddings"], config["hidden_size"])
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])
        self.pad_token_id = pad_token_id

    def forward(self, inputs: PackedInputs) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        pad = self.pad_token_id
        position_ids = inputs.position_ids if pad is None else positions_after_pad(inputs, pad)
        x = super().forward(inputs).add_(self.position_embeddings(position_ids))
        normed: Tensor = self.LayerNorm(x)
        return normed


class Residual(nn.Module):
    """LayerNorm(dense(x) + residual)."""

    def __init__(self, in_features: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.dense = Linear(in_features, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[tokens, in], [tokens, hidden] -> [tokens, hidden]."""
        return add_norm(self.dense(x), residual, self.LayerNorm)


class Intermediate(nn.Module):
    """act(dense(x))."""

    def __init__(self, hidden: int, intermediate: int, act: str) -> None:
        super().__init__()
        self.dense = Linear(hidden, intermediate, activation=activation(act))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, intermediate]."""
        y: Tensor = self.dense(x)
        return y


class Transform(nn.Module):
    """LayerNorm(act(dense(x))), before a masked-language-modelling head's decoder."""

    def __init__(self, size: int, config: HfConfig) -> None:
        super().__init__()
        self.dense = Linear(config["hidden_size"], size, activation=activation(config["hidden_act"]))
        self.LayerNorm = nn.LayerNorm(size, eps=config["layer_norm_eps"])

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, size]."""
        y: Tensor = self.LayerNorm(self.dense(x))
        return y
