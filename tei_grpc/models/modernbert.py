"""ModernBERT: pre-norm, rotary positions, and layers that look at a window between layers that look at all."""

from dataclasses import dataclass

from torch import Tensor, nn

from tei_grpc.errors import StartupError
from tei_grpc.layers.activation import activation
from tei_grpc.layers.attention import FULL, Mask
from tei_grpc.layers.embedding import Embedding
from tei_grpc.layers.heads import Decoder, text_means
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import Rope, Rotation, read_rope, rotary_attention
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, slots=True)
class View:
    """What layers of one type share in a batch."""

    rotation: Rotation
    mask: Mask


class Embeddings(nn.Module):
    """LayerNorm(word)."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config["vocab_size"], config["hidden_size"])
        self.norm = _norm(config)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        x: Tensor = self.norm(self.tok_embeddings(inputs.input_ids))
        return x


class Attention(nn.Module):
    """Self-attention, full or local."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, bias = config["hidden_size"], config["attention_bias"]
        self.heads = config["num_attention_heads"]
        self.Wqkv = Linear(hidden, 3 * hidden, bias=bias)
        self.Wo = Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, inputs: PackedInputs, view: View) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.Wo(rotary_attention(self.Wqkv(x), self.heads, inputs, view.rotation, mask=view.mask))
        return y


class GatedMLP(nn.Module):
    """Wo(act(a) * b), where Wi(x) is a and b side by side."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, intermediate, bias = config["hidden_size"], config["intermediate_size"], config["mlp_bias"]
        self.act = activation(config["hidden_activation"])
        self.Wi = Linear(hidden, 2 * intermediate, bias=bias)
        self.Wo = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        a, b = self.Wi(x).chunk(2, dim=-1)
        y: Tensor = self.Wo(self.act(a).mul_(b))
        return y


class Layer(nn.Module):
    """One pre-norm layer. The first has no norm before its attention: the embeddings come with one."""

    def __init__(self, config: HfConfig, index: int) -> None:
        super().__init__()
        self.attention_type: str = config["layer_types"][index]
        self.attn_norm = _norm(config) if index else nn.Identity()
        self.attn = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, inputs: PackedInputs, view: View) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = self.attn(self.attn_norm(x), inputs, view).add_(x)
        y: Tensor = self.mlp(self.mlp_norm(x)).add_(x)
        return y


class PredictionHead(nn.Module):
    """LayerNorm(act(dense(x))), under the classifier and under the decoder."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, act = config["hidden_size"], activation(config["classifier_activation"])
        self.dense = Linear(hidden, hidden, bias=config["classifier_bias"], activation=act)
        self.norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        y: Tensor = self.norm(self.dense(x))
        return y


_DEFAULTS = {
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_bias": True,
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "classifier_pooling": "cls",
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
}


@register("modernbert")
class ModernBert(Model):
    """ModernBERT."""

    heads = frozenset(Head)
    names = Names(extras=("head.", "classifier.", "decoder."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = _complete(blueprint.config)
        self.hidden_size = config["hidden_size"]
        self.ropes = {layer_type: _read_rope(config, layer_type) for layer_type in dict.fromkeys(config["layer_types"])}
        side = config["local_attention"] // 2
        self.masks = {FULL_ATTENTION: FULL, SLIDING_ATTENTION: Mask(left=side, right=side)}
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.final_norm = _norm(config)
        if blueprint.head is not Head.NONE:
            self.head = PredictionHead(config)
        if blueprint.head is Head.CLASSIFICATION:
            self.pools_mean = _pools_mean(config)
            self.classifier = Linear(config["hidden_size"], blueprint.labels)
        if blueprint.head is Head.MASKED_LM:
            self.decoder = Decoder(
                config["hidden_size"],
                config["vocab_size"],
                tied=blueprint.is_tied("decoder.weight"),
                bias=config["decoder_bias"],
            )

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        x: Tensor = self.embeddings(inputs)
        views = {name: View(rope.rotation(inputs, x.dtype), self.masks[name]) for name, rope in self.ropes.items()}
        for layer in self.layers:
            x = layer(x, inputs, views[layer.attention_type])
        hidden: Tensor = self.final_norm(x)
        return hidden

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        pooled = text_means(hidden, inputs) if self.pools_mean else hidden[inputs.first_rows]
        logits: Tensor = self.classifier(self.head(pooled))
        return logits

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.decoder(self.head(hidden), self.embeddings.tok_embeddings.weight)
        return logits


def _norm(config: HfConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config["norm_eps"], bias=config["norm_bias"])


def _complete(config: HfConfig) -> HfConfig:
    config = {**_DEFAULTS, **config}
    types = config.get("layer_types") or _layer_types(config)
    if len(types) != config["num_hidden_layers"] or not set(types) <= {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise StartupError(f"`layer_types` {types} must name {FULL_ATTENTION} or {SLIDING_ATTENTION} for each layer")
    return {**config, "layer_types": types}


def _layer_types(config: HfConfig) -> list[str]:
    every = config["global_attn_every_n_layers"]
    return [SLIDING_ATTENTION if index % every else FULL_ATTENTION for index in range(config["num_hidden_layers"])]


def _read_rope(config: HfConfig, layer_type: str) -> Rope:
    theta = config["global_rope_theta"]
    if layer_type == SLIDING_ATTENTION:
        theta = config["local_rope_theta"] or theta
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return read_rope(config, head_dim, layer_type=layer_type, theta=theta)


def _pools_mean(config: HfConfig) -> bool:
    pooling = config["classifier_pooling"]
    if pooling not in ("cls", "mean"):
        raise StartupError(f"`classifier_pooling` {pooling!r} is not supported, only 'cls' and 'mean' are")
    return bool(pooling == "mean")
