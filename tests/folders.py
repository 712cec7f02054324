"""Checkpoint folders without weights: all that is read before the device loads anything."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.checkpoints import make_tokenizer

CONFIG = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 40, "vocab_size": 93}
MEAN = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def write_json(file: Path, content: object) -> None:
    """`content` as JSON, in a folder that is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def embedder(folder: Path, files: Mapping[str, object] | None = None, **config: object) -> Path:
    """BERT, 40 positions, mean pooling, WordPiece; `files` are more JSON files, `config` more keys of config.json."""
    write_json(folder / "config.json", {**CONFIG, **config})
    make_tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in {"1_Pooling/config.json": MEAN, **(files or {})}.items():
        write_json(folder / name, content)
    return folder


def classifier(folder: Path, *labels: str, **config: object) -> Path:
    """A sequence classifier with these labels."""
    id2label = {str(index): label for index, label in enumerate(labels)}
    return embedder(folder, architectures=["BertForSequenceClassification"], id2label=id2label, **config)


def reranker(folder: Path) -> Path:
    """A sequence classifier with one label."""
    return classifier(folder, "relevance")


def splade(folder: Path) -> Path:
    """A masked language model with a SpladePooling module."""
    modules = [{"path": "", "type": "x.MLMTransformer"}, {"path": "1_SpladePooling", "type": "x.SpladePooling"}]
    return embedder(folder, {"modules.json": modules}, architectures=["BertForMaskedLM"])
