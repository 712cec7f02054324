"""Qwen3 (Qwen3-Embedding and its reranker conversions), voyage-4-nano and pplx-embed: heads are normed one by one."""

from dataclasses import replace

from torch import Tensor, nn

from tei_grpc.layers.decoder import DecoderLayers, DecoderStack, read_qwen_layers, read_shape
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import read_rope
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register

_DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@register("qwen3")
class Qwen3(DecoderStack, Model):
    """Causal, unless the checkpoint says otherwise. voyage-4-nano projects every token's vector by `linear`."""

    names = Names(extras=("lm_head.", "score.", "qa_outputs."))

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = {**_DEFAULTS, **blueprint.config}
        shape = read_shape(config, mlp_bias=False, head_norms=True)
        projected = _labels(config) if "linear.weight" in blueprint.tensors else None
        layers = DecoderLayers(shape, read_qwen_layers(config, read_rope(config, shape.head_dim)))
        self.add_layers(blueprint, config, shape, layers)
        self.hidden_size = projected or shape.hidden
        self.linear = Linear(shape.hidden, projected, bias=False) if projected else nn.Identity()

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        projected: Tensor = self.linear(super().encode(inputs))
        return projected


def _labels(config: HfConfig) -> int:
    """`num_labels`, which transformers writes as the length of `id2label`; two where neither is there."""
    return int(config.get("num_labels") or len(config.get("id2label") or range(2)))


@register("bidirectional_pplx_qwen3")
class BidirectionalQwen3(Qwen3):
    """pplx-embed: bidirectional, whatever the config says; pooled vectors hold whole numbers from -127 to 127."""

    heads = frozenset({Head.NONE})

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(replace(blueprint, config={**blueprint.config, "is_causal": False}))

    def after_pooling(self, vectors: Tensor) -> Tensor:
        """round(127 tanh(x)); see `Model`."""
        return vectors.tanh().mul_(127).round_()
