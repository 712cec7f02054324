"""tei.v1.Info: what is served, and within which limits."""

import os

from tei_grpc import GIT_SHA, __version__
from tei_grpc.engine.engine import Engine
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.rpc.context import Context
from tei_grpc.types import ModelType

MODEL_TYPES = {
    ModelType.EMBEDDING: tei_pb2.MODEL_TYPE_EMBEDDING,
    ModelType.CLASSIFIER: tei_pb2.MODEL_TYPE_CLASSIFIER,
    ModelType.RERANKER: tei_pb2.MODEL_TYPE_RERANKER,
}


DOCKER_LABEL = os.environ.get("TEI_GRPC_DOCKER_LABEL") or None  # set by the image's build arguments


class InfoServicer(tei_pb2_grpc.InfoServicer):
    """Reads the engine's info."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Info(self, request: tei_pb2.InfoRequest, context: Context) -> tei_pb2.InfoResponse:
        """Absent fields are those that are not known."""
        info = self._engine.info
        return tei_pb2.InfoResponse(
            version=__version__,
            sha=GIT_SHA,
            docker_label=DOCKER_LABEL,
            model_id=info.model_id,
            model_sha=info.model_sha,
            model_dtype=info.model_dtype,
            model_type=MODEL_TYPES[info.model_type],
            max_concurrent_requests=info.max_concurrent_requests,
            max_input_length=info.max_input_length,
            max_batch_tokens=info.max_batch_tokens,
            max_batch_requests=info.max_batch_requests,
            max_client_batch_size=info.max_client_batch_size,
            tokenization_workers=info.tokenization_workers,
        )
