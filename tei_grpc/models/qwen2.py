"""Qwen2 (gte-Qwen2, jina-code-embeddings): query, key and value have biases; upper layers may have a window."""

import logging

from torch import Tensor

from tei_grpc.layers.decoder import DecoderLayers, last_rows, read_qwen_layers, read_shape
from tei_grpc.layers.embedding import Embedding
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import read_rope
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register

logger = logging.getLogger(__name__)

_DEFAULTS = {"rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_REMOTE_CODE = "modeling_qwen.Qwen2Model"  # gte-Qwen2's own, which may be bidirectional


@register("qwen2")
class Qwen2(Model):
    """Causal, unless the checkpoint says otherwise."""

    heads = frozenset({Head.NONE, Head.CLASSIFICATION})
    names = Names(extras=("lm_head.", "score.", "qa_outputs."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        _warn_of_silence(config)
        shape = read_shape(config, qkv_bias=True, output_bias=False, mlp_bias=False)
        self.hidden_size = shape.hidden
        self.pad_token_id = config.get("pad_token_id")
        self.embed_tokens = Embedding(config["vocab_size"], shape.hidden)
        self.layers = DecoderLayers(shape, read_qwen_layers(config, read_rope(config, shape.head_dim)))
        self.norm = shape.norm(shape.hidden)
        if blueprint.head is Head.CLASSIFICATION:
            self.score = Linear(shape.hidden, blueprint.labels, bias=False)

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.norm(self.layers(self.embed_tokens(inputs.input_ids), inputs))
        return hidden

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        logits: Tensor = self.score(hidden[last_rows(inputs, self.pad_token_id)])
        return logits


def _warn_of_silence(config: HfConfig) -> None:
    remote_code = (config.get("auto_map") or {}).get("AutoModel") == _REMOTE_CODE
    if remote_code and "is_causal" not in config and "use_bidirectional_attention" not in config:
        logger.warning(
            "config.json names remote code (%s) but has no `is_causal`: attention is causal; "
            "if the model was trained bidirectional, add `is_causal: false`",
            _REMOTE_CODE,
        )
