"""Streaming RPCs: order, errors on the way, the end, and that every message is answered as the unary call would."""

import threading
from collections.abc import Iterator
from queue import Queue

import pytest
from google.protobuf.message import Message

from tei_grpc.pb import tei_pb2
from tests.contract.inputs import text_of
from tests.contract.targets import TIMEOUT, Code, Request, Target, outcome_of

INVALID = (Code.INVALID_ARGUMENT, "Input validation error: `inputs` cannot be empty")

STREAMS = {
    "Embed/EmbedStream": ("embedder", tei_pb2.EmbedRequest),
    "Embed/EmbedAllStream": ("embedder", tei_pb2.EmbedAllRequest),
    "Embed/EmbedSparseStream": ("splade", tei_pb2.EmbedSparseRequest),
    "Predict/PredictStream": ("classifier", tei_pb2.PredictRequest),
    "Predict/PredictPairStream": ("classifier", tei_pb2.PredictPairRequest),
}
TOKEN_STREAMS = {
    "Tokenize/TokenizeStream": ("embedder", tei_pb2.EncodeRequest(inputs="a"), tei_pb2.EncodeRequest()),
    "Tokenize/DecodeStream": ("embedder", tei_pb2.DecodeRequest(ids=[1]), tei_pb2.DecodeRequest()),
}


@pytest.fixture(params=STREAMS)
def stream(request: pytest.FixtureRequest) -> "Stream":
    """Every stream that infers, on a server that it fits."""
    kind, message_class = STREAMS[request.param]
    return Stream(request.getfixturevalue(kind), request.param, message_class)


class Stream:
    """A streaming method, and messages for it."""

    def __init__(self, target: Target, method: str, message_class: type[Message]) -> None:
        self.target = target
        self.method = method
        self._message_class = message_class

    def message(self, text: str) -> Message:
        is_pair = self._message_class is tei_pb2.PredictPairRequest
        return self._message_class(inputs=[text] if is_pair else text)

    def ask(self, *messages: Request, method: str | None = None):
        return self.target.ask(method or self.method, *messages)


class Sent:
    """Requests that are sent one by one, while the call is open."""

    def __init__(self) -> None:
        self._queue: Queue[Request | None] = Queue()

    def send(self, message: Request | None) -> None:
        """None ends the sending."""
        self._queue.put(message)

    def __iter__(self) -> Iterator[Request]:
        while (message := self._queue.get()) is not None:
            yield message


def test_answers_come_in_the_order_of_the_messages(stream: Stream) -> None:
    texts = [" ".join(["cat"] * (1 + 7 * i % 23)) for i in range(60)]
    outcome = stream.ask(*map(stream.message, texts))
    assert outcome.code is Code.OK
    assert [reply.metadata.compute_chars for reply in outcome.replies] == list(map(len, texts))


def test_bad_message_ends_the_stream_after_the_earlier_answers(stream: Stream) -> None:
    outcome = stream.ask(*map(stream.message, ["a", "b", "", "c"]))
    assert len(outcome.replies) == 2
    assert outcome.status == INVALID


def test_undecodable_message_fails_at_its_place(stream: Stream) -> None:
    outcome = stream.ask(stream.message("a"), b"\xff\xff", stream.message("b"))
    assert (len(outcome.replies), outcome.code) == (1, Code.INTERNAL)


def test_no_messages_means_no_answers(stream: Stream) -> None:
    outcome = stream.ask()
    assert (outcome.replies, outcome.code) == ([], Code.OK)


def test_answers_come_before_the_client_half_closes(stream: Stream) -> None:
    sent = Sent()
    call = stream.target.open(stream.method, sent, timeout=TIMEOUT)
    for text in ("a", "bc", "def"):
        sent.send(stream.message(text))
        assert next(call).metadata.compute_chars == len(text)
    sent.send(None)
    assert outcome_of(call).replies == []
    assert call.code() is Code.OK


def test_streams_carry_no_cost_headers(stream: Stream) -> None:
    outcome = stream.ask(stream.message("a"))
    assert not [name for name in outcome.headers if name.startswith("x-")]


def test_message_is_answered_as_the_unary_call_is(stream: Stream) -> None:
    (streamed,) = stream.ask(stream.message("hello world")).replies
    alone = stream.ask(stream.message("hello world"), method=stream.method.removesuffix("Stream")).reply
    for reply in (streamed, alone):
        reply.ClearField("metadata")
    assert streamed == alone


def test_more_messages_than_permits_wait_for_their_turn(classifier: Target) -> None:
    count = 3 * min(classifier.info.max_concurrent_requests, 100)
    outcome = classifier.ask("Predict/PredictStream", *[tei_pb2.PredictRequest(inputs="a")] * count)
    assert (len(outcome.replies), outcome.code) == (count, Code.OK)


@pytest.mark.parametrize("inputs", [[], ["a", "b", "c"]])
def test_wrong_arity_ends_a_stream_of_pairs(classifier: Target, inputs: list[str]) -> None:
    messages = [tei_pb2.PredictPairRequest(inputs=texts) for texts in (["a", "b"], inputs, ["a"])]
    outcome = classifier.ask("Predict/PredictPairStream", *messages)
    assert len(outcome.replies) == 1
    assert outcome.status == (
        Code.INVALID_ARGUMENT,
        f"`inputs` must have a single or two elements. Given: {len(inputs)}",
    )


def test_every_message_is_truncated_as_it_says(embedder: Target) -> None:
    text = text_of(embedder, embedder.info.max_input_length + 1)
    outcome = embedder.ask(
        "Embed/EmbedStream", *(tei_pb2.EmbedRequest(inputs=text, truncate=truncate) for truncate in (True, False))
    )
    assert [reply.metadata.compute_tokens for reply in outcome.replies] == [embedder.info.max_input_length]
    assert outcome.code is Code.INVALID_ARGUMENT


def test_stream_of_the_wrong_model_is_refused_at_its_first_message(embedder: Target) -> None:
    outcome = embedder.ask("Predict/PredictStream", tei_pb2.PredictRequest(inputs="a"))
    assert outcome.status == (Code.FAILED_PRECONDITION, "Backend error: Model is not a classifier model")


@pytest.mark.parametrize("method", TOKEN_STREAMS)
def test_token_streams_follow_the_same_rules(request: pytest.FixtureRequest, method: str) -> None:
    kind, good, bad = TOKEN_STREAMS[method]
    outcome = request.getfixturevalue(kind).ask(method, good, good, bad, good)
    assert (len(outcome.replies), outcome.code) == (2, Code.INVALID_ARGUMENT)


def test_streams_side_by_side_keep_to_themselves(embedder: Target) -> None:
    counts: dict[int, list[int]] = {}

    def run(words: int) -> None:
        text = " ".join(["cat"] * words)
        outcome = embedder.ask("Embed/EmbedStream", *[tei_pb2.EmbedRequest(inputs=text)] * 20)
        counts[words] = [reply.metadata.compute_chars for reply in outcome.replies]

    threads = [threading.Thread(target=run, args=(words,)) for words in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {words: [4 * words - 1] * 20 for words in range(1, 9)}
