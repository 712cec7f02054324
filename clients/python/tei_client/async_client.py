"""The asyncio client."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

import grpc

from tei_client import calls
from tei_client.calls import Call, Shape
from tei_client.channel import KEEPALIVE, Option, TlsOptions, make_options
from tei_client.connection import Connection
from tei_client.progress import Progress
from tei_client.retry import DEFAULT_RETRIES, NO_RETRIES, RetryPolicy
from tei_client.types import Floats, Pair, Prediction, Rank, ServerInfo, SparseVector, Token, TruncationDirection

Reply = TypeVar("Reply")
Result = TypeVar("Result")

MAX_STREAMS = 64  # lists under way at a time, each read by a thread; more wait


class AsyncClient:
    """Calls a server from asyncio code; `Client` with `await`.

        async with AsyncClient("localhost:3000") as client:
            vectors = await client.embed(["What is Deep Learning?", "Deep learning is..."])

    Arguments and results are those of `Client`. Cancelling a task cancels its call on the server.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: TlsOptions | None = None,
        timeout: float | None = None,
        retries: RetryPolicy = DEFAULT_RETRIES,
        keepalive: float = KEEPALIVE,
        max_receive_message_size: int = -1,
        options: Sequence[Option] = (),
    ) -> None:
        """Connect at the first call; the arguments are those of `Client`."""
        channel_options = make_options(target, max_receive_message_size, options, keepalive)
        self._connection = Connection(target, api_key, tls, channel_options)
        self._threads = ThreadPoolExecutor(MAX_STREAMS, "tei-client")
        self._timeout = timeout
        self._retries = retries
        self._rerank_limit: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._connection.close()
        self._threads.shutdown(wait=False)

    async def embed(
        self,
        texts: str | Sequence[str],
        *,
        normalize: bool = True,
        truncate: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncation_direction: TruncationDirection = "right",
    ) -> Floats:
        """Return the vectors [texts, dim] of a list, or the vector [dim] of one text; float32."""
        return await self._run(
            calls.embed(
                texts,
                normalize=normalize,
                truncate=truncate,
                dimensions=dimensions,
                prompt_name=prompt_name,
                truncation_direction=truncation_direction,
            )
        )

    async def embed_all(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        prompt_name: str | None = None,
        truncation_direction: TruncationDirection = "right",
    ) -> list[Floats]:
        """Return [tokens, hidden] for each text: a vector per token, special tokens included, not normalized."""
        return await self._run(
            calls.embed_all(
                texts, truncate=truncate, prompt_name=prompt_name, truncation_direction=truncation_direction
            )
        )

    async def embed_sparse(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        prompt_name: str | None = None,
        truncation_direction: TruncationDirection = "right",
    ) -> list[SparseVector]:
        """Return the non-zero entries over the vocabulary for each text (SPLADE models)."""
        return await self._run(
            calls.embed_sparse(
                texts, truncate=truncate, prompt_name=prompt_name, truncation_direction=truncation_direction
            )
        )

    async def rerank(
        self,
        query: str,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        return_text: bool = False,
        truncation_direction: TruncationDirection = "right",
    ) -> list[Rank]:
        """Return all texts by descending relevance to `query`; scores are in 0 to 1, or logits with `raw_scores`.

        More texts than the server takes in one message go through RerankStream.
        """
        return await self._run(
            calls.rerank(
                query,
                texts,
                limit=await self._texts_per_rerank(),
                truncate=truncate,
                raw_scores=raw_scores,
                return_text=return_text,
                truncation_direction=truncation_direction,
            )
        )

    async def predict(
        self,
        inputs: Sequence[str | Pair],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        truncation_direction: TruncationDirection = "right",
    ) -> list[list[Prediction]]:
        """Return every label, best first, for each text or pair of texts; logits with `raw_scores`."""
        return await self._run(
            calls.predict(inputs, truncate=truncate, raw_scores=raw_scores, truncation_direction=truncation_direction)
        )

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[list[Token]]:
        """Return the tokens of each text."""
        return await self._run(calls.tokenize(texts, add_special_tokens=add_special_tokens, prompt_name=prompt_name))

    async def decode(self, ids: Sequence[Iterable[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""
        return await self._run(calls.decode(ids, skip_special_tokens=skip_special_tokens))

    async def info(self) -> ServerInfo:
        """Return what is being served, and within which limits."""
        return await self._run(calls.info())

    async def health(self, service: str = "") -> bool:
        """Return whether the server, or one service such as `tei.v1.Embed`, is serving; asks once, never retries."""
        return await self._run(calls.health(service), NO_RETRIES)

    async def _texts_per_rerank(self) -> int:
        if self._rerank_limit is None:
            self._rerank_limit = (await self.info()).max_client_batch_size
        return self._rerank_limit

    async def _run(self, call: Call[Reply, Result], retries: RetryPolicy | None = None) -> Result:
        progress = Progress(call, retries or self._retries, self._timeout)
        while not progress.done:
            try:
                await self._attempt(call, progress)
                progress.end()
            except grpc.RpcError as error:
                await asyncio.sleep(progress.fail(error.code(), error.details() or ""))
        return progress.finish()

    async def _attempt(self, call: Call[Reply, Result], progress: Progress[Reply, Result]) -> None:
        if call.shape is Shape.UNARY:
            progress.add(await _result(self._connection.begin(call, progress.remaining())))
            return
        stream = self._connection.open(call, progress)
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, stream.read)
        finally:
            stream.cancel()


async def _result(future: "grpc.Future[Reply]") -> Reply:
    """Wait for gRPC's future on the event loop; a cancelled wait cancels the call."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop may be gone by then
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    try:
        await done.wait()
    finally:
        future.cancel()
    return future.result()
