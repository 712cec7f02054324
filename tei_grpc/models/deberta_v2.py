"""DeBERTa-v2 and v3: attention that weighs content and relative position apart from each other."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tei_grpc.errors import StartupError
from tei_grpc.layers.activation import activation
from tei_grpc.layers.bias import distances
from tei_grpc.layers.disentangled import Buckets, DisentangledSelfAttention, Positions
from tei_grpc.layers.embedding import Embedding, WordAndTypeEmbedding
from tei_grpc.layers.heads import BertHeads, Decoder, MaskedLM
from tei_grpc.layers.linear import Linear
from tei_grpc.layers.packed import PackedInputs
from tei_grpc.layers.post_norm import Intermediate, Residual, Transform
from tei_grpc.loading.weights import Names
from tei_grpc.models import Blueprint, Head, HfConfig, Model, register


def _norm(size: int, config: HfConfig) -> nn.LayerNorm:
    return nn.LayerNorm(size, eps=config["layer_norm_eps"])


class Embeddings(WordAndTypeEmbedding):
    """LayerNorm(embed_proj(word + token type + position)); all but the word are optional."""

    def __init__(self, config: HfConfig) -> None:
        hidden, size = config["hidden_size"], config["embedding_size"]
        super().__init__(config["vocab_size"], config["type_vocab_size"], size)
        positions = config["max_position_embeddings"]
        self.position_embeddings = Embedding(positions, size) if config["position_biased_input"] else None
        self.embed_proj = Linear(size, hidden, bias=False) if size != hidden else nn.Identity()
        self.LayerNorm = _norm(hidden, config)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        x = super().forward(inputs)
        if self.position_embeddings is not None:
            x.add_(self.position_embeddings(inputs.position_ids))
        normed: Tensor = self.LayerNorm(self.embed_proj(x))
        return normed


class Attention(nn.Module):
    """Self-attention with its residual."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.self = DisentangledSelfAttention(config)
        self.output = Residual(hidden, hidden, config["layer_norm_eps"])

    def forward(self, x: Tensor, inputs: PackedInputs, positions: Positions, buckets: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.output(self.self.attend(x, inputs, positions, buckets), x)
        return y


class Layer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        self.attention = Attention(config)
        self.intermediate = Intermediate(hidden, intermediate, config["hidden_act"])
        self.output = Residual(intermediate, hidden, config["layer_norm_eps"])

    def forward(self, x: Tensor, inputs: PackedInputs, positions: Positions, buckets: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = self.attention(x, inputs, positions, buckets)
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class Convolution(nn.Module):
    """A convolution along each text, with zeros beyond its ends."""

    def __init__(self, hidden: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(hidden, hidden // groups, kernel_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(hidden), requires_grad=False)

    def forward(self, x: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. A token and its neighbours are convolved as a sequence of their own."""
        size, tokens = self.weight.shape[2], len(x)
        offsets = torch.arange(size, device=x.device) - size // 2
        rows = torch.arange(tokens, device=x.device)[:, None] + offsets
        positions = inputs.position_ids[:, None] + offsets
        lengths = inputs.cu_seqlens.diff()[inputs.text_ids]
        outside = (positions < 0) | (positions >= lengths[:, None])
        windows = x[rows.clamp(0, tokens - 1)].masked_fill_(outside[:, :, None], 0)
        return functional.conv1d(windows.transpose(1, 2), self.weight, self.bias, groups=self.groups).squeeze(2)


class ConvLayer(nn.Module):
    """LayerNorm(residual + act(conv(x)))."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        self.conv = Convolution(config["hidden_size"], config["conv_kernel_size"], config["conv_groups"])
        self.act = activation(config["conv_act"])
        self.LayerNorm = _norm(config["hidden_size"], config)

    def forward(self, x: Tensor, residual: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden], [tokens, hidden] -> [tokens, hidden]."""
        y: Tensor = self.LayerNorm(self.act(self.conv(x, inputs)) + residual)
        return y


class Encoder(nn.Module):
    """The stack of layers, the relative position table, and v2's convolution beside the first layer."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.buckets = Buckets.read(config)
        self.layer = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.rel_embeddings = Embedding(2 * self.buckets.half, hidden) if config["relative_attention"] else None
        self.LayerNorm = _norm(hidden, config) if "layer_norm" in config["norm_rel_ebd"] else nn.Identity()
        self.conv = ConvLayer(config) if config["conv_kernel_size"] > 0 else None
        self._kept: tuple[torch.dtype, list[Positions]] | None = None

    def forward(self, embedded: Tensor, inputs: PackedInputs) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        buckets = self.buckets(distances(inputs))
        projected = self._projected(embedded.dtype)
        x = embedded
        for index, (layer, positions) in enumerate(zip(self.layer, projected, strict=True)):
            x = layer(x, inputs, positions, buckets)
            if index == 0 and self.conv is not None:
                x = self.conv(embedded, x, inputs)
        return x

    def _projected(self, dtype: torch.dtype) -> list[Positions]:
        """The table as each layer projects it. It is the same for all batches of a dtype, so the last is kept.

        Threads that run a model at a time run it in the same dtype.
        """
        if self._kept is None or self._kept[0] != dtype:
            self._kept = dtype, [self._project(layer) for layer in self.layer]
        return self._kept[1]

    def _project(self, layer: Any) -> Positions:
        if self.rel_embeddings is None:
            return Positions(None, None)
        positions: Positions = layer.attention.self.project(self.LayerNorm(self.rel_embeddings.weight))
        return positions


class Predictions(nn.Module):
    """BERT's masked-language-modelling head, which transformers calls the legacy one."""

    def __init__(self, config: HfConfig, *, tied: bool) -> None:
        super().__init__()
        self.transform = Transform(config["embedding_size"], config)
        self.decoder = Decoder(config["embedding_size"], config["vocab_size"], tied=tied)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, size] -> [rows, vocabulary]."""
        y: Tensor = self.decoder(self.transform(x), words)
        return y


class LMHead(nn.Module):
    """DeBERTa's own masked-language-modelling head. Its decoder is always the word embeddings."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.dense = Linear(hidden, hidden, activation=activation(config["hidden_act"]))
        self.LayerNorm = _norm(hidden, config)
        self.bias = nn.Parameter(torch.empty(config["vocab_size"]), requires_grad=False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """[rows, hidden], [vocabulary, hidden] -> [rows, vocabulary]."""
        return functional.linear(self.LayerNorm(self.dense(x)), words, self.bias)


class ContextPooler(nn.Module):
    """act(dense(x)), on a text's first token."""

    def __init__(self, config: HfConfig) -> None:
        super().__init__()
        size = config["pooler_hidden_size"]
        self.dense = Linear(size, size, activation=activation(config["pooler_hidden_act"]))

    def forward(self, x: Tensor) -> Tensor:
        """[texts, hidden] -> [texts, hidden]."""
        y: Tensor = self.dense(x)
        return y


_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-7,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "position_biased_input": True,
    "relative_attention": False,
    "share_att_key": False,
    "pooler_hidden_act": "gelu",
    "conv_kernel_size": 0,
    "conv_groups": 1,
    "conv_act": "tanh",
    "legacy": True,
}


def _read(config: HfConfig) -> HfConfig:
    """config.json with its defaults, and its lists as sets."""
    sizes = dict.fromkeys(("embedding_size", "pooler_hidden_size"), config["hidden_size"])
    read = {**_DEFAULTS, **sizes, **config}
    read["pos_att_type"] = _names(config, "pos_att_type", {"c2p", "p2c"})
    read["norm_rel_ebd"] = _names(config, "norm_rel_ebd", {"layer_norm", "none"})
    if read["conv_kernel_size"] > 0 and read["conv_kernel_size"] % 2 == 0:
        raise StartupError(f"`conv_kernel_size` {read['conv_kernel_size']} in config.json is not supported: it is even")
    return read


def _names(config: HfConfig, key: str, known: set[str]) -> set[str]:
    """The names that a key lists, as a list or with `|` between them."""
    value = config.get(key) or ()
    names = {name.strip() for name in (value.lower().split("|") if isinstance(value, str) else value)}
    if not names <= known:
        raise StartupError(f"`{key}` {value!r} in config.json is not supported, only {', '.join(sorted(known))} are")
    return names


@register("deberta-v2")
class DebertaV2(BertHeads, Model):
    """DeBERTa-v2 and v3."""

    heads = frozenset(Head)
    names = Names(
        prefixes=("deberta.",),
        renamed={".gamma": ".weight", ".beta": ".bias", "cls.predictions.bias": "cls.predictions.decoder.bias"},
        extras=(
            "embeddings.position_",
            *("pooler.", "classifier.", "qa_outputs."),
            *("cls.", "lm_predictions.", "mask_predictions."),
        ),
    )

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        config = _read(blueprint.config)
        self.hidden_size = config["hidden_size"]
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        if blueprint.head is Head.CLASSIFICATION:
            self.pooler = ContextPooler(config)
            self.classifier = Linear(config["hidden_size"], blueprint.labels)
        if blueprint.head is Head.MASKED_LM:
            if config["legacy"] and "cls.predictions.decoder.bias" in blueprint.tensors:
                tied = blueprint.is_tied("cls.predictions.decoder.weight")
                self.cls = MaskedLM(Predictions(config, tied=tied))
            else:
                self.lm_predictions = nn.ModuleDict({"lm_head": LMHead(config)})

    def encode(self, inputs: PackedInputs) -> Tensor:
        """See `Model`."""
        hidden: Tensor = self.encoder(self.embeddings(inputs), inputs)
        return hidden

    def vocabulary_logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""
        if hasattr(self, "cls"):
            return super().vocabulary_logits(hidden)
        logits: Tensor = self.lm_predictions["lm_head"](hidden, self.embeddings.word_embeddings.weight)
        return logits
