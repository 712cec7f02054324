"""The synchronous client."""

import time
from collections.abc import Iterable, Sequence
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


class Client:
    """Calls a server from ordinary code; one client may serve many threads.

        with Client("localhost:3000") as client:
            vectors = client.embed(["What is Deep Learning?", "Deep learning is..."])

    Lists go through one stream, answered in order, with a bounded number of texts under way. All methods raise
    InvalidInputError when the server refuses an input, TeiClientError when the call fails otherwise.
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
        """Connect at the first call.

        Args:
            target: `host:port`, `unix:path`, or `dns:///host:port` to spread calls over all addresses of the name that
                serve; `ipv4:host:port,host:port` lists them.
            api_key: sent as `authorization: Bearer KEY`.
            tls: certificates; None means plaintext.
            timeout: seconds that one method call may take, retries included.
            retries: what happens when the server is gone or has too much to do.
            keepalive: seconds of silence during a call until the server is asked whether it is there; at least 5.
            max_receive_message_size: bytes of the largest reply; -1 means no limit.
            options: further channel options of gRPC, which override the client's own.
        """
        channel_options = make_options(target, max_receive_message_size, options, keepalive)
        self._connection = Connection(target, api_key, tls, channel_options)
        self._timeout = timeout
        self._retries = retries
        self._rerank_limit: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._connection.close()

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        normalize: bool = True,
        truncate: bool = False,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncation_direction: TruncationDirection = "right",
    ) -> Floats:
        """Return the vectors [texts, dim] of a list, or the vector [dim] of one text; float32.

        Args:
            texts: a list for EmbedStream, one text for Embed. An empty list gives [0, 0] without a call.
            normalize: scale to unit length.
            truncate: cut texts longer than the server's `max_input_length` instead of having them refused.
            dimensions: keep only the first values of each vector, before normalization.
            prompt_name: key of the model's prompts; its text is put in front of each input.
            truncation_direction: the end that is cut.
        """
        return self._run(
            calls.embed(
                texts,
                normalize=normalize,
                truncate=truncate,
                dimensions=dimensions,
                prompt_name=prompt_name,
                truncation_direction=truncation_direction,
            )
        )

    def embed_all(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        prompt_name: str | None = None,
        truncation_direction: TruncationDirection = "right",
    ) -> list[Floats]:
        """Return [tokens, hidden] for each text: a vector per token, special tokens included, not normalized."""
        return self._run(
            calls.embed_all(
                texts, truncate=truncate, prompt_name=prompt_name, truncation_direction=truncation_direction
            )
        )

    def embed_sparse(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        prompt_name: str | None = None,
        truncation_direction: TruncationDirection = "right",
    ) -> list[SparseVector]:
        """Return the non-zero entries over the vocabulary for each text (SPLADE models)."""
        return self._run(
            calls.embed_sparse(
                texts, truncate=truncate, prompt_name=prompt_name, truncation_direction=truncation_direction
            )
        )

    def rerank(
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
        return self._run(
            calls.rerank(
                query,
                texts,
                limit=self._texts_per_rerank(),
                truncate=truncate,
                raw_scores=raw_scores,
                return_text=return_text,
                truncation_direction=truncation_direction,
            )
        )

    def predict(
        self,
        inputs: Sequence[str | Pair],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        truncation_direction: TruncationDirection = "right",
    ) -> list[list[Prediction]]:
        """Return every label, best first, for each text or pair of texts; logits with `raw_scores`."""
        return self._run(
            calls.predict(inputs, truncate=truncate, raw_scores=raw_scores, truncation_direction=truncation_direction)
        )

    def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[list[Token]]:
        """Return the tokens of each text."""
        return self._run(calls.tokenize(texts, add_special_tokens=add_special_tokens, prompt_name=prompt_name))

    def decode(self, ids: Sequence[Iterable[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""
        return self._run(calls.decode(ids, skip_special_tokens=skip_special_tokens))

    def info(self) -> ServerInfo:
        """Return what is being served, and within which limits."""
        return self._run(calls.info())

    def health(self, service: str = "") -> bool:
        """Return whether the server, or one service such as `tei.v1.Embed`, is serving; asks once, never retries."""
        return self._run(calls.health(service), NO_RETRIES)

    def _texts_per_rerank(self) -> int:
        if self._rerank_limit is None:
            self._rerank_limit = self.info().max_client_batch_size
        return self._rerank_limit

    def _run(self, call: Call[Reply, Result], retries: RetryPolicy | None = None) -> Result:
        progress = Progress(call, retries or self._retries, self._timeout)
        while not progress.done:
            try:
                self._attempt(call, progress)
                progress.end()
            except grpc.RpcError as error:
                time.sleep(progress.fail(error.code(), error.details() or ""))
        return progress.finish()

    def _attempt(self, call: Call[Reply, Result], progress: Progress[Reply, Result]) -> None:
        if call.shape is Shape.UNARY:
            progress.add(self._connection.ask(call, progress.remaining()))
        else:
            self._connection.open(call, progress).read()
