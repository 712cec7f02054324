"""The line over a weightless device: texts ranked in one request, whatever ends it."""

import asyncio

import numpy as np
import pytest

from tei_grpc.errors import InferenceError, ModelTypeError, ValidationError
from tei_grpc.types import Entry, ModelType, Scoring
from tests import folders
from tests.fakes import FakeRunner, answer, fake_engine
from tests.samples import endings, sample
from tests.unit.engine.waiting import held, until


def by_second_text(entry: Entry) -> tuple[np.ndarray]:
    """A pair's logit: the last token in front of the closing [SEP]."""
    return (entry.input_ids[-2:-1].astype(np.float32),)


async def test_texts_are_ranked_with_their_positions(tmp_path):
    runner = FakeRunner()
    runner.answer = by_second_text
    async with fake_engine(folders.reranker(tmp_path), runner) as (engine, _):
        result = await engine.rerank("query", ["b", "d", "a", "c"], scoring=Scoring(raw_scores=True))
    assert [(rank.index, rank.score) for rank in result.ranks] == [(1, 8), (3, 7), (0, 6), (2, 5)]


async def test_cost_of_all_pairs_is_added_up(tmp_path):
    async with fake_engine(folders.reranker(tmp_path)) as (engine, _):
        cost = (await engine.rerank("hello", ["a", "b c"])).metadata
    assert cost.compute_chars == 5 * 2 + 1 + 3
    assert cost.compute_tokens == 5 + 6


async def test_rerank_is_one_request_with_several_inputs(tmp_path):
    async with fake_engine(folders.reranker(tmp_path)) as (engine, _):
        await engine.rerank("hello", ["a", "b", "c"])
        assert sample(engine.metrics, "te_request_count_total", method="batch") == 1
        assert sample(engine.metrics, "te_predict_success_total") == 3
        assert endings(engine.metrics) == {"batch": 1}


@pytest.mark.parametrize(("query", "texts"), [("", ["world"]), ("hello", [""]), ("hello", ["", "world"])])
async def test_one_empty_side_is_scored(tmp_path, query, texts):
    async with fake_engine(folders.reranker(tmp_path)) as (engine, _):
        assert len((await engine.rerank(query, texts)).ranks) == len(texts)


async def test_two_empty_sides_are_refused(tmp_path):
    async with fake_engine(folders.reranker(tmp_path)) as (engine, _):
        with pytest.raises(ValidationError, match="cannot be empty"):
            await engine.rerank("", ["world", ""])


async def test_more_texts_than_a_call_may_have_are_refused(tmp_path):
    async with fake_engine(folders.reranker(tmp_path), max_client_batch_size=2) as (engine, device):
        with pytest.raises(ValidationError, match="batch size 3 > maximum allowed batch size 2"):
            await engine.rerank("hello", ["a", "b", "c"])
        assert device.runner.batches == []
        assert endings(engine.metrics) == {"validation": 1}


async def test_no_texts_are_refused(tmp_path):
    async with fake_engine(folders.reranker(tmp_path)) as (engine, _):
        with pytest.raises(ValidationError, match="`texts` cannot be empty"):
            await engine.rerank("hello", [])
        with pytest.raises(ValidationError, match="`texts` cannot be empty"), engine.reranking() as reranking:
            reranking.rank([], raw_scores=False)


async def test_more_labels_than_one_are_no_reranker(tmp_path):
    async with fake_engine(folders.classifier(tmp_path, "a", "b")) as (engine, _):
        assert engine.info.model_type is ModelType.CLASSIFIER
        with pytest.raises(ModelTypeError, match="model is not a re-ranker model"):
            await engine.rerank("hello", ["a"])


async def test_first_error_in_the_order_of_the_texts_decides(tmp_path):
    runner = FakeRunner()
    numbers = {5: "first", 6: "second"}

    def fail(entry: Entry):
        name = numbers.get(int(entry.input_ids[-2]))
        return InferenceError(name) if name else answer(entry)

    runner.answer = fail
    async with fake_engine(folders.reranker(tmp_path), runner) as (engine, device):
        with pytest.raises(InferenceError, match="first"):
            await engine.rerank("hello", ["c", "a", "b"])
        assert device.free_permits == 512
        assert endings(engine.metrics) == {"inference": 1}


async def test_many_texts_get_by_with_two_permits(tmp_path):
    options = {"max_concurrent_requests": 2}
    async with fake_engine(folders.reranker(tmp_path), **options) as (engine, device):
        texts = ["a"] * 32
        async with asyncio.timeout(10):
            results = await asyncio.gather(engine.rerank("hello", texts), engine.rerank("world", texts))
        assert [len(result.ranks) for result in results] == [32, 32]
        assert device.free_permits == 2


async def test_cancelled_rerank_takes_its_waiting_texts_along(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.reranker(tmp_path), runner) as (engine, device):
        first = await held(runner, engine.predict("z"))
        task = asyncio.ensure_future(engine.rerank("hello", ["a", "b", "c"]))
        await until(lambda: device.waiting == 3)
        task.cancel()
        await asyncio.wait([task])
        assert device.waiting == 0
        assert device.free_permits == 511
        runner.gate.set()
        await first
        assert len(runner.batches) == 1
        assert endings(engine.metrics) == {"single": 1, "cancelled": 1}


async def test_one_logit_gets_a_sigmoid_whatever_activation_the_checkpoint_names(tmp_path) -> None:
    """Case of a cross-encoder saved with the identity: raw scores are what `raw_scores` is for."""
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    folder = folders.classifier(tmp_path, "LABEL_0", sentence_transformers=identity)
    runner = FakeRunner()
    runner.answer = lambda entry: (np.array([2.0], np.float32),)
    async with fake_engine(folder, runner) as (engine, _device):
        (score,) = (await engine.rerank("a", ["b"])).ranks
        (raw,) = (await engine.rerank("a", ["b"], scoring=Scoring(raw_scores=True))).ranks
    assert score.score == pytest.approx(1 / (1 + np.exp(-2)), abs=1e-6)
    assert raw.score == 2.0
