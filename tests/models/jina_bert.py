"""Jina's BERT v2 as its definition, text by text and head by head, and checkpoints of its two published forms."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from tests.checkpoints import SIZES

HIDDEN, INNER, LAYERS = 48, 40, 3
SLOPES = [2.0**-power for power in (2, 4, 6, 8, 1, 3)]  # six heads: not a power of two
HEAD_DIM = HIDDEN // len(SLOPES)
REPOSITORIES = {False: "jinaai/jina-bert-implementation", True: "jinaai/jina-bert-v2-qk-post-norm"}

SHARED = {
    "attention.self.query": (HIDDEN, HIDDEN),
    "attention.self.key": (HIDDEN, HIDDEN),
    "attention.self.value": (HIDDEN, HIDDEN),
    "attention.output.dense": (HIDDEN, HIDDEN),
    "attention.output.LayerNorm": (HIDDEN,),
}
BASE = {"mlp.gated_layers": (2 * INNER, HIDDEN), "mlp.wo": (HIDDEN, INNER), "mlp.layernorm": (HIDDEN,)}
CODE = {
    "attention.self.layer_norm_q": (HIDDEN,),
    "attention.self.layer_norm_k": (HIDDEN,),
    "mlp.up_gated_layer": (2 * INNER, HIDDEN),
    "mlp.down_layer": (HIDDEN, INNER),
    "layer_norm_1": (HIDDEN,),
    "layer_norm_2": (HIDDEN,),
}
HEAD = {"pooler.dense": (HIDDEN, HIDDEN), "classifier": (1, HIDDEN)}


def jina_bert(folder: Path, *, code: bool, reranker: bool = False) -> nn.Module:
    """Write a checkpoint as Jina publishes it; the model that is returned must give the same."""
    layers = {f"encoder.layer.{i}.{name}": shape for i in range(LAYERS) for name, shape in _layer(code).items()}
    tables = {
        "embeddings.word_embeddings": (SIZES["vocab_size"], HIDDEN),
        "embeddings.token_type_embeddings": (2, HIDDEN),
    }
    shapes = {**tables, "embeddings.LayerNorm": (HIDDEN,), **layers, **(HEAD if reranker else {})}
    tensors = _random(shapes)
    names = {name: name if name.startswith("classifier") or not reranker else f"bert.{name}" for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(code=code, reranker=reranker)))
    return LiteralJinaBert(tensors, code=code)


def config(*, code: bool, reranker: bool = False) -> dict[str, object]:
    """config.json: it says `bert`, and leaves the rest to the code it names."""
    name = REPOSITORIES[code]
    sizes = {"vocab_size": SIZES["vocab_size"], "hidden_size": HIDDEN, "intermediate_size": INNER}
    return {
        **{**sizes, "num_hidden_layers": LAYERS, "num_attention_heads": len(SLOPES), "type_vocab_size": 2},
        "model_type": "bert",
        "_name_or_path": name,
        "architectures": ["JinaBertForSequenceClassification" if reranker else "JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": f"{name}--modeling_bert.JinaBertModel"},
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-12,
        **({"id2label": {"0": "LABEL_0"}} if reranker else {}),
    }


class LiteralJinaBert(nn.Module):
    """The definition. Returns logits where there is a classifier, token vectors otherwise."""

    def __init__(self, tensors: dict[str, Tensor], *, code: bool) -> None:
        super().__init__()
        self.tensors = tensors
        self.layer = self._code_layer if code else self._base_layer

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        """[1, tokens] -> [1, tokens, hidden] or [1, labels]."""
        words, types = (self.tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "token_type"))
        x = self._norm("embeddings.LayerNorm", words[input_ids[0]] + types[0])
        for index in range(LAYERS):
            x = self.layer(f"encoder.layer.{index}.", x)
        if "classifier.weight" in self.tensors:
            x = self._linear("classifier", torch.tanh(self._linear("pooler.dense", x[0])))
        return (x[None],)

    def _base_layer(self, prefix: str, x: Tensor) -> Tensor:
        x = self._attention(prefix, x, normalised=False)
        first, second = self._linear(f"{prefix}mlp.gated_layers", x).chunk(2, dim=1)
        return self._norm(
            f"{prefix}mlp.layernorm", x + self._linear(f"{prefix}mlp.wo", functional.gelu(first) * second)
        )

    def _code_layer(self, prefix: str, x: Tensor) -> Tensor:
        x = self._norm(f"{prefix}layer_norm_1", x + self._attention(prefix, x, normalised=True))
        first, second = self._linear(f"{prefix}mlp.up_gated_layer", x).chunk(2, dim=1)
        y = self._linear(f"{prefix}mlp.down_layer", first * functional.gelu(second))
        return self._norm(f"{prefix}layer_norm_2", x + y)

    def _attention(self, prefix: str, x: Tensor, *, normalised: bool) -> Tensor:
        query, key, value = (self._linear(f"{prefix}attention.self.{name}", x) for name in ("query", "key", "value"))
        if normalised:
            query = self._norm(f"{prefix}attention.self.layer_norm_q", query)
            key = self._norm(f"{prefix}attention.self.layer_norm_k", key)
        heads = zip(SLOPES, *(states.split(HEAD_DIM, dim=1) for states in (query, key, value)), strict=True)
        y = self._linear(f"{prefix}attention.output.dense", torch.cat([_attend(*head) for head in heads], dim=1))
        return self._norm(f"{prefix}attention.output.LayerNorm", x + y)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, x.shape[1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], 1e-12
        )


def _attend(slope: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.T / HEAD_DIM**0.5
    for q in range(len(query)):
        for k in range(len(key)):
            scores[q, k] -= slope * abs(q - k)
    return torch.softmax(scores, dim=1) @ value


def _layer(code: bool) -> dict[str, tuple[int, ...]]:
    return {**SHARED, **(CODE if code else BASE)}


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights for every name, and biases where the publisher's code has them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        scale = 0.5 if "_embeddings" in name else (1 / shape[-1]) ** 0.5
        tensors[f"{name}.weight"] = 1 + 0.1 * values if len(shape) == 1 else scale * values
        if not name.endswith(("_embeddings", "gated_layers", "up_gated_layer")):
            tensors[f"{name}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)
    return tensors
