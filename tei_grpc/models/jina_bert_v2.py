"""Jina's BERT v2 in its two forms: ALiBi instead of positions, and a gated feed-forward block.

The form of jina-embeddings-v2-base-code (`qk-post-norm`) also normalises queries and keys, and adds a layer's input
twice. Both are published as remote code, which is never run; the names of their tensors tell them apart.
"""

from collections.abc import Callable

from torch import Tensor, nn

from tei_grpc.errors import StartupError
from tei_grpc.layers.activation import activation
from tei_grpc.layers.attention import Mask, attention
from tei_grpc.layers.bias import alibi_bias
from tei_grpc.layers.heads import BertHeads
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.post_norm import Embeddings, Residual
from tei_grpc.layers.rows import add_norm
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register

GATES = {"geglu": "gelu", "reglu": "relu"}  # by `feed_forward_type`


def _norm(config: HfConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])


class SelfAttention(FusedLinear):
    """Softmax attention; the code form normalises queries and keys over all heads together."""

    def __init__(self, config: HfConfig, *, normalised: bool) -> None:
        hidden = config["hidden_size"]
        super().__init__(hidden, {"query": hidden, "key": hidden, "value": hidden})
        self.heads = config["num_attention_heads"]
        self.head_dim = hidden // self.heads
        self.layer_norm_q = _norm(config) if normalised else nn.Identity()
        self.layer_norm_k = _norm(config) if normalised else nn.Identity()

    def attend(self, x: Tensor, inputs: PackedInputs, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        query, key, value = self(x).chunk(3, dim=1)
        states = [self.layer_norm_q(query), self.layer_norm_k(key), value]
        query, key, value = (rows.view(-1, self.heads, self.head_dim) for rows in states)
        return attention(query, (key, value), inputs, scale=self.head_dim**-0.5, mask=mask)


class Attention(nn.Module):
    """Self-attention with its residual."""

    def __init__(self, config: HfConfig, *, normalised: bool) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.self = SelfAttention(config, normalised=normalised)
        self.output = Residual(hidden, hidden, config["layer_norm_eps"])

    def forward(self, x: Tensor, inputs: PackedInputs, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.output(self.self.attend(x, inputs, mask), x)
        return y


class GatedMLP(nn.Module):
    """LayerNorm(wo(act(a) * b) + x), a and b the halves of gated_layers(x)."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.act = activation(GATES[config["feed_forward_type"]])
        self.gated_layers = Linear(hidden, 2 * intermediate, bias=False)
        self.wo = Linear(intermediate, hidden)
        self.layernorm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gated_layers(x).chunk(2, dim=1)
        return add_norm(self.wo(self.act(gate).mul_(up)), x, self.layernorm)


class CodeMLP(nn.Module):
    """down_layer(a * act(b)), a and b the halves of up_gated_layer(x)."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.act = activation(GATES[config["feed_forward_type"]])
        self.up_gated_layer = Linear(hidden, 2 * intermediate, bias=False)
        self.down_layer = Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        up, gate = self.up_gated_layer(x).chunk(2, dim=1)
        y: Tensor = self.down_layer(self.act(gate).mul_(up))
        return y


class Layer(nn.Module):
    """One layer of the base form: mlp(attention(x))."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.attention = Attention(config, normalised=False)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, inputs: PackedInputs, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.mlp(self.attention(x, inputs, mask))
        return y


class CodeLayer(nn.Module):
    """One layer of the code form; its input is added to an attention output that already holds it."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.attention = Attention(config, normalised=True)
        self.layer_norm_1 = _norm(config)
        self.mlp = CodeMLP(config)
        self.layer_norm_2 = _norm(config)

    def forward(self, x: Tensor, inputs: PackedInputs, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = add_norm(self.attention(x, inputs, mask), x, self.layer_norm_1)
        return add_norm(self.mlp(x), x, self.layer_norm_2)


class Encoder(nn.Module):
    """The stack of layers, and the bias that they share."""

    def __init__(self, config: HfConfig, layer: Callable[[HfConfig], nn.Module]) -> None:
        super().__init__()
        self.heads = config["num_attention_heads"]
        self.layer = nn.ModuleList(layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        mask = Mask(bias=alibi_bias(self.heads, inputs))
        for layer in self.layer:
            x = layer(x, inputs, mask)
        return x


_DEFAULTS = {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "feed_forward_type": "geglu"}
_CODE = "encoder.layer.0.mlp.up_gated_layer.weight"


def _is_jina(config: HfConfig) -> bool:
    """`model_type` is bert, so what tells is the remote code that the config names, or the repository it came from."""
    named = [*(config.get("auto_map") or {}).values(), config.get("_name_or_path")]
    return any("JinaBert" in str(name) or "jina-bert" in str(name) for name in named)


@register("bert", matches=_is_jina)
class JinaBert(BertHeads, Model):
    """Jina embeddings v2 and the rerankers v1."""

    heads = frozenset({Head.NONE, Head.CLASSIFICATION})
    names = Names(
        prefixes=("bert.",),
        extras=(
            "embeddings.position_ids",
            "embeddings.token_type_ids",
            "pooler.",
            "classifier.",
            "qa_outputs.",
            "cls.",
        ),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        blueprint.check_values({"position_embedding_type": "alibi"})
        config = {**_DEFAULTS, **blueprint.config}
        if config["feed_forward_type"] not in GATES:
            kind = config["feed_forward_type"]
            raise StartupError(f"`feed_forward_type` {kind!r} in config.json is not supported, only {', '.join(GATES)}")
        self.hidden_size = config["hidden_size"]
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config, CodeLayer if _CODE in blueprint.tensors else Layer)
        self.add_classifier(blueprint, self.hidden_size)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.embeddings(inputs), inputs)
        return hidden
