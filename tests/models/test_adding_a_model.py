"""The family of docs/adding_a_model.md is served, from outside the package, without any other change."""

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tei_grpc import models
from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tests.checkpoints import BERT_SPECIAL, SIZES, make_tokenizer, randomise, write_pooling, write_tokenizer

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_model.md"
TEXTS = ("hello world", "a", "a query that is longer, and ends.")


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The guide's code as a module of somebody else's; what it registers is forgotten after the test."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    (tmp_path / "somebodys_albert.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    models.model_types()
    monkeypatch.setattr(models, "_entries", list(models._entries))
    yield "somebodys_albert"
    sys.modules.pop("somebodys_albert", None)
    models._load_installed_families.cache_clear()


@pytest.fixture
def albert(tmp_path: Path) -> Path:
    """A tiny ALBERT as transformers saves it, all biases and norms random."""
    config = transformers.AlbertConfig(**{**SIZES, "embedding_size": 16, "num_hidden_layers": 3})
    model = transformers.AlbertModel(config).eval()
    randomise(model, 0)
    folder = tmp_path / "albert"
    model.save_pretrained(folder)
    write_tokenizer(folder, BERT_SPECIAL, 132)
    write_pooling(folder, "mean", 32)
    return folder


def reference(folder: Path) -> np.ndarray:
    model, tokenizer = transformers.AlbertModel.from_pretrained(folder).eval(), make_tokenizer()
    with torch.inference_mode():
        hidden = [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0] for text in TEXTS]
    return np.stack([rows.mean(0).numpy() for rows in hidden])


async def embed(folder: Path) -> np.ndarray:
    async with Engine(EngineConfig(model_id=str(folder))) as engine:
        assert engine.info.optimized
        return np.stack([(await engine.embed(text, normalize=False)).embeddings for text in TEXTS])


def test_package_itself_does_not_know_the_family() -> None:
    assert models.find_family({"model_type": "albert"}) is None


async def test_imported_family_is_served(family: str, albert: Path) -> None:
    importlib.import_module(family)
    np.testing.assert_allclose(await embed(albert), reference(albert), atol=1e-5, rtol=1e-5)


async def test_installed_family_is_served(family: str, albert: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "somebodys-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = f"""
        [tei_grpc.models]
        albert = {family}
    """
    (metadata / "entry_points.txt").write_text(textwrap.dedent(points))
    importlib.invalidate_caches()
    models._load_installed_families.cache_clear()
    np.testing.assert_allclose(await embed(albert), reference(albert), atol=1e-5, rtol=1e-5)
