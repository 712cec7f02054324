"""tei.v1.Embed: vectors."""

from collections.abc import AsyncIterator

from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.rpc.context import Context, unary_caller
from tei_grpc.rpc.headers import send_headers
from tei_grpc.rpc.reply import FLOAT_BYTES, encode_embed, encode_embed_all, encode_embed_sparse
from tei_grpc.rpc.requests import input_of
from tei_grpc.rpc.room import Rooms
from tei_grpc.rpc.streams import Largest, answer_in_order
from tei_grpc.types import Caller, EmbedAllResult, EmbedResult, EmbedSparseResult

SPECIAL_TOKENS = 8  # more than any tokenizer adds
SPARSE_BYTES = 16 << 10  # more than most sparse vectors have: some hundred entries of about eleven bytes


class EmbedServicer(tei_pb2_grpc.EmbedServicer):
    """Pooled, per-token and sparse vectors. Replies are bytes already where they hold arrays."""

    def __init__(self, engine: Engine, rooms: Rooms) -> None:
        self._engine = engine
        self._rooms = rooms
        self._vector_bytes = Largest()
        self._sparse_bytes = Largest(SPARSE_BYTES)

    async def Embed(self, request: tei_pb2.EmbedRequest, context: Context) -> bytes:
        """One pooled vector."""
        result = await self._embed(request, unary_caller(context))
        await send_headers(context, result.metadata, self._engine.info)
        return encode_embed(result)

    async def EmbedStream(self, requests: AsyncIterator[tei_pb2.EmbedRequest], context: Context) -> None:
        """One pooled vector per message."""
        await answer_in_order(self._embed_reply, context, rooms=self._rooms, cost=self._vector_bytes)

    async def EmbedAll(self, request: tei_pb2.EmbedAllRequest, context: Context) -> bytes:
        """One vector per token."""
        result = await self._embed_all(request, unary_caller(context))
        reply = await encode_embed_all(result)
        await send_headers(context, result.metadata, self._engine.info)
        return reply

    async def EmbedAllStream(self, requests: AsyncIterator[tei_pb2.EmbedAllRequest], context: Context) -> None:
        """One vector per token, per message."""
        await answer_in_order(self._embed_all_reply, context, rooms=self._rooms, cost=self._embed_all_bytes)

    async def EmbedSparse(self, request: tei_pb2.EmbedSparseRequest, context: Context) -> bytes:
        """One vocabulary-sized vector as its non-zero entries."""
        result = await self._embed_sparse(request, unary_caller(context))
        reply = await encode_embed_sparse(result)
        await send_headers(context, result.metadata, self._engine.info)
        return reply

    async def EmbedSparseStream(self, requests: AsyncIterator[tei_pb2.EmbedSparseRequest], context: Context) -> None:
        """One sparse vector per message."""
        await answer_in_order(self._embed_sparse_reply, context, rooms=self._rooms, cost=self._sparse_bytes)

    def _embed_all_bytes(self, request: tei_pb2.EmbedAllRequest) -> int:
        """Bytes of the reply, at the most: no tokenizer makes more tokens than bytes, beside those of a prompt."""
        info = self._engine.info
        tokens = info.max_input_length
        if len(request.inputs) < tokens and not info.prompts:
            tokens = min(tokens, len(request.inputs.encode()) + SPECIAL_TOKENS)
        return tokens * info.hidden_size * FLOAT_BYTES

    async def _embed(self, request: tei_pb2.EmbedRequest, caller: Caller) -> EmbedResult:
        return await self._engine.embed(
            input_of(request),
            normalize=request.normalize if request.HasField("normalize") else True,
            dimensions=request.dimensions if request.HasField("dimensions") else None,
            caller=caller,
        )

    async def _embed_all(self, request: tei_pb2.EmbedAllRequest, caller: Caller) -> EmbedAllResult:
        return await self._engine.embed_all(input_of(request), caller=caller)

    async def _embed_sparse(self, request: tei_pb2.EmbedSparseRequest, caller: Caller) -> EmbedSparseResult:
        return await self._engine.embed_sparse(input_of(request), caller=caller)

    async def _embed_reply(self, request: tei_pb2.EmbedRequest, caller: Caller) -> bytes:
        return self._vector_bytes.hear(encode_embed(await self._embed(request, caller)))

    async def _embed_all_reply(self, request: tei_pb2.EmbedAllRequest, caller: Caller) -> bytes:
        return await encode_embed_all(await self._embed_all(request, caller))

    async def _embed_sparse_reply(self, request: tei_pb2.EmbedSparseRequest, caller: Caller) -> bytes:
        return self._sparse_bytes.hear(await encode_embed_sparse(await self._embed_sparse(request, caller)))
