"""Mistral (e5-mistral, SFR-Embedding): every layer has the same sliding window, or none has."""

from torch import Tensor

from tei_grpc.layers.decoder import DecoderLayers, LayerType, is_causal, last_rows, read_shape, window_mask
from tei_grpc.layers.embedding import Embedding
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import read_rope
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, Model, register

_DEFAULTS = {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096}


@register("mistral")
class Mistral(Model):
    """Causal, unless the checkpoint says otherwise."""

    heads = frozenset({Head.NONE, Head.CLASSIFICATION})
    names = Names(extras=("lm_head.", "score.", "qa_outputs."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        shape = read_shape(config, qkv_bias=False, output_bias=False, mlp_bias=False)
        mask = window_mask(config["sliding_window"], causal=is_causal(config))
        every = LayerType(mask, read_rope(config, shape.head_dim))
        self.hidden_size = shape.hidden
        self.pad_token_id = config.get("pad_token_id")
        self.embed_tokens = Embedding(config["vocab_size"], shape.hidden)
        self.layers = DecoderLayers(shape, [every] * config["num_hidden_layers"])
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
