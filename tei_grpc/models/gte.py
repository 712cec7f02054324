"""GTE, in transformers' format (`gte`) and in Alibaba's own (`new`): BERT with rotary positions and a gated MLP."""

from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.layers.activation import activation
from tei_grpc.layers.heads import BertHeads, Decoder
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.post_norm import Embeddings
from tei_grpc.layers.rotary import Rotation, read_rope, rotary_attention
from tei_grpc.layers.rows import add_norm
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.qkv_proj = Linear(hidden, 3 * hidden)
        self.o_proj = Linear(hidden, hidden)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.o_proj(rotary_attention(self.qkv_proj(x), self.heads, inputs, rotation))
        return y


class GatedMLP(nn.Module):
    """down_proj(act(gate) * up), where up_gate_proj(x) is up and gate side by side."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.act = activation(config["hidden_act"])
        self.up_gate_proj = Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        up, gate = self.up_gate_proj(x).chunk(2, dim=-1)
        y: Tensor = self.down_proj(self.act(gate).mul_(up))
        return y


class Layer(nn.Module):
    """One post-norm layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attn_ln = _norm(config)
        self.mlp = GatedMLP(config)
        self.mlp_ln = _norm(config)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = add_norm(self.attention(x, inputs, rotation), x, self.attn_ln)
        return add_norm(self.mlp(x), x, self.mlp_ln)


class Encoder(nn.Module):
    """The stack of layers, which share one rotation."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.rope = read_rope(config, config["hidden_size"] // config["num_attention_heads"], theta=160000.0)
        self.layer = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        rotation = self.rope.rotation(inputs, x.dtype)
        for layer in self.layer:
            x = layer(x, inputs, rotation)
        return x


class LMHead(nn.Module):
    """The masked-language-modelling head. A decoder that is tied is the word embeddings; its bias is always stored."""

    def __init__(self, config: HfConfig, *, tied: bool) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.dense = Linear(hidden, hidden, activation=functional.gelu)
        self.norm = _norm(config)
        self.decoder = Decoder(hidden, config["vocab_size"], tied=tied)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        y: Tensor = self.decoder(self.norm(self.dense(x)), words)
        return y


_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 1}
_SUPPORTED = {
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}


@register("gte", "new")
class Gte(BertHeads, Model):
    """GTE."""

    heads = frozenset(Head)
    names = Names(prefixes=("gte.", "new."), extras=("embeddings.position_ids", "pooler.", "classifier.", "lm_head."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        blueprint.check_values(_SUPPORTED)
        config = {**_DEFAULTS, **blueprint.config}
        self.hidden_size = config["hidden_size"]
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.add_classifier(blueprint, self.hidden_size)
        if blueprint.head is Head.MASKED_LM:
            self.lm_head = LMHead(config, tied=blueprint.is_tied("lm_head.decoder.weight"))

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.embeddings(inputs), inputs)
        return hidden

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.lm_head(hidden, self.embeddings.word_embeddings.weight)
        return logits


def _norm(config: HfConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])
