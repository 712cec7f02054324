"""Runs texts, given as token ids, through a runner: what the tests of this directory share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tei_grpc.config import EngineConfig
from tei_grpc.engine.batch import pack
from tei_grpc.engine.pipeline import BuildPipeline, build_pipeline
from tei_grpc.engine.runner import Runner
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Arrays, Entry, Kind
from tests.checkpoints import SIZES


def load_runner(folder: Path, pipeline: BuildPipeline = build_pipeline, **options: object) -> Runner:
    """A runner for a checkpoint, as the engine would build it."""
    config = EngineConfig(model_id=str(folder), **options)
    return Runner(read_model_config(folder, config), config, pipeline)


def random_ids(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    """Token ids without special tokens, one array per length."""
    generator = np.random.default_rng(seed)
    return [generator.integers(5, SIZES["vocab_size"], length, dtype=np.int32) for length in lengths]


TEXTS = random_ids(1, 2, 7, 8, 9, 25, 33, 70)


def run(runner: Runner, kinds: Kind | Sequence[Kind], ids: Sequence[np.ndarray]) -> list[Arrays]:
    """One batch of these texts; one kind for all, or one for each."""
    each = [kinds] * len(ids) if isinstance(kinds, Kind) else kinds
    answers = runner.run(pack([Entry(i, kind, text) for i, (kind, text) in enumerate(zip(each, ids, strict=True))]))
    for answer in answers:
        assert isinstance(answer, tuple), answer
    return answers


def reference(model: torch.nn.Module, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
    """First output of a transformers model for each text alone: [tokens, hidden], or [labels]."""
    with torch.inference_mode():
        return [model(torch.from_numpy(text[None].astype(np.int64)))[0][0].numpy() for text in ids]


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
