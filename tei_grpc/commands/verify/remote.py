"""Our side, as a running server: the same questions over tei.v1."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np

from tei_grpc.commands.verify.answers import Answers, Question, Task, spread
from tei_grpc.commands.verify.progress import Progress
from tei_grpc.errors import StartupError
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tei_grpc.types import Floats

SECONDS = 300.0  # for one text, from asking to the answer
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))

Call = Callable[..., Any]


def ask(address: str, question: Question, api_key: str | None, progress: Progress) -> Answers:
    """Answer all texts. Raises StartupError when the server refuses or cannot be reached."""
    metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
    try:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            return Server(channel, metadata).answer(question, progress)
    except grpc.RpcError as error:
        raise StartupError(f"{address}: {error.code().name}: {error.details()}") from error


class Server:
    """The server behind a channel."""

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._metadata = metadata
        self._compute_type = ""

    def answer(self, question: Question, progress: Progress) -> Answers:
        """Ask for everything. Raises grpc.RpcError."""
        info = self._call(tei_pb2_grpc.InfoStub(self._channel).Info, tei_pb2.InfoRequest())
        token_ids = [self._token_ids(text) for text in question.texts]
        if question.task is Task.RERANK:
            values = self._rerank(question, info.max_client_batch_size, progress)
        else:
            values = self._values(question, progress)
        path = {"+optimized": "packed", "": "generic"}.get(self._compute_type[3:], "not told")
        about = {"path": path, "longest input": str(info.max_input_length)}
        return Answers(token_ids, values, info.model_dtype, about)

    def _call(self, method: Call, request: object) -> Any:
        reply, call = method.with_call(request, timeout=SECONDS, metadata=self._metadata)  # type: ignore[attr-defined]
        headers = dict(call.initial_metadata())
        self._compute_type = str(headers.get("x-compute-type", self._compute_type))
        return reply

    def _token_ids(self, text: str) -> list[int]:
        request = tei_pb2.EncodeRequest(inputs=text, add_special_tokens=True)
        reply = self._call(tei_pb2_grpc.TokenizeStub(self._channel).Tokenize, request)
        return [token.id for token in reply.tokens]

    def _values(self, question: Question, progress: Progress) -> list[Floats]:
        values = []
        for text in question.texts:
            values.append(self._value(question, text))
            progress.step()
        return values

    def _value(self, question: Question, text: str) -> Floats:
        if question.task is Task.PREDICT:
            request = tei_pb2.PredictRequest(inputs=text, truncate=True, raw_scores=True)
            reply = self._call(tei_pb2_grpc.PredictStub(self._channel).Predict, request)
            scores = {prediction.label: prediction.score for prediction in reply.predictions}
            return np.array([scores.get(label, np.nan) for label in question.labels], np.float32)
        embed = tei_pb2_grpc.EmbedStub(self._channel)
        if question.task is Task.EMBED_SPARSE:
            sparse = self._call(embed.EmbedSparse, tei_pb2.EmbedSparseRequest(inputs=text, truncate=True))
            pairs = [(value.index, value.value) for value in sparse.sparse_embeddings]
            indices, values = zip(*pairs, strict=True) if pairs else ((), ())
            return spread(np.array(indices, np.int64), np.array(values, np.float32), question.size)
        vector = self._call(embed.Embed, tei_pb2.EmbedRequest(inputs=text, truncate=True, normalize=True))
        return np.array(vector.embeddings, np.float32)

    def _rerank(self, question: Question, at_most: int, progress: Progress) -> list[Floats]:
        rerank = tei_pb2_grpc.RerankStub(self._channel).Rerank
        scores: dict[int, float] = {}
        for start in range(0, len(question.texts), at_most):
            texts = question.texts[start : start + at_most]
            request = tei_pb2.RerankRequest(query=question.query, texts=texts, truncate=True, raw_scores=True)
            scores |= {start + rank.index: rank.score for rank in self._call(rerank, request).ranks}
            for _ in texts:
                progress.step()
        return [np.array([scores[index]], np.float32) for index in range(len(question.texts))]
