"""BERT, and RoBERTa with its kin (XLM-R, CamemBERT): the same encoder, other positions and other heads."""

import torch
from torch import Tensor, nn

from tei_grpc.layers.attention import attention
from tei_grpc.layers.heads import BertHeads, MaskedLM, RobertaHeads, decode
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.post_norm import Intermediate, PositionedEmbeddings, Residual, Transform
from tei_grpc.layers.stack import Parts, PostNormStack
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register


class Attention(nn.Module):
    """Self-attention with its residual."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.head_dim = hidden // self.heads
        self.self = FusedLinear(hidden, {"query": hidden, "key": hidden, "value": hidden})
        self.output = Residual(hidden, hidden, config["layer_norm_eps"])

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        query, key, value = self.self(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        attended = attention(query, (key, value), inputs, scale=self.head_dim**-0.5)
        y: Tensor = self.output(attended, x)
        return y


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.attention = Attention(config)
        self.intermediate = Intermediate(hidden, intermediate, config["hidden_act"])
        self.output = Residual(intermediate, hidden, config["layer_norm_eps"])

    @property
    def parts(self) -> Parts:
        """See PostNormLayer."""
        attended, up, down = self.attention.output, self.intermediate, self.output
        return Parts(self.attention.self, attended.dense, attended.LayerNorm, up.dense, down.dense, down.LayerNorm)

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = self.attention(x, inputs)
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class Encoder(PostNormStack):
    """The stack of layers."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__((Layer(config) for _ in range(config["num_hidden_layers"])), config["num_attention_heads"])


class Predictions(nn.Module):
    """BERT's masked-language-modelling head. A decoder that the checkpoint lacks is the word embeddings."""

    def __init__(self, config: HfConfig, *, tied: bool) -> None:
        super().__init__()
        self.transform = Transform(config["hidden_size"], config)
        self.decoder = None if tied else Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.bias = nn.Parameter(torch.empty(config["vocab_size"]), requires_grad=False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        return decode(self.transform(x), self.decoder, words, self.bias)


_RENAMED = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm, in checkpoints converted from TensorFlow
_EXTRAS = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.", "classifier.", "qa_outputs.")
_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}


@register("bert")
class Bert(BertHeads, Model):
    """BERT with learned positions from 0."""

    heads = frozenset(Head)
    names = Names(
        prefixes=("bert.",),
        renamed={**_RENAMED, "predictions.decoder.bias": "predictions.bias"},
        extras=(*_EXTRAS, "cls."),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        self.hidden_size = config["hidden_size"]
        self.embeddings = PositionedEmbeddings(config, None)
        self.encoder = Encoder(config)
        self.add_classifier(blueprint, self.hidden_size)
        if blueprint.head is Head.MASKED_LM:
            self.cls = MaskedLM(Predictions(config, tied=blueprint.is_tied("cls.predictions.decoder.weight")))

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.embeddings(inputs), inputs)
        return hidden


@register("roberta", "xlm-roberta", "camembert")
class Roberta(RobertaHeads, Model):
    """RoBERTa, XLM-R and CamemBERT: positions count from `pad_token_id` + 1."""

    heads = frozenset(Head)
    names = Names(
        prefixes=("roberta.", "xlm-roberta.", "camembert."),
        renamed={**_RENAMED, "lm_head.decoder.bias": "lm_head.bias"},
        extras=(*_EXTRAS, "lm_head."),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, "pad_token_id": 1, **blueprint.config}
        self.hidden_size = config["hidden_size"]
        self.embeddings = PositionedEmbeddings(config, config["pad_token_id"])
        self.encoder = Encoder(config)
        self.add_heads(blueprint, config)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.embeddings(inputs), inputs)
        return hidden
