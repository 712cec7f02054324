"""tei.v1.Rerank: texts ordered by their relevance to a query."""

from collections.abc import AsyncIterator, Sequence

from tei_grpc.engine.engine import Engine
from tei_grpc.engine.reranking import Score
from tei_grpc.errors import ValidationError
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.rpc.context import Context, stream_caller, unary_caller
from tei_grpc.rpc.headers import headers_of, send_headers
from tei_grpc.rpc.reply import metadata_message
from tei_grpc.rpc.requests import direction_of, scoring_of
from tei_grpc.rpc.room import Rooms
from tei_grpc.rpc.streams import collect_in_order
from tei_grpc.types import Caller, Input, RerankResult

MAX_RETURNED_CHARS = 64 << 20  # of the texts that one stream gets back; they wait for its end


class RerankServicer(tei_pb2_grpc.RerankServicer):
    """Scores of all texts of one call, sorted."""

    def __init__(self, engine: Engine, rooms: Rooms) -> None:
        self._engine = engine
        self._rooms = rooms

    async def Rerank(self, request: tei_pb2.RerankRequest, context: Context) -> tei_pb2.RerankResponse:
        """Ranks of the texts of one message."""
        texts = list(request.texts)
        result = await self._engine.rerank(
            request.query, texts, scoring=scoring_of(request), caller=unary_caller(context)
        )
        await send_headers(context, result.metadata, self._engine.info)
        return _response(result, texts if request.return_text else None)

    async def RerankStream(
        self, requests: AsyncIterator[tei_pb2.RerankStreamRequest], context: Context
    ) -> tei_pb2.RerankResponse:
        """Ranks of one text per message, once the client has sent all; the first message says how to answer."""
        first = _First()
        try:
            with self._engine.reranking(stream_caller(context)) as reranking:

                async def score(request: tei_pb2.RerankStreamRequest, _caller: Caller) -> Score:
                    first.hear(request)
                    return await reranking.score(_pair(request))

                scores = await collect_in_order(score, context, rooms=self._rooms)
                result = reranking.rank(scores, raw_scores=first.raw_scores)
                headers = headers_of(result.metadata, self._engine.info)
                await context.send_initial_metadata(headers)  # now: fails where the caller has left
                reranking.succeed(result)
            return _response(result, first.texts or None)
        finally:
            first.texts.clear()  # the traceback of a cancelled call would keep them until the garbage is collected


class _First:
    """What the first message of a stream asks for, and the texts, where it wants them back."""

    def __init__(self) -> None:
        self.raw_scores = False
        self.texts: list[str] = []
        self._returns_texts: bool | None = None
        self._chars = 0

    def hear(self, request: tei_pb2.RerankStreamRequest) -> None:
        """A message has come. Raises ValidationError when the texts become too many to be sent back."""
        if self._returns_texts is None:
            self._returns_texts, self.raw_scores = request.return_text, request.raw_scores
        if not self._returns_texts:
            return
        self._chars += len(request.text)
        if self._chars > MAX_RETURNED_CHARS:
            raise ValidationError(
                f"`return_text` can return {MAX_RETURNED_CHARS} characters of texts. Given: {self._chars} so far"
            )
        self.texts.append(request.text)


def _pair(request: tei_pb2.RerankStreamRequest) -> Input:
    direction = direction_of(request.truncation_direction)
    return Input(request.query, request.text, truncate=request.truncate, truncation_direction=direction)


def _response(result: RerankResult, texts: Sequence[str] | None) -> tei_pb2.RerankResponse:
    ranks = [
        tei_pb2.Rank(index=rank.index, score=rank.score, text=None if texts is None else texts[rank.index])
        for rank in result.ranks
    ]
    return tei_pb2.RerankResponse(ranks=ranks, metadata=metadata_message(result.metadata))
