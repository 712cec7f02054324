"""Tokenizers of small checkpoints, and what they make of a text."""

from pathlib import Path

from tei_grpc.config import EngineConfig
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input, SimpleToken, TruncationDirection
from tests import folders

RIGHT, LEFT = TruncationDirection.RIGHT, TruncationDirection.LEFT


def tokenizer_of(folder: Path, **options) -> Tokenizer:
    config = EngineConfig(model_id=str(folder), **options)
    return Tokenizer(read_model_config(folder, config), config)


def short(folder: Path, positions: int) -> Tokenizer:
    return tokenizer_of(folders.embedder(folder, max_position_embeddings=positions))


async def ids(tokenizer: Tokenizer, text: str, pair: str | None = None, **options) -> list[int]:
    return (await tokenizer.encode(Input(text, pair, **options))).input_ids.tolist()


async def tokens(tokenizer: Tokenizer, text: str, prompt_name: str | None = None) -> list[SimpleToken]:
    return await tokenizer.tokenize(text, list, add_special_tokens=True, prompt_name=prompt_name)


async def offsets(tokenizer: Tokenizer, text: str, prompt_name: str | None = None) -> list[tuple[int, int]]:
    return [(token.start, token.stop) for token in await tokens(tokenizer, text, prompt_name) if not token.special]
