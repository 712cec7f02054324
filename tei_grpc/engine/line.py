"""The line that one input walks: permit, tokenizer, queue, batch, model, and back as the result of a future."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from tei_grpc.engine.device import Device
from tei_grpc.engine.reranking import Answer, summarize
from tei_grpc.engine.tokenizer import Tokenizer
from tei_grpc.errors import DeadlineError
from tei_grpc.loading.model_config import ModelConfig
from tei_grpc.metrics import Metrics
from tei_grpc.types import Caller, Encoding, Entry, Failure, Input, Kind, Metadata, ModelFacts, Output

TOGETHER = 64  # inputs that are tokenized in one go: long enough to be worth a hop to a thread, and soon on the device


class Loaded(NamedTuple):
    """What the engine has once the model is there."""

    model: ModelConfig
    tokenizer: Tokenizer
    device: Device
    facts: ModelFacts


Taker = Callable[[Output | Failure], None]


class Sent(NamedTuple):
    """An input on its way."""

    chars: int
    entry: Entry
    tokenization_ns: int  # it took to tokenize it, with others where they are together


class Pending:
    """The inputs of one list: those that are under way, each with a permit, and what the others have come to."""

    def __init__(self, device: Device, takers: dict[int, Taker]) -> None:
        """Take the line's book of who takes which result."""
        self.answered: list[Answer] = []  # in the order of the list, as far as `wait` has come
        self.has_failed = False  # one of them
        self._device, self._takers = device, takers
        self._sent: list[Sent] = []
        self._results: dict[int, Output | Failure] = {}
        self._ended_ns: dict[int, int] = {}
        self._changed = asyncio.Event()

    def submit(self, sent: Sent) -> None:
        """Put an input that has a permit into the queue. Raises UnavailableError."""
        self._takers[sent.entry.id] = self._take
        self._sent.append(sent)
        self._device.submit(sent.entry)

    def _take(self, result: Output | Failure) -> None:
        self._results[result.id] = result
        self._ended_ns[result.id] = time.monotonic_ns()
        self.has_failed |= isinstance(result, Failure)
        self._device.release()
        self._changed.set()

    async def wait(self) -> None:
        """Until all are answered. Raises the error of the first that is not."""
        for sent in self._sent:
            id = sent.entry.id
            while id not in self._results:
                self._changed.clear()
                await self._changed.wait()
            result = self._results[id]
            if isinstance(result, Failure):
                try:
                    raise result.error
                finally:
                    del result  # which the error would keep, and that it
            self.answered.append(Answer(result, _metadata(sent, result, self._ended_ns[id])))

    def leave(self) -> None:
        """Have nothing under way any more, and keep no error."""
        for id in [sent.entry.id for sent in self._sent if sent.entry.id not in self._results]:
            del self._takers[id]
            self._device.cancel(id)
            self._device.release()
        self._results.clear()


class Line:
    """Sends inputs to the device's side and hands on what comes back for those under way. For one event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._takers: dict[int, Taker] = {}
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
            sent = Sent(input.chars, _entry(next(self._ids), kind, encoding, caller, queued), queued - started)
            output = await self._infer(loaded.device, sent.entry)
            metadata = _metadata(sent, output, time.monotonic_ns())
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
        pending = Pending(loaded.device, self._takers)
        begun = time.monotonic_ns()
        try:
            for start in range(0, len(inputs), TOGETHER):
                if pending.has_failed:
                    break
                await self._send(loaded, pending, kind, inputs[start : start + TOGETHER], caller)
            await pending.wait()
            return pending.answered, summarize(
                [each.metadata for each in pending.answered], time.monotonic_ns() - begun
            )
        finally:
            pending.leave()
            self._metrics.inputs_succeeded(kind, [each.metadata for each in pending.answered])

    async def _send(
        self, loaded: Loaded, pending: Pending, kind: Kind, inputs: Sequence[Input], caller: Caller
    ) -> None:
        """Tokenize together; then each: permit -> queue."""
        started = time.monotonic_ns()
        _check_deadline(caller, started)
        encodings = await loaded.tokenizer.encode_all(inputs)
        took = time.monotonic_ns() - started
        for input, encoding in zip(inputs, encodings, strict=True):
            self._metrics.input_started(kind)
            turn = loaded.device.admit(waits=True)
            if turn is not None:
                await turn
            self._metrics.input_encoded(len(encoding.input_ids), is_cut=encoding.is_cut)
            entry = _entry(next(self._ids), kind, encoding, caller, time.monotonic_ns())
            pending.submit(Sent(input.chars, entry, took))

    def deliver(self, results: Sequence[Output | Failure]) -> None:
        """Hand results to those who wait for them; who does not has left."""
        for result in results:
            take = self._takers.pop(result.id, None)
            if take is not None:
                take(result)

    async def _infer(self, device: Device, entry: Entry) -> Output:
        future: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._takers[entry.id] = partial(_settle, future)
        try:
            device.submit(entry)
            return await future
        except asyncio.CancelledError:
            device.cancel(entry.id)
            raise
        finally:
            self._takers.pop(entry.id, None)


def _settle(future: asyncio.Future[Output], result: Output | Failure) -> None:
    if future.done():  # the caller has left
        return
    if isinstance(result, Failure):
        future.set_exception(result.error)
    else:
        future.set_result(result)


def _entry(id: int, kind: Kind, encoding: Encoding, caller: Caller, queued: int) -> Entry:
    return Entry(
        id, kind, encoding.input_ids, encoding.token_type_ids, encoding.prompt_tokens, caller.deadline_ns, queued
    )


def _check_deadline(caller: Caller, now: int) -> None:
    if caller.deadline_ns is not None and caller.deadline_ns <= now:
        raise DeadlineError


def _metadata(sent: Sent, output: Output, ended: int) -> Metadata:
    return Metadata(
        compute_chars=sent.chars,
        compute_tokens=len(sent.entry.input_ids),
        total_time_ns=ended - sent.entry.queued_ns + sent.tokenization_ns,
        tokenization_time_ns=sent.tokenization_ns,
        queue_time_ns=output.queue_ns,
        inference_time_ns=output.inference_ns,
        batch_size=output.batch_size,
    )
