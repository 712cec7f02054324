"""Tiny checkpoints, made once per session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tei_grpc.engine.runner import Runner
from tei_grpc.layers import varlen
from tests.checkpoints import make_checkpoint
from tests.models.architectures import make_architecture
from tests.models.runners import load_runner
from tests.pipelines import cuda_stand_in

MakeCheckpoint = Callable[[str], Path]
MakeArchitecture = Callable[..., Path]
Load = Callable[..., Runner]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """The folder of a row of tests/checkpoints.py."""

    @cache
    def make(name: str) -> Path:
        return make_checkpoint(name, tmp_path_factory.mktemp(name, numbered=False))

    return make


@pytest.fixture(params=["cpu", "cuda"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a runner, ready to run: as on a CPU, and as on a CUDA device with stand-ins for its kernels."""
    if request.param == "cpu":
        return load_runner
    monkeypatch.setattr(varlen, "DTYPES", (*varlen.DTYPES, torch.float32))  # to be held against others in float32

    def load_ahead(folder: Path, **options: object) -> Runner:
        runner = load_runner(folder, cuda_stand_in, **options)
        runner.warm_up()
        return runner

    return load_ahead


@pytest.fixture(scope="session")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> MakeArchitecture:
    """The folder of a row of tests/models/architectures.py."""

    @cache
    def make(name: str, head: str) -> Path:
        return make_architecture(name, tmp_path_factory.mktemp(name + head, numbered=False), head)

    return lambda name, head="": make(name, head)


@pytest.fixture
def albert(tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return make_architecture("albert", tmp_path)
