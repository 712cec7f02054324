"""Every RPC without a socket: any bytes walk through the real methods, servicers, validation and tokenizer."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tei_grpc.config import EngineConfig
from tei_grpc.engine.device import Deliver
from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2
from tei_grpc.rpc.calls import RunningCalls
from tei_grpc.rpc.gate import Gate
from tei_grpc.rpc.health import HealthServicer
from tei_grpc.rpc.methods import Methods, Surroundings
from tei_grpc.rpc.reflection import V1_SERVICE, add_reflection
from tei_grpc.rpc.room import Rooms
from tei_grpc.servicers import add_servicers
from tei_grpc.types import Entry, ModelFacts, Output
from tests import folders
from tests.fakes import FakeRunner, answer
from tests.fuzz.bytes import damage, edits, vary

Code = grpc.StatusCode

SECONDS = 60.0  # that one call may take, when others want the processor, too; it takes less than a millisecond
WINDOW = 4
DOORS = 4
SETTINGS = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))

FILES = (tei_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
REQUESTS = {
    f"/{service.full_name}/{method.name}": method.input_type._concrete_class
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods
}
REQUESTS[f"/{V1_SERVICE}/ServerReflectionInfo"] = reflection_pb2.ServerReflectionRequest
METHODS = sorted(REQUESTS)

REFUSALS = {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND}
UNDECODABLE = {"Request could not be decoded", "Missing request message"}
INSIDE = re.compile(r"Traceback|tei_grpc|site-packages|\.py\b|object at 0x|Error\(|Exception|panicked")


class Call(NamedTuple):
    """Which model is asked, by which method, with what."""

    door: int
    method: str
    messages: list[bytes]


class Context:
    """What grpc.aio is to a handler: gives it the messages, keeps what it answers."""

    def __init__(self, handler: Any, messages: Sequence[bytes]) -> None:
        self._handler = handler
        self._messages = iter(messages)
        self.replies: list[bytes] = []
        self.status = (Code.OK, "")

    async def read(self) -> Any:
        raw = next(self._messages, grpc.aio.EOF)
        decode = self._handler.request_deserializer
        return raw if raw is grpc.aio.EOF or decode is None else decode(raw)

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not grpc.aio.EOF:
            yield request

    async def write(self, reply: Any) -> None:
        encode = self._handler.response_serializer
        self.replies.append(reply if encode is None else encode(reply))

    async def send_initial_metadata(self, metadata: object) -> None:
        """Nobody looks at it."""

    async def abort(self, code: Code, details: str = "", trailing_metadata: object = ()) -> NoReturn:
        self.status = (code, details)
        raise grpc.aio.AbortError

    def time_remaining(self) -> None:
        """No deadline."""

    async def answer(self) -> None:
        """Run the handler to its end."""
        handler = self._handler
        try:
            if handler.response_streaming:
                await handler.stream_stream(self._iterate(), self)
            else:
                self.replies.append(await handler.stream_unary(self._iterate(), self))
        except grpc.aio.AbortError:
            pass


class AtOnce:
    """A device that answers on the event loop: no thread has to be waited for."""

    async def start(self, deliver: Deliver, on_state: Callable[[bool], None]) -> ModelFacts:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        return FakeRunner().facts

    def admit(self, *, waits: bool) -> None:
        """There are permits without end."""

    def release(self) -> None:
        """See `admit`."""

    def submit(self, entry: Entry) -> None:
        self._loop.call_soon(self._deliver, [Output(entry.id, answer(entry), 0, 0, 1)])

    def cancel(self, entry_id: int) -> None:
        """Nobody leaves."""

    async def stop(self) -> bool:
        return True


class Door:
    """The services around one engine, composed as a server is."""

    def __init__(self, engine: Engine) -> None:
        self._handlers: dict[str, Any] = {}
        server: Any = self
        methods = Methods(server, Surroundings(RunningCalls(), engine.metrics, Gate(lambda: engine.state, None)))
        health = HealthServicer()
        health.end()  # Watch would wait for ever
        add_servicers(methods, engine, Rooms(WINDOW))
        health_pb2_grpc.add_HealthServicer_to_server(health, methods)
        add_reflection(methods)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            for method in METHODS:
                if (found := handler.service(SimpleNamespace(method=method))) is not None:
                    self._handlers[method] = found

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def call(self, method: str, messages: Sequence[bytes]) -> Context:
        context = Context(self._handlers[method], messages)
        await context.answer()
        return context


class Stage:
    """Models of every kind, each behind its door."""

    def __init__(self, loop: asyncio.AbstractEventLoop, doors: Sequence[Door]) -> None:
        self._loop = loop
        self._doors = doors
        self.outcomes: Counter[str] = Counter()

    def check(self, calls: Sequence[Call]) -> None:
        """Fail unless every call ends, in time, with an answer or with an error that is meant for callers."""
        self._loop.run_until_complete(self._check(calls))

    async def _check(self, calls: Sequence[Call]) -> None:
        for call in calls:
            try:
                async with asyncio.timeout(SECONDS):
                    context = await self._doors[call.door].call(call.method, call.messages)
            except TimeoutError:
                raise AssertionError(f"hung: {call}") from None
            self._judge(call, context)

    def _judge(self, call: Call, context: Context) -> None:
        code, text = context.status
        self.outcomes[code.name] += 1
        is_clean = code in REFUSALS or code is Code.OK or (code is Code.INTERNAL and text in UNDECODABLE)
        assert is_clean, (call, code, text)
        assert not INSIDE.search(text), (call, text)


@contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    """An embedding model with prompts, rerankers with and without a chat template, and SPLADE; without weights."""
    prompts = {"config_sentence_transformers.json": {"prompts": {"query": "query: ", "": ""}}}
    models = [
        folders.embedder(folder / "embedder", prompts),
        folders.reranker(folder / "reranker"),
        folders.splade(folder / "splade"),
        folders.reranker(folder / "templated"),
    ]
    template = "{% for m in messages if m.role in ('query', 'document') %}<{{ m.content }}>{% endfor %}"
    (folder / "templated" / "chat_template.jinja").write_text(template)
    loop = asyncio.new_event_loop()
    engines = AsyncExitStack()
    try:
        started = [loop.run_until_complete(engines.enter_async_context(_engine(model))) for model in models]
        yield Stage(loop, [Door(engine) for engine in started])
    finally:
        loop.run_until_complete(engines.aclose())
        loop.close()


def _engine(folder: Path) -> Engine:
    config = EngineConfig(model_id=str(folder), tokenization_workers=1)
    return Engine(config, AtOnce())


TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(("", "query", "\0", "[CLS] [SEP]", "\ufdfa", "\u0130", "e\u0301" * 20, "\U0001f468\u200d" * 9)),
    st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=4), st.integers(1, 5000)),
)
INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2)
UINT32 = st.integers(0, 100) | st.integers(0, 2**32 - 1)
VALUES = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_ENUM: INT32,
    FieldDescriptor.TYPE_INT32: INT32,
    FieldDescriptor.TYPE_UINT32: UINT32,
}


def messages_of(request: Any) -> st.SearchStrategy[bytes]:
    """Well-formed requests, any of their fields set to anything that fits."""
    fields = {}
    for field in request.DESCRIPTOR.fields:
        if field.type in VALUES:
            one = VALUES[field.type]
            fields[field.name] = st.lists(one, max_size=40) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: request(**values).SerializeToString())


RAW = st.binary(max_size=300)
REQUESTS_OF_ANY = st.one_of([messages_of(REQUESTS[method]) for method in METHODS])


def calls_of(method: str) -> st.SearchStrategy[Call]:
    """Calls of `method` with its own requests, damaged ones, those of other methods, and bytes of any kind."""
    own = messages_of(REQUESTS[method])
    message = st.one_of(own, st.builds(damage, own, edits), REQUESTS_OF_ANY, RAW)
    return st.builds(Call, st.integers(0, DOORS - 1), st.just(method), st.lists(message, max_size=3))


CALLS = st.one_of([calls_of(method) for method in METHODS])


def fuzz_calls(stage: Stage, *, examples: int = 100, variants: int = 0) -> Any:
    """A hypothesis test over all calls; hand its `fuzz_one_input` to a fuzzer, or call it.

    After each call come so many `variants` of it, which are much cheaper than calls that hypothesis draws.
    """

    @settings(SETTINGS, max_examples=examples)
    @given(CALLS)
    def check(call: Call) -> None:
        stage.check([call, *(variants_of(call, variants) if call.messages else ())])

    return check


def variants_of(call: Call, count: int) -> Iterator[Call]:
    """The call with its messages damaged in `count` ways, always the same ones."""
    rng = random.Random(b"".join(call.messages))
    for _ in range(count):
        yield call._replace(messages=[vary(raw, rng) for raw in call.messages])
