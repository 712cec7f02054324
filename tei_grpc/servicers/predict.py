"""tei.v1.Predict: labels and scores."""

from collections.abc import AsyncIterator

from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.rpc.context import Context, unary_caller
from tei_grpc.rpc.headers import send_headers
from tei_grpc.rpc.reply import metadata_message
from tei_grpc.rpc.requests import scoring_of
from tei_grpc.rpc.room import Rooms
from tei_grpc.rpc.streams import Largest, answer_in_order
from tei_grpc.types import Caller, PredictResult


class PredictServicer(tei_pb2_grpc.PredictServicer):
    """Sequence classification of a text or a pair of texts."""

    def __init__(self, engine: Engine, rooms: Rooms) -> None:
        self._engine = engine
        self._rooms = rooms
        self._bytes = Largest()  # by the number of labels

    async def Predict(self, request: tei_pb2.PredictRequest, context: Context) -> tei_pb2.PredictResponse:
        """Every label, best first."""
        return await self._with_headers(await self._predict(request, unary_caller(context)), context)

    async def PredictStream(self, requests: AsyncIterator[tei_pb2.PredictRequest], context: Context) -> None:
        """Every label, best first, per message."""
        await answer_in_order(self._predict_reply, context, rooms=self._rooms, cost=self._bytes)

    async def PredictPair(self, request: tei_pb2.PredictPairRequest, context: Context) -> tei_pb2.PredictResponse:
        """Every label, best first."""
        return await self._with_headers(await self._predict_pair(request, unary_caller(context)), context)

    async def PredictPairStream(self, requests: AsyncIterator[tei_pb2.PredictPairRequest], context: Context) -> None:
        """Every label, best first, per message."""
        await answer_in_order(self._predict_pair_reply, context, rooms=self._rooms, cost=self._bytes)

    async def _predict(self, request: tei_pb2.PredictRequest, caller: Caller) -> PredictResult:
        return await self._engine.predict(request.inputs, scoring=scoring_of(request), caller=caller)

    async def _predict_pair(self, request: tei_pb2.PredictPairRequest, caller: Caller) -> PredictResult:
        return await self._engine.predict(list(request.inputs), scoring=scoring_of(request), caller=caller)

    async def _predict_reply(self, request: tei_pb2.PredictRequest, caller: Caller) -> bytes:
        return self._bytes.hear(_response(await self._predict(request, caller)).SerializeToString())

    async def _predict_pair_reply(self, request: tei_pb2.PredictPairRequest, caller: Caller) -> bytes:
        return self._bytes.hear(_response(await self._predict_pair(request, caller)).SerializeToString())

    async def _with_headers(self, result: PredictResult, context: Context) -> tei_pb2.PredictResponse:
        await send_headers(context, result.metadata, self._engine.info)
        return _response(result)


def _response(result: PredictResult) -> tei_pb2.PredictResponse:
    predictions = [tei_pb2.Prediction(score=score, label=label) for score, label in result.predictions]
    return tei_pb2.PredictResponse(predictions=predictions, metadata=metadata_message(result.metadata))
