"""MPNet: BERT's layer, positions from 2, and a learned bias of the distance that all layers share."""

import math

import torch
from torch import Tensor, nn

from tei_grpc.layers.attention import Mask, attention
from tei_grpc.layers.bias import DistanceBias, distances
from tei_grpc.layers.embedding import Embedding
from tei_grpc.layers.heads import RobertaHeads
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.post_norm import Intermediate, PositionedEmbeddings, Residual
from tei_grpc.layers.rows import add_norm
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register

PAD_TOKEN_ID = 1  # for positions, whatever the config says
BUCKETS = 32  # whatever the config says
MAX_DISTANCE = 128  # from here on every distance falls into the last bucket


def bucket(distance: Tensor) -> Tensor:
    """T5's bucket of a distance (key - query), int64 -> int64: sixteen for each side, the far ones logarithmic."""
    side = BUCKETS // 2
    exact = side // 2
    away = distance.abs()
    scaled = torch.log(away.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact) * (side - exact)
    far = (exact + scaled.long()).clamp(max=side - 1)
    return torch.where(away < exact, away, far) + side * (distance > 0)


class SelfAttention(FusedLinear):
    """Self-attention."""

    def __init__(self, config: HfConfig) -> None:
        hidden = config["hidden_size"]
        super().__init__(hidden, {"q": hidden, "k": hidden, "v": hidden})
        self.heads = config["num_attention_heads"]
        self.head_dim = hidden // self.heads
        self.o = Linear(hidden, hidden)

    def attend(self, x: Tensor, inputs: PackedInputs, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        query, key, value = self(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        y: Tensor = self.o(attention(query, (key, value), inputs, scale=self.head_dim**-0.5, mask=mask))
        return y


class Attention(nn.Module):
    """Self-attention with its residual."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.attn = SelfAttention(config)
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    def forward(self, x: Tensor, inputs: PackedInputs, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return add_norm(self.attn.attend(x, inputs, mask), x, self.LayerNorm)


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.attention = Attention(config)
        self.intermediate = Intermediate(hidden, intermediate, config["hidden_act"])
        self.output = Residual(intermediate, hidden, config["layer_norm_eps"])

    def forward(self, x: Tensor, inputs: PackedInputs, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = self.attention(x, inputs, mask)
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class Encoder(nn.Module):
    """The stack of layers, and the bias that they share."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.relative_attention_bias = Embedding(BUCKETS, config["num_attention_heads"])

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        values = self.relative_attention_bias(bucket(distances(inputs)))
        mask = Mask(bias=DistanceBias(values.T.float()))
        for layer in self.layer:
            x = layer(x, inputs, mask)
        return x


@register("mpnet")
class MPNet(RobertaHeads, Model):
    """MPNet."""

    heads = frozenset(Head)
    names = Names(
        prefixes=("mpnet.",),
        renamed={".gamma": ".weight", ".beta": ".bias", "lm_head.decoder.bias": "lm_head.bias"},
        extras=("embeddings.position_ids", "pooler.", "classifier.", "qa_outputs.", "lm_head."),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, **blueprint.config, "type_vocab_size": 0}
        self.hidden_size = config["hidden_size"]
        self.embeddings = PositionedEmbeddings(config, PAD_TOKEN_ID)
        self.encoder = Encoder(config)
        self.add_heads(blueprint, config)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.embeddings(inputs), inputs)
        return hidden
