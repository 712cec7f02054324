"""DistilBERT: BERT with half the layers, without token types and without a pooler."""

from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers.activation import activation
from tei_grpc.layers.attention import attention
from tei_grpc.layers.embedding import Embedding
from tei_grpc.layers.heads import Decoder
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rows import add_norm
from tei_grpc.layers.stack import Parts, PostNormStack
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register

EPS = 1e-12  # of every LayerNorm; the config does not say


class Embeddings(nn.Module):
    """LayerNorm(word + position)."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config["vocab_size"], config["dim"])
        self.position_embeddings = Embedding(config["max_position_embeddings"], config["dim"])
        self.LayerNorm = nn.LayerNorm(config["dim"], eps=EPS)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        x: Tensor = self.word_embeddings(inputs.input_ids)
        normed: Tensor = self.LayerNorm(x.add_(self.position_embeddings(inputs.position_ids)))
        return normed


class Attention(FusedLinear):
    """Self-attention."""

    def __init__(self, config: HfConfig) -> None:
        hidden = config["dim"]
        super().__init__(hidden, {"q_lin": hidden, "k_lin": hidden, "v_lin": hidden})
        self.heads = config["n_heads"]
        self.head_dim = hidden // self.heads
        self.out_lin = Linear(hidden, hidden)

    def attend(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        query, key, value = self(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        y: Tensor = self.out_lin(attention(query, (key, value), inputs, scale=self.head_dim**-0.5))
        return y


class FeedForward(nn.Module):
    """lin2(act(lin1(x)))."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.lin1 = Linear(config["dim"], config["hidden_dim"], activation=activation(config["activation"]))
        self.lin2 = Linear(config["hidden_dim"], config["dim"])

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.lin2(self.lin1(x))
        return y


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.sa_layer_norm = nn.LayerNorm(config["dim"], eps=EPS)
        self.ffn = FeedForward(config)
        self.output_layer_norm = nn.LayerNorm(config["dim"], eps=EPS)

    @property
    def parts(self) -> Parts:
        """See PostNormLayer."""
        attention, ffn = self.attention, self.ffn
        return Parts(attention, attention.out_lin, self.sa_layer_norm, ffn.lin1, ffn.lin2, self.output_layer_norm)

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = add_norm(self.attention.attend(x, inputs), x, self.sa_layer_norm)
        return add_norm(self.ffn(x), x, self.output_layer_norm)


class Transformer(PostNormStack):
    """The stack of layers."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__((Layer(config) for _ in range(config["n_layers"])), config["n_heads"])


@register("distilbert")
class DistilBert(Model):
    """DistilBERT with learned positions from 0."""

    heads = frozenset(Head)
    names = Names(
        prefixes=("distilbert.",),
        renamed={".gamma": ".weight", ".beta": ".bias"},
        extras=("embeddings.position_ids", "vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {"activation": "gelu", **blueprint.config}
        self.hidden_size = config["dim"]
        self.embeddings = Embeddings(config)
        self.transformer = Transformer(config)
        if blueprint.head is Head.CLASSIFICATION:
            self.pre_classifier = Linear(config["dim"], config["dim"], activation=functional.relu)
            self.classifier = Linear(config["dim"], blueprint.labels)
        if blueprint.head is Head.MASKED_LM:
            self.vocab_transform = Linear(config["dim"], config["dim"], activation=activation(config["activation"]))
            self.vocab_layer_norm = nn.LayerNorm(config["dim"], eps=EPS)
            tied = blueprint.is_tied("vocab_projector.weight")
            self.vocab_projector = Decoder(config["dim"], config["vocab_size"], tied=tied)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.transformer(self.embeddings(inputs), inputs)
        return hidden

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.classifier(self.pre_classifier(hidden[inputs.first_rows]))
        return logits

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        x = self.vocab_layer_norm(self.vocab_transform(hidden))
        logits: Tensor = self.vocab_projector(x, self.embeddings.word_embeddings.weight)
        return logits
