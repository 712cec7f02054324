"""tei.v1.Tokenize: the model's tokenizer, without the model."""

import asyncio
from collections.abc import AsyncIterator

from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.rpc.context import Context, unary_caller
from tei_grpc.rpc.requests import prompt_name_of
from tei_grpc.rpc.streams import answer_in_order
from tei_grpc.types import Caller, SimpleToken

MAX_LOOP_TOKENS = 512  # a longer reply is put together on a thread: it would hold up the event loop


class TokenizeServicer(tei_pb2_grpc.TokenizeServicer):
    """Texts to tokens and back."""

    def __init__(self, engine: Engine, window: int) -> None:
        self._engine = engine
        self._window = window

    async def Tokenize(self, request: tei_pb2.EncodeRequest, context: Context) -> tei_pb2.EncodeResponse | bytes:
        """Every token of the text."""
        return await self._tokenize(request, unary_caller(context))

    async def TokenizeStream(self, requests: AsyncIterator[tei_pb2.EncodeRequest], context: Context) -> None:
        """Every token of the text, per message."""
        await answer_in_order(self._tokenize, context, window=self._window)

    async def Decode(self, request: tei_pb2.DecodeRequest, context: Context) -> tei_pb2.DecodeResponse:
        """The text of token ids."""
        return await self._decode(request, unary_caller(context))

    async def DecodeStream(self, requests: AsyncIterator[tei_pb2.DecodeRequest], context: Context) -> None:
        """The text of token ids, per message."""
        await answer_in_order(self._decode, context, window=self._window)

    async def _tokenize(self, request: tei_pb2.EncodeRequest, _caller: Caller) -> tei_pb2.EncodeResponse | bytes:
        tokens = await self._engine.tokenize(
            request.inputs, add_special_tokens=request.add_special_tokens, prompt_name=prompt_name_of(request)
        )
        if len(tokens) > MAX_LOOP_TOKENS:
            return await asyncio.to_thread(lambda: _response(tokens).SerializeToString())
        return _response(tokens)

    async def _decode(self, request: tei_pb2.DecodeRequest, _caller: Caller) -> tei_pb2.DecodeResponse:
        text = await self._engine.decode(list(request.ids), skip_special_tokens=request.skip_special_tokens)
        return tei_pb2.DecodeResponse(text=text)


def _response(tokens: list[SimpleToken]) -> tei_pb2.EncodeResponse:
    return tei_pb2.EncodeResponse(tokens=map(_token_message, tokens))


def _token_message(token: SimpleToken) -> tei_pb2.SimpleToken:
    return tei_pb2.SimpleToken(id=token.id, text=token.text, special=token.special, start=token.start, stop=token.stop)
