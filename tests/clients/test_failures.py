"""Both clients against a server that fails as told."""

import asyncio
import time

import grpc
import numpy as np
import pytest
from tei_client import AsyncClient, InvalidInputError, RetryPolicy, TeiClientError
from tei_client.connection import WINDOW
from tei_client.pb import tei_pb2, tei_pb2_grpc

from tests.clients.conftest import Failure, serve_embed

Code = grpc.StatusCode
NUMBERS = [str(number) for number in range(10)]
VECTORS = np.arange(10, dtype=np.float32)[:, None]


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.CANCELLED])
async def test_passing_failures_are_not_seen(scripted, connect, code):
    scripted.script.extend([Failure(code), Failure(code)])
    async with connect(scripted.address) as ask:
        assert (await ask("embed", "7")).tolist() == [7]
    assert scripted.calls == [["7"], ["7"], ["7"]]


async def test_attempts_are_counted(scripted, connect):
    scripted.script.extend([Failure(Code.UNAVAILABLE)] * 3)
    async with connect(scripted.address, retries=RetryPolicy(3, 0.001, 0.002)) as ask:
        with pytest.raises(TeiClientError) as caught:
            await ask("embed", "7")
    assert (caught.value.code, caught.value.message, caught.value.index) == (Code.UNAVAILABLE, "as scripted", None)
    assert len(scripted.calls) == 3


async def test_broken_stream_goes_on_where_it_broke(scripted, connect):
    scripted.script.extend([Failure(Code.UNAVAILABLE, answers=4), Failure(Code.RESOURCE_EXHAUSTED, answers=3)])
    async with connect(scripted.address) as ask:
        assert np.array_equal(await ask("embed", NUMBERS), VECTORS)
    assert [call[0] for call in scripted.calls] == ["0", "4", "7"]


async def test_refused_input_is_named_by_its_place_in_the_whole_list(scripted, connect):
    scripted.script.extend([Failure(Code.UNAVAILABLE, answers=4), Failure(Code.INVALID_ARGUMENT, 2, "too long")])
    async with connect(scripted.address) as ask:
        with pytest.raises(InvalidInputError) as caught:
            await ask("embed", NUMBERS)
    assert (caught.value.code, caught.value.message, caught.value.index) == (Code.INVALID_ARGUMENT, "too long", 6)
    assert len(scripted.calls) == 2


async def test_timeout_bounds_all_attempts_together(scripted, connect):
    scripted.script.extend([Failure(Code.UNAVAILABLE)] * 10_000)
    began = time.monotonic()
    async with connect(scripted.address, timeout=0.2, retries=RetryPolicy(10_000, 0.02, 0.02)) as ask:
        with pytest.raises(TeiClientError):
            await ask("embed", NUMBERS)
    assert time.monotonic() - began < 2


async def test_server_that_is_not_there_is_unavailable(connect):
    async with connect("127.0.0.1:1") as ask:
        with pytest.raises(TeiClientError) as caught:
            await ask("embed", NUMBERS)
    assert (caught.value.code, caught.value.index) == (Code.UNAVAILABLE, 0)


async def test_key_goes_with_every_attempt_of_every_kind(scripted, connect):
    scripted.script.append(Failure(Code.UNAVAILABLE))
    async with connect(scripted.address, api_key="secret") as ask:
        await ask("embed", "1")
        await ask("embed", ["1"])
    assert scripted.keys == ["Bearer secret"] * 3


class Slow(tei_pb2_grpc.EmbedServicer):
    """Reads whatever it gets; answers only once `gate` is open."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.ahead = self.most_ahead = 0
        self.full = asyncio.Event()
        self.left = asyncio.Event()

    async def Embed(self, request, context):
        self.full.set()
        try:
            await self.gate.wait()
        finally:
            self.left.set()

    async def EmbedStream(self, requests, context):
        texts = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, texts))
        try:
            await self.gate.wait()
            while (text := await texts.get()) is not None:
                self.ahead -= 1
                yield tei_pb2.EmbedResponse(embeddings=[float(text)])
        finally:
            reader.cancel()
            self.left.set()

    async def _read(self, requests, texts):
        async for request in requests:
            self.ahead += 1
            self.most_ahead = max(self.ahead, self.most_ahead)
            if self.ahead == WINDOW:
                self.full.set()
            texts.put_nowait(request.inputs)
        texts.put_nowait(None)


async def test_closing_ends_a_call_for_good(connect):
    slow = Slow()
    async with serve_embed(slow) as address, connect(address) as ask:
        asking = asyncio.create_task(ask("embed", "1"))
        await asyncio.wait_for(slow.full.wait(), 10)
        await ask("close")
        with pytest.raises(TeiClientError) as caught:
            await asyncio.wait_for(asking, 10)
    assert caught.value.code is Code.CANCELLED


async def test_no_more_than_the_window_is_under_way(connect):
    slow = Slow()
    numbers = [str(number) for number in range(3 * WINDOW)]
    async with serve_embed(slow) as address, connect(address) as ask:
        asking = asyncio.create_task(ask("embed", numbers))
        await asyncio.wait_for(slow.full.wait(), 10)
        slow.gate.set()
        assert (await asking)[:, 0].tolist() == list(range(3 * WINDOW))
    assert slow.most_ahead == WINDOW


async def test_stream_that_times_out_says_which_input_has_no_answer(connect):
    slow = Slow()
    async with serve_embed(slow) as address, connect(address, timeout=0.2) as ask:
        with pytest.raises(TeiClientError) as caught:
            await ask("embed", NUMBERS)
        await asyncio.wait_for(slow.left.wait(), 10)
    assert (caught.value.code, caught.value.index) == (Code.DEADLINE_EXCEEDED, 0)


@pytest.mark.parametrize("texts", ["1", ["1"] * 2 * WINDOW], ids=["unary", "stream"])
async def test_cancelled_task_ends_its_call_on_the_server(texts):
    slow = Slow()
    async with serve_embed(slow) as address, AsyncClient(address) as client:
        asking = asyncio.create_task(client.embed(texts))
        await asyncio.wait_for(slow.full.wait(), 10)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(slow.left.wait(), 10)


class Short(tei_pb2_grpc.EmbedServicer):
    """Ends every stream well, but with one answer."""

    async def EmbedStream(self, requests, context):
        async for _ in requests:
            pass
        yield tei_pb2.EmbedResponse(embeddings=[1])


async def test_stream_that_ends_early_is_an_error(connect):
    async with serve_embed(Short()) as address, connect(address) as ask:
        with pytest.raises(TeiClientError, match="after 1 of 10 answers") as caught:
            await ask("embed", NUMBERS)
    assert caught.value.code is Code.INTERNAL
