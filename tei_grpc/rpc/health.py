"""grpc.health.v1: per service, whether calls make sense. Lives off the engine's state alone, never off its load."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tei_grpc.rpc.context import Context
from tei_grpc.types import ModelType, State

SERVICES_OF = {
    ModelType.EMBEDDING: ("tei.v1.Embed",),
    ModelType.CLASSIFIER: ("tei.v1.Predict",),
    ModelType.RERANKER: ("tei.v1.Predict", "tei.v1.Rerank"),
}
ALWAYS = ("", "tei.v1.Info", "tei.v1.Tokenize")
LIVENESS = "liveness"  # the name in Kubernetes' own examples: a restart would help, that and nothing else
NAMES = ("", "tei.v1.Info", "tei.v1.Tokenize", "tei.v1.Embed", "tei.v1.Predict", "tei.v1.Rerank", LIVENESS)

Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers from a set of names; services that do not fit the model stay NOT_SERVING."""

    def __init__(self) -> None:
        self._serving = frozenset({LIVENESS})
        self._is_withdrawn = False
        self._is_ended = False
        self._changed = asyncio.Event()

    def follow(self, state: State, model_type: ModelType | None) -> None:
        """Take over the engine's state; before the model is known nothing serves but `LIVENESS`."""
        if state is State.SERVING and model_type is not None:
            self._set(frozenset((LIVENESS, *ALWAYS, *SERVICES_OF[model_type])))
        else:
            self._set(frozenset(() if state is State.UNHEALTHY else (LIVENESS,)))

    def withdraw(self) -> None:
        """Turn everything but `LIVENESS` NOT_SERVING for good.

        Watch goes on: a client whose Watch ends asks again, at once and as often as it is told NOT_SERVING.
        """
        self._set(self._serving & {LIVENESS})
        self._is_withdrawn = True

    def end(self) -> None:
        """Let every Watch end once it has told the last status."""
        self._is_ended = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Answer now; NOT_FOUND for names that are none of ours."""
        if request.service not in NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service not registered")
        return Response(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Stream the status of a service, now and at each change; SERVICE_UNKNOWN for names that are none of ours."""
        sent: Any = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                await context.write(Response(status=status))
                sent = status
            elif self._is_ended:
                return
            else:
                await changed.wait()

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """Answer for all services at once."""
        return health_pb2.HealthListResponse(statuses={name: Response(status=self._status(name)) for name in NAMES})

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in NAMES:
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if service in self._serving else Response.NOT_SERVING

    def _set(self, serving: frozenset[str]) -> None:
        if not self._is_withdrawn:
            self._serving = serving
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
