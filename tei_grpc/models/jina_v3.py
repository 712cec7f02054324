"""Jina's XLM-RoBERTa: v3, in transformers' format and in the original one, and the reranker v2.

RoBERTa's heads on an encoder that names its parts as flash-attention does. Positions are rotary, or a table.
"""

from torch import Tensor, nn

from tei_grpc.layers.activation import activation
from tei_grpc.layers.attention import attention
from tei_grpc.layers.embedding import Embedding, WordAndTypeEmbedding, positions_after_pad
from tei_grpc.layers.heads import RobertaHeads
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.mlp import MLP
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import Rope, Rotation, read_rope, rotary_attention
from tei_grpc.layers.rows import add_norm
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register


class PositionedEmbedding(WordAndTypeEmbedding):
    """word + token type + position, counted as RoBERTa does."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__(config["vocab_size"], config["type_vocab_size"], config["hidden_size"])
        self.position_embeddings = Embedding(config["max_position_embeddings"], config["hidden_size"])
        self.pad_token_id: int = config["pad_token_id"]

    def forward(self, inputs: PackedInputs) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        return super().forward(inputs).add_(self.position_embeddings(positions_after_pad(inputs, self.pad_token_id)))


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.Wqkv = Linear(hidden, 3 * hidden)
        self.out_proj = Linear(hidden, hidden)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation | None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        states = self.Wqkv(x)
        if rotation is None:
            query, key, value = states.view(len(x), 3, self.heads, -1).unbind(1)
            attended = attention(query, (key, value), inputs, scale=query.shape[2] ** -0.5)
        else:
            attended = rotary_attention(states, self.heads, inputs, rotation)
        y: Tensor = self.out_proj(attended)
        return y


class Layer(nn.Module):
    """One post-norm layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.mixer = Attention(config)
        self.norm1 = _norm(config)
        self.mlp = MLP(config["hidden_size"], config["intermediate_size"], activation(config["hidden_act"]))
        self.norm2 = _norm(config)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation | None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = add_norm(self.mixer(x, inputs, rotation), x, self.norm1)
        return add_norm(self.mlp(x), x, self.norm2)


class Encoder(nn.Module):
    """The stack of layers, which share one rotation."""

    def __init__(self, config: HfConfig, rope: Rope | None) -> None:
        super().__init__()
        self.rope = rope
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        rotation = self.rope.rotation(inputs, x.dtype) if self.rope else None
        for layer in self.layers:
            x = layer(x, inputs, rotation)
        return x


_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "type_vocab_size": 1, "pad_token_id": 1}
_REMOTE_CONFIG = "XLMRobertaFlashConfig"


def _is_rotary(config: HfConfig) -> bool:
    return config.get("position_embedding_type") == "rotary"


def _has_table(config: HfConfig) -> bool:
    named = str((config.get("auto_map") or {}).get("AutoConfig"))
    return named.endswith(_REMOTE_CONFIG) and not _is_rotary(config)


@register("xlm-roberta", matches=_is_rotary)
@register("jina_embeddings_v3")
class JinaV3(RobertaHeads, Model):
    """Jina v3. The original format calls itself xlm-roberta, and differs from it by its position embeddings."""

    heads = frozenset(Head)
    names = Names(
        prefixes=("roberta.",),
        renamed={"lm_head.decoder.bias": "lm_head.bias"},
        extras=("pooler.", "classifier.", "qa_outputs.", "lm_head."),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        self.hidden_size = config["hidden_size"]
        self.embeddings = self._embeddings(config)
        self.emb_ln = _norm(config)
        self.encoder = Encoder(config, self._rope(config))
        self.add_heads(blueprint, config)

    def _embeddings(self, config: HfConfig) -> WordAndTypeEmbedding:
        return WordAndTypeEmbedding(config["vocab_size"], config["type_vocab_size"], config["hidden_size"])

    def _rope(self, config: HfConfig) -> Rope | None:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        return read_rope(config, head_dim, theta=config.get("rotary_emb_base") or 20000.0)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.emb_ln(self.embeddings(inputs)), inputs)
        return hidden


@register("xlm-roberta", matches=_has_table)
class JinaRerankerV2(JinaV3):
    """Jina's reranker v2: XLM-RoBERTa's own position table under the names of v3's parts."""

    def _embeddings(self, config: HfConfig) -> WordAndTypeEmbedding:
        return PositionedEmbedding(config)

    def _rope(self, config: HfConfig) -> Rope | None:
        return None


def _norm(config: HfConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])
