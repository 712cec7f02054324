"""BERT, and RoBERTa with its kin (XLM-R, CamemBERT): the same encoder, other positions and other heads."""

import torch
from torch import Tensor, nn

from tei_grpc.layers.activation import activation
from tei_grpc.layers.attention import attention
from tei_grpc.layers.embedding import Embedding, positions_after_pad
from tei_grpc.layers.heads import ClassificationHead, Pooler, RobertaLMHead, decode
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register


class Embeddings(nn.Module):
    """LayerNorm(word + position + token type)."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.word_embeddings = Embedding(config["vocab_size"], hidden)
        self.position_embeddings = Embedding(config["max_position_embeddings"], hidden)
        self.token_type_embeddings = Embedding(config["type_vocab_size"], hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])

    def forward(self, inputs: PackedInputs, position_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]. With a single token type the ids that came with the text are ignored."""
        x: Tensor = self.word_embeddings(inputs.input_ids)
        types = self.token_type_embeddings
        x.add_(types.weight[0] if len(types.weight) == 1 else types(inputs.token_type_ids))
        x.add_(self.position_embeddings(position_ids))
        normed: Tensor = self.LayerNorm(x)
        return normed


class Residual(nn.Module):
    """LayerNorm(dense(x) + residual)."""

    def __init__(self, in_features: int, config: HfConfig) -> None:
        super().__init__()
        self.dense = Linear(in_features, config["hidden_size"])
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[tokens, in], [tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.LayerNorm(self.dense(x).add_(residual))
        return y


class Attention(nn.Module):
    """Self-attention with its residual."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.head_dim = hidden // self.heads
        self.self = FusedLinear(hidden, {"query": hidden, "key": hidden, "value": hidden})
        self.output = Residual(hidden, config)

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        query, key, value = self.self(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        attended = attention(query, (key, value), inputs, scale=self.head_dim**-0.5)
        y: Tensor = self.output(attended, x)
        return y


class Intermediate(nn.Module):
    """act(dense(x))."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        act = activation(config["hidden_act"])
        self.dense = Linear(config["hidden_size"], config["intermediate_size"], activation=act)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, intermediate]."""
        y: Tensor = self.dense(x)
        return y


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = Residual(config["intermediate_size"], config)

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = self.attention(x, inputs)
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        for layer in self.layer:
            x = layer(x, inputs)
        return x


class Transform(nn.Module):
    """LayerNorm(act(dense(x))), before BERT's decoder."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.dense = Linear(hidden, hidden, activation=activation(config["hidden_act"]))
        self.LayerNorm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        y: Tensor = self.LayerNorm(self.dense(x))
        return y


class Predictions(nn.Module):
    """BERT's masked-language-modelling head. A decoder that the checkpoint lacks is the word embeddings."""

    def __init__(self, config: HfConfig, *, tied: bool) -> None:
        super().__init__()
        self.transform = Transform(config)
        self.decoder = None if tied else Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.bias = nn.Parameter(torch.empty(config["vocab_size"]), requires_grad=False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        return decode(self.transform(x), self.decoder, words, self.bias)


class MaskedLM(nn.Module):
    """The `cls.` level of BERT's names."""

    def __init__(self, config: HfConfig, *, tied: bool) -> None:
        super().__init__()
        self.predictions = Predictions(config, tied=tied)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        y: Tensor = self.predictions(x, words)
        return y


_RENAMED = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm, in checkpoints converted from TensorFlow
_EXTRAS = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.", "classifier.", "qa_outputs.")
_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}


@register("bert")
class Bert(Model):
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
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        if blueprint.head is Head.CLASSIFICATION:
            self.pooler = Pooler(config["hidden_size"]) if "pooler.dense.weight" in blueprint.tensors else nn.Identity()
            self.classifier = Linear(config["hidden_size"], blueprint.labels)
        if blueprint.head is Head.MASKED_LM:
            self.cls = MaskedLM(config, tied=blueprint.is_tied("cls.predictions.decoder.weight"))

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.embeddings(inputs, inputs.position_ids), inputs)
        return hidden

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.classifier(self.pooler(hidden[inputs.first_rows]))
        return logits

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.cls(hidden, self.embeddings.word_embeddings.weight)
        return logits


@register("roberta", "xlm-roberta", "camembert")
class Roberta(Model):
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
        self.pad_token_id: int = config["pad_token_id"]
        self.hidden_size = config["hidden_size"]
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        if blueprint.head is Head.CLASSIFICATION:
            self.classifier = ClassificationHead(config["hidden_size"], blueprint.labels)
        if blueprint.head is Head.MASKED_LM:
            tied = blueprint.is_tied("lm_head.decoder.weight")
            self.lm_head = RobertaLMHead(
                config["hidden_size"], config["vocab_size"], eps=config["layer_norm_eps"], tied=tied
            )

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        position_ids = positions_after_pad(inputs, self.pad_token_id)
        hidden: Tensor = self.encoder(self.embeddings(inputs, position_ids), inputs)
        return hidden

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.classifier(hidden[inputs.first_rows])
        return logits

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.lm_head(hidden, self.embeddings.word_embeddings.weight)
        return logits
