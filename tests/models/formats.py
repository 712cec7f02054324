"""Checkpoints in formats that transformers reads only with the publisher's code.

Each function writes one, and returns a model of transformers' own that must give the same token vectors: the same
weights under other names, with parts replaced by their definition where transformers has none.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from tests.checkpoints import ONE_LABEL, SIZES, randomise

Tensors = dict[str, Tensor]
TASKS = ["retrieval.query", "separation", "text-matching"]
RANK = 2


def nomic_own(folder: Path, *, trained: int = 132, factor: float | None = None) -> nn.Module:
    """Nomic v1 with its own config; with `factor`, texts longer than `trained` tokens are scaled."""
    rope = {"rope_type": "dynamic", "factor": factor} if factor else {"rope_type": "default"}
    options = {"max_position_embeddings": trained, "rope_parameters": {**rope, "rope_theta": 1000.0}}
    model = _build(transformers.NomicBertModel, options)
    own = {"activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "rotary_scaling_factor": factor}
    biases = dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False)
    own |= {"max_trained_positions": trained, "rotary_emb_base": 1000, "type_vocab_size": 2}
    _save(model, folder, {**_nomic_sizes(), **own, **biases})
    return model


def nomic_experts(folder: Path) -> nn.Module:
    """Nomic v2: the dense layers are Jina v3's, every second MLP is a mixture of experts."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = transformers.JinaEmbeddingsV3Model(_config(transformers.JinaEmbeddingsV3Model, {"rope_parameters": rope}))
    for layer in model.layers[1::2]:
        layer.mlp = LiteralExperts()
    randomise(model, 0)
    own = {"activation_function": "gelu", "layer_norm_epsilon": 1e-5, "rotary_emb_base": 10000, "type_vocab_size": 1}
    experts = {"moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": 4, "moe_normalize_expert_weights": False}
    biases = dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)
    names = {
        "mixer": "attn",
        "mlp.router": "mlp.router.layer",
        "mlp.w": "mlp.experts.mlp.w",
        "mlp.bias": "mlp.experts.bias",
    }
    _save(model.eval(), folder, {**_nomic_sizes(), **own, **experts, **biases}, partial(_rename, names))
    return model


def alibaba_new(folder: Path, *, head: str = "Model", factor: float = 8.0) -> nn.Module:
    """GTE under its first name, `new`, with its fixed NTK scaling, which equals a linear one with other numbers."""
    head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    rope = {"rope_type": "linear", "factor": factor ** (2 / head_dim), "rope_theta": 20000.0 * factor}
    options = {"rope_parameters": rope, "pad_token_id": 1, "type_vocab_size": 1, **ONE_LABEL}
    model = _build(getattr(transformers, f"Gte{head}"), options)
    scaling = {
        "rope_theta": 20000,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "position_embedding_type": "rope",
    }
    switches = {"layer_norm_type": "layer_norm", "logn_attention_scale": False, "pack_qkv": True}
    config = {**SIZES, **scaling, **switches, "type_vocab_size": 1, **ONE_LABEL}
    _save(model, folder, {**config, "model_type": "new", "architectures": [f"New{head}"]}, _prefix_new)
    return model


def jina_v3_adapted(folder: Path, *, task: str | None = None) -> nn.Module:
    """Jina v3 as first published: three adaptations of each matrix. The model that is returned has `task` merged."""
    model = _build(transformers.JinaEmbeddingsV3Model, {})
    own = {"model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    adaptations = {"lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": 1}
    config = {**SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5, **own, **adaptations}
    config["architectures"] = ["XLMRobertaModel"]
    model.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    stored, merged = _adapt(plain, None if task is None else TASKS.index(task))
    save_file(merged, folder / "model.safetensors", metadata={"format": "pt"})
    adapted = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return adapted


def jina_reranker_v2(folder: Path) -> nn.Module:
    """XLM-RoBERTa under the names of flash-attention's parts; its config has no `model_type`."""
    options = {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5, **ONE_LABEL}
    model = _build(transformers.XLMRobertaForSequenceClassification, options)
    names = {
        "embeddings.LayerNorm": "emb_ln",
        "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "norm2",
    }
    own = {"position_embedding_type": "absolute", "use_flash_attn": True, "num_labels": 1}
    own["auto_map"] = {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}
    architectures = ["XLMRobertaForSequenceClassification"]
    _save(model, folder, {**SIZES, **options, **own, "architectures": architectures}, partial(_rename, names))
    fused: Tensors = load_file(folder / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):
        level = f"roberta.encoder.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [fused.pop(f"{level}.attention.self.{part}.{kind}") for part in ("query", "key", "value")]
            fused[f"{level}.mixer.Wqkv.{kind}"] = torch.cat(parts)
    save_file(fused, folder / "model.safetensors", metadata={"format": "pt"})
    return model


FORMATS: dict[str, Callable[[Path], nn.Module]] = {
    "nomic-own": nomic_own,
    "nomic-own-scaled": partial(nomic_own, trained=8, factor=2.0),
    "nomic-experts": nomic_experts,
    "new": alibaba_new,
    "jina-v3-adapted": jina_v3_adapted,
}


class LiteralExperts(nn.Module):
    """Each token goes through two of four experts, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        hidden, rows = SIZES["hidden_size"], 4 * SIZES["intermediate_size"]
        self.router = nn.Linear(hidden, 4, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.empty(rows, hidden)), nn.Parameter(torch.empty(rows, hidden))
        self.bias = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[1, tokens, hidden] -> the same."""
        return torch.stack([self._sum(token) for token in x[0]])[None] + self.bias

    def _sum(self, token: Tensor) -> Tensor:
        shares = torch.softmax(self.router(token), dim=-1)
        best = sorted(range(4), key=lambda expert: -shares[expert])[:2]
        return sum(shares[expert] * self._expert(expert, token) for expert in best)

    def _expert(self, expert: int, token: Tensor) -> Tensor:
        w1, w2 = (w.view(4, SIZES["intermediate_size"], -1)[expert] for w in (self.w1, self.w2))
        return functional.gelu(w1 @ token) @ w2


def _config(model_class: type[nn.Module], options: Mapping[str, Any]) -> transformers.PretrainedConfig:
    config = model_class.config_class(**{**SIZES, **options})
    config._attn_implementation = "eager"
    return config


def _build(model_class: type[nn.Module], options: Mapping[str, Any]) -> nn.Module:
    model = model_class(_config(model_class, options)).eval()
    randomise(model, 0)
    return model


def _save(
    model: nn.Module, folder: Path, config: Mapping[str, Any], rename: Callable[[str], str] = lambda name: name
) -> None:
    model.save_pretrained(folder)
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def _nomic_sizes() -> dict[str, Any]:
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    sizes = {name: SIZES[key] for key, name in names.items()}
    sizes |= {"n_inner": SIZES["intermediate_size"], "n_positions": 132, "vocab_size": SIZES["vocab_size"]}
    return {**sizes, "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "rotary_emb_fraction": 1.0}


def _rename(names: Mapping[str, str], name: str) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _prefix_new(name: str) -> str:
    return name.replace("gte.", "new.", 1) if name.startswith("gte.") else name


def _adapt(plain: Tensors, task: int | None) -> tuple[Tensors, Tensors]:
    """The tensors as published, and with one task merged."""
    generator = torch.Generator().manual_seed(0)
    stored, merged = {}, dict(plain)
    for name, weight in plain.items():
        if weight.dim() == 1:
            stored[f"roberta.{name}"] = weight
            continue
        left = torch.randn(len(TASKS), len(weight), RANK, generator=generator) * 0.3
        right = torch.randn(len(TASKS), RANK, weight.shape[1], generator=generator) * 0.3
        a, b = (left, right) if "embeddings" in name else (right, left)
        level = f"roberta.{name.removesuffix('weight')}parametrizations.weight"
        stored |= {f"{level}.original": weight, f"{level}.0.lora_A": a, f"{level}.0.lora_B": b}
        if task is not None:
            merged[name] = weight + left[task] @ right[task] / RANK
    return stored, merged
