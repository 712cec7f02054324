"""EuroBERT: Llama's layers, bidirectional, with the heads of an encoder."""

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from tei_grpc.errors import StartupError
from tei_grpc.layers.attention import FULL
from tei_grpc.layers.decoder import DecoderLayers, LayerType, read_shape
from tei_grpc.layers.embedding import Embedding
from tei_grpc.layers.heads import Decoder, text_means
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import read_rope
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register

_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_CLASSIFIER_POOLINGS = ("late", "mean", "bos")


@register("eurobert")
class EuroBert(Model):
    """Embeddings, classification, and masked language modelling with a decoder that may be the word embeddings."""

    heads = frozenset(Head)
    names = Names(extras=("lm_head.", "dense.", "classifier."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        shape = read_shape(config)
        every = LayerType(FULL, read_rope(config, shape.head_dim))
        self.hidden_size = shape.hidden
        self.embed_tokens = Embedding(config["vocab_size"], shape.hidden)
        self.layers = DecoderLayers(shape, [every] * config["num_hidden_layers"])
        self.norm = shape.norm(shape.hidden)
        if blueprint.head is Head.CLASSIFICATION:
            self.classifier_pooling = _classifier_pooling(config)
            self.dense = Linear(shape.hidden, shape.hidden, activation=functional.gelu)
            self.classifier = Linear(shape.hidden, blueprint.labels)
        if blueprint.head is Head.MASKED_LM:
            tied = replace(blueprint, config=config).is_tied("lm_head.weight")
            self.lm_head = Decoder(shape.hidden, config["vocab_size"], tied=tied, bias=shape.mlp_bias)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.norm(self.layers(self.embed_tokens(inputs.input_ids), inputs))
        return hidden

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`. `late` classifies every token and takes the mean of the logits."""
        if self.classifier_pooling == "late":
            return text_means(self.classifier(self.dense(hidden)), inputs)
        pooled = text_means(hidden, inputs) if self.classifier_pooling == "mean" else hidden[inputs.first_rows]
        logits: Tensor = self.classifier(self.dense(pooled))
        return logits

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.lm_head(hidden, self.embed_tokens.weight)
        return logits


def _classifier_pooling(config: HfConfig) -> str:
    """The key is `clf_pooling` in checkpoints that came with remote code."""
    pooling = str(config.get("classifier_pooling") or config.get("clf_pooling") or "late")
    if pooling not in _CLASSIFIER_POOLINGS:
        raise StartupError(f"`classifier_pooling` {pooling!r} is not supported; supported are {_CLASSIFIER_POOLINGS}")
    return pooling
