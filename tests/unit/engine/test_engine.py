"""The whole line over a weightless device: what each verb answers and refuses, and what is counted."""

import asyncio

import numpy as np
import pytest

from tei_grpc.errors import ModelTypeError, ValidationError
from tei_grpc.types import Input
from tests import folders
from tests.fakes import SIZE, FakeRunner, fake_engine, row
from tests.samples import endings, sample
from tests.unit.engine.waiting import held, until


async def test_embedding_is_normalized_unless_told_otherwise(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        absent, on, off = [await engine.embed("hello", **kw) for kw in ({}, {"normalize": True}, {"normalize": False})]
    assert absent.embeddings.tolist() == on.embeddings.tolist()
    assert np.linalg.norm(absent.embeddings) == pytest.approx(1, abs=1e-6)
    assert off.embeddings.tolist() == [3, 87, 2, 82, 3, 2, 82, 3]


async def test_dimensions_are_cut_before_normalizing(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        result = await engine.embed("hello", dimensions=2)
    np.testing.assert_allclose(result.embeddings, np.array([3, 87]) / np.hypot(3, 87), atol=1e-7)


async def test_all_dimensions_are_the_same_as_none_given(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        one, other = await engine.embed("hello"), await engine.embed("hello", dimensions=SIZE)
    assert one.embeddings.tolist() == other.embeddings.tolist()


@pytest.mark.parametrize("dimensions", [0, SIZE + 1, 2**32 - 1])
async def test_impossible_dimensions_never_reach_the_model(tmp_path, dimensions):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, _):
        with pytest.raises(ValidationError, match="`dimensions`"):
            await engine.embed("hello", dimensions=dimensions)
    assert runner.batches == []


async def test_every_token_gets_its_vector(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        result = await engine.embed_all("hello world")
    assert result.token_embeddings[:, 0].tolist() == [2, 82, 83, 3]


async def test_sparse_indices_and_values_belong_together(tmp_path):
    async with fake_engine(folders.splade(tmp_path)) as (engine, _):
        result = await engine.embed_sparse("hello a")
    assert result.indices.tolist() == [2, 3, 5, 82]
    assert result.values.tolist() == [1, 1, 1, 1]


async def test_metadata_counts_characters_without_and_tokens_with_the_prompt(tmp_path):
    files = {"config_sentence_transformers.json": {"prompts": {"query": "query: "}}}
    async with fake_engine(folders.embedder(tmp_path, files)) as (engine, _):
        result = await engine.embed(Input("hello", prompt_name="query"))
    assert (result.metadata.compute_chars, result.metadata.compute_tokens) == (5, 5)


async def test_white_space_is_embedded(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        result = await engine.embed("\t\n  ")
    assert (result.metadata.compute_chars, result.metadata.compute_tokens) == (4, 2)


async def test_times_add_up(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        cost = (await engine.embed("hello")).metadata
    parts = (cost.tokenization_time_ns, cost.queue_time_ns, cost.inference_time_ns)
    assert min(parts) >= 0
    assert sum(parts) <= cost.total_time_ns


async def test_default_prompt_goes_in_front(tmp_path):
    async with fake_engine(folders.embedder(tmp_path), default_prompt="query: ") as (engine, device):
        await engine.embed("hello")
        assert device.runner.batches[0][0].input_ids.tolist() == [2, 92, 45, 82, 3]


async def test_kinds_share_a_batch(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, device):
        first = await held(runner, engine.embed("z"))
        others = [asyncio.ensure_future(work) for work in (engine.embed("hello"), engine.embed_all("a b c"))]
        await until(lambda: device.waiting == 2)
        runner.gate.set()
        embedded, all_embedded = await asyncio.gather(*others)
        await first
    assert len(runner.batches) == 2
    expected = row(runner.batches[1][0])
    np.testing.assert_allclose(embedded.embeddings, expected / np.linalg.norm(expected), atol=1e-6)
    assert all_embedded.token_embeddings.shape == (5, SIZE)


async def test_labels_come_best_first(tmp_path):
    runner = FakeRunner()
    runner.answer = lambda entry: (np.array([0, 2, 1], np.float32),)
    async with fake_engine(folders.classifier(tmp_path, "a", "b", "c"), runner) as (engine, _):
        result = await engine.predict("hello")
    assert [prediction.label for prediction in result.predictions] == ["b", "c", "a"]
    assert result.predictions[0].score == pytest.approx(0.665241, abs=1e-6)


async def test_checkpoint_says_multi_label(tmp_path):
    runner = FakeRunner()
    runner.answer = lambda entry: (np.array([2, 1, 0], np.float32),)
    folder = folders.classifier(tmp_path, "a", "b", "c", problem_type="multi_label_classification")
    async with fake_engine(folder, runner) as (engine, _):
        result = await engine.predict(["hello"])
    scores = [prediction.score for prediction in result.predictions]
    np.testing.assert_allclose(scores, [0.880797, 0.731059, 0.5], atol=1e-6)


async def test_pair_is_predicted_as_a_pair(tmp_path):
    async with fake_engine(folders.reranker(tmp_path)) as (engine, device):
        await engine.predict(("hello", "world"))
        entry = device.runner.batches[0][0]
    assert entry.input_ids.tolist() == [2, 82, 3, 83, 3]
    assert entry.token_type_ids.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("texts", [(), ("a", "b", "c")])
async def test_neither_text_nor_pair_is_refused(tmp_path, texts):
    async with fake_engine(folders.reranker(tmp_path)) as (engine, _):
        with pytest.raises(ValidationError, match="single or two elements"):
            await engine.predict(texts)


async def test_wrong_model_is_refused_before_any_work(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, device):
        for work in (engine.predict("x"), engine.embed_sparse("x"), engine.rerank("x", ["y"])):
            with pytest.raises(ModelTypeError):
                await work
        assert device.runner.batches == []


@pytest.mark.parametrize("verb", ["embed", "embed_all", "tokenize"])
async def test_empty_text_is_refused(tmp_path, verb):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, device):
        with pytest.raises(ValidationError, match="`inputs` cannot be empty"):
            await getattr(engine, verb)("")
        assert device.runner.batches == []


async def test_text_is_tokenized_and_put_together_again(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        tokens = await engine.tokenize("hello world", add_special_tokens=False)
        assert await engine.decode([token.id for token in tokens]) == "hello world"
        with pytest.raises(ValidationError, match="`input_ids` cannot be empty"):
            await engine.decode([])


async def test_each_input_is_counted_by_its_group(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        await engine.embed("hello")
        await engine.embed_all("hello world")
        with pytest.raises(ValidationError):
            await engine.embed("")
        assert sample(engine.metrics, "te_embed_count_total") == 2
        assert sample(engine.metrics, "te_embed_success_total") == 2
        assert sample(engine.metrics, "te_request_input_length_sum") == 3 + 4
        assert endings(engine.metrics) == {"single": 2, "validation": 1}
