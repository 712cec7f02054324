"""Checkpoints whose config.json names no architectures, told by their tensors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading.architecture import infer_architectures, tensor_names
from tei_grpc.loading.model_config import ModelConfig, read_model_config
from tei_grpc.types import Kind, ModelType, Pooling
from tests.checkpoints import make_checkpoint
from tests.models.runners import load_runner, random_ids, run

TEXTS = random_ids(3, 8)


def nameless(folder: Path, name: str, value: object = None) -> Path:
    """A checkpoint with `architectures` null, or as given."""
    make_checkpoint(name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": value}))
    return folder


def read(folder: Path, **options: object) -> ModelConfig:
    return read_model_config(folder, EngineConfig(model_id=str(folder), **options))


@pytest.mark.parametrize("value", [None, []])
@pytest.mark.parametrize("name", ["ce-t", "roberta-three-labels", "distilbert-three-labels", "deberta-three-labels"])
def test_sequence_classifier_is_known_by_its_head(tmp_path: Path, caplog, name: str, value: object) -> None:
    named = make_checkpoint(name, tmp_path / "named")
    found = nameless(tmp_path / "nameless", name, value)
    assert (read(found).kind, read(found).labels) == (read(named).kind, read(named).labels)
    assert "by its tensors, the model is one ForSequenceClassification" in caplog.text
    logits = [run(load_runner(folder), Kind.PREDICT, TEXTS)[1][0] for folder in (named, found)]
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    "name", ["mlm-t", "roberta-masked-lm", "distilbert-masked-lm", "deberta-masked-lm", "modernbert-masked-lm"]
)
def test_masked_language_model_is_known_by_its_head(tmp_path: Path, name: str) -> None:
    folder = nameless(tmp_path, name)
    assert read(folder, pooling="splade").pooling == (Pooling.SPLADE,)
    assert len(run(load_runner(folder, pooling="splade"), Kind.EMBED_SPARSE, TEXTS)) == 2


@pytest.mark.parametrize("name", ["bert-mean", "roberta", "qwen3", "gte"])
def test_encoder_stays_one(tmp_path: Path, name: str) -> None:
    assert read(nameless(tmp_path, name)).kind is ModelType.EMBEDDING


def test_checkpoint_that_says_how_to_pool_is_no_classifier(tmp_path: Path) -> None:
    folder = nameless(tmp_path, "ce-t")
    assert read(folder, pooling="mean").kind is ModelType.EMBEDDING


@pytest.mark.parametrize("name", ["bert-tokens", "qwen3-one-label", "modernbert-one-label"])
def test_head_that_can_be_of_two_kinds_is_refused(tmp_path: Path, name: str) -> None:
    folder = nameless(tmp_path, name)
    shutil.rmtree(folder / "1_Pooling", ignore_errors=True)
    with pytest.raises(StartupError, match=r"names no `architectures`, and tensor `(classifier|score)\.weight` can be"):
        read(folder)
    assert read(folder, pooling="mean").kind is ModelType.EMBEDDING


def test_names_of_shards_come_from_their_index(tmp_path: Path) -> None:
    weight_map = {"classifier.out_proj.weight": "pytorch_model-00001-of-00001.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert infer_architectures(tmp_path, pooled=False) == ("ForSequenceClassification",)


def test_header_holds_the_names_of_all_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert tensor_names(tmp_path) == set(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "content", [b"", b"\x05", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"31"]
)
def test_damaged_header_holds_no_names(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert tensor_names(tmp_path) == frozenset()
