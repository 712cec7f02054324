"""Tiny checkpoints, made once per session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

MakeCheckpoint = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """The folder of a row of tests/checkpoints.py."""

    @cache
    def make(name: str) -> Path:
        return make_checkpoint(name, tmp_path_factory.mktemp(name, numbered=False))

    return make
