"""The books balance: whatever callers do, every request that has begun has ended, in exactly one way."""

import asyncio
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tei_grpc.errors import InferenceError
from tei_grpc.metrics import METHODS
from tei_grpc.pb import tei_pb2, tei_pb2_grpc
from tests.fakes import answer
from tests.grpc.conftest import Served, serve_fake, until, write_checkpoint
from tests.samples import balance, endings, sample

RPCS = {
    f"/{service.full_name}/{method.name}": method.input_type._concrete_class
    for service in tei_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
REFUSED, CRASHED = 12, 13  # token ids of w8 and w9
LONG = "w1 " * 600
TEXTS = {
    "good": "w1 w2",
    "refused": "w8",
    "crashed": "w1 w9",
    "long": LONG,
    "cut": LONG,
    "direction": "w1",
    "empty": "",
}
MODELS = {
    "embedder": (("BertModel",), {}),
    "splade": (("BertForMaskedLM",), {}),
    "reranker": (("BertForSequenceClassification",), {"id2label": {"0": "LABEL_0"}}),
    "classifier": (("BertForSequenceClassification",), {"id2label": {"0": "a", "1": "b"}}),
}
ENDED = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)  # what a client writes to is over
FITTING = {
    "embedder": "Embed/Embed(All)?(Stream)?$",
    "splade": "EmbedSparse",
    "reranker": "Predict|Rerank",
    "classifier": "Predict",
}
KEY = (("authorization", "Bearer key"),)


class Plan(NamedTuple):
    """One call: its method, its messages, when it ends, and whether it has the key."""

    path: str
    messages: list[str]
    ending: str
    has_key: bool


def plans(model: str) -> st.SearchStrategy[Plan]:
    """Any call, but mostly calls that the model can answer."""
    fitting = [path for path in sorted(RPCS) if re.search(FITTING[model], path)]
    return st.builds(
        Plan,
        path=st.sampled_from(fitting * 5 + sorted(RPCS)),
        messages=st.lists(st.sampled_from([*["good"] * 6, "undecodable", *TEXTS]), min_size=1, max_size=5),
        ending=st.sampled_from(["whole", "whole", "left", "left late", "deadline", "long deadline", "half open"]),
        has_key=st.sampled_from([True] * 9 + [False]),
    )


days = st.sampled_from(sorted(MODELS)).flatmap(
    lambda model: st.tuples(st.just(model), st.lists(plans(model), min_size=10, max_size=40))
)


def message(path: str, what: str) -> bytes:
    """A message for any method, and what is wrong with it, if anything."""
    if what == "undecodable":
        return b"\x0a\xff\xff\xff\xff\xff"
    request, text = RPCS[path](), TEXTS[what]
    for field in request.DESCRIPTOR.fields:
        if field.name in ("inputs", "query", "text", "texts"):
            setattr(request, field.name, text) if not field.is_repeated else getattr(request, field.name).append(text)
        elif field.name == "ids":
            request.ids.extend([5, 6])
        elif field.name == "truncate":
            request.truncate = what == "cut"
        elif field.name == "truncation_direction" and what == "direction":
            request.truncation_direction = 7
    return request.SerializeToString()


def fussy(entry):
    """Takes a moment, and does not like two words."""
    time.sleep(0.002)
    if REFUSED in entry.input_ids:
        return InferenceError("Inference failed")
    if CRASHED in entry.input_ids:
        raise ValueError("no such word")
    return answer(entry)


async def make(plan: Plan, channel: grpc.aio.Channel) -> None:
    timeout = {"deadline": 0.005, "long deadline": 0.05}.get(plan.ending, 10)
    call = channel.stream_stream(plan.path)(timeout=timeout, metadata=KEY if plan.has_key else ())
    messages = plan.messages if plan.path.endswith("Stream") else plan.messages[:1]
    try:
        for what in messages:
            await call.write(message(plan.path, what))
        if plan.ending == "left":
            await asyncio.sleep(0.005)  # a call is at any stage then
            call.cancel()
        if plan.ending != "half open":
            await call.done_writing()
        await call.read()
        if plan.ending in ("left late", "half open"):
            call.cancel()
        while await call.read() is not grpc.aio.EOF:
            pass
    except (*ENDED, asyncio.CancelledError):
        call.cancel()


def is_settled(served: Served) -> bool:
    metrics = served.engine.metrics
    gauges = [sample(metrics, name) for name in ("te_queue_size", "te_permits_in_use")]
    return gauges == [0, 0] and all(begun == ended for begun, ended in balance(metrics).values())


async def carry_out(model: str, calls: list[Plan]) -> None:
    architectures, config = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder), *architectures, **config)
        options = {"pooling": "splade"} if model == "splade" else {}
        async with serve_fake(checkpoint, max_concurrent_requests=4, api_key="key", **options) as served:
            served.runner.answer = fussy
            await asyncio.gather(*(make(plan, served.channel) for plan in calls))
            await until(lambda: is_settled(served))
            begun = sum(count for count, _ in balance(served.engine.metrics).values())
            assert begun <= sum(map(most_requests, calls))


def most_requests(plan: Plan) -> int:
    """How many requests the call may have been."""
    if "/tei.v1.Tokenize/" in plan.path or "/tei.v1.Info/" in plan.path:
        return 0
    is_one = "/tei.v1.Rerank/" in plan.path or not plan.path.endswith("Stream") or not plan.has_key
    return 1 if is_one else max(1, len(plan.messages))


@given(day=days)
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
def test_every_request_ends_once_whatever_callers_do(day):
    asyncio.run(carry_out(*day))


async def ended(served: Served, path: str, *messages: bytes, metadata=()) -> None:
    """Make a call and wait for its status."""
    call = served.channel.stream_stream(path)(metadata=metadata, timeout=10)
    try:
        for each in messages:
            await call.write(each)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except ENDED:
        pass
    await call.code()


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/tei.v1.Embed/Embed", "single"),
        ("/tei.v1.Embed/EmbedStream", "stream"),
        ("/tei.v1.Predict/PredictPair", "single"),
        ("/tei.v1.Rerank/Rerank", "batch"),
        ("/tei.v1.Rerank/RerankStream", "batch"),
    ],
)
async def test_refused_key_is_a_failed_request_of_the_method(serve, path, method):
    async with serve(api_key="key") as served:
        await ended(served, path, b"")
        metrics = served.engine.metrics
        assert sample(metrics, "te_request_failure_total", err="unauthenticated", method=method) == 1
        assert balance(metrics)[method] == (1, 1)


@pytest.mark.parametrize("path", ["/tei.v1.Tokenize/Tokenize", "/tei.v1.Info/Info", "/grpc.health.v1.Health/Check"])
async def test_calls_that_are_no_requests_are_not_counted(serve, path):
    async with serve(api_key="key") as served:
        await ended(served, path, b"")
        await ended(served, path, b"", metadata=KEY)
        assert balance(served.engine.metrics) == dict.fromkeys(METHODS, (0, 0))


async def test_call_while_loading_is_a_failed_request(serve):
    async with serve(load=False) as served:
        await ended(served, "/tei.v1.Embed/Embed", b"")
        assert endings(served.engine.metrics) == {"unavailable": 1}


@pytest.mark.parametrize("path", ["/tei.v1.Embed/Embed", "/tei.v1.Embed/EmbedStream", "/tei.v1.Rerank/Rerank"])
@pytest.mark.parametrize(("what", "kind"), [("undecodable", "undecodable"), ("direction", "validation")])
async def test_message_that_never_reaches_the_engine_is_a_failed_request(served, path, what, kind):
    await ended(served, path, message(path, what))
    assert endings(served.engine.metrics) == {kind: 1}


async def test_message_that_fails_inside_a_rerank_stream_is_counted_once(tmp_path):
    architectures, config = MODELS["reranker"]
    path = "/tei.v1.Rerank/RerankStream"
    async with serve_fake(write_checkpoint(tmp_path, *architectures, **config)) as served:
        await ended(served, path, message(path, "good"), message(path, "undecodable"))
        await ended(served, path, message(path, "direction"))
        assert endings(served.engine.metrics) == {"undecodable": 1, "validation": 1}


async def test_sparse_calls_streams_failures_and_leavers_add_up(tmp_path):
    checkpoint = write_checkpoint(tmp_path, "BertForMaskedLM")
    async with serve_fake(checkpoint, pooling="splade") as served:
        metrics = served.engine.metrics
        for _ in range(3):
            await served.embed.EmbedSparse(tei_pb2.EmbedSparseRequest(inputs="w1"))
        with pytest.raises(grpc.aio.AioRpcError):
            await served.embed.EmbedSparse(tei_pb2.EmbedSparseRequest(inputs=""))
        stream = served.embed.EmbedSparseStream()
        for _ in range(10):
            await stream.write(tei_pb2.EmbedSparseRequest(inputs="w1"))
        await stream.done_writing()
        assert len([reply async for reply in stream]) == 10
        served.runner.gate.clear()
        leaver = served.embed.EmbedSparse(tei_pb2.EmbedSparseRequest(inputs="w1"))
        await until(lambda: sample(metrics, "te_permits_in_use") == 1)
        leaver.cancel()
        await until(lambda: is_settled(served))
        assert endings(metrics) == {"single": 3, "validation": 1, "stream": 10, "cancelled": 1}
        assert sample(metrics, "te_embed_success_total") == 13


async def test_cut_input_is_counted(served):
    await served.embed.Embed(tei_pb2.EmbedRequest(inputs=LONG, truncate=True))
    await served.embed.Embed(tei_pb2.EmbedRequest(inputs="w1", truncate=True))
    assert sample(served.engine.metrics, "te_request_truncated_total") == 1


async def test_call_that_the_drain_cuts_is_dropped(serve):
    async with serve(shutdown_grace=0.05) as served:
        served.runner.gate.clear()
        call = served.embed.Embed(tei_pb2.EmbedRequest(inputs="w1"))
        await until(lambda: sample(served.engine.metrics, "te_permits_in_use") == 1)
        stopping = asyncio.create_task(served.server.stop())
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await call
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        assert endings(served.engine.metrics) == {"cancelled": 1}
        served.runner.gate.set()
        await stopping


async def test_failure_of_the_model_has_the_id_of_its_log_line(served, caplog):
    served.runner.answer = fussy
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await tei_pb2_grpc.EmbedStub(served.channel).Embed(tei_pb2.EmbedRequest(inputs="w8"))
    [record] = [record for record in caplog.records if record.getMessage() == "Inference failed"]
    assert failed.value.details() == f"Inference failed, id {record.span['request_id']}"


async def leave_in_the_middle(served: Served, path: str, *messages: bytes) -> None:
    """Cancel a call whose requests have no end; how far the server is then is up to chance, so do it often."""
    for _ in range(30):
        call = served.channel.stream_stream(path)()
        await call.wait_for_connection()
        for each in messages:
            await call.write(each)
        await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.sleep(0.003)
    await until(lambda: is_settled(served))


async def test_rerank_stream_that_its_caller_leaves_is_never_a_success(tmp_path):
    architectures, config = MODELS["reranker"]
    path = "/tei.v1.Rerank/RerankStream"
    async with serve_fake(write_checkpoint(tmp_path, *architectures, **config)) as served:
        await leave_in_the_middle(served, path, message(path, "good"))
        assert set(endings(served.engine.metrics)) <= {"cancelled"}
        await leave_in_the_middle(served, path)
        assert set(endings(served.engine.metrics)) <= {"cancelled"}


async def test_call_that_its_caller_leaves_before_the_message_is_no_request(served):
    await leave_in_the_middle(served, "/tei.v1.Embed/Embed")
    assert endings(served.engine.metrics) == {}
