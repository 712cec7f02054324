"""Models that mean something: their answers equal those of transformers, and make sense."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.types import Scoring
from tests.small_heads import small_heads

# none of these was seen in training
QUESTION = "How tall is the Eiffel Tower?"
DOCUMENTS = [
    "Cats sleep most of the day.",
    "The Eiffel Tower is 330 metres tall.",
    "The Louvre is a museum in Paris.",
    "",
    "The tower was painted in a reddish brown for many years. " * 12,
]
OPINIONS = {
    "this is really good": "positive",
    "i enjoyed every minute": "positive",
    "this is really bad": "negative",
    "never again": "negative",
}
RAW = Scoring(raw_scores=True)
QUERIES = ["capital of france", "What is Deep Learning?", "a", "how do i reverse a list in python"]


@pytest.fixture
async def reranker(minilm_dir: Path) -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model_id=str(small_heads(minilm_dir).reranker))) as engine:
        yield engine


@pytest.fixture
async def classifier(minilm_dir: Path) -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model_id=str(small_heads(minilm_dir).sentiment))) as engine:
        yield engine


def logits_of(folder: Path, *texts: str) -> np.ndarray:
    """What transformers computes for one text or one pair, [labels]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        # in lists: given alone, an empty second text is taken for none
        return model(**tokenizer(*([text] for text in texts), return_tensors="pt")).logits[0].numpy()


async def test_logits_of_pairs_equal_transformers(reranker: Engine) -> None:
    expected = [logits_of(Path(reranker.config.model_id), QUESTION, text)[0] for text in DOCUMENTS]
    result = await reranker.rerank(QUESTION, DOCUMENTS, scoring=RAW)
    found = {rank.index: rank.score for rank in result.ranks}
    np.testing.assert_allclose([found[index] for index in range(len(DOCUMENTS))], expected, atol=1e-4, rtol=0)


async def test_scores_of_pairs_equal_the_sigmoid_of_transformers(reranker: Engine) -> None:
    logits = [logits_of(Path(reranker.config.model_id), QUESTION, text)[0] for text in DOCUMENTS]
    found = {rank.index: rank.score for rank in (await reranker.rerank(QUESTION, DOCUMENTS)).ranks}
    expected = torch.sigmoid(torch.tensor(np.array(logits))).numpy()
    np.testing.assert_allclose([found[index] for index in range(len(DOCUMENTS))], expected, atol=1e-5, rtol=0)


async def test_document_that_answers_comes_first(reranker: Engine) -> None:
    ranks = (await reranker.rerank(QUESTION, DOCUMENTS[:3])).ranks
    assert [rank.index for rank in ranks] == [1, 2, 0]
    assert ranks[0].score > 0.5 > ranks[2].score


async def test_logits_of_texts_equal_transformers(classifier: Engine) -> None:
    for text in (*OPINIONS, QUESTION, "a"):
        expected = logits_of(Path(classifier.config.model_id), text)
        found = {label: score for score, label in (await classifier.predict(text, scoring=RAW)).predictions}
        np.testing.assert_allclose([found["negative"], found["positive"]], expected, atol=1e-4, rtol=0)


async def test_scores_of_texts_equal_the_softmax_of_transformers(classifier: Engine) -> None:
    for text in OPINIONS:
        expected = torch.tensor(logits_of(Path(classifier.config.model_id), text)).softmax(-1).numpy()
        found = {label: score for score, label in (await classifier.predict(text)).predictions}
        np.testing.assert_allclose([found["negative"], found["positive"]], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("text", OPINIONS)
async def test_opinion_is_recognized(classifier: Engine, text: str) -> None:
    best = (await classifier.predict(text)).predictions[0]
    assert (best.label, best.score > 0.5) == (OPINIONS[text], True)


@pytest.fixture
async def splade(splade_dir: Path) -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model_id=str(splade_dir), pooling="splade")) as engine:
        yield engine


async def test_sparse_vectors_equal_the_formula_over_transformers(splade: Engine) -> None:
    """max over tokens of log(1 + relu(logit)), special tokens included (Formal et al. 2021, SPLADE v2, eq. 6)."""
    folder = splade.config.model_id
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    for text in QUERIES:
        with torch.inference_mode():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        expected = torch.log1p(torch.relu(logits)).amax(0).numpy()
        result = await splade.embed_sparse(text)
        assert result.indices.tolist() == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(result.values, expected[result.indices], atol=1e-5, rtol=0)


async def test_sparse_vector_equals_sentence_transformers(splade: Engine) -> None:
    from sentence_transformers.sparse_encoder import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    modules = [MLMTransformer(splade.config.model_id), SpladePooling("max")]
    expected = SparseEncoder(modules=modules, device="cpu").encode(QUERIES, convert_to_sparse_tensor=False)
    for text, row in zip(QUERIES, expected.numpy(), strict=True):
        result = await splade.embed_sparse(text)
        found = np.zeros_like(row)
        found[result.indices] = result.values
        np.testing.assert_allclose(found, row, atol=1e-5, rtol=0)


async def test_query_is_expanded_to_what_it_is_about(splade: Engine) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(splade.config.model_id)
    result = await splade.embed_sparse("capital of france")
    best = result.indices[np.argsort(-result.values)[:10]]
    assert {"capital", "france", "paris"} <= set(tokenizer.convert_ids_to_tokens(best.tolist()))
