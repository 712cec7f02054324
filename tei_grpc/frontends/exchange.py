"""The side of the process with the model: it acts for every front-end on the one device, and keeps what each holds."""

import asyncio
import json
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from typing import NamedTuple

from tei_grpc.engine.device import Device
from tei_grpc.errors import ErrorKind, OverloadedError, TeiError, UnavailableError
from tei_grpc.frontends.channel import Channel
from tei_grpc.frontends.messages import (
    Admit,
    Answered,
    Broken,
    Cancel,
    Failed,
    Granted,
    Healthy,
    Listening,
    Loaded,
    Located,
    Message,
    Ready,
    Refused,
    Release,
    Submit,
    Withdraw,
)
from tei_grpc.frontends.slots import Slots, to_words
from tei_grpc.loading.hub import Snapshot
from tei_grpc.types import Entry, Failure, Kind, ModelFacts, Output

KINDS = list(Kind)
ERROR_KINDS = list(ErrorKind)


class Ticket(NamedTuple):
    """Whose entry it is, what it is called there, and its slot."""

    connection: "Connection"
    id: int
    slot: int


class Exchange:
    """What all front-ends share. For one event loop."""

    device: Device  # there, as the slots are, before any front-end can ask for a permit
    slots: Slots

    def __init__(self, memory: int, permits: int) -> None:
        """Take the file of the slots."""
        self.tickets: dict[int, Ticket] = {}
        self.ids = count()  # entries have names of their own here: two front-ends may use the same one
        self.free = list(range(permits))
        self._memory, self._permits = memory, permits
        self._news: list[Message] = []  # what a front-end has to hear first
        self._healthy = True
        self._connections: set[Connection] = set()

    def locate(self, checkpoint: Snapshot) -> None:
        """Tell all front-ends, also later ones, where the checkpoint is."""
        self._announce(Located(json.dumps([str(checkpoint.folder), checkpoint.sha])))

    def open(self, device: Device, facts: ModelFacts, longest: int) -> None:
        """Let the front-ends, also later ones, use the device; `longest` is the tokens of the longest input."""
        self.device = device
        self.slots = Slots(self._memory, self._permits, longest)
        self._announce(Loaded(longest, json.dumps(asdict(facts))))

    def connect(self, end: socket.socket) -> "Connection":
        """Serve a front-end at the other end of a socket pair."""
        connection = Connection(self, end, self._connections.discard)
        self._connections.add(connection)
        for message in [*self._news, Healthy(self._healthy)]:
            connection.send(message)
        return connection

    def deliver(self, results: Sequence[Output | Failure]) -> None:
        """Hand the device's results to those whose entries they are."""
        for result in results:
            ticket = self.tickets.pop(result.id, None)
            if ticket is not None:
                ticket.connection.answer(ticket, result)

    def follow(self, healthy: bool) -> None:
        """Tell all front-ends whether the device runs."""
        self._healthy = healthy
        self.tell(Healthy(healthy))

    def tell(self, message: Message) -> None:
        """Send a message to all front-ends."""
        for connection in self._connections:
            connection.send(message)

    def close(self) -> None:
        """Let go of all front-ends, which ends them."""
        for connection in list(self._connections):
            connection.close()

    def _announce(self, message: Message) -> None:
        self._news.append(message)
        self.tell(message)


class Connection:
    """One front-end: the permits and entries it has. When it is gone, all of them come back."""

    def __init__(self, exchange: Exchange, end: socket.socket, on_end: "Callable[[Connection], None]") -> None:
        self.listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.trouble: str | None = None  # why it cannot start
        self._exchange = exchange
        self._on_end = on_end
        self._waiting: OrderedDict[int, None] = OrderedDict()  # for permits
        self._turn: asyncio.Future[None] | None = None  # the next permit for one of them
        self._slots: set[int] = set()
        self._entries: dict[int, int] = {}  # its names -> ours
        self._channel = Channel(end, self._receive, self._end)

    def send(self, message: Message) -> None:
        """Send a message."""
        self._channel.send(message)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
        self._end()

    def answer(self, ticket: Ticket, result: Output | Failure) -> None:
        """Send what became of an entry."""
        del self._entries[ticket.id]
        if isinstance(result, Failure):
            self.send(_failure(ticket.id, result.error))
            return
        words = to_words(result.arrays)
        fits = self._exchange.slots.put_arrays(ticket.slot, words)
        rows = len(result.arrays[0])
        times = result.queue_ns, result.inference_ns, result.batch_size
        message = Answered(ticket.id, len(words), rows, *times, not fits)
        self._channel.send(message, None if fits else words.data)

    def _receive(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Admit(id, waits):
                self._admit(id, waits)
            case Release(slot):
                self._slots.remove(slot)
                self._give_back(slot)
            case Cancel(id):
                self._cancel(id)
            case Withdraw(id):
                self._waiting.pop(id, None)
            case Listening():
                self.listening.set_result(None)
            case Ready():
                self.ready.set_result(None)
            case Broken(text):
                self.trouble = text

    def _submit(self, message: Submit) -> None:
        exchange = self._exchange
        entry = _entry(next(exchange.ids), message, exchange.slots)
        exchange.tickets[entry.id] = Ticket(self, message.id, message.slot)
        self._entries[message.id] = entry.id
        try:
            exchange.device.submit(entry)
        except UnavailableError as error:
            exchange.deliver([Failure(entry.id, error)])

    def _cancel(self, id: int) -> None:
        ours = self._entries.pop(id, None)
        if ours is not None:  # otherwise the answer is on its way
            del self._exchange.tickets[ours]
            self._exchange.device.cancel(ours)

    def _admit(self, id: int, waits: bool) -> None:
        if waits:
            self._waiting[id] = None
            if self._turn is None:
                self._take_turns()
            return
        try:
            self._exchange.device.admit(waits=False)
        except OverloadedError:
            self.send(Refused(id))
        else:
            self._grant(id)

    def _take_turns(self) -> None:
        """Grant permits to those who wait, in order, until one has to be waited for."""
        while self._waiting:
            turn = self._exchange.device.admit(waits=True)
            if turn is not None:
                self._turn = asyncio.ensure_future(turn)
                self._turn.add_done_callback(self._end_turn)
                return
            self._grant_first()

    def _end_turn(self, turn: asyncio.Future[None]) -> None:
        self._turn = None
        if turn.cancelled():
            return
        if self._waiting:
            self._grant_first()
            self._take_turns()
        else:  # they have left while it was on its way
            self._exchange.device.release()

    def _grant_first(self) -> None:
        id, _ = self._waiting.popitem(last=False)
        self._grant(id)

    def _grant(self, id: int) -> None:
        slot = self._exchange.free.pop()
        self._slots.add(slot)
        self.send(Granted(id, slot))

    def _give_back(self, slot: int) -> None:
        self._exchange.free.append(slot)
        self._exchange.device.release()

    def _end(self) -> None:
        self._waiting.clear()
        if self._turn is not None:
            self._turn.cancel()
        for id in list(self._entries):
            self._cancel(id)
        while self._slots:
            self._give_back(self._slots.pop())
        self._on_end(self)


def _entry(id: int, message: Submit, slots: Slots) -> Entry:
    ids, types = slots.take_ids(message.slot, message.length, has_types=message.has_types)
    deadline = message.deadline_ns or None
    return Entry(id, KINDS[message.kind], ids, types, message.prompt_tokens, deadline, message.queued_ns)


def _failure(id: int, error: Exception) -> Failed:
    kind = error.kind if isinstance(error, TeiError) else ErrorKind.INFERENCE
    return Failed(id, ERROR_KINDS.index(kind), str(error))
