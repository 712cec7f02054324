"""The whole line over a weightless device: permits, deadlines, order, books, states."""

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest

from tei_grpc.config import EngineConfig
from tei_grpc.engine.engine import Engine
from tei_grpc.errors import (
    DeadlineError,
    InferenceError,
    ModelTypeError,
    OverloadedError,
    StartupError,
    UnavailableError,
    ValidationError,
)
from tei_grpc.loading.model_config import read_model_config
from tei_grpc.types import Caller, Entry, Input, ModelType, Scoring, State
from tests import folders
from tests.fakes import SIZE, FakeDevice, FakeRunner, answer, fake_engine, row
from tests.samples import endings, sample

STREAM = Caller(waits=True)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until `condition` holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def held(runner: FakeRunner, work) -> asyncio.Task:
    """Start `work` and let the runner keep it."""
    runner.gate.clear()
    runner.running.clear()
    task = asyncio.ensure_future(work)
    await asyncio.to_thread(runner.running.wait, 10)
    return task


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


# --- permits


async def test_permit_comes_back_after_an_answer(tmp_path):
    async with fake_engine(folders.embedder(tmp_path), max_concurrent_requests=2) as (engine, device):
        for _ in range(5):
            await engine.embed("hello")
        assert device.free_permits == 2


async def test_permit_comes_back_after_a_refusal_of_the_tokenizer(tmp_path):
    async with fake_engine(folders.embedder(tmp_path), max_concurrent_requests=2) as (engine, device):
        with pytest.raises(ValidationError, match="tokens"):
            await engine.embed("a " * 100)
        assert device.free_permits == 2


async def test_permit_comes_back_after_a_failure_of_the_model(tmp_path):
    runner = FakeRunner()
    runner.answer = lambda entry: InferenceError("Inference failed")
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, device):
        with pytest.raises(InferenceError):
            await engine.embed("hello")
        assert device.free_permits == 2


async def test_permit_comes_back_when_the_caller_leaves(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, device):
        running = await held(runner, engine.embed("hello"))
        waiting = asyncio.ensure_future(engine.embed("world"))
        await until(lambda: device.waiting == 1)
        for task in (running, waiting):
            task.cancel()
        await asyncio.wait([running, waiting])
        assert device.free_permits == 2
        assert device.waiting == 0
        runner.gate.set()
        await engine.embed("a")
        assert [[entry.input_ids.tolist() for entry in batch] for batch in runner.batches] == [
            [[2, 82, 3]],
            [[2, 5, 3]],
        ]


async def test_overload_fails_fast_and_passes(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, device):
        first = await held(runner, engine.embed("a"))
        second = asyncio.ensure_future(engine.embed("b"))
        await until(lambda: device.free_permits == 0)
        with pytest.raises(OverloadedError, match="Model is overloaded"):
            await engine.embed("c")
        runner.gate.set()
        await asyncio.gather(first, second)
        await engine.embed("c")


async def test_stream_waits_where_a_unary_call_fails(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=1) as (engine, _):
        first = await held(runner, engine.embed("a"))
        streamed = asyncio.ensure_future(engine.embed("b", caller=STREAM))
        await asyncio.sleep(0)
        assert not streamed.done()
        runner.gate.set()
        await first
        assert len((await streamed).embeddings) == SIZE


# --- deadlines


async def test_caller_whose_deadline_has_passed_is_not_tokenized(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, device):
        with pytest.raises(DeadlineError):
            await engine.embed("far too long " * 100, caller=Caller(deadline_ns=time.monotonic_ns()))
        assert device.runner.batches == []
        assert endings(engine.metrics) == {"expired": 1}


async def test_deadline_that_passes_in_the_queue_is_dropped_there(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, device):
        first = await held(runner, engine.embed("a"))
        late = asyncio.ensure_future(engine.embed("b", caller=Caller(deadline_ns=time.monotonic_ns() + 20_000_000)))
        await until(lambda: device.waiting == 1)
        await asyncio.sleep(0.03)
        runner.gate.set()
        with pytest.raises(DeadlineError):
            await late
        await first
        assert len(runner.batches) == 1
        assert endings(engine.metrics) == {"single": 1, "expired": 1}


# --- rerank


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


# --- life


async def test_nothing_is_served_before_the_start(tmp_path):
    engine = Engine(EngineConfig(model_id=str(folders.embedder(tmp_path))))
    assert engine.state is State.LOADING
    for work in (engine.embed("x"), engine.rerank("x", ["y"]), engine.tokenize("x"), engine.decode([1])):
        with pytest.raises(UnavailableError, match="The model is not loaded"):
            await work
    await engine.stop()


@pytest.mark.parametrize("text", ["hello", "hello " * 1000])
async def test_nothing_is_served_after_the_stop(tmp_path, text):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        pass
    with pytest.raises(UnavailableError):
        await engine.embed(Input(text, truncate=True))


async def test_stopping_fails_what_waits(tmp_path):
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, device):
        first = await held(runner, engine.embed("a"))
        waiting = asyncio.ensure_future(engine.embed("b"))
        await until(lambda: device.waiting == 1)
        stopping = asyncio.ensure_future(engine.stop())
        with pytest.raises(UnavailableError, match="The server is shutting down"):
            await waiting
        runner.gate.set()
        await stopping
        assert len((await first).embeddings) == SIZE


async def test_watchers_see_each_change_of_state(tmp_path):
    seen: list[State] = []
    config = EngineConfig(model_id=str(folders.embedder(tmp_path)))
    engine = Engine(config, FakeDevice(read_model_config(tmp_path, config), config))
    engine.on_state(seen.append)
    async with engine:
        engine._follow_device(False)
        engine._follow_device(False)
        engine._follow_device(True)
        engine.drain()
        engine._follow_device(False)
    assert seen == [State.SERVING, State.UNHEALTHY, State.SERVING, State.DRAINING]


async def test_running_calls_go_on_while_draining(tmp_path):
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        engine.drain()
        assert len((await engine.embed("hello")).embeddings) == SIZE


async def test_folder_without_a_model_does_not_start(tmp_path):
    with pytest.raises(StartupError, match=r"`config.json` not found"):
        await Engine(EngineConfig(model_id=str(tmp_path))).start()


async def test_info_tells_the_limits_in_force(tmp_path):
    options = {"max_batch_tokens": 100, "max_batch_requests": 7, "max_client_batch_size": 3, "tokenization_workers": 2}
    async with fake_engine(folders.embedder(tmp_path), max_concurrent_requests=9, **options) as (engine, _):
        info = engine.info
    assert {name: getattr(info, name) for name in options} == options
    assert info.max_concurrent_requests == 9
    assert info.max_input_length == 40
    assert info.model_id == str(tmp_path)
    assert info.model_sha is None
    assert (info.model_dtype, info.device, info.optimized) == ("float32", "cpu", True)


@pytest.mark.parametrize(
    ("folder", "kind", "answers"),
    [
        (folders.embedder, ModelType.EMBEDDING, (True, False, True)),
        (folders.splade, ModelType.EMBEDDING, (True, True, False)),
        (folders.reranker, ModelType.RERANKER, (False, False, False)),
        (lambda path: folders.classifier(path, "a", "b"), ModelType.CLASSIFIER, (False, False, False)),
    ],
)
async def test_info_tells_what_the_model_answers(tmp_path, folder, kind, answers):
    async with fake_engine(folder(tmp_path)) as (engine, _):
        info = engine.info
    assert info.model_type is kind
    assert (info.embeds, info.embeds_sparse, info.embeds_all) == answers


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


@pytest.mark.parametrize("delay", [0, 0.01, 0.1])
async def test_engine_that_is_stopped_while_it_loads_does_not_serve(minilm_dir, delay: float) -> None:
    engine = Engine(EngineConfig(model_id=str(minilm_dir)))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(delay)
    await engine.stop()
    with pytest.raises(StartupError):
        await starting
    with pytest.raises(UnavailableError):
        await engine.embed("a")


async def test_engine_is_started_once(tmp_path) -> None:
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _device):
        with pytest.raises(StartupError, match="once"):
            await engine.start()


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


async def test_refusal_of_an_overloaded_engine_takes_no_time(tmp_path) -> None:
    """The target is 50 ms; a test on a busy machine asks for ten times that."""
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, _device):
        first = await held(runner, engine.embed("a"))
        second = asyncio.ensure_future(engine.embed("b"))
        await asyncio.sleep(0)
        started = time.monotonic()
        with pytest.raises(OverloadedError):
            await engine.embed("c")
        assert time.monotonic() - started < 0.5
        runner.gate.set()
        await asyncio.gather(first, second)
