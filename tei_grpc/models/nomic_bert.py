"""Nomic v1, v1.5 and v2: BERT with rotary positions. v1 has gated MLPs, v2 plain ones and mixtures of experts in turn.

Two dialects of config are read: Nomic's own, which names things as GPT-2's config does, and transformers'.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tei_grpc.layers.activation import activation
from tei_grpc.layers.embedding import WordAndTypeEmbedding
from tei_grpc.layers.experts import Mixture, MixtureOfExperts
from tei_grpc.layers.heads import BertHeads, Decoder, MaskedLM
from tei_grpc.layers.linear import FusedLinear, Linear
from tei_grpc.layers.mlp import MLP
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.rotary import Rotation, read_rope, rotary_attention
from tei_grpc.layers.rows import add_norm
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, bias = config["hidden_size"], config["qkv_proj_bias"]
        self.heads = config["num_attention_heads"]
        self.Wqkv = Linear(hidden, 3 * hidden, bias=bias)
        self.out_proj = Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.out_proj(rotary_attention(self.Wqkv(x), self.heads, inputs, rotation))
        return y


class GatedMLP(FusedLinear):
    """fc2(fc11(x) * act(fc12(x))). fc11 and fc12 are this module's own product."""

    def __init__(self, config: HfConfig) -> None:
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        super().__init__(hidden, {"fc11": intermediate, "fc12": intermediate}, bias=config["mlp_fc1_bias"])
        self.act = activation(config["hidden_act"])
        self.fc2 = Linear(intermediate, hidden, bias=config["mlp_fc2_bias"])

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        up, gate = super().forward(x).chunk(2, dim=-1)
        y: Tensor = self.fc2(self.act(gate).mul_(up))
        return y


class Layer(nn.Module):
    """One post-norm layer."""

    def __init__(self, config: HfConfig, index: int) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.norm1 = _norm(config)
        self.mlp = _mlp(config, index)
        self.norm2 = _norm(config)

    def forward(self, x: Tensor, inputs: PackedInputs, rotation: Rotation) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = add_norm(self.attn(x, inputs, rotation), x, self.norm1)
        return add_norm(self.mlp(x), x, self.norm2)


class Encoder(nn.Module):
    """The stack of layers, which share one rotation."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.rope = read_rope(config, config["hidden_size"] // config["num_attention_heads"], theta=1000.0)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["num_hidden_layers"]))

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        rotation = self.rope.rotation(inputs, x.dtype)
        for layer in self.layers:
            x = layer(x, inputs, rotation)
        return x


class Transform(nn.Module):
    """LayerNorm(act(dense(x))), before the decoder."""

    def __init__(self, config: HfConfig, *, bias: bool) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.dense = Linear(hidden, hidden, bias=bias, activation=activation(config["hidden_act"]))
        self.layer_norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        y: Tensor = self.layer_norm(self.dense(x))
        return y


class Predictions(nn.Module):
    """The masked-language-modelling head; Nomic's own checkpoints have no biases in it, those of transformers do."""

    def __init__(self, config: HfConfig, blueprint: Blueprint) -> None:
        super().__init__()
        tied = blueprint.is_tied("cls.predictions.decoder.weight")
        has_bias = "cls.predictions.decoder.bias" in blueprint.tensors
        self.transform = Transform(config, bias="cls.predictions.transform.dense.bias" in blueprint.tensors)
        self.decoder = Decoder(config["hidden_size"], config["vocab_size"], tied=tied, bias=has_bias)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        y: Tensor = self.decoder(self.transform(x), words)
        return y


_NAMES = {  # of Nomic's own dialect
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}  # `activation_function` and what its gate does
_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_DEFAULTS = {"hidden_act": "silu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
_SUPPORTED: Mapping[str, Any] = {
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "parallel_block": False,
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "use_rms_norm": False,
}


@register("nomic_bert")
class NomicBert(BertHeads, Model):
    """Nomic v1, v1.5 and v2."""

    heads = frozenset(Head)
    names = Names(
        prefixes=("nomic_bert.", "bert."),
        renamed={"predictions.bias": "predictions.decoder.bias"},
        extras=("pooler.", "classifier.", "cls."),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        blueprint.check_values(_SUPPORTED)
        config = _translate(blueprint.config)
        self.hidden_size = config["hidden_size"]
        self.embeddings = WordAndTypeEmbedding(config["vocab_size"], config["type_vocab_size"], self.hidden_size)
        self.emb_ln = _norm(config)
        self.encoder = Encoder(config)
        self.add_classifier(blueprint, self.hidden_size)
        if blueprint.head is Head.MASKED_LM:
            self.cls = MaskedLM(Predictions(config, blueprint))

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.emb_ln(self.embeddings(inputs)), inputs)
        return hidden


def _translate(config: HfConfig) -> HfConfig:
    """Transformers' dialect, with the keys that only Nomic's own has filled in."""
    if "n_embd" not in config:
        return {**dict.fromkeys(_BIASES, False), **_DEFAULTS, "gated": True, **config}
    act, factor = config["activation_function"], config.get("rotary_scaling_factor")
    inner = config.get("n_inner") or 4 * config["n_embd"]
    renamed = {_NAMES.get(key, key): value for key, value in {**config, "n_inner": inner}.items()}
    scaling = {"rope_scaling": {"type": "dynamic", "factor": factor}} if factor else {}
    gate = {"gated": act in _GATED, "hidden_act": _GATED.get(act, act)}
    return {**dict.fromkeys(_BIASES, True), **_DEFAULTS, **renamed, **scaling, **gate}


def _mlp(config: HfConfig, index: int) -> nn.Module:
    every = config.get("moe_every_n_layers") or 0
    sizes, act = (config["hidden_size"], config["intermediate_size"]), activation(config["hidden_act"])
    if every and index % every == 1:
        return MixtureOfExperts(Mixture(*sizes, config["num_experts"], config["moe_top_k"], act))
    if config["gated"]:
        return GatedMLP(config)
    return MLP(*sizes, act, biases=(config["mlp_fc1_bias"], config["mlp_fc2_bias"]))


def _norm(config: HfConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config["layer_norm_eps"])
