"""int8 layers in whole models: near float32, independent of batch mates, and in float32 where they overflow."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from tei_grpc.engine.batch import pack
from tei_grpc.errors import InferenceError, StartupError
from tei_grpc.layers import int8
from tei_grpc.layers.precision import Float32
from tei_grpc.types import Entry, Kind
from tests.checkpoints import ROWS
from tests.models.conftest import MakeCheckpoint
from tests.models.runners import load_runner, normalized, random_ids, run
from tests.models.test_float16 import LOUD, scale_token

TEXTS = random_ids(1, 7, 25, 33)
ENCODERS = [name for name, row in ROWS.items() if row.pooling]
CLASSIFIERS = [name for name, row in ROWS.items() if row.model.endswith("ForSequenceClassification")]
MASKED_LMS = [name for name, row in ROWS.items() if row.model.endswith("ForMaskedLM")]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about numbers: a slow machine is good enough."""
    monkeypatch.setattr(int8, "_is_faster", lambda: True)


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.sum(normalized(found) * normalized(expected), axis=-1)


@pytest.mark.parametrize("name", ENCODERS)
def test_token_vectors_stay_close_to_float32(checkpoint: MakeCheckpoint, name: str) -> None:
    expected = run(load_runner(checkpoint(name)), Kind.EMBED_ALL, TEXTS)
    found = run(load_runner(checkpoint(name), dtype="int8"), Kind.EMBED_ALL, TEXTS)
    each = np.concatenate([cosines(a, b) for (a,), (b,) in zip(found, expected, strict=True)])
    assert each.mean() >= 0.99


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_stay_close_to_float32(checkpoint: MakeCheckpoint, name: str) -> None:
    expected = run(load_runner(checkpoint(name)), Kind.PREDICT, TEXTS)
    found = run(load_runner(checkpoint(name), dtype="int8"), Kind.PREDICT, TEXTS)
    assert np.abs(np.array(found) - np.array(expected)).max() <= 0.1 * max(1.0, np.abs(np.array(expected)).max())


@pytest.mark.parametrize("name", MASKED_LMS)
def test_vocabulary_weights_stay_close_to_float32(checkpoint: MakeCheckpoint, name: str) -> None:
    expected = run(load_runner(checkpoint(name), pooling="splade"), Kind.EMBED, TEXTS)
    found = run(load_runner(checkpoint(name), pooling="splade", dtype="int8"), Kind.EMBED, TEXTS)
    assert np.mean([cosines(a, b) for (a,), (b,) in zip(found, expected, strict=True)]) >= 0.99


@pytest.mark.parametrize("name", ENCODERS)
def test_text_in_a_mixed_batch_gets_what_it_gets_alone(checkpoint: MakeCheckpoint, name: str) -> None:
    runner = load_runner(checkpoint(name), dtype="int8")
    alone = [run(runner, Kind.EMBED, [text])[0][0] for text in TEXTS]
    for (together,), single in zip(run(runner, Kind.EMBED, TEXTS), alone, strict=True):
        # attention is in bfloat16; a value at the border of two integers may fall either way
        assert cosines(together, single) >= 0.999


@pytest.mark.parametrize("name", ENCODERS)
def test_int8_weights_serve_float32_too(checkpoint: MakeCheckpoint, name: str) -> None:
    expected = run(load_runner(checkpoint(name)), Kind.EMBED_ALL, TEXTS)
    runner = load_runner(checkpoint(name), dtype="int8")
    with torch.inference_mode(), Float32():
        found = run(runner, Kind.EMBED_ALL, TEXTS)
    each = np.concatenate([cosines(a, b) for (a,), (b,) in zip(found, expected, strict=True)])
    assert each.mean() >= 0.995  # the weights are rounded, the activations are not


def test_input_that_overflows_float32_fails_alone(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    runner = load_runner(scale_token(checkpoint("bert-mean"), tmp_path, 1e30), dtype="int8")
    entries = [Entry(0, Kind.EMBED, np.array([2, LOUD, 3], np.int32)), Entry(1, Kind.EMBED, TEXTS[1])]
    failed, (answered,) = runner.run(pack(entries))
    assert isinstance(failed, InferenceError)
    assert np.isfinite(answered).all()


def test_cosine_is_reported_at_load(checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tei_grpc.engine.quantization"):
        runner = load_runner(checkpoint("bert-mean"), dtype="int8")
    assert runner.facts.dtype == "int8"
    (record,) = [record for record in caplog.records if "mean cosine" in record.message]
    assert 0.99 <= record.args[0] <= 1


def test_generic_path_refuses_int8(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(StartupError, match="`dtype` int8 is not supported on the generic path"):
        load_runner(checkpoint("bert-mean"), dtype="int8", force_generic=True)


def test_machine_without_int8_refuses_before_loading(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8._refusal.cache_clear()
    monkeypatch.setattr(int8, "_is_faster", lambda: False)
    try:
        with pytest.raises(StartupError, match="`dtype` int8 is not possible here"):
            load_runner(checkpoint("bert-mean"), dtype="int8")
    finally:
        int8._refusal.cache_clear()


def test_minilm_stays_close_to_float32(minilm_dir: Path) -> None:
    texts = [text % 29000 + 1000 for text in random_ids(5, 12, 30, 80, 200)]
    expected = run(load_runner(minilm_dir), Kind.EMBED, texts)
    found = run(load_runner(minilm_dir, dtype="int8"), Kind.EMBED, texts)
    assert np.mean([cosines(a, b) for (a,), (b,) in zip(found, expected, strict=True)]) >= 0.99
