"""Fixtures for all tests: real models that `make` fetches, and logging as it was."""

import logging
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tei_grpc import cli, cpus
from tei_grpc.config import Settings
from tests.needs import need

cpus.tune_process()  # as the server does: before anything imports torch

# how long an example takes says more about the machine than about the code
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

MODELS = Path(__file__).resolve().parent.parent / ".models"


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """sentence-transformers/all-MiniLM-L6-v2: BERT, mean pooling, 384 values."""
    return _fetched("all-MiniLM-L6-v2", "minilm")


@pytest.fixture(scope="session")
def splade_dir() -> Path:
    """A tiny SPLADE model: BertForMaskedLM, vocabulary of 30522."""
    return _fetched("splade-tiny", "splade")


@pytest.fixture(scope="session")
def xlm_r_tokenizer_dir() -> Path:
    """XLM-RoBERTa's tokenizer.json, of 250,002 pieces, and nothing else."""
    return _fetched("xlm-r-tokenizer", "xlm-r-tokenizer")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Whatever the test configures, the next one does not see."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("tei_test.engine").setLevel(logging.NOTSET)
    logging.captureWarnings(False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, restored_logging: None) -> list[Settings]:
    """Run everything but the server; the list holds the settings that it would get."""
    settings: list[Settings] = []
    monkeypatch.setattr(cli, "_run_server", lambda given: settings.append(given) or 0)
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    return settings


def _fetched(directory: str, name: str) -> Path:
    path = MODELS / directory
    need(path.is_dir(), f"{path} is missing: python scripts/fetch_demo_model.py {name}")
    return path
