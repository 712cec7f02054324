"""Vectors equal those of sentence-transformers for what its files add to a model: pooling, prompts, modules."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling
from torch import nn

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import StartupError, ValidationError
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input
from tests.models.conftest import MakeCheckpoint

TEXTS = ("hello world", "a", "a query that is longer, and ends.")
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
LEGACY = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}
PROMPTS = {"query": "query: ", "longer": "a query that hello world "}


@pytest.fixture
def bert(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("bert-t")


def save(bert: Path, folder: Path, *after: nn.Module, pooling: Pooling | None = None) -> SentenceTransformer:
    """BERT with mean pooling, or another, and these modules, in the files of the installed sentence-transformers."""
    encoder = SentenceTransformer(str(bert), device="cpu")[0]
    model = SentenceTransformer(modules=[encoder, pooling or Pooling(32), *after], device="cpu", prompts=PROMPTS)
    model.save(str(folder))
    return model


async def embed(
    folder: Path, texts: Sequence[str] = TEXTS, prompt_name: str | None = None, normalize: bool = False, **options
) -> np.ndarray:
    async with Engine(EngineConfig(model_id=str(folder), **options)) as engine:
        inputs = [Input(text, prompt_name=prompt_name) for text in texts]
        return np.stack([(await engine.embed(input, normalize=normalize)).embeddings for input in inputs])


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [*MODES, ("cls", "mean"), ("lasttoken", "max", "cls"), MODES])
async def test_every_pooling_and_every_concatenation_is_the_same(bert: Path, tmp_path: Path, mode) -> None:
    model = save(bert, tmp_path, pooling=Pooling(32, mode))
    found = await embed(tmp_path)
    assert_close(found, model.encode(list(TEXTS)))
    assert found.shape[1] == 32 * (1 if isinstance(mode, str) else len(mode))


@pytest.mark.parametrize("modes", [["mean", "cls"], ["lasttoken", "weightedmean", "max"], list(MODES)])
async def test_flags_of_older_files_are_concatenated_in_the_same_order(bert: Path, tmp_path: Path, modes) -> None:
    save(bert, tmp_path)
    flags = {f"pooling_mode_{LEGACY[mode]}": mode in modes for mode in MODES}
    config = json.dumps({"word_embedding_dimension": 32, **flags})
    (tmp_path / "1_Pooling" / "config.json").write_text(config)
    assert_close(await embed(tmp_path), SentenceTransformer(str(tmp_path), device="cpu").encode(list(TEXTS)))


@pytest.mark.parametrize("prompt_name", PROMPTS)
@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", [*MODES, ("cls", "mean", "lasttoken")])
async def test_prompts_are_pooled_or_left_out_as_there(
    bert: Path, tmp_path: Path, mode, include_prompt: bool, prompt_name: str
) -> None:
    model = save(bert, tmp_path, pooling=Pooling(32, mode, include_prompt=include_prompt))
    found = await embed(tmp_path, prompt_name=prompt_name)
    assert_close(found, model.encode(list(TEXTS), prompt_name=prompt_name))


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity(), nn.GELU(), nn.ReLU(), nn.Sigmoid(), nn.SiLU(), None])
async def test_activations_of_dense_modules_are_the_same(bert: Path, tmp_path: Path, activation) -> None:
    model = save(bert, tmp_path, Dense(32, 16, activation_function=activation))
    assert_close(await embed(tmp_path), model.encode(list(TEXTS)))


@pytest.mark.parametrize("residual", [False, True])
async def test_modules_run_in_order_on_concatenated_vectors(bert: Path, tmp_path: Path, residual: bool) -> None:
    norm = LayerNorm(48)
    nn.init.uniform_(norm.norm.weight, 0.5, 1.5)
    dense = Dense(64, 48, use_residual=residual), norm, Dense(48, 48, bias=False, use_residual=residual)
    model = save(bert, tmp_path, *dense, pooling=Pooling(32, ("mean", "cls")))
    assert_close(await embed(tmp_path), model.encode(list(TEXTS)))


async def test_normalize_module_leaves_raw_vectors_to_who_asks_for_them(bert: Path, tmp_path: Path) -> None:
    model = save(bert, tmp_path, Normalize())
    assert_close(await embed(tmp_path, normalize=True), model.encode(list(TEXTS)))
    raw = SentenceTransformer(modules=[model[0], model[1]], device="cpu").encode(list(TEXTS))
    assert_close(await embed(tmp_path, normalize=False), raw)


@pytest.mark.parametrize(("options", "size"), [({"pooling": Pooling(32, ("mean", "cls"))}, 64), ({}, 32)])
async def test_dimensions_reach_to_the_whole_vector(bert: Path, tmp_path: Path, options, size: int) -> None:
    save(bert, tmp_path, **options)
    async with Engine(EngineConfig(model_id=str(tmp_path))) as engine:
        assert len((await engine.embed("hello", dimensions=size)).embeddings) == size
        with pytest.raises(ValidationError, match=f"`dimensions`.*{size}"):
            await engine.embed("hello", dimensions=size + 1)


@pytest.mark.parametrize("key", ["module_input_name", "module_output_name"])
def test_module_that_reads_or_writes_something_else_is_refused(bert: Path, tmp_path: Path, key: str) -> None:
    from tests.models.runners import load_runner

    save(bert, tmp_path, Dense(32, 16))
    config = json.loads((tmp_path / "2_Dense" / "config.json").read_text())
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({**config, key: "token_embeddings"}))
    with pytest.raises(StartupError, match=f"`{key}` 'token_embeddings' is not supported"):
        load_runner(tmp_path)


# --- --dense-path


def write_dense(folder: Path, size: int) -> None:
    folder.mkdir()
    config = {"in_features": 32, "out_features": size, "bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {"linear.weight": torch.randn(size, 32, generator=torch.Generator().manual_seed(size))},
        folder / "model.safetensors",
    )


async def test_dense_path_takes_the_place_of_the_dense_module(bert: Path, tmp_path: Path) -> None:
    save(bert, tmp_path / "all", Dense(32, 16), Normalize())
    write_dense(tmp_path / "all" / "2_Dense_8", 8)
    found = await embed(tmp_path / "all", dense_path="2_Dense_8")
    shutil.copytree(tmp_path / "all", tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "2_Dense")
    (tmp_path / "other" / "2_Dense_8").rename(tmp_path / "other" / "2_Dense")
    expected = await embed(tmp_path / "other")
    assert found.shape[1] == 8
    assert_close(found, expected)


async def test_dense_path_is_applied_where_no_module_is_listed(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path, dirs_exist_ok=True)
    write_dense(tmp_path / "2_Dense_8", 8)
    raw = await embed(tmp_path)
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(8)).numpy()
    assert_close(await embed(tmp_path, dense_path="2_Dense_8"), np.tanh(raw @ weight.T))


def test_dense_path_among_several_dense_modules_is_refused(bert: Path, tmp_path: Path) -> None:
    save(bert, tmp_path, Dense(32, 16), Dense(16, 8))
    write_dense(tmp_path / "2_Dense_8", 8)
    with pytest.raises(StartupError, match="one Dense module, but this model has several: 2_Dense, 3_Dense"):
        read_model_config(tmp_path, EngineConfig(model_id=str(tmp_path), dense_path="2_Dense_8"))


def test_dense_path_without_a_module_is_named(bert: Path) -> None:
    with pytest.raises(StartupError, match=r"`config\.json` not found in `.*2_Dense_8`"):
        read_model_config(bert, EngineConfig(model_id=str(bert), dense_path="2_Dense_8"))


def test_dense_path_has_no_effect_on_a_classifier(checkpoint: MakeCheckpoint, caplog) -> None:
    folder = checkpoint("clf-t")
    assert read_model_config(folder, EngineConfig(model_id=str(folder), dense_path="2_Dense")).modules == ()
    assert "`--dense-path` has no effect" in caplog.text
