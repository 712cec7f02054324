"""Qwen2 (gte-Qwen2, jina-code-embeddings): query, key and value have biases; upper layers may have a window."""

import logging

from tei_grpc.layers.decoder import DecoderLayers, DecoderStack, read_qwen_layers, read_shape
from tei_grpc.layers.rotary import read_rope
from tei_grpc.loading.tokenizer_files import GTE_QWEN2, is_gte_qwen2
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, HfConfig, Model, register

logger = logging.getLogger(__name__)

_DEFAULTS = {"rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


@register("qwen2")
class Qwen2(DecoderStack, Model):
    """Causal, unless the checkpoint says otherwise."""

    names = Names(extras=("lm_head.", "score.", "qa_outputs."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        _warn_of_silence(config)
        shape = read_shape(config, qkv_bias=True, output_bias=False, mlp_bias=False)
        layers = DecoderLayers(shape, read_qwen_layers(config, read_rope(config, shape.head_dim)))
        self.add_layers(blueprint, config, shape, layers)


def _warn_of_silence(config: HfConfig) -> None:
    """The publisher's code, which is never run, may be bidirectional."""
    if is_gte_qwen2(config) and "is_causal" not in config and "use_bidirectional_attention" not in config:
        logger.warning(
            "config.json names remote code (%s) but has no `is_causal`: attention is causal; "
            "if the model was trained bidirectional, add `is_causal: false`",
            GTE_QWEN2,
        )
