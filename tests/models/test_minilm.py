"""The real all-MiniLM-L6-v2, through the engine, against sentence-transformers and transformers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.types import Caller, Input

PHRASES = (
    "What is Deep Learning?",
    "a",
    "El rápido zorro marrón salta sobre el perro perezoso",
    "これは短い文です。",
    "Быстрая коричневая лиса",
    "שלום עולם",
    "👩‍🔬 emoji, café, naïve façade!",
    "def main(argc, argv): return {'a': [1, 2, 3]}",
    "الذكاء الاصطناعي",
    "https://example.org/?q=1&r=%20",
)
TEXTS = [" ".join(PHRASES[(i + j) % len(PHRASES)] for j in range(1 + i % 7 * 3)) for i in range(60)]
WAITS = Caller(waits=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(minilm_dir: Path) -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model_id=str(minilm_dir))) as engine:
        yield engine


async def embed(engine: Engine, texts: list[str], **options: bool) -> np.ndarray:
    inputs = [Input(text, truncate=True) for text in texts]
    results = await asyncio.gather(*(engine.embed(input, caller=WAITS, **options) for input in inputs))
    return np.stack([result.embeddings for result in results])


@pytest.mark.asyncio(loop_scope="module")
async def test_vectors_of_60_texts_equal_sentence_transformers(engine: Engine, minilm_dir: Path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(minilm_dir), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(await embed(engine, TEXTS), expected, atol=1e-5, rtol=0)


@pytest.mark.asyncio(loop_scope="module")
async def test_token_vectors_equal_transformers(engine: Engine, minilm_dir: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(minilm_dir).eval(), AutoTokenizer.from_pretrained(minilm_dir)
    for text in TEXTS[::7]:
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=256, padding=False)
        with torch.inference_mode():
            expected = model(**encoded).last_hidden_state[0].numpy()
        found = (await engine.embed_all(Input(text, truncate=True))).token_embeddings
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("text", "values", "norm"),
    [
        ("What is Deep Learning?", [-0.59059864, -0.25252345, 0.14972475, 0.05487579, -0.11783009], 7.58091),
        ("Deep Learning is...", [-0.11974101, -0.5844457, 0.34629655, -0.24922174, -0.33206654], 6.27148),
    ],
)
async def test_values_are_those_that_were_published(
    engine: Engine, text: str, values: list[float], norm: float
) -> None:
    """From the snapshots of text-embeddings-inference, whose GELU is the tanh form: hence the tolerance."""
    (found,) = await embed(engine, [text], normalize=False)
    np.testing.assert_allclose(found[:5], values, atol=4e-3, rtol=0)
    assert float(np.linalg.norm(found)) == pytest.approx(norm, abs=4e-3)


@pytest.mark.asyncio(loop_scope="module")
async def test_vector_does_not_depend_on_who_shares_its_batch(engine: Engine) -> None:
    alone = np.concatenate([await embed(engine, [text]) for text in TEXTS[:32]])
    everything = asyncio.gather(*(engine.embed_all(Input(text, truncate=True), caller=WAITS) for text in TEXTS[40:]))
    together, turned = await embed(engine, TEXTS[:32]), await embed(engine, TEXTS[31::-1])
    await everything
    np.testing.assert_allclose(together, alone, atol=1e-6, rtol=0)
    np.testing.assert_allclose(turned[::-1], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "cosine"), [("bfloat16", 0.9998), ("float16", 0.9998)])
async def test_16_bit_vectors_stay_close(minilm_dir: Path, dtype: str, cosine: float) -> None:
    async with Engine(EngineConfig(model_id=str(minilm_dir), dtype=dtype)) as narrow:
        found = await embed(narrow, TEXTS)
    async with Engine(EngineConfig(model_id=str(minilm_dir))) as wide:
        expected = await embed(wide, TEXTS)
    assert float(np.sum(found * expected, axis=1).min()) >= cosine
