"""Weights that somebody has made up: one clean error names what is wrong. Most were found by `make fuzz`."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import folders
from tests.checkpoints import bert_t
from tests.language_models import make_reranker
from tests.unit.loading.starts import refusal_of_the_whole, rewrite


def test_weights_outside_of_the_directory_are_not_read(tmp_path):
    folder = bert_t(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"embeddings.word_embeddings.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refusal_of_the_whole(folder)
    assert text == (
        "`model.safetensors.index.json` names `../model.safetensors`, which is not in the checkpoint's directory"
    )


def test_header_that_claims_more_bytes_than_there_are_is_refused(tmp_path):
    folder = bert_t(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes((2**60).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert refusal_of_the_whole(folder) == f"{weights} is damaged or cut short"


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"weight_map": ["x"]}, "`model.safetensors.index.json`: `weight_map` must be an object, not ['x']"),
        ({"weight_map": {"x": {}}}, "`{file}`: `weight_map` must map tensors to names of files"),
        ({}, "`{file}` names no weight files: it has no `weight_map`"),
        ([], "`{file}` must hold a JSON object"),
    ],
)
def test_index_of_another_form_is_named(tmp_path, index, text):
    folder = bert_t(tmp_path)
    (folder / "model.safetensors").unlink()
    folders.write_json(folder / "model.safetensors.index.json", index)
    assert refusal_of_the_whole(folder) == text.format(file=folder / "model.safetensors.index.json")


@pytest.mark.parametrize("header", [b"[1, 2]", b'"x"', b"[" * 100_000])
def test_header_that_is_no_object_is_refused_where_it_has_to_tell_the_architecture(tmp_path, header):
    folder = bert_t(tmp_path)
    rewrite(folder / "config.json", architectures=None)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert refusal_of_the_whole(folder) == f"{folder / 'model.safetensors'} is damaged or cut short"


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({0: torch.ones(1)}, "{file} holds no dictionary of tensors by name"),
        ({"weight": torch.ones(())}, "tensor `weight` has shape [], the model needs [32, 32]"),
    ],
)
def test_head_of_another_form_is_named(tmp_path, tensors, text):
    folder = bert_t(tmp_path)
    file = folder / "colbert_linear.pt"
    torch.save(tensors, file)
    assert refusal_of_the_whole(folder, colbert=True) == text.format(file=file)


def test_vocabulary_head_without_rows_is_refused(tmp_path):
    folder = make_reranker(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(())}, folder / "model.safetensors")
    text = "tensor `lm_head.weight` has shape []; it must have a row for each token"
    assert refusal_of_the_whole(folder) == text
