"""The line that one input walks: permit, tokenizer, queue, batch, model, and back as the result of a future."""

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from tei_grpc.engine.device import Device
from tei_grpc.engine.reranking import Answer, summarize
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import DeadlineError
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.metrics import Metrics
from tei_grpc.types import Caller, Encoding, Entry, Failure, Input, Kind, Metadata, ModelFacts, Output

RECENT = 512  # inputs that are looked at for failures before more are sent
TOGETHER = 64  # inputs that are tokenized in one go: long enough to be worth a hop to a thread, and soon on the device


class Loaded(NamedTuple):
    """What the engine has once the model is there."""

    model: ModelConfig
    tokenizer: Tokenizer
    device: Device
    facts: ModelFacts


class Sent(NamedTuple):
    """An input under way."""

    input: Input
    encoding: Encoding
    entry: Entry
    future: asyncio.Future[Output]
    started_ns: int  # as if it had been tokenized after it had its permit

    @property
    def has_failed(self) -> bool:
        """Whether its answer is an error."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is not None


class Line:
    """Sends inputs to the device's side and keeps the futures of those that are under way. For one event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._pending: dict[int, asyncio.Future[Output]] = {}
        self._ids = count()

    async def answer(self, loaded: Loaded, kind: Kind, input: Input, caller: Caller) -> Answer:
        """Permit -> tokenize -> queue -> batch -> model -> output; the permit is held to the end."""
        self._metrics.input_started(kind)
        turn = loaded.device.admit(waits=caller.waits)
        if turn is not None:
            await turn
        try:
            started = time.monotonic_ns()
            _check_deadline(caller, started)
            encoding = await loaded.tokenizer.encode(input)
            queued = time.monotonic_ns()
            _check_deadline(caller, queued)
            self._metrics.input_encoded(len(encoding.input_ids), is_cut=encoding.is_cut)
            output = await self._infer(loaded.device, _entry(next(self._ids), kind, encoding, caller, queued))
            metadata = _metadata(input, encoding, output, started, queued)
            self._metrics.input_succeeded(kind, metadata)
            return Answer(output, metadata)
        finally:
            loaded.device.release()

    async def answer_all(
        self, loaded: Loaded, kind: Kind, inputs: Sequence[Input], caller: Caller
    ) -> tuple[list[Answer], Metadata]:
        """As `answer`, for many, in their order, tokenized some at a time; the first that fails decides the error.

        Each has a permit of its own, for which it waits. Nothing is left under way.
        """
        sent: list[Sent] = []
        begun = time.monotonic_ns()
        try:
            for start in range(0, len(inputs), TOGETHER):
                if any(one.has_failed for one in sent[-RECENT:]):
                    break
                some = inputs[start : start + TOGETHER]
                started = time.monotonic_ns()
                _check_deadline(caller, started)
                encodings = await loaded.tokenizer.encode_all(some)
                took = time.monotonic_ns() - started
                for input, encoding in zip(some, encodings, strict=True):
                    sent.append(await self._send(loaded.device, kind, input, encoding, caller, took))
            answers = [self._answered(one, await one.future, kind) for one in sent]
            return answers, summarize([answer.metadata for answer in answers], time.monotonic_ns() - begun)
        finally:
            for one in sent:
                if one.future.cancel() or one.future.cancelled():  # with its caller
                    loaded.device.cancel(one.entry.id)
                else:
                    one.future.exception()  # of others than the first that failed nobody asks

    async def _send(
        self, device: Device, kind: Kind, input: Input, encoding: Encoding, caller: Caller, took: int
    ) -> "Sent":
        """Permit -> queue; the permit is given back when the future ends. To tokenize took `took` ns."""
        self._metrics.input_started(kind)
        turn = device.admit(waits=True)
        if turn is not None:
            await turn
        future: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        entry = _entry(next(self._ids), kind, encoding, caller, time.monotonic_ns())
        self._metrics.input_encoded(len(encoding.input_ids), is_cut=encoding.is_cut)
        self._pending[entry.id] = future
        future.add_done_callback(lambda _: self._end(device, entry.id))
        try:
            device.submit(entry)
        except BaseException:
            future.cancel()
            raise
        return Sent(input, encoding, entry, future, entry.queued_ns - took)

    def _end(self, device: Device, entry_id: int) -> None:
        self._pending.pop(entry_id, None)
        device.release()

    def _answered(self, one: "Sent", output: Output, kind: Kind) -> Answer:
        metadata = _metadata(one.input, one.encoding, output, one.started_ns, one.entry.queued_ns)
        self._metrics.input_succeeded(kind, metadata)
        return Answer(output, metadata)

    def deliver(self, results: Sequence[Output | Failure]) -> None:
        """Hand outputs to those who wait for them."""
        for result in results:
            future = self._pending.pop(result.id, None)
            if future is None or future.done():
                continue  # the caller has left
            if isinstance(result, Failure):
                future.set_exception(result.error)
            else:
                future.set_result(result)

    async def _infer(self, device: Device, entry: Entry) -> Output:
        future: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._pending[entry.id] = future
        try:
            device.submit(entry)
            return await future
        except asyncio.CancelledError:
            device.cancel(entry.id)
            raise
        finally:
            self._pending.pop(entry.id, None)


def _entry(id: int, kind: Kind, encoding: Encoding, caller: Caller, queued: int) -> Entry:
    return Entry(
        id, kind, encoding.input_ids, encoding.token_type_ids, encoding.prompt_tokens, caller.deadline_ns, queued
    )


def _check_deadline(caller: Caller, now: int) -> None:
    if caller.deadline_ns is not None and caller.deadline_ns <= now:
        raise DeadlineError


def _metadata(input: Input, encoding: Encoding, output: Output, started: int, queued: int) -> Metadata:
    return Metadata(
        compute_chars=input.chars,
        compute_tokens=len(encoding.input_ids),
        total_time_ns=time.monotonic_ns() - started,
        tokenization_time_ns=queued - started,
        queue_time_ns=output.queue_ns,
        inference_time_ns=output.inference_ns,
        batch_size=output.batch_size,
    )
