"""A CrossEncoder made of an encoder, pooling and Dense modules scores as in sentence-transformers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from tei_grpc.config import EngineConfig
from tei_grpc.engine.finish import sigmoid
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Input, Kind, ModelType
from tests.models.conftest import MakeCheckpoint
from tests.models.runners import load_runner, run

PAIRS = [("hello world", "cafe"), ("hello", "query query"), ("x", "a b c d e f g")]


def save_cross_encoder(encoder: Path, folder: Path, labels: int) -> CrossEncoder:
    hidden = Dense(32, 24, activation_function=nn.GELU())
    scores = Dense(24, labels, activation_function=nn.Identity(), module_output_name="scores")
    model = CrossEncoder(modules=[Transformer(str(encoder)), Pooling(32, "cls"), hidden, scores])
    model.save_pretrained(str(folder))
    return CrossEncoder(str(folder))


def encode(folder: Path) -> list[np.ndarray]:
    config = EngineConfig(model_id=str(folder), tokenization_workers=1)
    tokenizer = Tokenizer(read_model_config(folder, config), config)
    ids = [asyncio.run(tokenizer.encode(Input(*pair))).input_ids for pair in PAIRS]
    tokenizer.close()
    return ids


@pytest.mark.parametrize(("labels", "kind"), [(1, ModelType.RERANKER), (3, ModelType.CLASSIFIER)])
def test_scores_are_those_of_sentence_transformers(
    checkpoint: MakeCheckpoint, tmp_path: Path, labels: int, kind: ModelType
) -> None:
    expected = save_cross_encoder(checkpoint("modernbert"), tmp_path, labels).predict(PAIRS)
    model = read_model_config(tmp_path, EngineConfig(model_id=str(tmp_path)))
    assert (model.kind, len(model.labels)) == (kind, labels)
    found = np.stack([logits for (logits,) in run(load_runner(tmp_path), Kind.PREDICT, encode(tmp_path))])
    np.testing.assert_allclose(sigmoid(found[:, 0]) if labels == 1 else found, expected, atol=1e-5, rtol=0)
