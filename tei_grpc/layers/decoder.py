"""Owns the layer of decoder-shaped models (Llama and its kin), the stack around it, and what configs say of both.

Pre-norm, rotary positions, grouped queries, gated MLP. The shape serves bidirectional encoders as well as causal
models: which tokens a token sees is a `LayerType`'s mask.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from tei_grpc.errors import StartupError
from tei_grpc.layers.activation import Activation, activation
from tei_grpc.layers.attention import CAUSAL, FULL, Mask, attention
from tei_grpc.layers.blueprint import Blueprint, Head, HfConfig
from tei_grpc.layers.embedding import Embedding
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.mlp import GatedMLP
from tei_grpc.layers.norm import RMSNorm
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import Rope, Rotation, rotate


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and switches that all layers of a model have in common."""

    hidden: int
    intermediate: int
    heads: int
    key_heads: int  # of key and value; a group of heads shares one
    head_dim: int
    scale: float  # on the scores
    activation: Activation
    norm: Callable[[int], RMSNorm]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # RMSNorm of each head of query and key, before they are rotated


def read_shape(config: HfConfig, **switches: bool) -> Shape:
    """The shape that a config describes; `switches` are those of `Shape` that it does not name.

    Raises KeyError for a key that every checkpoint has, and StartupError for an unknown activation.
    """
    heads, bias = config["num_attention_heads"], bool(config.get("attention_bias"))
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    described = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias"))}
    return Shape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        key_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        activation=activation(config.get("hidden_act") or "silu"),
        norm=partial(RMSNorm, eps=config["rms_norm_eps"]),
        **{**described, **switches},
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerType:
    """What may differ from layer to layer. Layers of the same type hold the same object."""

    mask: Mask
    rope: Rope


def is_causal(config: HfConfig) -> bool:
    """Checkpoints become bidirectional by `is_causal: false` or `use_bidirectional_attention: true`."""
    return config.get("is_causal") is not False and not config.get("use_bidirectional_attention")


def window_mask(window: int | None, *, causal: bool) -> Mask:
    """A config's `sliding_window` as transformers reads it.

    A causal token sees `window` tokens, its own included; a bidirectional one sees `window` tokens on either side.
    """
    if window is None:
        return CAUSAL if causal else FULL
    return Mask(left=window - 1, right=0) if causal else Mask(left=window, right=window)


def read_layer_types(config: HfConfig, derived: Iterable[str], types: Mapping[str, LayerType]) -> list[LayerType]:
    """The type of each layer by `layer_types`, or by the `derived` names where an older config lacks that key.

    Raises StartupError for a name that `types` lacks, and for another number of names than layers.
    """
    names = list(config.get("layer_types") or derived)
    for name in names:
        if name not in types:
            raise StartupError(f"`layer_types` has {name!r}; this model supports: {', '.join(types)}")
    if len(names) != config["num_hidden_layers"]:
        raise StartupError(
            f"`layer_types` has {len(names)} entries, `num_hidden_layers` is {config['num_hidden_layers']}"
        )
    return [types[name] for name in names]


def read_qwen_layers(config: HfConfig, rope: Rope) -> list[LayerType]:
    """The type of each of Qwen's layers: with `use_sliding_window`, those from `max_window_layers` on have a window."""
    causal, layers = is_causal(config), config["num_hidden_layers"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = {"full_attention": LayerType(window_mask(None, causal=causal), rope)}
    if window is not None:
        types["sliding_attention"] = LayerType(window_mask(window, causal=causal), rope)
    full = layers if window is None else config["max_window_layers"]
    derived = ("full_attention" if layer < full else "sliding_attention" for layer in range(layers))
    return read_layer_types(config, derived, types)


class SelfAttention(FusedLinear):
    """Query, key and value are this module's own product."""

    def __init__(self, shape: Shape) -> None:
        heads, key_heads = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
        parts = {"q_proj": heads, "k_proj": key_heads, "v_proj": key_heads}
        super().__init__(shape.hidden, parts, bias=shape.qkv_bias)
        self.shape = shape
        self.q_norm = shape.norm(shape.head_dim) if shape.head_norms else nn.Identity()
        self.k_norm = shape.norm(shape.head_dim) if shape.head_norms else nn.Identity()
        self.o_proj = Linear(heads, shape.hidden, bias=shape.output_bias)

    def attend(self, x: Tensor, inputs: PackedInputs, rotation: Rotation, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        states = self(x).unflatten(1, (-1, self.shape.head_dim))
        query, key, value = states.split([self.shape.heads, self.shape.key_heads, self.shape.key_heads], dim=1)
        query, key = rotate(self.q_norm(query), rotation), rotate(self.k_norm(key), rotation)
        y: Tensor = self.o_proj(attention(query, (key, value), inputs, scale=self.shape.scale, mask=mask))
        return y


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = shape.norm(shape.hidden)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = shape.norm(shape.hidden)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate, shape.activation, bias=shape.mlp_bias)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = x + self.self_attn.attend(self.input_layernorm(x), inputs, rotation, mask)
        return x.add_(self.mlp(self.post_attention_layernorm(x)))


class DecoderLayers(nn.ModuleList):
    """The stack. Layers of one type share its rotation, which is computed once per batch."""

    def __init__(
        self, shape: Shape, types: Sequence[LayerType], layer: Callable[[Shape], nn.Module] = DecoderLayer
    ) -> None:
        """`types`: one for each layer."""
        super().__init__(layer(shape) for _ in types)
        self.types = types

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        rotations = {kind: kind.rope.rotation(inputs, x.dtype) for kind in set(self.types)}
        for layer, kind in zip(self, self.types, strict=True):
            x = layer(x, inputs, rotations[kind], kind.mask)
        return x


def last_rows(inputs: PackedInputs, pad_token_id: int | None) -> Tensor:
    """The row of each text's last token that is not `pad_token_id`, [texts] int64; its first row if it has none.

    This is the token on which transformers' sequence classifiers of decoder shape score a text.
    """
    firsts = inputs.first_rows.long()
    rows = torch.arange(len(inputs.input_ids), device=firsts.device)
    if pad_token_id is not None:
        rows = rows.masked_fill(inputs.input_ids == pad_token_id, 0)
    return firsts.scatter_reduce(0, inputs.text_ids, rows, "amax")


class DecoderStack(nn.Module):
    """Words, layers, a last norm, the score of a text's last token. Stands before `Model` among a family's bases."""

    heads: ClassVar[frozenset[Head]] = frozenset({Head.NONE, Head.CLASSIFICATION})

    def add_layers(self, blueprint: Blueprint, config: HfConfig, shape: Shape, layers: DecoderLayers) -> None:
        """The family's tensors. `config` is the blueprint's, with the family's defaults."""
        self.hidden_size = shape.hidden
        self.pad_token_id = config.get("pad_token_id")
        self.embed_tokens = Embedding(config["vocab_size"], shape.hidden)
        self.layers = layers
        self.norm = shape.norm(shape.hidden)
        if blueprint.head is Head.CLASSIFICATION:
            self.score = Linear(shape.hidden, blueprint.labels, bias=False)

    def embed(self, inputs: PackedInputs) -> Tensor:
        """Word embeddings, [tokens, hidden]."""
        words: Tensor = self.embed_tokens(inputs.input_ids)
        return words

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.norm(self.layers(self.embed(inputs), inputs))
        return hidden

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.score(hidden[last_rows(inputs, self.pad_token_id)])
        return logits
