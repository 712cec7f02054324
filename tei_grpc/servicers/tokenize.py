"""tei.v1.Tokenize: the model's tokenizer, without the model."""

from collections.abc import AsyncIterator

from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.rpc.context import Context, unary_caller
from tei_grpc.rpc.reply import encode_tokens
from tei_grpc.rpc.requests import prompt_name_of
from tei_grpc.rpc.room import Rooms
from tei_grpc.rpc.streams import answer_in_order
from tei_grpc.types import Caller

TOKEN_BYTES = 24
PIECE_BYTES = 8  # of text for an id; most are shorter


class TokenizeServicer(tei_pb2_grpc.TokenizeServicer):
    """Texts to tokens and back. Replies with tokens are bytes already, made where the text is tokenized."""

    def __init__(self, engine: Engine, rooms: Rooms) -> None:
        self._engine = engine
        self._rooms = rooms

    async def Tokenize(self, request: tei_pb2.EncodeRequest, context: Context) -> bytes:
        """Every token of the text."""
        return await self._tokenize(request, unary_caller(context))

    async def TokenizeStream(self, requests: AsyncIterator[tei_pb2.EncodeRequest], context: Context) -> None:
        """Every token of the text, per message."""
        await answer_in_order(self._tokenize, context, rooms=self._rooms, cost=_most_bytes)

    async def Decode(self, request: tei_pb2.DecodeRequest, context: Context) -> tei_pb2.DecodeResponse:
        """The text of token ids."""
        return await self._decode(request, unary_caller(context))

    async def DecodeStream(self, requests: AsyncIterator[tei_pb2.DecodeRequest], context: Context) -> None:
        """The text of token ids, per message."""
        await answer_in_order(self._decode_reply, context, rooms=self._rooms, cost=_text_bytes)

    async def _tokenize(self, request: tei_pb2.EncodeRequest, caller: Caller) -> bytes:
        return await self._engine.tokenize_into(
            encode_tokens,
            request.inputs,
            add_special_tokens=request.add_special_tokens,
            prompt_name=prompt_name_of(request),
            caller=caller,
        )

    async def _decode(self, request: tei_pb2.DecodeRequest, caller: Caller) -> tei_pb2.DecodeResponse:
        text = await self._engine.decode(
            list(request.ids), skip_special_tokens=request.skip_special_tokens, caller=caller
        )
        return tei_pb2.DecodeResponse(text=text)

    async def _decode_reply(self, request: tei_pb2.DecodeRequest, caller: Caller) -> bytes:
        return (await self._decode(request, caller)).SerializeToString()


def _text_bytes(request: tei_pb2.DecodeRequest) -> int:
    """Bytes of the reply, roughly."""
    return PIECE_BYTES * len(request.ids)


def _most_bytes(request: tei_pb2.EncodeRequest) -> int:
    """Bytes of the reply, roughly, at the most: a token for every character, with its id, offsets and text."""
    return TOKEN_BYTES * len(request.inputs)
