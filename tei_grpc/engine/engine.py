"""The engine: each public verb is the list of stages that a request walks. It is the Python API, too."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from tei_grpc.config import EngineConfig
from tei_grpc.engine import finish, validation
from tei_grpc.engine.device import Device
from tei_grpc.engine.info import describe
from tei_grpc.engine.inputs import as_input, as_scored
from tei_grpc.engine.line import Line, Loaded
from tei_grpc.engine.queue import Admission
from tei_grpc.engine.request import Books, Request
from tei_grpc.engine.reranking import Reranking, all_in_order
from tei_grpc.engine.tokenizer import Form, Tokenizer
from tei_grpc.errors import StartupError, UnavailableError
from tei_grpc.loading import hub
from tei_grpc.loading.failures import loading_errors
from tei_grpc.loading.hub import Snapshot
from tei_grpc.loading.model_config import ModelConfig, read_model_config
from tei_grpc.metrics import Metrics
from tei_grpc.types import (
    Caller,
    EmbedAllResult,
    EmbedManyResult,
    EmbedResult,
    EmbedSparseResult,
    Info,
    Input,
    Kind,
    PredictResult,
    RerankResult,
    Scoring,
    SimpleToken,
    State,
)

if TYPE_CHECKING:
    from tei_grpc.traces.recorder import Traces

T = TypeVar("T")

UNARY, WAITING = Caller(), Caller(waits=True)
SCORING = Scoring()


class Engine:
    """Serves one model. `async with Engine(EngineConfig(model_id=...)) as engine: await engine.embed("text")`.

    All verbs raise TeiError only, besides CancelledError when the calling task is cancelled; then the entry leaves the
    queue. To be used from one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device | None = None,
        metrics: Metrics | None = None,
        traces: "Traces | None" = None,
        fetch: Callable[[EngineConfig], Snapshot] = hub.fetch,
    ) -> None:
        """Take what finds the checkpoint's files, in a thread: `fetch`."""
        self.config = config
        self._fetch = fetch
        self.metrics = metrics or Metrics()
        self._books = Books(self.metrics, traces)
        self.state = State.LOADING
        self._device = device
        self._loaded: Loaded | None = None
        self._info: Info | None = None
        self._is_started = False
        self.is_stuck = False
        self._watchers: list[Callable[[State], None]] = []
        self._line = Line(self.metrics)
        self._tokenizing = Admission(config.max_concurrent_requests)  # of Tokenize and Decode, which need no model

    @property
    def info(self) -> Info:
        """What is served, and within which limits. Raises UnavailableError until the model is loaded."""
        if self._info is None:
            raise UnavailableError("The model is not loaded")
        return self._info

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Find the checkpoint, load it, warm it up; once in an engine's life. Raises StartupError."""
        if self._is_started:
            raise StartupError("An engine can be started once; make a new one")
        self._is_started = True
        with loading_errors(self.config):
            await self._load()

    async def _load(self) -> None:
        checkpoint = await asyncio.to_thread(self._fetch, self.config)
        model = await asyncio.to_thread(read_model_config, checkpoint.folder, self.config)
        tokenizer = await asyncio.to_thread(Tokenizer, model, self.config)
        self._check_wanted()
        self.metrics.serve_model(model.max_input_length)
        if self._device is None:
            self._device = _local_device(model, self.config, self.metrics)
        facts = await self._device.start(self._line.deliver, self._follow_device)
        self._check_wanted()
        self._loaded = Loaded(model, tokenizer, self._device, facts)
        self._info = describe(self.config, model, facts, sha=checkpoint.sha, tokenization_workers=tokenizer.workers)
        self.metrics.describe(self._info)
        if self.state is State.LOADING:  # otherwise the device has failed already
            self._set_state(State.SERVING)

    def _check_wanted(self) -> None:
        if self.state is State.DRAINING:
            raise StartupError("The engine was stopped while it was loading")

    async def stop(self) -> None:
        """Fail what still waits with UnavailableError and let go of the model, unless a batch hangs (`is_stuck`)."""
        self.drain()
        if self._device is not None:
            self.is_stuck = not await self._device.stop()
        if self._loaded is not None:
            self._loaded.tokenizer.close()
            self._loaded = None

    def drain(self) -> None:
        """Tell watchers that the end is near. Running calls go on; front doors let no new ones in."""
        self._set_state(State.DRAINING)

    def on_state(self, watcher: Callable[[State], None]) -> None:
        """Call `watcher` on the event loop at every change of `state`."""
        self._watchers.append(watcher)

    async def embed(
        self, input: Input | str, *, normalize: bool = True, dimensions: int | None = None, caller: Caller = UNARY
    ) -> EmbedResult:
        """One pooled vector [dimensions], float32; of unit length if `normalize`."""
        with self._request(caller, Kind.EMBED) as request:
            loaded = self._checked()
            input = as_input(input)
            validation.check_kind(loaded.model, Kind.EMBED, normalize=normalize)
            validation.check_input(loaded.model, input)
            validation.check_dimensions(dimensions, loaded.facts.embedding_size)
            answer = await self._line.answer(loaded, Kind.EMBED, input, caller)
            vector = finish.embedding(answer.output.arrays[0], normalize=normalize, dimensions=dimensions)
            request.succeed(answer.metadata)
            return EmbedResult(vector, answer.metadata)

    async def embed_many(
        self, inputs: Sequence[Input | str], *, normalize: bool = True, dimensions: int | None = None
    ) -> EmbedManyResult:
        """Pooled vectors of many inputs, float32 [inputs, dimensions], in their order.

        They are what `embed` gives for each, sooner, because inputs are tokenized many at a time. Each waits for a
        permit of its own; the first that fails decides the error.
        """
        with self._request(WAITING, Kind.EMBED, "batch") as request:
            loaded = self._checked()
            validation.check_list(inputs)
            validation.check_kind(loaded.model, Kind.EMBED, normalize=normalize)
            validation.check_dimensions(dimensions, loaded.facts.embedding_size)
            given = [as_input(input) for input in inputs]
            for input in given:
                validation.check_input(loaded.model, input)
            answers, metadata = await self._line.answer_all(loaded, Kind.EMBED, given, WAITING)
            found = [answer.output.arrays[0] for answer in answers]
            vectors = finish.embeddings(found, normalize=normalize, dimensions=dimensions)
            request.succeed(metadata)
            return EmbedManyResult(vectors, metadata)

    async def embed_all(self, input: Input | str, *, caller: Caller = UNARY) -> EmbedAllResult:
        """One vector per token [tokens, hidden], float32; special tokens included, never normalized."""
        with self._request(caller, Kind.EMBED_ALL) as request:
            loaded = self._checked()
            input = as_input(input)
            validation.check_kind(loaded.model, Kind.EMBED_ALL)
            validation.check_input(loaded.model, input)
            answer = await self._line.answer(loaded, Kind.EMBED_ALL, input, caller)
            request.succeed(answer.metadata)
            return EmbedAllResult(answer.output.arrays[0], answer.metadata)

    async def embed_sparse(self, input: Input | str, *, caller: Caller = UNARY) -> EmbedSparseResult:
        """The non-zero entries of one vocabulary-sized vector."""
        with self._request(caller, Kind.EMBED_SPARSE) as request:
            loaded = self._checked()
            input = as_input(input)
            validation.check_kind(loaded.model, Kind.EMBED_SPARSE)
            validation.check_input(loaded.model, input)
            answer = await self._line.answer(loaded, Kind.EMBED_SPARSE, input, caller)
            indices, values = answer.output.arrays
            request.succeed(answer.metadata)
            return EmbedSparseResult(indices, values, answer.metadata)

    async def predict(
        self, texts: str | Sequence[str], *, scoring: Scoring = SCORING, caller: Caller = UNARY
    ) -> PredictResult:
        """Every label with its score, best first, for a text or a pair of texts."""
        with self._request(caller, Kind.PREDICT) as request:
            loaded = self._checked()
            texts = (texts,) if isinstance(texts, str) else texts
            validation.check_arity(texts)
            input = as_scored(*texts, scoring=scoring)
            validation.check_kind(loaded.model, Kind.PREDICT)
            validation.check_input(loaded.model, input)
            answer = await self._line.answer(loaded, Kind.PREDICT, input, caller)
            predictions = finish.predictions(
                answer.output.arrays[0],
                loaded.model.labels,
                raw_scores=scoring.raw_scores,
                multi_label=loaded.model.multi_label,
            )
            request.succeed(answer.metadata)
            return PredictResult(predictions, answer.metadata)

    async def rerank(
        self, query: str, texts: Sequence[str], *, scoring: Scoring = SCORING, caller: Caller = UNARY
    ) -> RerankResult:
        """The texts by their relevance to the query, best first. Each text waits for a permit of its own."""
        validation.check_some(texts)
        with self.reranking(caller) as reranking:
            validation.check_texts(texts, self.config.max_client_batch_size)
            inputs = [as_scored(query, text, scoring=scoring) for text in texts]
            scores = await all_in_order([reranking.score(input) for input in inputs])
            result = reranking.rank(scores, raw_scores=scoring.raw_scores)
            reranking.succeed(result)
            return result

    def reranking(self, caller: Caller = UNARY) -> Reranking:
        """One Rerank request whose texts may come one after the other. Raises ModelTypeError."""
        loaded = self._checked()
        validation.check_reranker(loaded.model)
        waiting = replace(caller, waits=True)
        return Reranking(
            loaded.model,
            self._request(caller, "rerank", "batch"),
            lambda input: self._line.answer(loaded, Kind.PREDICT, input, waiting),
        )

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, prompt_name: str | None = None, caller: Caller = UNARY
    ) -> list[SimpleToken]:
        """Every token of the prompt and the text, with UTF-8 byte offsets. Never truncates."""
        return await self.tokenize_into(
            list, text, add_special_tokens=add_special_tokens, prompt_name=prompt_name, caller=caller
        )

    async def tokenize_into(
        self,
        form: Form[T],
        text: str,
        *,
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        caller: Caller = UNARY,
    ) -> T:
        """What `form` makes of the tokens that `tokenize` gives, on the thread on which they are made."""
        loaded = self._checked()
        validation.check_text(loaded.model, text)
        async with self._tokenizing.permit(waits=caller.waits):
            return await loaded.tokenizer.tokenize(
                text, form, add_special_tokens=add_special_tokens, prompt_name=prompt_name
            )

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, caller: Caller = UNARY) -> str:
        """The text of token ids."""
        loaded = self._checked()
        validation.check_ids(loaded.model, ids)
        async with self._tokenizing.permit(waits=caller.waits):
            return await loaded.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _request(self, caller: Caller, kind: str, method: str | None = None) -> Request:
        return Request(self._books, caller, kind, method)

    def _checked(self) -> Loaded:
        if self._loaded is None:
            raise UnavailableError("The model is not loaded")
        return self._loaded

    def _follow_device(self, healthy: bool) -> None:
        self._set_state(State.SERVING if healthy else State.UNHEALTHY)

    def _set_state(self, state: State) -> None:
        if self.state in (state, State.DRAINING):
            return
        self.state = state
        for watcher in self._watchers:
            watcher(state)


def _local_device(model: ModelConfig, config: EngineConfig, metrics: Metrics) -> Device:
    from tei_grpc.engine.worker import Worker  # only a process that runs the model needs it

    return Worker(model, config, metrics)
