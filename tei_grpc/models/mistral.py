"""Mistral (e5-mistral, SFR-Embedding): every layer has the same sliding window, or none has."""

from tei_grpc.layers.decoder import DecoderLayers, DecoderStack, LayerType, is_causal, read_shape, window_mask
from tei_grpc.layers.rotary import read_rope
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Model, register

_DEFAULTS = {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096}


@register("mistral")
class Mistral(DecoderStack, Model):
    """Causal, unless the checkpoint says otherwise."""

    names = Names(extras=("lm_head.", "score.", "qa_outputs."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        shape = read_shape(config, qkv_bias=False, output_bias=False, mlp_bias=False)
        mask = window_mask(config["sliding_window"], causal=is_causal(config))
        every = LayerType(mask, read_rope(config, shape.head_dim))
        self.add_layers(blueprint, config, shape, DecoderLayers(shape, [every] * config["num_hidden_layers"]))
