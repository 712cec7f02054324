"""A list of texts in one call: the same vectors in the same order, whatever ends it."""

import asyncio
import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest

from tei_grpc.errors import InferenceError, ValidationError
from tei_grpc.types import Entry, Failure, Input
from tests import folders
from tests.fakes import FakeRunner, answer, fake_engine
from tests.samples import endings, sample

PERMITS = 512  # by default
TEXTS = [f"{'hello ' * (number % 7 + 1)}world" for number in range(300)]


async def test_list_gets_what_its_texts_get_one_by_one(tmp_path) -> None:
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        for options in ({}, {"normalize": False}, {"dimensions": 3}):
            alone = [(await engine.embed(text, **options)).embeddings for text in TEXTS[:20]]
            together = (await engine.embed_many(TEXTS[:20], **options)).embeddings
            assert together.dtype == np.float32
            np.testing.assert_allclose(together, np.stack(alone), rtol=1e-7)


async def test_list_may_be_longer_than_there_are_permits(tmp_path) -> None:
    async with fake_engine(folders.embedder(tmp_path), max_concurrent_requests=8) as (engine, device):
        found = (await engine.embed_many(TEXTS, normalize=False)).embeddings
        alone = [(await engine.embed(text, normalize=False)).embeddings for text in TEXTS[:7]]
        assert device.free_permits == 8
    np.testing.assert_array_equal(found, np.stack(alone)[np.arange(300) % 7])


async def test_list_is_one_request_and_as_many_inputs(tmp_path) -> None:
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        result = await engine.embed_many(TEXTS[:20])
        assert endings(engine.metrics) == {"batch": 1}
        assert sample(engine.metrics, "te_embed_count_total") == 20
        assert sample(engine.metrics, "te_embed_success_total") == 20
    assert result.metadata.compute_chars == sum(map(len, TEXTS[:20]))


async def test_zero_vector_stays_zero(tmp_path) -> None:
    runner = FakeRunner()
    runner.answer = lambda entry: (np.zeros(8, np.float32),)
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, _):
        assert (await engine.embed_many(["a", "b"])).embeddings.tolist() == [[0.0] * 8] * 2


async def test_bad_text_is_named_before_any_work(tmp_path) -> None:
    runner = FakeRunner()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, _):
        with pytest.raises(ValidationError, match="empty"):
            await engine.embed_many(["a", ""])
        with pytest.raises(ValidationError, match="`inputs` cannot be empty"):
            await engine.embed_many([])
        assert runner.batches == []


async def test_first_that_fails_decides_and_the_rest_leaves_the_queue(tmp_path, caplog) -> None:
    runner = FakeRunner()
    runner.answer = lambda entry: InferenceError("this one") if len(entry) == 5 else answer(entry)
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, device):
        with pytest.raises(InferenceError, match="this one"):
            await engine.embed_many(TEXTS)
        await asyncio.sleep(0)  # what has been cancelled gives its permits back
        assert device.free_permits == PERMITS
        assert endings(engine.metrics) == {"inference": 1}
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_inputs_before_the_first_that_fails_count_as_answered(tmp_path) -> None:
    runner = FakeRunner()
    runner.answer = lambda entry: InferenceError("this one") if len(entry) == 5 else answer(entry)
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, _):
        with pytest.raises(InferenceError, match="this one"):
            await engine.embed_many(TEXTS[:7])  # of 4, 5, ... tokens
        assert sample(engine.metrics, "te_embed_count_total") == 7
        assert sample(engine.metrics, "te_embed_success_total") == 1
        assert sample(engine.metrics, "te_embed_duration_count") == 1


async def test_first_in_order_decides_even_if_it_fails_last(tmp_path) -> None:
    runner = FakeRunner()
    runner.answer = lambda entry: InferenceError(f"of {len(entry)} tokens")
    async with fake_engine(folders.embedder(tmp_path), runner, max_batch_requests=1) as (engine, device):
        runner.gate.clear()
        blocker = asyncio.ensure_future(engine.embed("hello"))
        await asyncio.to_thread(runner.running.wait, 10)
        task = asyncio.ensure_future(engine.embed_many(["a b c", "a"]))
        async with asyncio.timeout(10):
            while device.waiting < 2:
                await asyncio.sleep(0)
        engine._line.deliver([Failure(2, InferenceError("the second one"))])
        runner.gate.set()
        with pytest.raises(InferenceError, match="of 5 tokens"):
            await task
        with pytest.raises(InferenceError, match="of 3 tokens"):
            await blocker
        await asyncio.sleep(0)
        assert device.free_permits == PERMITS


@pytest.mark.parametrize("fails", [False, True])
async def test_list_that_has_ended_leaves_no_vectors_to_the_garbage_collector(tmp_path, fails) -> None:
    given: list[weakref.ref[np.ndarray]] = []

    def remember(entry: Entry) -> tuple[np.ndarray] | InferenceError:
        if fails and len(entry) == 5:
            return InferenceError("this one")
        (vector,) = answer(entry)
        given.append(weakref.ref(vector))
        return (vector,)

    runner = FakeRunner()
    runner.answer = remember
    gc.collect()
    gc.disable()
    try:
        async with fake_engine(folders.embedder(tmp_path), runner) as (engine, _):
            with suppress(InferenceError):
                await engine.embed_many(TEXTS[:100])
        await asyncio.sleep(0)  # what the device has said last is heard
        assert len(given) > 50
        assert [ref for ref in given if ref() is not None] == []
    finally:
        gc.enable()


async def test_cancelled_list_leaves_the_queue(tmp_path) -> None:
    runner = FakeRunner()
    runner.gate.clear()
    async with fake_engine(folders.embedder(tmp_path), runner) as (engine, device):
        task = asyncio.ensure_future(engine.embed_many(TEXTS))
        await asyncio.to_thread(runner.running.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert device.free_permits == PERMITS
        assert device.waiting == 0
        assert not engine._line._takers
        runner.gate.set()


async def test_too_long_text_fails_unless_it_is_truncated(tmp_path) -> None:
    long = "hello " * 600
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        with pytest.raises(ValidationError, match="tokens"):
            await engine.embed_many(["a", long])
        assert len((await engine.embed_many(["a", Input(long, truncate=True)])).embeddings) == 2


async def test_text_alone_is_no_list(tmp_path) -> None:
    async with fake_engine(folders.embedder(tmp_path)) as (engine, _):
        with pytest.raises(ValidationError, match="`inputs` must be a list"):
            await engine.embed_many("hello")


async def test_cancelled_list_takes_even_the_text_that_it_waits_for_out_of_the_queue(tmp_path) -> None:
    runner = FakeRunner()
    runner.gate.clear()
    async with fake_engine(folders.embedder(tmp_path), runner, max_batch_requests=1) as (engine, device):
        blocker = asyncio.ensure_future(engine.embed("hello"))
        await asyncio.to_thread(runner.running.wait, 10)
        task = asyncio.ensure_future(engine.embed_many(TEXTS[:20]))
        async with asyncio.timeout(10):
            while device.waiting < 20:
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert device.waiting == 0
        runner.gate.set()
        await blocker


async def test_nothing_more_is_sent_once_one_has_failed(tmp_path) -> None:
    runner = FakeRunner()
    runner.answer = lambda entry: InferenceError("the first one")
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=8) as (engine, _):
        with pytest.raises(InferenceError, match="the first one"):
            await engine.embed_many(TEXTS * 10)
    assert sum(map(len, runner.batches)) < 200


async def test_wait_for_a_permit_is_no_time_of_the_tokenizer(tmp_path) -> None:
    runner = FakeRunner()
    runner.gate.clear()
    async with fake_engine(folders.embedder(tmp_path), runner, max_concurrent_requests=2) as (engine, _):
        task = asyncio.ensure_future(engine.embed_many(TEXTS[:20]))
        await asyncio.to_thread(runner.running.wait, 10)
        await asyncio.sleep(0.3)  # the others wait for permits
        runner.gate.set()
        metadata = (await task).metadata
    assert metadata.tokenization_time_ns < 100_000_000 < metadata.total_time_ns
