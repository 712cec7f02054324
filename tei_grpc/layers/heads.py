"""Owns the heads that several families share, with the tensor names that checkpoints give them."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers.blueprint import Blueprint, Head, HfConfig
from tei_grpc.layers.embedding import WordAndTypeEmbedding
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs


class Pooler(nn.Module):
    """tanh(dense(x)), BERT's step between a text's first token and its classifier."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden, activation=torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        """[texts, hidden] -> [texts, hidden]."""
        y: Tensor = self.dense(x)
        return y


class ClassificationHead(nn.Module):
    """out_proj(tanh(dense(x))) on a text's first token, as RoBERTa has it."""

    def __init__(self, hidden: int, labels: int) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden, activation=torch.tanh)
        self.out_proj = Linear(hidden, labels)

    def forward(self, x: Tensor) -> Tensor:
        """[texts, hidden] -> [texts, labels]."""
        y: Tensor = self.out_proj(self.dense(x))
        return y


class Decoder(nn.Module):
    """Vocabulary logits. A decoder that is tied is the word embeddings, with a bias of its own."""

    def __init__(self, hidden: int, vocabulary: int, *, tied: bool, bias: bool = True) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocabulary, hidden), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(vocabulary), requires_grad=False) if bias else None

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        return functional.linear(x, words if self.weight is None else self.weight, self.bias)


def decode(x: Tensor, decoder: Linear | None, words: Tensor, bias: Tensor) -> Tensor:
    """Vocabulary logits plus bias, [rows, hidden] -> [rows, vocabulary]; without a decoder of its own, by the words."""
    y: Tensor = functional.linear(x, words) if decoder is None else decoder(x)
    return y.add_(bias)


class MaskedLM(nn.Module):
    """The `cls.` level of BERT's names."""

    def __init__(self, predictions: nn.Module) -> None:
        super().__init__()
        self.predictions = predictions

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        y: Tensor = self.predictions(x, words)
        return y


class RobertaLMHead(nn.Module):
    """RoBERTa's masked-language-modelling head; its activation is gelu whatever the config says.

    A decoder that is tied is the word embeddings.
    """

    def __init__(self, hidden: int, vocabulary: int, *, eps: float, tied: bool) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden, activation=functional.gelu)
        self.layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.decoder = None if tied else Linear(hidden, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.empty(vocabulary), requires_grad=False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        return decode(self.layer_norm(self.dense(x)), self.decoder, words, self.bias)


class BertHeads(nn.Module):
    """BERT's ways from hidden states to logits. Stands before `Model` among a family's bases."""

    embeddings: WordAndTypeEmbedding
    pooler: nn.Module
    classifier: nn.Module
    cls: nn.Module

    def add_classifier(self, blueprint: Blueprint, hidden: int) -> None:
        """The classifier, if the model is one, with a pooler where the checkpoint stores one."""
        if blueprint.head is Head.CLASSIFICATION:
            self.pooler = Pooler(hidden) if "pooler.dense.weight" in blueprint.tensors else nn.Identity()
            self.classifier = Linear(hidden, blueprint.labels)

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.classifier(self.pooler(hidden[inputs.first_rows]))
        return logits

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.cls(hidden, self.embeddings.word_embeddings.weight)
        return logits


class RobertaHeads(nn.Module):
    """RoBERTa's ways from hidden states to logits. Stands before `Model` among a family's bases."""

    embeddings: WordAndTypeEmbedding

    def add_heads(self, blueprint: Blueprint, config: HfConfig) -> None:
        """The head that the model has, if any. `config` is the blueprint's, with the family's defaults."""
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        if blueprint.head is Head.CLASSIFICATION:
            self.classifier = ClassificationHead(hidden, blueprint.labels)
        if blueprint.head is Head.MASKED_LM:
            tied = blueprint.is_tied("lm_head.decoder.weight")
            self.lm_head = RobertaLMHead(hidden, vocabulary, eps=config["layer_norm_eps"], tied=tied)

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.classifier(hidden[inputs.first_rows])
        return logits

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.lm_head(hidden, self.embeddings.word_embeddings.weight)
        return logits


def text_means(x: Tensor, inputs: PackedInputs) -> Tensor:
    """The mean over each text's tokens, summed in float32: [tokens, size] -> [texts, size], in the dtype of `x`."""
    if x.is_cuda:
        lengths = inputs.cu_seqlens.diff().long()
        return torch.segment_reduce(x.float(), "mean", lengths=lengths, unsafe=True).to(x.dtype)
    means = [x[start:stop].mean(0, dtype=torch.float32) for start, stop in pairwise(inputs.offsets)]
    return torch.stack(means).to(x.dtype)
