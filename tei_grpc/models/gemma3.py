"""Gemma 3 text models (EmbeddingGemma): four norms per layer, and five local layers to each global one."""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from tei_grpc.layers.activation import activation
from tei_grpc.layers.attention import Mask
from tei_grpc.layers.decoder import (
    DecoderLayers,
    DecoderStack,
    LayerType,
    SelfAttention,
    Shape,
    is_causal,
    read_layer_types,
    read_shape,
    window_mask,
)
from tei_grpc.layers.mlp import GatedMLP
from tei_grpc.layers.norm import RMSNorm
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import Rope, Rotation, read_rope
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, HfConfig, Model, register

_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


class Layer(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = shape.norm(shape.hidden)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = shape.norm(shape.hidden)
        self.pre_feedforward_layernorm = shape.norm(shape.hidden)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate, shape.activation)
        self.post_feedforward_layernorm = shape.norm(shape.hidden)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation, mask: Mask) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        attended = self.self_attn.attend(self.input_layernorm(x), inputs, rotation, mask)
        x = x + self.post_attention_layernorm(attended)
        return x.add_(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))


@register("gemma3_text")
class Gemma3(DecoderStack, Model):
    """Causal, unless the checkpoint says otherwise, as EmbeddingGemma does."""

    names = Names(extras=("lm_head.", "score."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        blueprint.check_values({"attn_logit_softcapping": None})
        config = {**_DEFAULTS, **blueprint.config}
        shape = _shape(config)
        layers = DecoderLayers(shape, _layer_types(config, shape.head_dim), layer=Layer)
        self.add_layers(blueprint, config, shape, layers)

    def embed(self, inputs: PackedInputs) -> Tensor:
        """Word embeddings times sqrt(hidden), rounded to the model's dtype as in training: [tokens, hidden]."""
        words = super().embed(inputs)
        return words.mul_(words.new_tensor(self.hidden_size**0.5))


def _shape(config: HfConfig) -> Shape:
    return replace(
        read_shape(config, mlp_bias=False, head_norms=True),
        scale=config["query_pre_attn_scalar"] ** -0.5,
        activation=activation(config["hidden_activation"]),
        norm=partial(RMSNorm, eps=config["rms_norm_eps"], offset=1.0),
    )


def _layer_types(config: HfConfig, head_dim: int) -> list[LayerType]:
    causal, pattern = is_causal(config), config["sliding_window_pattern"]
    types = {
        "full_attention": LayerType(window_mask(None, causal=causal), _global_rope(config, head_dim)),
        "sliding_attention": LayerType(_local_mask(config), _local_rope(config, head_dim)),
    }
    layers = range(1, config["num_hidden_layers"] + 1)
    return read_layer_types(config, ("sliding_attention" if i % pattern else "full_attention" for i in layers), types)


def _local_mask(config: HfConfig) -> Mask:
    """With `use_bidirectional_attention` the window counts the tokens of both sides."""
    window = config["sliding_window"]
    if config.get("use_bidirectional_attention"):
        return window_mask(window // 2, causal=False)
    return window_mask(window, causal=is_causal(config))


def _global_rope(config: HfConfig, head_dim: int) -> Rope:
    return read_rope(config, head_dim, layer_type="full_attention", theta=GLOBAL_THETA)


def _local_rope(config: HfConfig, head_dim: int) -> Rope:
    """Configs of transformers 4 scale the global rope only, and name the local theta `rope_local_base_freq`."""
    theta = config.get("rope_local_base_freq", LOCAL_THETA)
    local = {"rope_parameters": (config.get("rope_parameters") or {}).get("sliding_attention")}
    return read_rope(local, head_dim, theta=theta)
