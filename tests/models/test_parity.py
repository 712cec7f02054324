"""Our outputs equal transformers' for every checkpoint of the table."""

import numpy as np
import pytest
import torch
import transformers

from tei_grpc.types import Kind
from tests.checkpoints import ROWS
from tests.models.conftest import Load, MakeCheckpoint
from tests.models.runners import load_runner, normalized, random_ids, reference, run

TEXTS = random_ids(1, 2, 7, 8, 9, 25, 33, 38)
ENCODERS = [name for name, row in ROWS.items() if row.pooling]
CLASSIFIERS = [name for name, row in ROWS.items() if row.model.endswith("ForSequenceClassification")]
MASKED_LMS = [name for name, row in ROWS.items() if row.model.endswith("ForMaskedLM")]


def transformers_model(folder, auto=transformers.AutoModel):
    return auto.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", ENCODERS)
def test_token_vectors_equal_transformers(checkpoint: MakeCheckpoint, load: Load, name: str) -> None:
    expected = reference(transformers_model(checkpoint(name)), TEXTS)
    for (found,), hidden in zip(run(load(checkpoint(name)), Kind.EMBED_ALL, TEXTS), expected, strict=True):
        np.testing.assert_allclose(found, hidden, atol=1e-4, rtol=0)
        np.testing.assert_allclose(normalized(found), normalized(hidden), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ENCODERS)
def test_bfloat16_stays_close_to_transformers_in_float32(checkpoint: MakeCheckpoint, name: str) -> None:
    expected = reference(transformers_model(checkpoint(name)), TEXTS)
    runner = load_runner(checkpoint(name), dtype="bfloat16")
    for (found,), hidden in zip(run(runner, Kind.EMBED_ALL, TEXTS), expected, strict=True):
        assert found.dtype == np.float32
        assert np.min(np.sum(normalized(found) * normalized(hidden), axis=-1)) >= 0.999


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_equal_transformers(checkpoint: MakeCheckpoint, load: Load, name: str) -> None:
    model = transformers_model(checkpoint(name), transformers.AutoModelForSequenceClassification)
    expected = reference(model, TEXTS)
    for (found,), logits in zip(run(load(checkpoint(name)), Kind.PREDICT, TEXTS), expected, strict=True):
        np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MASKED_LMS)
def test_splade_weights_equal_the_formula_on_transformers_logits(
    checkpoint: MakeCheckpoint, load: Load, name: str
) -> None:
    expected = reference(transformers_model(checkpoint(name), transformers.AutoModelForMaskedLM), TEXTS)
    runner = load(checkpoint(name), pooling="splade")
    for (indices, values), logits in zip(run(runner, Kind.EMBED_SPARSE, TEXTS), expected, strict=True):
        weights = torch.log1p(torch.relu(torch.from_numpy(logits))).amax(0).numpy()
        assert indices.dtype == np.uint32
        assert indices.tolist() == np.flatnonzero(weights).tolist()
        np.testing.assert_allclose(values, weights[indices], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["bert-mean", "bert-cls", "bert-relu", "rob-t"])
def test_pooled_vectors_equal_sentence_transformers(checkpoint: MakeCheckpoint, name: str) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(checkpoint(name)), device="cpu")
    texts = ["hello world", "a", "a query that is longer, and ends."]
    ids = [np.array(text, np.int32) for text in model.tokenizer(texts)["input_ids"]]
    found = np.stack([vector for (vector,) in run(load_runner(checkpoint(name)), Kind.EMBED, ids)])
    np.testing.assert_allclose(normalized(found), model.encode(texts), atol=1e-5, rtol=0)


def test_token_types_shift_a_pair_as_in_transformers(checkpoint: MakeCheckpoint) -> None:
    from tei_grpc.engine.batch import pack
    from tei_grpc.types import Entry

    ids, types = np.array([2, 82, 3, 83, 3], np.int32), np.array([0, 0, 0, 1, 1], np.int32)
    model = transformers_model(checkpoint("bert-one-label"), transformers.AutoModelForSequenceClassification)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids).long()[None], token_type_ids=torch.from_numpy(types).long()[None])[0][0]
    runner = load_runner(checkpoint("bert-one-label"))
    ((logits,),) = runner.run(pack([Entry(0, Kind.PREDICT, ids, types)]))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_pad_token_inside_a_roberta_text_keeps_the_pad_position(checkpoint: MakeCheckpoint) -> None:
    text = np.array([0, 20, 1, 21, 1, 1, 22, 2], np.int32)
    model = transformers_model(checkpoint("roberta"))
    mask = torch.ones(1, len(text), dtype=torch.long)
    with torch.inference_mode():
        expected = model(torch.from_numpy(text).long()[None], attention_mask=mask)[0][0].numpy()
    _, (found,), _ = run(load_runner(checkpoint("roberta")), Kind.EMBED_ALL, [text[:3], text, text[:5]])
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
