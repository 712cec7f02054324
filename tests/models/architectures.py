"""Tiny checkpoints of architectures without a family of ours, as transformers saves them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints import (
    BERT_SPECIAL,
    ROBERTA,
    ROBERTA_SPECIAL,
    SIZES,
    THREE_LABELS,
    randomise,
    write_pooling,
    write_tokenizer,
)

LIMIT = 128  # tokens


@dataclass(frozen=True)
class Architecture:
    """Names of transformers' classes, and the config's own spelling of the sizes."""

    model: str  # "AlbertModel"; heads are found by its beginning, "Albert"
    config: Mapping[str, Any] = field(default_factory=dict)
    pooling: str = "mean"
    special: tuple[str, ...] = BERT_SPECIAL

    @property
    def name(self) -> str:
        """The beginning of the names of its classes."""
        return self.model.removesuffix("Model").removesuffix("Encoder")


USUAL = {key: SIZES[key] for key in SIZES if key != "vocab_size"}

ARCHITECTURES: dict[str, Architecture] = {
    "albert": Architecture("AlbertModel", {**USUAL, "embedding_size": 24}),
    "electra": Architecture("ElectraModel", {**USUAL, "embedding_size": 24}),
    "mobilebert": Architecture(
        "MobileBertModel",
        {**USUAL, "embedding_size": 24, "intra_bottleneck_size": 16, "normalization_type": "layer_norm"},
    ),
    "fnet": Architecture("FNetModel", USUAL),
    "rembert": Architecture("RemBertModel", {**USUAL, "input_embedding_size": 24, "output_embedding_size": 40}),
    "xlm": Architecture("XLMModel", {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 132}),
    "funnel": Architecture(
        "FunnelModel",
        {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1], "max_position_embeddings": 132},
    ),
    "big_bird": Architecture("BigBirdModel", {**USUAL, "block_size": 2, "num_random_blocks": 1}),
    "longformer": Architecture("LongformerModel", {**USUAL, **ROBERTA, "attention_window": 8}, "cls", ROBERTA_SPECIAL),
    "t5": Architecture("T5EncoderModel", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "gpt2": Architecture(
        "GPT2Model", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 132, "pad_token_id": 0}, "lasttoken"
    ),
    "xlnet": Architecture("XLNetModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "roformer": Architecture("RoFormerModel", USUAL),
}


def make_architecture(name: str, folder: Path, head: str = "", **config: Any) -> Path:
    """Write a checkpoint of row `name` into `folder`; `head` is "ForMaskedLM" or "ForSequenceClassification"."""
    row = ARCHITECTURES[name]
    model_class = getattr(transformers, row.name + head if head else row.model)
    labels = {"ForSequenceClassification": THREE_LABELS}.get(head, {})
    built = model_class.config_class(vocab_size=SIZES["vocab_size"], **{**row.config, **labels, **config})
    model = model_class(built).eval()
    randomise(model, 0, gain=0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    write_tokenizer(folder, row.special, LIMIT)
    if not head:
        write_pooling(folder, row.pooling, SIZES["hidden_size"])
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; None drops one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
