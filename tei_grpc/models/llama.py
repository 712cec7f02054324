"""Llama, and NVIDIA's bidirectional form of it, whose reranker scores a pooled vector instead of the last token."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from tei_grpc.errors import StartupError
from tei_grpc.layers.decoder import (
    DecoderLayers,
    DecoderStack,
    LayerType,
    is_causal,
    last_rows,
    read_shape,
    window_mask,
)
from tei_grpc.layers.heads import text_means
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import read_rope
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Model, register

_DEFAULTS = {"rms_norm_eps": 1e-6}
_BIDIRECTIONAL_DEFAULTS = {"pooling": "avg", "temperature": 1.0}


@register("llama")
class Llama(DecoderStack, Model):
    """Causal, unless the checkpoint says otherwise."""

    names = Names(prefixes=("transformer.",), extras=("lm_head.", "score.", "qa_outputs."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        shape = read_shape(config)
        every = LayerType(window_mask(None, causal=is_causal(config)), read_rope(config, shape.head_dim))
        self.add_layers(blueprint, config, shape, DecoderLayers(shape, [every] * config["num_hidden_layers"]))


@register("llama_bidirec")
class BidirectionalLlama(Llama):
    """NVIDIA's embedders and rerankers: bidirectional, whatever the config says; rerankers score a pooled vector."""

    def __init__(self, blueprint: Blueprint) -> None:
        config = {**_BIDIRECTIONAL_DEFAULTS, **blueprint.config, "is_causal": False}
        super().__init__(replace(blueprint, config=config))
        if config["pooling"] not in _POOLERS:
            raise StartupError(
                f"`pooling` {config['pooling']!r} is not supported; supported are: {', '.join(_POOLERS)}"
            )
        self.pool = _POOLERS[config["pooling"]]
        self.temperature = float(config["temperature"])

    def classify(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """score(pooled) / temperature; see `Model`."""
        logits: Tensor = self.score(self.pool(hidden, inputs))
        return logits / self.temperature


def _first_tokens(hidden: Tensor, inputs: PackedInputs) -> Tensor:
    return hidden[inputs.first_rows]


def _last_tokens(hidden: Tensor, inputs: PackedInputs) -> Tensor:
    return hidden[last_rows(inputs, pad_token_id=None)]


_POOLERS: Mapping[str, Callable[[Tensor, PackedInputs], Tensor]] = {
    "avg": text_means,
    "cls": _first_tokens,
    "last": _last_tokens,
}
