"""The device as a front-end sees it: in another process, behind a channel and shared memory."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tei_grpc.config import EngineConfig
from tei_grpc.engine.device import Deliver
from tei_grpc.errors import (
    DeadlineError,
    ErrorKind,
    InferenceError,
    OverloadedError,
    StartupError,
    TeiError,
    UnavailableError,
)
from tei_grpc.frontends.channel import Channel
from tei_grpc.frontends.messages import (
    Admit,
    Answered,
    Cancel,
    Drain,
    Failed,
    Granted,
    Healthy,
    Loaded,
    Located,
    Message,
    Refused,
    Release,
    Reload,
    Submit,
    Withdraw,
)
from tei_grpc.frontends.slots import Slots, to_arrays
from tei_grpc.loading.hub import Snapshot
from tei_grpc.types import Entry, Failure, Kind, ModelFacts, Output

GONE = "The model runner is gone"
KINDS = list(Kind)
ERROR_KINDS = list(ErrorKind)
ERRORS: dict[ErrorKind, type[TeiError]] = {  # what a device answers with
    ErrorKind.DEADLINE: DeadlineError,
    ErrorKind.UNAVAILABLE: UnavailableError,
    ErrorKind.INFERENCE: InferenceError,
}


class _Flight(NamedTuple):
    """An entry under way, and the slot it uses."""

    kind: Kind
    slot: int


class RemoteDevice:
    """A Device in the process at the other end of a channel, where queue and permits are.

    A permit comes with a slot. Between `admit` and `release` the slot is either idle or in use by one entry; an input
    has at most one entry at a time, so that there is always an idle slot for the entry that is submitted.
    """

    def __init__(self, end: socket.socket, memory: int, permits: int) -> None:
        """Take the channel's end and the file of the slots."""
        self.checkpoint: Future[Snapshot] = Future()  # a thread waits for it
        self.gone = asyncio.Event()  # set when the other process is
        self.ending = asyncio.Event()  # set when the front-end is told to end, or is alone
        self.on_reload: Callable[[], None] = lambda: None
        self._memory, self._permits = memory, permits
        self._slots: Slots | None = None
        self._ids = count()
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._idle: list[int] = []
        self._flights: dict[int, _Flight] = {}
        self._healthy = True
        self._facts: asyncio.Future[ModelFacts] = asyncio.get_running_loop().create_future()
        self._deliver: Deliver = lambda results: None
        self._on_state: Callable[[bool], None] = lambda healthy: None
        self._channel = Channel(end, self._receive, self._end)

    def fetch(self, config: EngineConfig) -> Snapshot:
        """Wait for the checkpoint that the other process has found. Raises StartupError. Not for the event loop."""
        return self.checkpoint.result()

    def tell(self, message: Message) -> None:
        """Say how far this front-end has come."""
        self._channel.send(message)

    async def start(self, deliver: Deliver, on_state: Callable[[bool], None]) -> ModelFacts:
        """See Device."""
        self._deliver = deliver
        self._on_state = on_state
        facts = await self._facts
        if not self._healthy:  # which was told before anybody listened
            on_state(False)
        return facts

    def admit(self, *, waits: bool) -> Awaitable[None] | None:
        """See Device. It always takes a way there and back."""
        self._check()
        return self._admit(waits)

    def release(self) -> None:
        """See Device."""
        if self._idle:  # otherwise the permits went with the other process
            self._channel.send(Release(self._idle.pop()))

    def submit(self, entry: Entry) -> None:
        """See Device."""
        self._check()
        if self._slots is None:
            raise RuntimeError("`start` has not returned")
        slot = self._idle.pop()
        self._flights[entry.id] = _Flight(entry.kind, slot)
        self._slots.put_ids(slot, entry)
        self._channel.send(_submission(entry, slot))

    def cancel(self, entry_id: int) -> None:
        """See Device."""
        if self._land(entry_id) is not None:
            self._channel.send(Cancel(entry_id))

    async def stop(self) -> bool:
        """See Device. The model itself goes on."""
        self._channel.close()
        return True

    def _check(self) -> None:
        if self.gone.is_set():
            raise UnavailableError(GONE)

    async def _admit(self, waits: bool) -> None:
        id, turn = next(self._ids), asyncio.get_running_loop().create_future()
        self._turns[id] = turn
        self._channel.send(Admit(id, waits))
        try:
            await turn
        except asyncio.CancelledError:
            if self._turns.pop(id, None) is not None:
                self._channel.send(Withdraw(id))
            elif not turn.cancelled() and turn.exception() is None:  # it was granted a moment ago
                self.release()
            raise

    def _land(self, entry_id: int) -> _Flight | None:
        """Take an entry out of the air, if it is still there; its slot is idle again."""
        flight = self._flights.pop(entry_id, None)
        if flight is not None:
            self._idle.append(flight.slot)
        return flight

    def _receive(self, message: Message) -> None:
        match message:
            case Answered():
                self._take_answer(message)
            case Granted(id, slot):
                self._take_permit(id, slot)
            case Refused(id):
                self._settle(id, OverloadedError())
            case Failed(id, kind, text):
                if self._land(id) is not None:
                    error = ERRORS.get(ERROR_KINDS[kind], InferenceError)
                    self._deliver([Failure(id, error(text))])
            case Healthy(healthy):
                self._set_healthy(healthy)
            case Located(text):
                folder, sha = json.loads(text)
                self.checkpoint.set_result(Snapshot(Path(folder), sha))
            case Loaded(longest, text):
                self._slots = Slots(self._memory, self._permits, longest)
                self._facts.set_result(ModelFacts(**json.loads(text)))
            case Reload():
                self.on_reload()
            case Drain():
                self.ending.set()

    def _take_answer(self, message: Answered) -> None:
        words = np.empty(message.words, np.int32)
        if message.has_file:
            self._channel.read_file(words.data)
        flight = self._land(message.id)
        if flight is None or self._slots is None:
            return  # the caller has left
        if not message.has_file:
            words = self._slots.take_arrays(flight.slot, message.words)
        arrays = to_arrays(flight.kind, words, message.rows)
        self._deliver([Output(message.id, arrays, message.queue_ns, message.inference_ns, message.batch_size)])

    def _take_permit(self, id: int, slot: int) -> None:
        turn = self._turns.pop(id, None)
        if turn is None or turn.done():  # the caller has left
            self._channel.send(Release(slot))
            return
        self._idle.append(slot)
        turn.set_result(None)

    def _settle(self, id: int, error: TeiError) -> None:
        turn = self._turns.pop(id, None)
        if turn is not None and not turn.done():
            turn.set_exception(error)

    def _set_healthy(self, healthy: bool) -> None:
        if healthy != self._healthy:
            self._healthy = healthy
            self._on_state(healthy)

    def _end(self) -> None:
        """Nobody is there any more: health turns, and all that waits is told at once."""
        self.gone.set()
        self._set_healthy(False)
        for id in list(self._turns):
            self._settle(id, UnavailableError(GONE))
        flights = list(self._flights)
        self._flights.clear()
        self._idle.clear()
        self._deliver([Failure(id, UnavailableError(GONE)) for id in flights])
        for future in (self.checkpoint, self._facts):
            if not future.done():
                future.set_exception(StartupError(GONE))
        self.ending.set()


def _submission(entry: Entry, slot: int) -> Submit:
    return Submit(
        entry.id,
        slot,
        KINDS.index(entry.kind),
        len(entry),
        entry.token_type_ids is not None,
        entry.prompt_tokens,
        entry.deadline_ns or 0,
        entry.queued_ns,
    )
