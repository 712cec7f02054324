"""The engine as a Python API over real models with random weights, compared with transformers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.types import Scoring
from tests import checkpoints

TEXT = "hello world"
LONG = " ".join("abcdefghijklmnopqrstuvwxyz")
OTHERS = [LONG, "a", "北京 😀", "query: café", LONG[:20]]
RAW = Scoring(raw_scores=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make each checkpoint once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = getattr(checkpoints, name)(tmp_path_factory.mktemp(name))
        return made[name]

    return make


def engine_over(folder: Path, **options: object) -> Engine:
    return Engine(EngineConfig(model_id=str(folder), **options))


def reference(folder: Path, auto_class, *texts: str) -> transformers.utils.ModelOutput:
    """What transformers answers for a text or a pair; as a batch of one, because it takes a bare "" for no text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = [[text] for text in texts]
    encoding = tokenizer(*batch, return_tensors="pt", return_token_type_ids=len(texts) == 2)
    with torch.inference_mode():
        return auto_class.from_pretrained(folder).eval()(**encoding)


@pytest.mark.parametrize("name", ["bert_t", "rob_t"])
async def test_token_vectors_equal_transformers(folder, name):
    hidden = reference(folder(name), transformers.AutoModel, TEXT).last_hidden_state[0]
    async with engine_over(folder(name), pooling="mean") as engine:
        result = await engine.embed_all(TEXT)
    np.testing.assert_allclose(result.token_embeddings, hidden.numpy(), atol=1e-5)


async def test_embedding_is_the_mean_of_token_vectors(folder):
    hidden = reference(folder("bert_t"), transformers.AutoModel, TEXT).last_hidden_state[0]
    async with engine_over(folder("bert_t")) as engine:
        result = await engine.embed(TEXT, normalize=False)
    np.testing.assert_allclose(result.embeddings, hidden.mean(0).numpy(), atol=1e-5)


async def test_sparse_embedding_follows_the_formula(folder):
    logits = reference(folder("mlm_t"), transformers.AutoModelForMaskedLM, TEXT).logits[0]
    weights = logits.relu().log1p().amax(0)
    async with engine_over(folder("mlm_t"), pooling="splade") as engine:
        result = await engine.embed_sparse(TEXT)
    assert result.indices.tolist() == weights.nonzero().flatten().tolist()
    np.testing.assert_allclose(result.values, weights[weights > 0].numpy(), atol=1e-5)


async def test_labels_are_scored_as_transformers_does(folder):
    output = reference(folder("clf_t"), transformers.AutoModelForSequenceClassification, TEXT)
    async with engine_over(folder("clf_t")) as engine:
        result = await engine.predict(TEXT)
    scores = {prediction.label: prediction.score for prediction in result.predictions}
    expected = output.logits[0].softmax(-1).tolist()
    assert [scores[label] for label in ("negative", "neutral", "positive")] == pytest.approx(expected, abs=1e-5)


async def test_pairs_are_scored_as_pairs(folder):
    texts = ["world", "a b c", ""]
    model = transformers.AutoModelForSequenceClassification
    logits = [float(reference(folder("ce_t"), model, "hello", text).logits) for text in texts]
    async with engine_over(folder("ce_t")) as engine:
        raw = await engine.rerank("hello", texts, scoring=RAW)
        squashed = await engine.rerank("hello", texts)
    assert {rank.index: rank.score for rank in raw.ranks} == pytest.approx(dict(enumerate(logits)), abs=1e-5)
    expected = {index: 1 / (1 + np.exp(-logit)) for index, logit in enumerate(logits)}
    assert {rank.index: rank.score for rank in squashed.ranks} == pytest.approx(expected, abs=1e-5)


async def test_embedding_does_not_depend_on_batch_mates(folder):
    async with engine_over(folder("bert_t")) as engine:
        alone = await engine.embed(TEXT)
        together, *_ = await asyncio.gather(engine.embed(TEXT), *map(engine.embed, OTHERS), engine.embed_all(LONG))
    np.testing.assert_allclose(together.embeddings, alone.embeddings, atol=1e-6)


async def test_score_does_not_depend_on_batch_mates(folder):
    async with engine_over(folder("ce_t")) as engine:
        alone = await engine.rerank("hello", ["world"])
        together = await engine.rerank("hello", ["world", *OTHERS])
    score = next(rank.score for rank in together.ranks if rank.index == 0)
    assert score == pytest.approx(alone.ranks[0].score, abs=1e-6)


async def test_first_answer_equals_every_later_one(folder):
    async with engine_over(folder("bert_t")) as engine:
        first = await engine.embed(TEXT)
        later = [await engine.embed(TEXT) for _ in range(20)]
    assert all(result.embeddings.tolist() == first.embeddings.tolist() for result in later)


async def test_dimensions_are_the_head_of_the_whole_vector(folder):
    async with engine_over(folder("bert_t")) as engine:
        whole = (await engine.embed(TEXT, normalize=False)).embeddings
        head = (await engine.embed(TEXT, dimensions=8)).embeddings
    np.testing.assert_allclose(head, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
