"""Reads what a checkpoint says about itself, without its weights, or what it is refused for."""

from pathlib import Path

import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import ModelConfig, read_model_config


def read(folder: Path, **options: object) -> ModelConfig:
    return read_model_config(folder, EngineConfig(model_id=str(folder), **options))


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(StartupError) as error:
        read(folder, **options)
    return error.value.message
