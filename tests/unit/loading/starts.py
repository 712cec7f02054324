"""Starts over files that somebody has made up, and what the user is told."""

import asyncio
import json
from pathlib import Path

import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import StartupError
from tei_grpc.loading.model_config import read_model_config


def rewrite(file: Path, **changes: object) -> None:
    """Other values for some keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refusal(folder: Path) -> str:
    """What the user is told, at a start without weights."""
    config = EngineConfig(model_id=str(folder))
    with pytest.raises(StartupError) as caught:
        Tokenizer(read_model_config(folder, config), config).close()
    return caught.value.message


def refusal_of_the_whole(folder: Path, **options: object) -> str:
    """What the user is told, at a start with weights."""

    async def start() -> None:
        async with Engine(EngineConfig.model_validate({"model_id": str(folder), **options})):
            pass

    with pytest.raises(StartupError) as caught:
        asyncio.run(start())
    return caught.value.message
